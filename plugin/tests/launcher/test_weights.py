"""Weights by commit, against a hub on this machine that speaks the real protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from assay_kernels.launcher import weights

MINIATURE = Path(__file__).parents[3] / "models" / "miniature" / "checkpoint"
REVISION = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"


class Hub:
    """Serves the miniature as `ours/miniature`. The file `spoil` is sent damaged; the file `cut`
    breaks off half-way once."""

    def __init__(self) -> None:
        self.files = {file.name: file.read_bytes() for file in MINIATURE.iterdir()}
        self.spoil = ""
        self.cut = ""
        self.requests: list[str] = []
        self.ranges: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def info(self) -> bytes:
        siblings = []
        for name, data in self.files.items():
            one: dict[str, object] = {"rfilename": name, "size": len(data)}
            if name.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(one)
        found = {"id": "ours/miniature", "modelId": "ours/miniature", "sha": REVISION}
        return json.dumps(found | {"siblings": siblings, "tags": [], "private": False}).encode()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(path)
        if path.startswith("/api/models/ours/miniature"):
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": "0" * 40}
                    for n, d in self.files.items()
                ]
                self.send(request, 200, json.dumps(tree).encode(), {})
            else:
                self.send(request, 200, self.info(), {"Content-Type": "application/json"})
            return
        data = self.files.get(path.rpartition("/")[2])
        if data is None:
            self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        name = path.rpartition("/")[2]
        headers = {"X-Repo-Commit": REVISION, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if name == self.spoil:
            data = data[:-4] + b"XXXX"
        status = 200
        if (wanted := request.headers.get("Range")) and request.command == "GET":
            self.ranges.append(f"{name} {wanted}")
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        self.send(request, status, data, headers, cut=name == self.cut and status == 200)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        cut: bool = False,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if cut:
            self.cut = ""
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(2)
            return
        request.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()


def fetch(hub: Hub, folder: Path, revision: str = REVISION, **more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "assay_kernels.launcher.weights", "ours/miniature", revision]
    answer = subprocess.run(
        [*command, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        env=dict(os.environ)
        | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        | {"HF_HOME": str(folder.parent / "hf"), "ASSAY_SECRETS_DIR": str(folder.parent)} | more,
    )  # fmt: skip
    return answer.returncode, answer.stdout


def test_a_revision_is_fetched_once_and_then_no_network_is_asked(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    code, said = fetch(hub, folder)
    assert code == 0, said
    for name, data in hub.files.items():
        assert (folder / name).read_bytes() == data
    asked = len(hub.requests)
    assert fetch(hub, folder, ASSAY_OFFLINE="1")[0] == 0
    assert len(hub.requests) == asked


def test_a_broken_off_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    # The hub's client writes 10 MiB at a time: less than that of a file is fetched again.
    hub.files["extra.bin"] = os.urandom(40 << 20)
    hub.cut = "extra.bin"
    code, said = fetch(hub, folder)
    if code != 0:  # the hub's client may also try again by itself
        assert not (folder / weights.STAMP).exists()
        code, said = fetch(hub, folder)
    assert code == 0, said
    assert any(line.startswith("extra.bin bytes=") for line in hub.ranges)


def test_a_damaged_file_is_removed_and_nothing_is_called_complete(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    hub.spoil = "model-00002-of-00003.safetensors"
    code, said = fetch(hub, folder)
    assert code == 1
    assert "model-00002-of-00003.safetensors" in said
    assert not (folder / weights.STAMP).exists()
    hub.spoil = ""
    assert fetch(hub, folder)[0] == 0


def test_a_branch_is_refused(hub: Hub, tmp_path: Path) -> None:
    code, said = fetch(hub, tmp_path / "weights", revision="main")
    assert code == 2
    assert "must be a commit of 40 hexadecimal digits" in said
    assert hub.requests == []


def test_offline_and_incomplete_is_said(hub: Hub, tmp_path: Path) -> None:
    code, said = fetch(hub, tmp_path / "weights", ASSAY_OFFLINE="1")
    assert code == 2
    assert "ASSAY_OFFLINE=1" in said
    assert hub.requests == []


def test_another_revision_gets_a_folder_of_its_own(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    stamp = {"repository": "ours/miniature", "revision": "f" * 40, "files": {}}
    (folder / weights.STAMP).write_text(json.dumps(stamp))
    code, said = fetch(hub, folder)
    assert code == 2
    assert "give that its own folder" in said


def test_a_complete_folder_that_lost_a_file_is_no_longer_complete(tmp_path: Path) -> None:
    stamp = {"repository": "ours/miniature", "revision": REVISION, "files": {"config.json": 10}}
    (tmp_path / weights.STAMP).write_text(json.dumps(stamp))
    with pytest.raises(weights.WeightsError, match=r"config\.json is not the 10 bytes"):
        weights.is_complete(tmp_path, "ours/miniature", REVISION)
