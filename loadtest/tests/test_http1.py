"""The HTTP reader against h11, an independent one, and against bytes that nobody should send."""

from __future__ import annotations

import contextlib
import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_load.stream.errors import StreamError
from assay_load.stream.http1 import ResponseReader

BODIES = st.lists(st.binary(min_size=1, max_size=200), max_size=8)
CUTS = st.lists(st.integers(0, 3000), max_size=30)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def read(data: bytes, cuts: list[int], closes: bool = False) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    body = b"".join(piece for part in pieces_of(data, cuts) for piece in reader.feed(part))
    if closes:
        reader.end_of_input()
    return reader, body


def by_h11(data: bytes, closes: bool) -> tuple[int, bytes] | None:
    """(status, body) of a complete response; None if h11 refuses it or it has no end."""
    connection = h11.Connection(our_role=h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(data)
        if closes:
            connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return None if connection.trailing_data[0] else (status, body)
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return None
    except h11.RemoteProtocolError:
        return None


def chunked(bodies: list[bytes], extension: str = "") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(b), extension.encode(), b) for b in bodies)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@given(BODIES, CUTS, st.sampled_from(["", ";a=b", " ;x"]))
def test_chunks_come_whole_however_they_were_cut(
    bodies: list[bytes], cuts: list[int], extension: str
) -> None:
    reader, body = read(chunked(bodies, extension), cuts)
    assert reader.complete
    assert reader.reusable
    assert body == b"".join(bodies)


@given(st.binary(max_size=500), CUTS)
def test_a_counted_body_ends_where_it_says(body: bytes, cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, found = read(head + body, cuts)
    assert (reader.complete, found) == (True, body)


@given(st.binary(max_size=500), CUTS)
def test_a_body_without_a_length_ends_with_the_connection(body: bytes, cuts: list[int]) -> None:
    reader, found = read(b"HTTP/1.0 200 OK\r\n\r\n" + body, cuts, closes=True)
    assert (reader.complete, reader.reusable, found) == (True, False, body)


@given(BODIES, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=3), CUTS)
def test_it_accepts_nothing_that_h11_refuses_and_reads_the_same(
    bodies: list[bytes], edits: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = bytearray(chunked(bodies))
    for at, bytes_ in edits:
        data[at % len(data) : at % len(data) + len(bytes_)] = bytes_
    try:
        reader, body = read(bytes(data), cuts)
    except StreamError:
        return  # stricter than h11 is allowed: nobody's server sends such things
    if reader.complete:
        assert by_h11(bytes(data), closes=False) == (reader.status, body)


@given(st.binary(max_size=300), CUTS)
def test_any_bytes_end_in_a_stream_error_or_in_waiting(data: bytes, cuts: list[int]) -> None:
    for start in (
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ):
        with contextlib.suppress(StreamError):
            read(start + data, cuts, closes=True)


@pytest.mark.parametrize(
    "data",
    [
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 70000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000,
        b"HTTP/1.1 204 No Content\r\n\r\nbody",
    ],
)
def test_what_is_malformed_is_called_so(data: bytes) -> None:
    with pytest.raises(StreamError) as caught:
        read(data, [])
    assert caught.value.kind == "malformed_http"


def test_an_interim_response_is_passed_over() -> None:
    reader, body = read(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked([b"ab"]), [])
    assert (reader.status, body) == (200, b"ab")


@pytest.mark.parametrize("cut", [10, 30, 50, 60])
def test_an_early_end_is_a_closed_connection(cut: int) -> None:
    data = chunked([b"abcdef", b"ghi"])
    assert cut < len(data)
    with pytest.raises(StreamError) as caught:
        read(data[:cut], [], closes=True)
    assert caught.value.kind == "connection_closed"
