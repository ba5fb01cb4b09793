"""A wish to stop, at the moments when it must not be lost or obeyed at once."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assay_kernels.launcher import serve
from assay_kernels.launcher.server import Server
from assay_kernels.launcher.settings import STOP_MARGIN_SECONDS, LaunchError, Settings

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(Settings("model", tmp_path / "profile.yaml", state=tmp_path))


def signalled(then: list[str], what: str, number: signal.Signals) -> Callable[[], None]:
    def begin() -> None:
        os.kill(os.getpid(), number)
        then.append(what)

    return begin


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_during_the_start_waits_for_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(server, "start", signalled(happened, "started", number))
    signals = serve.StopSignals(server)
    signals.listen()
    with pytest.raises(serve.StopRequested):
        signals.start()
    assert happened == ["started"]


def test_a_signal_during_the_stop_kills_and_does_not_interrupt_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(server, "kill", lambda: happened.append("killed"))
    monkeypatch.setattr(server, "stop", signalled(happened, "stopped", signal.SIGINT))
    signals = serve.StopSignals(server)
    signals.listen()
    signals.stop()
    assert happened == ["killed", "stopped"]


def test_what_cannot_be_ended_is_not_called_stopped(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise serve.StopRequested

    monkeypatch.setattr(serve, "run", interrupted)
    monkeypatch.setattr(serve, "Server", lambda _: server)
    monkeypatch.setattr(server, "kill", lambda: [7])
    with pytest.raises(LaunchError, match=r"still ending.*\[7\]"):
        serve.serve(server.settings)
    assert "stopped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "seconds"),
    [((), 300), (("--shutdown-timeout=600",), 600), (("--shutdown_timeout", "5"), 5)],
)
def test_the_kill_waits_as_long_as_vllm_was_told_to_drain(
    server: Server, extra: tuple[str, ...], seconds: float
) -> None:
    """The chart's --shutdown-timeout wins over the profile's, for vLLM and for who ends it."""
    server.settings.profile.write_text("shutdown-timeout: 300\n")
    server.settings = dataclasses.replace(server.settings, extra=extra)
    assert server.settings.grace == seconds + STOP_MARGIN_SECONDS
