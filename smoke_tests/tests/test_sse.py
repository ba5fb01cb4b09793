"""The event-stream parser, on whatever a server may send."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from assay_smoke.client.answer import Answer, StreamedChat
from assay_smoke.client.sse import SseParser


def parsed(pieces: list[bytes], **more: int) -> tuple[list[str], SseParser]:
    parser = SseParser(**more)
    events = [event for piece in pieces for event in parser.feed(piece)]
    parser.close()
    return events, parser


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(raw) + 1) for p in places), len(raw)]
    return [raw[a:b] for a, b in pairwise(edges)]


DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(
    st.lists(DATA, min_size=1),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 10_000)),
    st.booleans(),
)
@example(["ü€😀"], "\r\n", list(range(40)), True)
def test_events_arrive_whole_however_the_bytes_are_cut(
    data: list[str], end: str, places: list[int], comments: bool
) -> None:
    comment = f": keep-alive{end}{end}" if comments else ""
    raw = "".join(f"{comment}data: {d}{end}id: 1{end}{end}" for d in data).encode()
    events, parser = parsed(cut(raw, places))
    assert events == data
    assert parser.problems == []


@given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_any_bytes_are_survived_and_cuts_change_nothing(raw: bytes, places: list[int]) -> None:
    events, parser = parsed(cut(raw, places))
    whole, same = parsed([raw])
    assert events == whole
    assert parser.problems == same.problems


def test_several_data_lines_are_one_event() -> None:
    assert parsed([b"data: a\ndata:b\n\n"])[0] == ["a\nb"]


def test_a_huge_line_is_named_and_not_kept() -> None:
    raw = b"data: " + b"x" * 5000 + b"\n\ndata: fine\n\n"
    events, parser = parsed(cut(raw, list(range(0, 5000, 97))), max_line=1000)
    assert events == ["fine"]
    assert "longer than 1000 bytes" in parser.problems[0]
    assert len(parser._buffer) == 0


def test_one_event_of_endless_lines_is_not_kept_either() -> None:
    events, parser = parsed([b"data: " + b"y" * 100 + b"\n"] * 50 + [b"\n"], max_line=1000)
    assert parser.problems
    assert sum(map(len, events)) <= 1000


def test_a_stream_that_stops_within_an_event_is_named() -> None:
    assert parsed([b'data: {"a"'])[1].problems == ["the stream ends within an event"]
    assert parsed([b"data: a\n"])[1].problems == ["the stream ends within an event"]
    assert parsed([b"data: a\n\n"])[1].problems == []


def test_what_is_no_event_stream_is_named() -> None:
    assert "no field" in parsed([b"<html>\n\n"])[1].problems[0]
    assert "UTF-8" in parsed([b"data: \xff\n\n"])[1].problems[0]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "content",
                    "reasoning",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "index",
                    "logprobs",
                    "logprob",
                    "token",
                    "top_logprobs",
                    "finish_reason",
                    "usage",
                    "completion_tokens",
                    "error",
                    "message",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(st.lists(ANYTHING | st.just({"choices": [{"delta": {"content": "a"}}]}), max_size=6))
def test_any_json_in_a_stream_is_survived(events: list[object]) -> None:
    answer = Answer()
    chat = StreamedChat(answer)
    for event in events:
        chat.piece(json.dumps(event))
    chat.close()
    assert answer.problems, "no such stream is whole: it lacks [DONE]"


def test_a_whole_stream_is_put_together() -> None:
    chat = StreamedChat(Answer())

    def piece(**delta: object) -> str:
        return json.dumps({"choices": [{"index": 0, "delta": delta}]})

    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    for event in (
        piece(role="assistant"), piece(reasoning="Hm"), piece(content="Pa"), piece(content="ris"),
        piece(tool_calls=[call]), piece(tool_calls=[call | {"function": {"arguments": ": 1}"}}]),
        json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        json.dumps({"choices": [], "usage": {"completion_tokens": 4}}), "[DONE]",
    ):  # fmt: skip
        chat.piece(event)
    chat.close()
    answer = chat.answer
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("Hm", "Paris", "stop")
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("f", '{"a": 1}')]
    assert (answer.problems, answer.completion_tokens) == ([], 4)


def test_what_comes_after_the_end_is_a_problem() -> None:
    chat = StreamedChat(Answer())
    for event in ('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', "[DONE]", "{}"):
        chat.piece(event)
    chat.close()
    assert chat.answer.problems == ["data after [DONE]"]
