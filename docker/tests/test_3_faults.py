"""What goes wrong in production, done to real containers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import STALLED_SECONDS, Stack, Stream, docker, messages

DRAIN_SECONDS = 60
"""stop_grace_period of compose.cpu.yaml."""


def wait_for_restart(stack: Stack, before: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while stack.restarts() == before:
        assert time.monotonic() < deadline, stack.log()[-4000:]
        time.sleep(0.5)


def test_a_client_whose_server_is_killed_is_told_and_the_server_comes_back(stack: Stack) -> None:
    before = stack.restarts()
    stream = Stream(stack, 6000)
    reader = threading.Thread(target=stream.read)
    reader.start()
    while stream.chunks < 10:
        assert reader.is_alive(), stream.error
        time.sleep(0.05)
    stack.signal("VLLM::EngineCore", "SIGKILL")
    reader.join(60)
    assert not reader.is_alive(), "the client still waits: silence"
    assert stream.error, "the client was told nothing"
    assert stream.finish == ""
    wait_for_restart(stack, before, 60)
    assert stack.status() in (0, 503)
    stack.wait_until_open()
    assert "Paris" in stack.ask()


def test_a_frozen_engine_is_found_by_the_watchdog(stack: Stack) -> None:
    """Frozen while idle: its metrics go on saying that nothing runs, and /health says 200."""
    before = stack.restarts()
    stack.signal("VLLM::EngineCore", "SIGSTOP")
    assert stack.status("/health") == 200
    wait_for_restart(stack, before, 4 * STALLED_SECONDS)
    assert any("the server was ended because" in m for m in messages(stack.log()))
    stack.wait_until_open()
    assert "Paris" in stack.ask()


def test_a_dead_canary_leaves_a_healthy_server_alone(stack: Stack) -> None:
    before = stack.restarts()
    docker("kill", stack.container("canary"))
    for _ in range(5):
        assert "Paris" in stack.ask()
        time.sleep(1)
    assert stack.inspect()["State"]["Health"]["Status"] == "healthy"
    assert stack.restarts() == before
    docker("start", stack.container("canary"))


def test_streams_that_run_when_a_stop_is_asked_for_are_finished(stack: Stack) -> None:
    """More of them than run at a time: the ones that wait for their turn are accepted too."""
    stack.wait_until_open()
    streams = [Stream(stack, 40) for _ in range(20)]
    try:
        with ThreadPoolExecutor(20) as pool:
            readers = [pool.submit(stream.read) for stream in streams]
            while not all(stream.accepted for stream in streams):
                assert not any(stream.error for stream in streams), [s.error for s in streams]
                time.sleep(0.02)
            began = time.monotonic()
            grace = str(DRAIN_SECONDS)
            docker("stop", "--time", grace, stack.container(), timeout=DRAIN_SECONDS + 60)
            took = time.monotonic() - began
            for reader in readers:
                reader.result()
        assert {(s.finish, s.done, s.error) for s in streams} == {("length", True, "")}
        assert took < DRAIN_SECONDS
        assert stack.inspect()["State"]["ExitCode"] == 0
    finally:
        stack.up()


@pytest.mark.slow
def test_an_engine_that_the_kernel_kills_for_memory_comes_back(stack: Stack) -> None:
    before = stack.restarts()
    hog = """
import os
from assay_kernels.launcher import procfs
for pid in procfs.descendants(1):
    if procfs.title(pid).startswith("VLLM::EngineCore"):
        open(f"/proc/{pid}/oom_score_adj", "w").write("1000")
blocks = []
while True:
    blocks.append(bytearray(64 << 20))
"""
    docker("exec", stack.container(), "python", "-c", hog, check=False)
    wait_for_restart(stack, before, 60)
    log = messages(stack.log())
    assert any("killed from outside" in message for message in log), log[-20:]
    stack.wait_until_open()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/var/cache/assay", "/run/assay"])
def test_a_disk_that_fills_does_not_stop_a_server_that_runs(stack: Stack, folder: str) -> None:
    filler = f"{folder}/filler"
    code = f"""
import errno
try:
    with open({filler!r}, "wb", buffering=0) as file:
        while file.write(b"x" * (1 << 20)):
            pass
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    stack.wait_until_open()
    before = stack.restarts()
    try:
        assert stack.python(code).strip() == "ENOSPC"
        for _ in range(3):
            assert "Paris" in stack.ask()
        assert stack.restarts() == before
    finally:
        stack.python(f"import os; os.remove({filler!r})")


@pytest.mark.slow
def test_a_rollback_is_the_digest_of_before(stack: Stack) -> None:
    """Two local images: the other is this one with a layer more."""
    image = stack.inspect()["Config"]["Image"]
    other = f"{image.split(':')[0]}:other"
    docker("commit", "-c", "LABEL other=1", stack.container(), other)
    text = stack.env.read_text()
    try:
        stack.env.write_text(text.replace(f"ASSAY_CPU_IMAGE={image}", f"ASSAY_CPU_IMAGE={other}"))
        stack.up()
        assert stack.inspect()["Config"]["Labels"]["other"] == "1"
        assert "Paris" in stack.ask()
    finally:
        stack.env.write_text(text)
        stack.up()
    assert "other" not in stack.inspect()["Config"]["Labels"]
    assert "Paris" in stack.ask()
