"""The closed door: no client is answered before the server has been found sound, and none without
a key where keys are asked for.

    vllm serve ... --middleware assay_kernels.vllm_plugin.door.ClosedDoor

Two questions, in this order:

*Who is it?* With `$ASSAY_API_KEYS_FILE`, every path but HEALTH_PATHS wants `Authorization: Bearer
KEY` with one of the keys in that file (one a line, `#` for comments); anything else is 401. vLLM's
own `--api-key` guards only some paths. The file is read again when it changes.

*Is the server sound?* The door is open while the file `$ASSAY_RUN_DIR/open` exists. Closed,
everything but OPEN_PATHS is 503 with Retry-After.

The holder of the key in `$ASSAY_BYPASS_KEY_FILE`, who sends it in the header `x-assay-key`, passes
both: whoever tests the server before its clients may use it. A file, because the environment of a
process can be read in /proc and is shown by `docker inspect`.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from assay_kernels.vllm_plugin import proof

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEALTH_PATHS = frozenset({"/health", "/ping"})
OPEN_PATHS = HEALTH_PATHS | {"/metrics", "/version"}
BYPASS_HEADER = b"x-assay-key"
RETRY_AFTER_SECONDS = 5

_log = logging.getLogger("assay.door")


class KeysError(Exception):
    """The file of keys cannot be used; names the file and the rule, and never a key."""


def read_keys(path: Path) -> list[bytes]:
    """The keys in a file. Raises KeysError when it cannot be read or a key is not printable ASCII
    without spaces, which no header could carry."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(33 <= byte <= 126 for byte in key):
            raise KeysError(f"{path}, line {number}: a key is printable ASCII")
        keys.append(key)
    return keys


class Keys:
    """The keys of a file, kept as digests under a key of this process's own.

    A lookup of such a digest takes the same time whatever was presented and however many keys there
    are: who does not know the process's key cannot make a digest that nearly fits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._secret = secrets.token_bytes(32)
        self._seen: tuple[int, ...] = ()
        self._digests: frozenset[bytes] = frozenset()
        self._take(read_keys(path), self._stamp())

    def accept(self, presented: bytes) -> bool:
        self._reload()
        return self._digest(presented) in self._digests

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)
        except OSError:
            return (-1,)
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _take(self, keys: list[bytes], stamp: tuple[int, ...]) -> None:
        self._digests = frozenset(map(self._digest, keys))
        self._seen = stamp
        _log.info("%d API keys from %s", len(keys), self.path)

    def _reload(self) -> None:
        """Read the file if it changed; one that cannot be used leaves the keys as they are."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self._take(read_keys(self.path), stamp)
        except KeysError as error:
            self._seen = stamp
            _log.error("%s; the keys read before stay", error)


class ClosedDoor:
    """ASGI middleware; looks at its files at every request."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.sign = os.fspath(proof.run_dir() / "open")
        bypass = os.environ.get("ASSAY_BYPASS_KEY_FILE", "")
        self.bypass = next(iter(read_keys(Path(bypass))), b"") if bypass else b""
        file = os.environ.get("ASSAY_API_KEYS_FILE", "")
        self.keys = Keys(Path(file)) if file else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path = path_of(scope) if scope["type"] == "http" else ""
        if path in HEALTH_PATHS or self.has_bypass(scope):
            await self.app(scope, receive, send)
        elif self.keys is not None and not self.keys.accept(bearer(scope)):
            await refuse(scope, send, UNAUTHORIZED)
        elif path in OPEN_PATHS or os.path.exists(self.sign):
            await self.app(scope, receive, send)
        else:
            await refuse(scope, send, CLOSED)

    def has_bypass(self, scope: Message) -> bool:
        if not self.bypass:
            return False
        return any(
            name.lower() == BYPASS_HEADER and hmac.compare_digest(value, self.bypass)
            for name, value in scope["headers"]
        )


def path_of(scope: Message) -> str:
    """Path inside the application: without the prefix that a proxy mounts it under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def bearer(scope: Message) -> bytes:
    """What stands behind `Bearer`; nothing when the header is missing, not so, or there twice."""
    found = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(found) != 1:
        return b""
    scheme, _, token = found[0].partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else b""


class Refusal:
    """One way to be turned away, in OpenAI's form."""

    def __init__(
        self, status: int, kind: str, message: str, header: tuple[bytes, bytes], websocket: int
    ) -> None:
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.body = json.dumps({"error": error}).encode()
        self.status = status
        self.headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
            header,
        ]
        self.websocket: Message = {"type": "websocket.close", "code": websocket, "reason": kind}


CLOSED = Refusal(
    503,
    "service_unavailable",
    "The server has started but has not been found sound yet. Try again soon.",
    (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
    1013,
)
UNAUTHORIZED = Refusal(
    401,
    "unauthorized",
    "A known key is needed: Authorization: Bearer KEY.",
    (b"www-authenticate", b"Bearer"),
    1008,
)


async def refuse(scope: Message, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        await send(dict(refusal.websocket))
        return
    start = {"type": "http.response.start", "status": refusal.status, "headers": refusal.headers}
    await send(start)
    await send({"type": "http.response.body", "body": refusal.body})
