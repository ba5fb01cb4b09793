"""The launcher's own requests to the server it started."""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

# The server is on this machine: a proxy named in the environment is not for it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoAnswerError(Exception):
    """The server gave no usable answer; says what it gave instead."""


@dataclass(frozen=True)
class Client:
    host: str
    port: int

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    def _get(
        self, path: str, timeout: float, key: str = "", body: dict[str, Any] | None = None
    ) -> str:
        headers = {"Content-Type": "application/json"} | ({"x-assay-key": key} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with _opener.open(request, timeout=timeout) as response:
            content: bytes = response.read()
        return content.decode(errors="replace")

    def healthy(self) -> bool:
        try:
            self._get("/health", 5)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def status_without_key(self, path: str) -> int:
        """HTTP status that a client gets."""
        try:
            self._get(path, 30)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"did not answer {path}: {error!r}") from error
        return 200

    def page(self, path: str, key: str, timeout: float) -> str:
        """What stands there for the holder of the door's key. Raises NoAnswerError."""
        try:
            return self._get(path, timeout, key)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"did not answer {path}: {error!r}") from error

    def one_token(self, key: str, timeout: float) -> None:
        """Have the engine make one step. Any answer will do, an error too: somebody was there to
        give it. Raises NoAnswerError when none came."""
        try:
            model = json.loads(self.page("/v1/models", key, timeout))["data"][0]["id"]
            self._get("/v1/chat/completions", timeout, key, body(model, "Hi") | {"max_tokens": 1})
        except urllib.error.HTTPError:
            return
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise NoAnswerError(f"did not answer one token: {error!r}") from error


def body(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
