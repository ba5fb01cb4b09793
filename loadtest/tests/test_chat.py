"""One streamed answer: what counts as a token, and each way in which an answer can be wrong."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_load.stream.chat import ChatStream
from assay_load.stream.errors import StreamError

MODEL = "m"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "i", "model": MODEL, "choices": [choice]}


def usage(completion: int, prompt: int = 7) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"id": "i", "model": MODEL, "choices": [], "usage": counts}


GOOD = [chunk(role="assistant", content=""), chunk(reasoning="a"), chunk(content="b"),
        chunk("length", content="c"), usage(3), "[DONE]"]  # fmt: skip


def stream(events: list[Any], end: bytes = b"0\r\n\r\n") -> ChatStream:
    """Each event at its own second, from 1 on."""
    made = ChatStream(MODEL)
    made.feed(HEAD, 0.0)
    for second, value in enumerate(events, 1):
        made.feed(event(value), float(second))
    made.feed(end, 99.0)
    return made


def kind_of(
    events: list[Any], asked: int = 3, exact: bool = True, end: bytes = b"0\r\n\r\n"
) -> str:
    with pytest.raises(StreamError) as caught:
        stream(events, end).check(asked, exact)
    return caught.value.kind


def test_times_are_those_of_the_tokens_and_empty_deltas_are_none() -> None:
    made = stream(GOOD)
    made.check(3, exact=True)
    answer = made.answer
    assert list(answer.arrivals) == [2.0, 3.0, 4.0]
    assert (answer.first_reasoning, answer.first_content, answer.first) == (2.0, 3.0, 2.0)
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)
    assert answer.finish_reason == "length"


def test_a_tool_call_is_a_first_token_too() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
    made = stream([chunk(tool_calls=call), chunk("length", content="x"), usage(3), "[DONE]"])
    made.check(3, exact=True)
    assert made.answer.first == made.answer.first_tool == 1.0


def test_older_servers_reasoning_counts() -> None:
    made = stream([chunk(reasoning_content="x"), chunk("length"), usage(1), "[DONE]"])
    made.check(1, exact=True)
    assert made.answer.first_reasoning == 1.0


def test_several_tokens_in_a_chunk_are_no_error_but_more_chunks_than_tokens_are() -> None:
    stream([chunk("length", content="abc"), usage(3), "[DONE]"]).check(3, exact=True)
    assert (
        kind_of([*[chunk(content="a")] * 4, chunk("length"), usage(3), "[DONE]"]) == "token_count"
    )


def test_token_ids_must_be_as_many_as_the_usage_says() -> None:
    def with_ids(count: int) -> dict[str, Any]:
        made = chunk("length", content="abc")
        made["choices"][0]["token_ids"] = [5] * count
        return made

    stream([with_ids(3), usage(3), "[DONE]"]).check(3, exact=True)
    assert kind_of([with_ids(2), usage(3), "[DONE]"]) == "token_count"


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (GOOD[:-1], "truncated_stream"),
        ([*GOOD[:3], usage(2), "[DONE]"], "truncated_stream"),
        ([*GOOD[:4], "[DONE]"], "no_usage"),
        ([*GOOD[:4], usage(2), "[DONE]"], "token_count"),
        ([chunk("length"), usage(3), "[DONE]"], "empty_answer"),
        ([*GOOD, chunk(content="x")], "malformed_event"),
        ([chunk(content="a"), {"error": {"message": "boom"}}], "error_event"),
        ([chunk(content="a"), "{not json"], "malformed_event"),
        ([{"id": "i", "model": MODEL, "choices": [{"delta": {"content": 5}}]}], "malformed_event"),
        ([{"id": "i", "model": "other", "choices": []}], "wrong_model"),
        ([chunk(content="a"), chunk("stop", content="b"), usage(3), "[DONE]"], "token_count"),
    ],
)
def test_each_wrong_answer_has_its_own_kind(events: list[Any], kind: str) -> None:
    assert kind_of(events) == kind


def test_fewer_tokens_are_right_where_the_model_may_end_itself() -> None:
    events = [chunk(content="a"), chunk("stop", content="b"), usage(2), "[DONE]"]
    stream(events).check(3, exact=False)
    assert kind_of([*[chunk(content="a")] * 3, chunk("stop"), usage(4), "[DONE]"], exact=False) == (
        "token_count"
    )


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nbusy", "http_503"),
        (b"HTTP/1.1 500 X\r\nConnection: close\r\n\r\nboom", "http_500"),
        (b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
         "not_a_stream"),
        (HEAD + event(GOOD[1]), "connection_closed"),
        (HEAD, "connection_closed"),
    ],
)  # fmt: skip
def test_what_is_no_stream_is_told_apart(response: bytes, kind: str) -> None:
    made = ChatStream(MODEL)

    def read() -> None:
        made.feed(response, 0.0)
        made.end_of_input()

    with pytest.raises(StreamError) as caught:
        read()
    assert caught.value.kind == kind


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([event(e) for e in GOOD])), max_size=8
    )
)
def test_no_server_can_crash_it(parts: list[bytes]) -> None:
    made = ChatStream(MODEL)
    try:
        made.feed(HEAD, 0.0)
        for part in parts:
            made.feed(part, 1.0)
        made.end_of_input()
        made.check(3, exact=True)
    except StreamError:
        pass


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "error", "model", "id",
                             "prompt_tokens", "completion_tokens", "finish_reason", "token_ids"]),
            inner, max_size=4,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_any_json_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(StreamError):
        stream([value, *GOOD[1:]]).check(3, exact=True)
