"""The launcher's own requests to the server it started."""

import http.client
import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

# The server is on this machine: a proxy named in the environment is not for it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

NOT_A_NUMBER = -9999.0
"""What vLLM sends in place of a log-probability that JSON cannot hold."""


class NoAnswerError(Exception):
    """The server gave no usable answer; says what it gave instead."""


@dataclass(frozen=True)
class Client:
    host: str
    port: int
    key: str

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    def _request(
        self, path: str, body: dict[str, Any] | None, timeout: float, with_key: bool = True
    ) -> bytes:
        headers = {"Content-Type": "application/json"}
        if with_key:
            headers["x-assay-key"] = self.key
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with _opener.open(request, timeout=timeout) as response:
            content: bytes = response.read()
        return content

    def _json(self, what: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        """The answer to a request with the key; raises NoAnswerError for anything but JSON."""
        try:
            return json.loads(self._request(path, body, timeout))
        except urllib.error.HTTPError as error:
            raise NoAnswerError(f"answered {error.code} to {what}{_detail(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"did not answer {what}: {error!r}") from error
        except ValueError as error:
            raise NoAnswerError(f"answered {what} with something that is not JSON") from error

    def healthy(self) -> bool:
        try:
            self._request("/health", None, 5)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def status_without_key(self, path: str) -> int:
        """HTTP status that a client gets."""
        try:
            self._request(path, None, 30, with_key=False)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"did not answer {path}: {error!r}") from error
        return 200

    def model(self) -> str:
        answer = self._json("/v1/models", "/v1/models", None, 30)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise NoAnswerError("names no model at /v1/models") from error

    def ask(self, model: str, question: str, timeout: float) -> str:
        """The text of one chat completion, every token of which has a real probability."""
        request = body(model, question) | {"logprobs": True}
        answer = self._json("a chat request", "/v1/chat/completions", request, timeout)
        try:
            choice = answer["choices"][0]
            text = str(choice["message"].get("content") or "").strip()
            tokens = (choice.get("logprobs") or {}).get("content") or []
            probabilities = [token["logprob"] for token in tokens]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise NoAnswerError("answered a chat request without a completion") from error
        unreal = [p for p in probabilities if not _is_log_probability(p)]
        if unreal:
            raise NoAnswerError(
                f"answered a chat request with log-probability {json.dumps(unreal[0])}"
                f" for {len(unreal)} of {len(probabilities)} tokens: its logits are not numbers"
            )
        if not text:
            raise NoAnswerError("answered a chat request with empty content")
        if not probabilities:
            raise NoAnswerError("answered a chat request without log-probabilities")
        return text


def _is_log_probability(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > NOT_A_NUMBER


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
    except (OSError, http.client.HTTPException):
        text = ""
    if error.code == 500:
        text = f"{text} (logits that are NaN end so)".strip()
    return f": {text}" if text else ""


def body(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
