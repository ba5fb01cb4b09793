"""The launcher from a person's point of view, with a fake in vLLM's place."""

import os
import signal
import socket
import time

import pytest

from .conftest import Launches
from .drive import FAKE


def test_the_first_answer_is_printed_with_the_url_and_a_curl_line(launch: Launches) -> None:
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    assert "A: Paris." in run.text
    assert f"http://127.0.0.1:{run.port}/v1   model: fake" in run.text
    assert f"curl -s http://127.0.0.1:{run.port}/v1/chat/completions" in run.text
    assert "4 layers, 4 in NVFP4" in run.text
    assert run.status("/v1/models")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_was_asked_for_is_clean_and_leaves_nothing(
    launch: Launches, number: signal.Signals
) -> None:
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    assert len(run.running()) == 6, "launcher, guard, API server, engine, two workers"
    run.process.send_signal(number)
    assert run.ends() == 0
    assert run.vanishes(0) == {}


def test_a_stop_while_starting_leaves_nothing(launch: Launches) -> None:
    run = launch(FAKE_DELAY="60")
    run.wait_for("asking the first question")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 0
    assert run.vanishes(0) == {}


@pytest.mark.parametrize("stubborn", ["", "EngineCore,Worker_TP1"])
def test_a_killed_launcher_leaves_nothing(launch: Launches, stubborn: str) -> None:
    run = launch(FAKE_STUBBORN=stubborn, FAKE_GRACE="1")
    run.wait_for("Ctrl-C stops it.")
    run.process.kill()
    assert run.vanishes() == {}


def test_a_killed_guard_leaves_nothing_and_is_reported(launch: Launches) -> None:
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    os.kill(run.pid_of("launcher.guard"), signal.SIGKILL)
    assert run.ends() == 1
    assert "its guard was killed" in run.text
    assert run.vanishes(0) == {}


def test_what_ignores_the_wish_to_stop_is_killed(launch: Launches) -> None:
    run = launch(FAKE_STUBBORN="EngineCore,Worker_TP1", FAKE_GRACE="1")
    run.wait_for("Ctrl-C stops it.")
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 0
    assert run.vanishes(0) == {}


def test_a_second_ctrl_c_does_not_wait(launch: Launches) -> None:
    run = launch(FAKE_STUBBORN="EngineCore,Worker_TP1", FAKE_GRACE="60")
    run.wait_for("Ctrl-C stops it.")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.ends()
    assert time.monotonic() - began < 8
    assert run.vanishes(2) == {}


def test_a_server_that_dies_later_is_reported_and_its_children_go_too(launch: Launches) -> None:
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    os.kill(run.pid_of(f"python {FAKE} "), signal.SIGKILL)
    assert run.ends() == 1
    assert "killed from outside" in run.text
    assert run.vanishes(0) == {}


def test_clients_wait_outside_until_the_first_answer(launch: Launches) -> None:
    run = launch(FAKE_DELAY="3")
    run.wait_for("asking the first question")
    status, headers = run.status("/v1/models")
    assert status == 503
    assert "Retry-After" in {name.title() for name in headers}
    assert run.status("/health")[0] == 200
    run.wait_for("Ctrl-C stops it.")
    assert run.status("/v1/models")[0] == 200


def test_an_empty_answer_is_no_answer(launch: Launches) -> None:
    run = launch(FAKE_ANSWER=" ")
    assert run.ends() == 1
    assert "empty content" in run.text
    assert run.vanishes(0) == {}


def test_a_server_that_ends_early_gives_its_reason_and_its_log(launch: Launches) -> None:
    run = launch(FAKE_CRASH="no such tensor: layers.0.attn.wq_a")
    assert run.ends() == 1
    assert "vLLM ended: RuntimeError: no such tensor: layers.0.attn.wq_a" in run.text
    assert "log: .assay/serve.log" in run.text


def test_a_taken_port_is_one_line_and_exit_code_2(launch: Launches) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = launch(port=taken.getsockname()[1])
        assert run.ends() == 2
    assert run.text.count("\n") == 1
    assert "is in use" in run.text


def test_a_folder_without_a_checkpoint_is_one_line_and_exit_code_2(launch: Launches) -> None:
    (launch.model / "config.json").unlink()
    run = launch()
    assert run.ends() == 2
    assert run.text.count("\n") == 1


def test_a_second_server_in_the_same_folder_does_not_disturb_the_first(launch: Launches) -> None:
    first = launch()
    first.wait_for("Ctrl-C stops it.")
    second = launch()
    assert second.ends() == 2
    assert "--state-dir" in second.text
    assert first.status("/v1/models")[0] == 200


def test_the_profile_s_variables_reach_vllm_unless_the_caller_says_otherwise(
    launch: Launches,
) -> None:
    launch.profile.with_suffix(".env").write_text("# why\nFAKE_ANSWER=Of the profile\nA=\n")
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    assert "A: Of the profile" in run.text
    run = launch("--state-dir", "other", FAKE_ANSWER="Of the caller")
    run.wait_for("Ctrl-C stops it.")
    assert "A: Of the caller" in run.text


@pytest.mark.parametrize("title", ["APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"])
def test_a_process_without_the_plugin_keeps_the_door_shut(launch: Launches, title: str) -> None:
    run = launch(FAKE_UNPROVEN=title)
    seen = set()
    while run.process.poll() is None:
        seen.add(run.status("/v1/models")[0])
        time.sleep(0.02)
    assert run.process.returncode == 1
    assert f"{title.replace('APIServer', 'API server')} (pid " in run.text
    assert "runs without the plugin" in run.text
    assert seen <= {0, 503}
    assert run.vanishes(0) == {}


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("FAKE_UNLOADED", "loaded its weights without the plugin"),
        ("FAKE_PLAIN", "serves no layer of a quantised model in NVFP4"),
    ],
)
def test_a_worker_that_took_nothing_keeps_the_door_shut(
    launch: Launches, variable: str, words: str
) -> None:
    run = launch(**{variable: "Worker_TP1"})
    assert run.ends() == 1
    assert words in run.text
    assert "Worker_TP1" in run.text
    assert "Worker_TP0" not in run.text


def test_an_engine_without_workers_counts_as_one(launch: Launches) -> None:
    run = launch(FAKE_WORKERS="", FAKE_UNLOADED="EngineCore")
    assert run.ends() == 1
    assert "EngineCore" in run.text


def test_an_unquantised_checkpoint_may_be_left_to_vllm(launch: Launches) -> None:
    (launch.model / "config.json").write_text("{}")
    run = launch(FAKE_PLAIN="Worker_TP0,Worker_TP1")
    run.wait_for("Ctrl-C stops it.")


def test_a_failed_import_in_the_log_ends_the_start_at_once_and_is_quoted(launch: Launches) -> None:
    log = (
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] Failed to load plugin assay\n"
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] Traceback (most recent call)\n"
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] ImportError: no numpy\n"
    )
    run = launch(FAKE_LOG=log, FAKE_DELAY="60")
    assert run.ends() == 1
    assert "could not import the plugin: ImportError: no numpy" in run.text


def test_an_allow_list_without_the_plugin_is_named_as_the_reason(launch: Launches) -> None:
    run = launch(FAKE_UNPROVEN="Worker_TP1", VLLM_PLUGINS="other")
    assert run.ends() == 1
    assert "VLLM_PLUGINS=other does not name assay" in run.text


def test_without_the_requirement_it_only_warns(launch: Launches) -> None:
    run = launch(FAKE_UNPROVEN="Worker_TP1", ASSAY_REQUIRE="0")
    run.wait_for("Ctrl-C stops it.")
    assert "warning: VLLM::Worker_TP1 (pid " in run.text
