"""The launcher's own requests to the server it started."""

import http.client
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

    def _get(self, path: str, timeout: float) -> None:
        with _opener.open(self.url + path, timeout=timeout) as response:
            response.read()

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


def body(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
