"""The launcher and the real vLLM: what the fake cannot show."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Launch, free_port

REPO = Path(__file__).resolve().parents[3]
PROFILE = REPO / "docker" / "profiles" / "miniature-cpu.yaml"
MINIATURE = REPO / "models" / "miniature" / "checkpoint"
CHECKPOINT = Path(os.environ.get("ASSAY_TEST_CHECKPOINT", MINIATURE))
BREAK_IMPORT = Path(__file__).with_name("break_import")
START_SECONDS = 500.0

pytestmark = pytest.mark.serve


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """`assay-kernels serve` on the miniature, with the test's extra arguments and variables."""
    arguments, variables = getattr(request, "param", ((), {}))
    port = free_port()
    command = [sys.executable, "-m", "assay_kernels.cli", "serve", str(CHECKPOINT)]
    command += ["--config", str(PROFILE), "--port", str(port), "--", *arguments]
    launch = Launch(tmp_path, command, port, **variables)
    yield launch
    launch.end()


def two_workers(broken: str) -> tuple[tuple[str, ...], dict[str, str]]:
    variables = {"BREAK_IMPORT_IN": broken, "PYTHONPATH": str(BREAK_IMPORT)}
    return ("--tensor-parallel-size", "2"), variables


@pytest.mark.parametrize("run", [two_workers("VllmWorker-1")], indirect=True)
def test_an_import_error_in_one_worker_of_two_means_that_nothing_is_served(run: Launch) -> None:
    seen = set()
    while run.process.poll() is None:
        seen.add(run.status("/v1/models")[0])
        time.sleep(0.1)
    assert run.process.returncode == 1
    assert "libassay.so.1: broken for this test" in run.text
    assert "Worker_TP1 (pid " in run.text
    assert "Worker_TP0" not in run.text
    assert seen <= {0, 503}
    assert run.vanishes(0) == {}


def test_a_killed_launcher_takes_a_serving_vllm_with_it(run: Launch) -> None:
    run.wait_for("Ctrl-C stops it.", START_SECONDS)
    assert run.status("/v1/models")[0] == 200
    assert any(title.startswith("VLLM::EngineCore") for title in run.running().values())
    run.process.kill()
    assert run.vanishes(40) == {}


def test_ctrl_c_during_the_load_leaves_nothing(run: Launch) -> None:
    run.wait_for("starting the engine", START_SECONDS)
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 0
    assert run.vanishes(0) == {}
