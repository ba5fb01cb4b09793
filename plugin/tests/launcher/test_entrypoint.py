"""What the image's entry point makes of its environment."""

import io
import json
import os
from pathlib import Path

import pytest

from assay_kernels.launcher import entrypoint, logfile, shm
from assay_kernels.launcher.settings import LaunchError

PROFILES = Path(__file__).parents[3] / "docker" / "profiles"
GIVEN = {"ASSAY_MODEL": "/model", "ASSAY_PROFILE": "b200x8", "ASSAY_PROFILES": str(PROFILES)}


def test_defaults_are_a_container_s() -> None:
    settings = entrypoint.settings(GIVEN, ("--max-num-seqs", "4"))
    assert (settings.host, settings.port, settings.echo) == ("0.0.0.0", 8000, "json")
    assert settings.profile == PROFILES / "b200x8.yaml"
    assert settings.extra == ("--max-num-seqs", "4")
    assert settings.state == Path("/run/assay")


def test_a_collector_of_traces_becomes_vllm_s_flag() -> None:
    given = GIVEN | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://otel:4317"}
    extra = entrypoint.settings(given, ()).extra
    assert extra == ("--otlp-traces-endpoint", "http://otel:4317")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ASSAY_PROFILE", "b200", "is no profile of"),
        ("ASSAY_PROFILE", "", "is no profile of"),
        ("ASSAY_MODEL", "", "ASSAY_MODEL is not set"),
        ("ASSAY_PORT", "http", "must be a positive number"),
        ("STARTUP_BUDGET", "0", "must be a positive number"),
        ("STARTUP_BUDGET", "nan", "must be a positive number"),
        ("ASSAY_LOG_FORMAT", "yaml", "must be json or text"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words) as refused:
        entrypoint.settings(GIVEN | {name: value}, ())
    assert refused.value.code == 2
    assert "\n" not in str(refused.value)


def test_keys_are_copied_to_a_file_for_this_uid_alone(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "api_keys").write_text("one\ntwo\n")
    (tmp_path / "secrets" / "metrics_key").write_text("three")
    given = {"ASSAY_SECRETS_DIR": str(tmp_path / "secrets")}
    for _ in range(2):  # a restart finds the file of before
        target = entrypoint.take_secrets(given, tmp_path / "state")
        assert target is not None
        assert target.read_text().split() == ["one", "two", "three"]
        assert target.stat().st_mode & 0o777 == 0o600


def test_without_secrets_no_keys_are_asked_for(tmp_path: Path) -> None:
    assert entrypoint.take_secrets({"ASSAY_SECRETS_DIR": str(tmp_path)}, tmp_path) is None


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_secret_that_cannot_be_read_names_the_uid(tmp_path: Path) -> None:
    (tmp_path / "api_keys").touch(mode=0o000)
    with pytest.raises(LaunchError, match="ASSAY_UID"):
        entrypoint.take_secrets({"ASSAY_SECRETS_DIR": str(tmp_path)}, tmp_path / "state")


def test_a_log_line_becomes_one_json_object() -> None:
    line = '(EngineCore pid=7) WARNING 11-30 12:00:00 [core.py:1] "quoted"\twords'
    record = json.loads(logfile.as_json(line, "APIServer"))
    assert (record["level"], record["process"], record["pid"]) == ("WARNING", "EngineCore", "7")
    assert record["message"] == '"quoted"\twords'
    assert json.loads(logfile.as_json("plain", "APIServer"))["process"] == "APIServer"


def test_the_launcher_s_own_words_become_json_line_by_line() -> None:
    out = io.StringIO()
    print("a table\n  of two lines", file=logfile.JsonLines(out))
    assert [json.loads(x)["message"] for x in out.getvalue().splitlines()] == [
        "a table", "  of two lines",
    ]  # fmt: skip


def test_an_echoed_log_is_kept_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logfile, "KEPT_BYTES", 1000)
    source, descriptor = os.pipe()
    with os.fdopen(descriptor, "w") as writer:
        for number in range(300):
            writer.write(f"line {number:04}\n")
    logfile._relay(source, tmp_path / "serve.log", "text")
    assert (tmp_path / "serve.log").stat().st_size < 1100
    assert (tmp_path / "serve.1").stat().st_size < 1100
    assert logfile.read(tmp_path / "serve.log")[-1] == "line 0299"


def test_only_shared_memory_of_this_server_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    ours, theirs = tmp_path / "psm_ours", tmp_path / "psm_theirs"
    ours.touch()
    theirs.touch()
    record = tmp_path / "record.json"
    record.write_text(json.dumps([str(ours), "/etc/passwd", 7]))
    assert shm.clear(record) == [ours]
    assert theirs.exists()
    assert not record.exists()
    assert shm.clear(record) == []


def test_kernels_of_the_image_are_brought_where_more_can_be_added(tmp_path: Path) -> None:
    built, cache = tmp_path / "built", tmp_path / "cache"
    (built / "0123").mkdir(parents=True)
    (built / "0123" / "gather.o").write_text("object")
    (built / "0123" / "gather.lock").touch()
    given = {"ASSAY_BUILT_KERNELS": str(built), "ASSAY_KERNEL_CACHE": str(cache)}
    assert entrypoint.bring_kernels(given) == 1
    assert [p.relative_to(cache) for p in cache.rglob("*.*")] == [Path("0123/gather.o")]
    (cache / "0123" / "gather.o").write_text("compiled here")
    assert entrypoint.bring_kernels(given) == 0
    assert (cache / "0123" / "gather.o").read_text() == "compiled here"
    assert entrypoint.bring_kernels({}) == 0


def test_a_cache_that_takes_no_kernels_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "gather.o").touch()
    given = {"ASSAY_BUILT_KERNELS": str(tmp_path / "built"), "ASSAY_KERNEL_CACHE": "/proc/no"}
    assert entrypoint.bring_kernels(given) == 0
    assert "warning: kernels of the image are not in /proc/no" in capsys.readouterr().out
