"""The closed door, as an ASGI application sees it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from assay_kernels.vllm_plugin.door import ClosedDoor

KEY = (b"X-Assay-Key", b"secret")


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClosedDoor:
    monkeypatch.setenv("ASSAY_RUN_DIR", str(tmp_path))
    give_key(tmp_path, monkeypatch)
    return ClosedDoor(stream)


def give_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bypass.key").write_text("secret\n")
    monkeypatch.setenv("ASSAY_BYPASS_KEY_FILE", str(folder / "bypass.key"))


async def stream(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await send({"type": f"{scope['type']}.reached"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def through(door: ClosedDoor, path: str = "/v1/models", kind: str = "http", **scope: Any) -> Any:
    """Messages that the application, or the door in its place, sends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    full = {"type": kind, "path": path, "root_path": "", "headers": [], **scope}
    asyncio.run(door(full, lambda: asyncio.sleep(0), send))  # type: ignore[arg-type]
    return sent


def status(messages: Any) -> int:
    return int(messages[0]["status"])


def test_closed_it_answers_503_with_an_openai_style_error(door: ClosedDoor) -> None:
    start, body = through(door)
    assert start["status"] == 503
    assert int(dict(start["headers"])[b"retry-after"]) > 0
    error = json.loads(body["body"])["error"]
    assert error["code"] == 503
    assert error["message"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version"])
def test_probes_and_metrics_are_answered_while_closed(door: ClosedDoor, path: str) -> None:
    assert status(through(door, path)) == 200
    assert status(through(door, f"/api{path}", root_path="/api")) == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/invocations", "/health/../v1/models", "/healthy", "/", ""]
)
def test_nothing_else_is(door: ClosedDoor, path: str) -> None:
    assert status(through(door, path)) == 503


def test_the_key_passes_and_a_wrong_one_does_not(door: ClosedDoor) -> None:
    assert status(through(door, headers=[KEY])) == 200
    assert status(through(door, headers=[(b"x-assay-key", b"secre")])) == 503
    assert status(through(door, headers=[(b"x-assay-key", b"")])) == 503


def test_without_a_key_set_no_header_passes(
    door: ClosedDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASSAY_BYPASS_KEY_FILE")
    assert status(through(ClosedDoor(stream), headers=[(b"x-assay-key", b"")])) == 503


def test_open_it_passes_every_part_of_a_stream(door: ClosedDoor, tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    bodies = [m["body"] for m in through(door) if m["type"] == "http.response.body"]
    assert bodies == [b"one", b"two", b""]


def test_it_can_be_closed_again(door: ClosedDoor, tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    assert status(through(door)) == 200
    (tmp_path / "open").unlink()
    assert status(through(door)) == 503


def test_websockets_are_refused_while_closed(door: ClosedDoor, tmp_path: Path) -> None:
    assert through(door, "/health", kind="websocket")[0]["type"] == "websocket.close"
    (tmp_path / "open").touch()
    assert through(door, kind="websocket")[0]["type"] == "websocket.reached"


def test_lifespan_events_always_pass(door: ClosedDoor) -> None:
    assert through(door, kind="lifespan") == [{"type": "lifespan.reached"}]


def with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> tuple[ClosedDoor, Path]:
    """An open door that asks for keys."""
    monkeypatch.setenv("ASSAY_RUN_DIR", str(tmp_path))
    give_key(tmp_path, monkeypatch)
    (tmp_path / "open").touch()
    keys = tmp_path / "keys"
    keys.write_text(text)
    monkeypatch.setenv("ASSAY_API_KEYS_FILE", str(keys))
    return ClosedDoor(stream), keys


def bearing(value: str, *more: tuple[bytes, bytes]) -> Any:
    return [(b"Authorization", value.encode()), *more]


def test_every_path_but_health_asks_for_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, _ = with_keys(tmp_path, monkeypatch, "one\n# two\n\n  three  \n")
    for path in ("/v1/models", "/metrics", "/version", "/docs", "/tokenize", "/", ""):
        assert status(through(door, path)) == 401, path
        assert status(through(door, path, headers=bearing("Bearer one"))) == 200, path
    assert status(through(door, "/health")) == 200
    assert status(through(door, "/api/ping", root_path="/api")) == 200
    assert status(through(door, headers=bearing("bearer  three"))) == 200
    assert status(through(door, headers=[KEY])) == 200
    assert through(door, kind="websocket")[0] == {
        "type": "websocket.close", "code": 1008, "reason": "unauthorized",
    }  # fmt: skip


@pytest.mark.parametrize(
    "value", ["one", "Basic one", "Bearer", "Bearer ", "Bearer two", "Bearer # two", "Bearer onee",
              "Bearer on", "Bearer one one", "Bearer ONE"],
)  # fmt: skip
def test_what_is_no_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    door, _ = with_keys(tmp_path, monkeypatch, "one\n# two\n")
    start, body = through(door, headers=bearing(value))
    assert start["status"] == 401
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert "one" not in json.loads(body["body"])["error"]["message"].split()


def test_two_authorization_headers_are_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, _ = with_keys(tmp_path, monkeypatch, "one\n")
    headers = bearing("Bearer one", (b"authorization", b"Bearer other"))
    assert status(through(door, headers=headers)) == 401


def test_a_key_does_not_open_a_closed_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, _ = with_keys(tmp_path, monkeypatch, "one\n")
    (tmp_path / "open").unlink()
    assert status(through(door, headers=bearing("Bearer one"))) == 503
    assert status(through(door)) == 401


def test_keys_are_read_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door, keys = with_keys(tmp_path, monkeypatch, "one\n")
    other = tmp_path / "other"
    other.write_text("two\n")
    other.replace(keys)
    assert status(through(door, headers=bearing("Bearer one"))) == 401
    assert status(through(door, headers=bearing("Bearer two"))) == 200
    keys.write_text("not a key\n")
    assert status(through(door, headers=bearing("Bearer two"))) == 200, "a bad file changes nothing"
    assert "printable ASCII" in caplog.text
    assert "not a key" not in caplog.text
    keys.unlink()
    assert status(through(door, headers=bearing("Bearer two"))) == 200
    keys.write_text("")
    assert status(through(door, headers=bearing("Bearer two"))) == 401, "no key passes nobody"
