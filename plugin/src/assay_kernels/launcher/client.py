"""The launcher's own requests to the server it started."""

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
    key: str

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    def _request(self, path: str, body: dict[str, Any] | None, timeout: float) -> bytes:
        headers = {"x-assay-key": self.key, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with _opener.open(request, timeout=timeout) as response:
            content: bytes = response.read()
        return content

    def healthy(self) -> bool:
        try:
            self._request("/health", None, 5)
        except OSError:
            return False
        return True

    def model(self) -> str:
        answer = json.loads(self._request("/v1/models", None, 30))
        name: str = answer["data"][0]["id"]
        return name

    def ask(self, model: str, question: str, timeout: float) -> str:
        """The text of one chat completion, at temperature 0 and without thinking."""
        try:
            answer = json.loads(
                self._request("/v1/chat/completions", body(model, question), timeout)
            )
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise NoAnswerError(f"answered {error.code} to a chat request: {detail}") from error
        except OSError as error:
            raise NoAnswerError(f"did not answer a chat request: {error}") from error
        message = answer["choices"][0]["message"]
        text = message.get("content") or message.get("reasoning") or ""
        if not text.strip():
            tokens = answer.get("usage", {}).get("completion_tokens")
            raise NoAnswerError(f"answered a chat request with empty content ({tokens} tokens)")
        return str(text).strip()


def body(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
