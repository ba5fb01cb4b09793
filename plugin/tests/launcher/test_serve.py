"""The launcher from a person's point of view, with a fake in vLLM's place."""

import os
import shutil
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from assay_kernels.launcher import host

from .conftest import Launches
from .drive import FAKE

MINIATURE = Path(__file__).parents[3] / "models" / "miniature" / "checkpoint"


def test_what_passed_is_printed_with_the_url_and_a_curl_line(launch: Launches) -> None:
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    assert "tier ready: 4 checks passed" in run.text
    assert "Q: Which city?\n  A: Paris." in run.text
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
    run.wait_for("asking the suite")
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


def test_clients_wait_outside_until_the_suite_has_passed(launch: Launches) -> None:
    run = launch(FAKE_DELAY="3")
    run.wait_for("asking the suite")
    status, headers = run.status("/v1/models")
    assert status == 503
    assert "Retry-After" in {name.title() for name in headers}
    assert run.status("/health")[0] == 200
    run.wait_for("Ctrl-C stops it.")
    assert run.status("/v1/models")[0] == 200


def test_a_server_without_the_door_is_ended(launch: Launches) -> None:
    run = launch(FAKE_NO_DOOR="1")
    assert run.ends() == 1
    assert "the closed door is not in front of the server" in run.text
    assert "answered 200 without the key" in run.text
    assert run.vanishes(0) == {}


def test_the_front_end_without_middleware_is_switched_off(launch: Launches) -> None:
    run = launch(VLLM_USE_RUST_FRONTEND="1")
    run.wait_for("Ctrl-C stops it.")
    assert "rust: 0" in (launch.folder / ".assay" / "serve.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "profile", "named"),
    [
        (("--grpc",), "", "--grpc after --"),
        (("--port=9000",), "", "--port after --"),
        (("--ssl_keyfile", "k"), "", "--ssl-keyfile after --"),
        (("--middlew", "m.M"), "", "--middleware after --"),
        ((), "uds: /tmp/socket", "--uds in the profile"),
        ((), "ssl_certfile: c", "--ssl-certfile in the profile"),
    ],
)
def test_a_way_past_the_door_is_one_line_and_exit_code_2(
    launch: Launches, arguments: tuple[str, ...], profile: str, named: str
) -> None:
    launch.profile.write_text(f"{launch.profile.read_text()}{profile}\n")
    run = launch("--", *arguments)
    assert run.ends() == 2
    assert named in run.text
    assert run.text.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("ASSAY_ARITHMETIC", "w4a8", "must be one of w4a16, w4a4, reference"),
        ("ASSAY_CPU_OPS", "fast", "must be one of auto, torch, native"),
        ("ASSAY_KERNELS", "fast", "must be one of auto, sm100, sm90, cpu, library, reference"),
        ("ASSAY_ON_MISMATCH", "warn", "must be one of fallback, abort"),
        ("ASSAY_SELFCHECK_TIMEOUT", "0", "must be seconds above 0"),
    ],
)
def test_a_misspelt_switch_is_refused_before_anything_starts(
    launch: Launches, name: str, value: str, rule: str
) -> None:
    run = launch(**{name: value})
    assert run.ends() == 2
    assert f"{name}='{value}': {rule}" in run.text
    assert not (launch.folder / ".assay").exists()


def test_a_truncated_shard_is_refused_before_anything_starts(launch: Launches) -> None:
    shutil.rmtree(launch.model)
    shutil.copytree(MINIATURE, launch.model)
    shard = sorted(launch.model.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    run = launch()
    assert run.ends() == 2
    assert shard.name in run.text
    assert run.text.count("\n") == 1
    assert not (launch.folder / ".assay").exists()


def completion(*log_probabilities: str, content: str = "!!!!") -> str:
    tokens = ", ".join(f'{{"token": "!", "logprob": {value}}}' for value in log_probabilities)
    return (
        f'{{"choices": [{{"finish_reason": "stop",'
        f' "message": {{"content": "{content}", "reasoning": "Hm."}},'
        f' "logprobs": {{"content": [{tokens}]}}}}]}}'
    )


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (completion("-0.5", content=" "), "empty-content: 1 of 1 answers without content"),
        (completion("-0.5", "NaN"), "token 1: NaN"),
        (completion("-0.5", "null"), "token 1: null"),
        (completion("-9999.0", "-9999.0"), "token 0: -9999.0"),
        ("{}", "well-formed: 1 of 1 answers break the protocol"),
        ("<html>", "the answer is not JSON"),
        (completion("-0.5", content="Parisian"), "one: wanted 'Paris', got 'Parisian'"),
    ],
)
def test_incoherence_keeps_the_door_shut(launch: Launches, chat: str, words: str) -> None:
    run = launch(FAKE_CHAT=chat)
    assert run.ends() == 1
    assert "found the server incoherent" in run.text
    assert words in run.text
    assert "Ctrl-C stops it." not in run.text
    assert "Traceback" not in run.text
    assert run.vanishes(0) == {}


def test_without_log_probabilities_nobody_can_tell(launch: Launches) -> None:
    run = launch(FAKE_CHAT=completion(content="Paris"))
    assert run.ends() == 1
    assert "could not find the server sound: nan-logprobs: the server gives no" in run.text


def test_an_error_in_place_of_an_answer_keeps_the_door_shut(launch: Launches) -> None:
    run = launch(FAKE_CHAT="no engine", FAKE_CHAT_STATUS="500")
    assert run.ends() == 1
    assert "/v1/chat/completions answered 500: no engine" in run.text


@pytest.mark.parametrize("models", ["[", "{}", '{"data": []}', "[1]"])
def test_a_broken_list_of_models_is_no_traceback(launch: Launches, models: str) -> None:
    run = launch(FAKE_MODELS=models)
    assert run.ends() == 1
    assert "/v1/models" in run.text
    assert "Traceback" not in run.text


def test_the_profile_names_the_suite(launch: Launches) -> None:
    launch.profile.with_suffix(".env").write_text("ASSAY_READY_SUITE=no-such-suite\n")
    run = launch(ASSAY_READY_SUITE="")
    assert run.ends() == 1
    # An empty variable of the caller hides the profile's: the default suite is asked.
    assert "suite deepseek-v4" in run.text
    run = launch(ASSAY_READY_SUITE="other-suite")
    assert run.ends() == 1
    assert "no suite 'other-suite'" in run.text


def test_another_reference_is_named_and_looked_for_at_once(launch: Launches) -> None:
    run = launch(ASSAY_READY_REFERENCE="gone.json")
    assert run.ends() == 2
    assert "ASSAY_READY_REFERENCE gone.json: no such file" in run.text
    (launch.folder / "mine.json").write_text("{}")
    run = launch(ASSAY_READY_REFERENCE="mine.json")
    assert run.ends() == 1
    assert "could not find the server sound: assay-smoke: mine.json" in run.text


def test_without_the_requirement_incoherence_is_a_warning(launch: Launches) -> None:
    run = launch(FAKE_ANSWER="!!!!", ASSAY_REQUIRE="0")
    run.wait_for("Ctrl-C stops it.")
    assert "warning: suite" in run.text
    assert "found the server incoherent: known-answers" in run.text


def test_a_canary_may_open_the_door(launch: Launches) -> None:
    run = launch(ASSAY_READY_SUITE="canary")
    run.wait_for("waiting for a canary")
    assert run.status("/v1/models")[0] == 503
    key = launch.folder / ".assay" / "bypass.key"
    assert key.stat().st_mode & 0o777 == 0o600
    request = urllib.request.Request(
        f"http://127.0.0.1:{run.port}/v1/models", headers={"x-assay-key": key.read_text().strip()}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    (launch.folder / ".assay" / "run" / "open").touch()
    run.wait_for("the canary has opened the door")
    assert run.status("/v1/models")[0] == 200


def test_keys_are_asked_for_where_there_are_some(launch: Launches) -> None:
    (launch.folder / "keys").write_text("# ours\nsk-one\n")
    run = launch(ASSAY_API_KEYS_FILE="keys")
    run.wait_for("Ctrl-C stops it.")
    assert run.status("/v1/models")[0] == 401
    assert run.status("/health")[0] == 200
    for path in launch.folder.rglob("*"):
        if path.is_file() and path.name != "keys" and not path.is_socket():
            assert b"sk-one" not in path.read_bytes(), path


@pytest.mark.parametrize(("keys", "words"), [(None, "No such file"), ("# none\n", "holds no key"),
                                             ("a key\n", "printable ASCII")])  # fmt: skip
def test_keys_that_cannot_be_used_start_nothing(
    launch: Launches, keys: str | None, words: str
) -> None:
    if keys is not None:
        (launch.folder / "keys").write_text(keys)
    run = launch(ASSAY_API_KEYS_FILE="keys")
    assert run.ends() == 2
    assert words in run.text
    assert run.text.count("\n") == 1


def test_a_door_left_open_by_an_earlier_run_is_shut(launch: Launches) -> None:
    run_dir = launch.folder / ".assay" / "run"
    run_dir.mkdir(parents=True, mode=0o755)
    (run_dir / "open").touch()
    run = launch(FAKE_DELAY="60")
    run.wait_for("asking the suite")
    assert run.status("/v1/models")[0] == 503
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_a_door_that_cannot_be_shut_starts_nothing(launch: Launches) -> None:
    sign = launch.folder / ".assay" / "run" / "open"
    sign.mkdir(parents=True)
    run = launch()
    assert run.ends() == 2
    assert "afresh" in run.text
    assert "Traceback" not in run.text


def test_more_workers_than_numa_nodes_are_given_cores(launch: Launches) -> None:
    ranks = host.numa_nodes() + 1
    run = launch("--", "-tp", str(ranks))
    run.wait_for("Ctrl-C stops it.")
    (line,) = (line for line in run.text.splitlines() if "more workers than NUMA nodes" in line)
    binding = line.partition("VLLM_CPU_OMP_THREADS_BIND=")[2]
    assert binding == "nobind" or binding.count("|") == ranks - 1
    assert f"bind: {binding}" in (launch.folder / ".assay" / "serve.log").read_text()


def test_the_caller_s_cores_are_kept(launch: Launches) -> None:
    run = launch("--", "-tp", "64", VLLM_CPU_OMP_THREADS_BIND="0|1")
    run.wait_for("Ctrl-C stops it.")
    assert "more workers" not in run.text
    assert "bind: 0|1" in (launch.folder / ".assay" / "serve.log").read_text()


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


def test_a_folder_without_a_tokenizer_is_one_line_and_exit_code_2(launch: Launches) -> None:
    (launch.model / "tokenizer.json").unlink()
    run = launch()
    assert run.ends() == 2
    assert "tokenizer.json" in run.text
    assert run.text.count("\n") == 1


def test_plugins_that_leave_ours_out_are_one_line_and_exit_code_2(launch: Launches) -> None:
    run = launch(VLLM_PLUGINS="other")
    assert run.ends() == 2
    assert "VLLM_PLUGINS=other does not name assay" in run.text
    assert run.text.count("\n") == 1


def test_an_impossible_port_is_one_line_and_exit_code_2(launch: Launches) -> None:
    run = launch(port=88400)
    assert run.ends() == 2
    assert run.text.count("\n") == 1


@pytest.mark.parametrize("profile", [b"shutdown-timeout: soon\n", b"\xff\xfe\x00"])
def test_a_profile_that_cannot_be_used_is_one_line_and_exit_code_2(
    launch: Launches, profile: bytes
) -> None:
    launch.profile.write_bytes(profile)
    run = launch()
    assert run.ends() == 2
    assert "Traceback" not in run.text
    assert "profile" in run.text


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
    launch.profile.with_suffix(".env").write_text("# why\nFAKE_ANSWER=Paris of the profile\nA=\n")
    run = launch()
    run.wait_for("Ctrl-C stops it.")
    assert "A: Paris of the profile" in run.text
    run = launch("--state-dir", "other", FAKE_ANSWER="Paris of the caller")
    run.wait_for("Ctrl-C stops it.")
    assert "A: Paris of the caller" in run.text


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
        ("FAKE_PLAIN", "serves 0 layers in NVFP4, the checkpoint stores 4 so"),
        ("FAKE_PARTLY", "serves 1 layers in NVFP4, the checkpoint stores 4 so"),
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
    run = launch(FAKE_PLAIN="Worker_TP0,Worker_TP1", FAKE_EXPECTED="0")
    run.wait_for("Ctrl-C stops it.")


def test_a_quantised_model_without_any_nvfp4_layer_keeps_the_door_shut(launch: Launches) -> None:
    run = launch(FAKE_PLAIN="Worker_TP0,Worker_TP1", FAKE_EXPECTED="0")
    assert run.ends() == 1
    assert "holds no NVFP4 layer of a quantised model" in run.text


def test_a_failed_import_in_the_log_ends_the_start_at_once_and_is_quoted(launch: Launches) -> None:
    log = (
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] Failed to load plugin assay\n"
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] Traceback (most recent call)\n"
        "(Worker_TP1 pid=1) ERROR 11-30 18:00:00 [__init__.py:73] ImportError: no numpy\n"
    )
    run = launch(FAKE_LOG=log, FAKE_DELAY="60")
    assert run.ends() == 1
    assert "could not import the plugin: ImportError: no numpy" in run.text


def test_without_the_check_an_allow_list_that_leaves_the_plugin_out_is_a_warning(
    launch: Launches,
) -> None:
    run = launch(FAKE_UNPROVEN="Worker_TP1", VLLM_PLUGINS="other", ASSAY_REQUIRE="0")
    run.wait_for("Ctrl-C stops it.")
    assert "VLLM_PLUGINS=other does not name assay" in run.text


def test_without_the_requirement_it_only_warns(launch: Launches) -> None:
    run = launch(FAKE_UNPROVEN="Worker_TP1", ASSAY_REQUIRE="0")
    run.wait_for("Ctrl-C stops it.")
    assert "warning: VLLM::Worker_TP1 (pid " in run.text
