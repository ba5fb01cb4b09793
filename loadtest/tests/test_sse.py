"""The event reader against a plain reading of the standard, cut in any way."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_load.stream import sse
from assay_load.stream.errors import StreamError
from assay_load.stream.sse import EventReader

LINES = st.one_of(
    st.sampled_from([b"", b"", b":comment", b"data", b"data:", b"data: x", b"data:  y", b"id: 3",
                     b"event: e", b"retry: 1", b"datax: 1", b"\xef\xbb\xbfdata: b", b"data: a:b"]),
    st.text(max_size=20).map(lambda t: b"data: " + re.sub("[\r\n]", "", t).encode()),
)  # fmt: skip
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def by_the_standard(stream: bytes) -> list[bytes]:
    """The whole stream at once, line by line."""
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    events, data = [], []
    for line in lines[:-1]:  # what follows the last line end is no line yet
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif line.split(b":", 1)[0] == b"data":
            value = line[5:]
            data.append(value[1:] if value[:1] == b" " else value)
    return events


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.lists(st.integers(0, 200), max_size=12))
def test_events_are_those_of_the_standard_however_they_were_cut(
    lines: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(line + end for line, end in lines)
    edges = [0, *sorted(c for c in cuts if c < len(stream)), len(stream)]
    reader = EventReader()
    found = [e for a, b in itertools.pairwise(edges) for e in reader.feed(stream[a:b])]
    # A lone CR at a cut may be half of a CR LF: the reader takes it for a line's end at once, which
    # the standard's own parser does too.
    assert found == by_the_standard(stream)


@given(st.text(min_size=1, max_size=30).filter(lambda t: not re.search("[\r\n]", t)))
def test_a_character_cut_in_two_is_whole_again(text: str) -> None:
    stream = b"data: " + text.encode() + b"\n\n"
    reader = EventReader()
    found = [event for i in range(len(stream)) for event in reader.feed(stream[i : i + 1])]
    assert [event.decode() for event in found] == [text]


def test_an_endless_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 1000)
    reader = EventReader()
    for _ in range(250):
        reader.feed(b"data: xxxx\n")
    with pytest.raises(StreamError):
        reader.feed(b"data: xxxx\n")


def test_bytes_after_the_last_event_are_noticed() -> None:
    reader = EventReader()
    reader.feed(b"data: a\n\ndata: b")
    assert reader.pending
