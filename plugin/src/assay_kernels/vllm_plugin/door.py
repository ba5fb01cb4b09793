"""The closed door: no client is answered before the server has been found sound.

    vllm serve ... --middleware assay_kernels.vllm_plugin.door.ClosedDoor

The door is open while the file `$ASSAY_RUN_DIR/open` exists. Closed, everything but OPEN_PATHS
answers 503 with Retry-After, except to the holder of `$ASSAY_BYPASS_KEY`, who sends it in the
header `x-assay-key`: whoever tests the server before its clients may use it.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from assay_kernels.vllm_plugin import proof

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
KEY_HEADER = b"x-assay-key"
RETRY_AFTER_SECONDS = 5


class ClosedDoor:
    """ASGI middleware; looks at the file at every request."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.sign = proof.run_dir() / "open"
        self.key = os.environ.get("ASSAY_BYPASS_KEY", "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.sign.exists() or self.may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": "not ready"})
        else:
            await refuse(send)

    def may_pass(self, scope: Message) -> bool:
        if scope["type"] == "http" and path_of(scope) in OPEN_PATHS:
            return True
        if not self.key:
            return False
        return any(
            name.lower() == KEY_HEADER and hmac.compare_digest(value, self.key)
            for name, value in scope["headers"]
        )


def path_of(scope: Message) -> str:
    """Path inside the application: without the prefix that a proxy mounts it under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


async def refuse(send: Send) -> None:
    body = {
        "error": {
            "message": "The server has started but has not been found sound yet. Try again soon.",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        }
    }
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": content})
