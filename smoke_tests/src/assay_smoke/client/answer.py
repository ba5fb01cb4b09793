"""An answer as it came over the wire, read without trust.

Reading never raises: a field of the wrong type is a problem of the answer, and NaN in any of its
wire forms (`null`, `NaN`, -9999, a string) becomes `math.nan` in the token that carries it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay_smoke.text import excerpt, special_tokens

NOT_A_NUMBER = -9999.0
"""What vLLM sends where a log-probability is -inf, which JSON cannot hold
(vllm/entrypoints/openai, 0.32)."""
MAX_PROBLEMS = 20

Json = Any


@dataclass(frozen=True)
class Token:
    text: str
    logprob: float
    """Nats; NaN when it was none."""
    top: tuple[tuple[str, float], ...] = ()
    """(token, log-probability) of the likeliest, best first, as far as the server listed them."""

    @property
    def gap(self) -> float | None:
        """Nats between the two likeliest; None when fewer than two are known."""
        if len(self.top) < 2:
            return None
        return self.top[0][1] - self.top[1][1]

    @property
    def behind(self) -> float:
        """Nats by which the chosen token is less likely than the likeliest; 0 when it is that."""
        return max(0.0, self.top[0][1] - self.logprob) if self.top else 0.0


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


@dataclass
class Answer:
    """What one request brought back."""

    label: str = ""
    """Who asked: the check and the item."""
    prompt: str = ""
    """The request's own text, to excuse what an answer repeats of it."""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    """Per prompt position: token id -> nats of the likeliest and of the prompt's own."""
    problems: list[str] = field(default_factory=list)
    """What was wrong with its form."""
    unreal: list[str] = field(default_factory=list)
    """Log-probabilities that are none: 'token 7: null'."""
    chat: bool = False
    """By the chat endpoint, whose parsers keep markup away from clients."""
    asked_logprobs: bool = False
    asked_tokens: int = 0
    """max_tokens of the request."""
    free: bool = True
    """Nothing (a schema, a bias) but the model chose the tokens."""
    endless: bool = False
    """It was not allowed to end when it wanted to (min_tokens)."""
    seconds: float = 0.0
    first_token_seconds: float | None = None

    @property
    def text(self) -> str:
        """Everything that a client may see."""
        return self.reasoning + self.content

    @property
    def generated(self) -> int:
        """Tokens, by whoever says more: usage, or the tokens that came."""
        return max(self.completion_tokens or 0, len(self.tokens), len(self.ids))

    def held_back(self, index: int) -> bool:
        """Whether the token at `index` is the second best, the end being forbidden."""
        if not self.endless or index >= len(self.tokens) or not self.tokens[index].top:
            return False
        return bool(special_tokens(self.tokens[index].top[0][0]))

    def problem(self, words: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(words)

    def logprob(self, value: Json, where: str) -> float:
        """A log-probability in nats, or NaN and a note of the form in which it was none."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = _float(value)
            if math.isfinite(number) and NOT_A_NUMBER < number <= 1e-3:
                return min(number, 0.0)
        if len(self.unreal) < MAX_PROBLEMS:
            self.unreal.append(f"{where}: {_shown(value)}")
        return math.nan


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Json) -> str:
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def parse_json(raw: str | bytes) -> Json:
    """JSON, NaN and Infinity included; raises ValueError for everything else."""
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def text_of(answer: Answer, holder: Mapping[str, Json], key: str) -> str:
    value = holder.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        answer.problem(f"{key} is {type(value).__name__}, not text")
        return ""
    return value


def object_of(answer: Answer, value: Json, what: str) -> dict[str, Json]:
    if isinstance(value, dict):
        return value
    answer.problem(f"{what} is {type(value).__name__}, not an object")
    return {}


def list_of(answer: Answer, value: Json, what: str) -> list[Json]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    answer.problem(f"{what} is {type(value).__name__}, not a list")
    return []


def ids_of(answer: Answer, value: Json, what: str) -> list[int]:
    ids = list_of(answer, value, what)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return ids
    answer.problem(f"{what} holds something that is no token id")
    return []


def read_usage(answer: Answer, value: Json) -> None:
    if not isinstance(value, dict):
        return
    for key, name in (("prompt_tokens", "prompt_tokens"), ("completion_tokens",) * 2):
        number = value.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**40:
            setattr(answer, name, number)
        elif number is not None:
            answer.problem(f"usage.{key} is {_shown(number)}")


def read_finish(answer: Answer, choice: Mapping[str, Json]) -> None:
    reason = choice.get("finish_reason")
    if reason is None:
        return
    if not isinstance(reason, str):
        answer.problem(f"finish_reason is {_shown(reason)}")
        return
    answer.finish_reason = excerpt(reason, 40)


def read_chat_logprobs(answer: Answer, value: Json) -> None:
    """Tokens from a chat's `logprobs.content`; safe to call again for each piece of a stream."""
    if value is None:
        return
    content = object_of(answer, value, "logprobs").get("content")
    for entry in list_of(answer, content, "logprobs.content"):
        record = object_of(answer, entry, "a token's entry")
        where = f"token {len(answer.tokens)}"
        logprob = answer.logprob(record.get("logprob"), where)
        top = []
        for likely in list_of(answer, record.get("top_logprobs"), "top_logprobs"):
            other = object_of(answer, likely, "an entry of top_logprobs")
            top.append(
                (text_of(answer, other, "token"), _quiet(answer, other.get("logprob"), where))
            )
        answer.tokens.append(Token(text_of(answer, record, "token"), logprob, _sorted(top)))


def _quiet(answer: Answer, value: Json, where: str) -> float:
    """As `logprob`, but -9999 is fine: an unlikely token may have no probability at all."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= NOT_A_NUMBER:
        return NOT_A_NUMBER
    return answer.logprob(value, where)


def _sorted(top: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(top, key=lambda pair: -pair[1] if pair[1] == pair[1] else math.inf))


def read_completion_logprobs(answer: Answer, value: Json) -> None:
    """Tokens from a completion's `logprobs`: parallel lists."""
    if value is None:
        return
    record = object_of(answer, value, "logprobs")
    texts = list_of(answer, record.get("tokens"), "logprobs.tokens")
    probabilities = list_of(answer, record.get("token_logprobs"), "logprobs.token_logprobs")
    tops = list_of(answer, record.get("top_logprobs"), "logprobs.top_logprobs")
    if len(texts) != len(probabilities):
        answer.problem(f"{len(texts)} tokens with {len(probabilities)} log-probabilities")
    for index, (text, value_) in enumerate(zip(texts, probabilities, strict=False)):
        where = f"token {len(answer.tokens)}"
        listed = tops[index] if index < len(tops) else None
        top = [
            (name, _quiet(answer, p, where))
            for name, p in (listed.items() if isinstance(listed, dict) else ())
        ]
        shown = text if isinstance(text, str) else ""
        answer.tokens.append(Token(shown, answer.logprob(value_, where), _sorted(top)))


def read_prompt_logprobs(answer: Answer, value: Json) -> None:
    """vLLM's `prompt_logprobs`: per position an object id -> {logprob, rank, decoded_token}; the
    first position has none."""
    for index, entry in enumerate(list_of(answer, value, "prompt_logprobs")):
        if entry is None:
            if index:
                answer.unreal.append(f"prompt token {index}: null")
            answer.prompt_logprobs.append(None)
            continue
        position: dict[int, float] = {}
        for key, record in object_of(answer, entry, "a prompt position").items():
            holder = object_of(answer, record, "a prompt log-probability")
            if not key.lstrip("-").isdigit() or len(key) > 400:
                answer.problem(f"prompt log-probability under {key[:24]!r}, which is no token id")
                continue
            position[int(key)] = answer.logprob(holder.get("logprob"), f"prompt token {index}")
        answer.prompt_logprobs.append(position)


def read_message(answer: Answer, message: Mapping[str, Json]) -> None:
    """Content, reasoning and tool calls of a whole chat message."""
    answer.content = text_of(answer, message, "content")
    answer.reasoning = text_of(answer, message, "reasoning") or text_of(
        answer, message, "reasoning_content"
    )
    for call in list_of(answer, message.get("tool_calls"), "tool_calls"):
        function = object_of(
            answer, object_of(answer, call, "a tool call").get("function"), "function"
        )
        answer.tool_calls.append(
            ToolCall(text_of(answer, function, "name"), text_of(answer, function, "arguments"))
        )


def read_chat(answer: Answer, body: Json) -> None:
    """Fill `answer` from the JSON of a chat completion."""
    document = object_of(answer, body, "the answer")
    read_usage(answer, document.get("usage"))
    answer.prompt_ids = ids_of(answer, document.get("prompt_token_ids"), "prompt_token_ids")
    choices = list_of(answer, document.get("choices"), "choices")
    if not choices:
        answer.problem("no choices")
        return
    choice = object_of(answer, choices[0], "a choice")
    read_finish(answer, choice)
    read_message(answer, object_of(answer, choice.get("message"), "message"))
    read_chat_logprobs(answer, choice.get("logprobs"))
    answer.ids = ids_of(answer, choice.get("token_ids"), "token_ids")
    _check_whole(answer)


def read_completion(answer: Answer, body: Json) -> None:
    """Fill `answer` from the JSON of a text completion."""
    document = object_of(answer, body, "the answer")
    read_usage(answer, document.get("usage"))
    choices = list_of(answer, document.get("choices"), "choices")
    if not choices:
        answer.problem("no choices")
        return
    choice = object_of(answer, choices[0], "a choice")
    read_finish(answer, choice)
    answer.content = text_of(answer, choice, "text")
    read_completion_logprobs(answer, choice.get("logprobs"))
    read_prompt_logprobs(answer, choice.get("prompt_logprobs"))
    answer.ids = ids_of(answer, choice.get("token_ids"), "token_ids")
    answer.prompt_ids = ids_of(answer, choice.get("prompt_token_ids"), "prompt_token_ids")
    _check_whole(answer)


def _check_whole(answer: Answer) -> None:
    if answer.finish_reason is None:
        answer.problem("no finish_reason")


@dataclass
class StreamedChat:
    """Puts the pieces of a streamed chat completion together."""

    answer: Answer
    done: bool = False
    error: dict[str, Json] | None = None
    """The error that the server sent in place of the rest, if it did."""
    _calls: dict[int, list[str]] = field(default_factory=dict)

    def piece(self, data: str) -> bool:
        """Take one event; True when it brought content, reasoning or a tool call."""
        answer = self.answer
        if self.done:
            answer.problem("data after [DONE]")
            return False
        if data == "[DONE]":
            self.done = True
            return False
        try:
            document = object_of(answer, parse_json(data), "an event")
        except ValueError:
            answer.problem(f"an event is not JSON: {data[:60]!r}")
            return False
        if isinstance(document.get("error"), dict):
            self.error = document["error"]
            return False
        read_usage(answer, document.get("usage"))
        if "prompt_token_ids" in document and not answer.prompt_ids:
            answer.prompt_ids = ids_of(answer, document["prompt_token_ids"], "prompt_token_ids")
        grew = False
        for value in list_of(answer, document.get("choices"), "choices"):
            choice = object_of(answer, value, "a choice")
            if choice.get("index", 0) != 0:
                answer.problem(f"a choice with index {_shown(choice.get('index'))}")
                continue
            delta = object_of(answer, choice.get("delta"), "delta")
            content = text_of(answer, delta, "content")
            reasoning = text_of(answer, delta, "reasoning") or text_of(
                answer, delta, "reasoning_content"
            )
            if answer.finish_reason is not None and (content or reasoning):
                answer.problem("text after the finish_reason")
            answer.content += content
            answer.reasoning += reasoning
            grew |= bool(content or reasoning) | self._tool_pieces(delta)
            read_chat_logprobs(answer, choice.get("logprobs"))
            answer.ids += ids_of(answer, choice.get("token_ids"), "token_ids")
            read_finish(answer, choice)
        return grew

    def _tool_pieces(self, delta: Mapping[str, Json]) -> bool:
        pieces = list_of(self.answer, delta.get("tool_calls"), "tool_calls")
        for value in pieces:
            call = object_of(self.answer, value, "a piece of a tool call")
            index = call.get("index", 0)
            if not isinstance(index, int) or not 0 <= index < 64:
                self.answer.problem(f"a tool call with index {_shown(index)}")
                continue
            function = object_of(self.answer, call.get("function"), "function")
            name, arguments = self._calls.setdefault(index, ["", ""])
            self._calls[index] = [
                name + text_of(self.answer, function, "name"),
                arguments + text_of(self.answer, function, "arguments"),
            ]
        return bool(pieces)

    def close(self) -> None:
        if not self.done:
            self.answer.problem("the stream ends without [DONE]")
        _check_whole(self.answer)
        self.answer.tool_calls = [ToolCall(*self._calls[i]) for i in sorted(self._calls)]
