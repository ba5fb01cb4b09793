"""All streams of a process, read from one place.

A greenlet per stream would be woken for every token; at a thousand streams those switches are most
of the work. Here one epoll instance holds every socket, and what it reports is read and parsed on
the spot, inside gevent's hub. The greenlet that owns the stream wakes once: when it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import gevent
from gevent.event import AsyncResult
from gevent.monkey import get_original

from assay_load.stream.transport import Transport

# gevent takes epoll away from the select module, for it would block; it is never waited on here.
_make_epoll: Callable[[], Any] = get_original("select", "epoll")
_READ = 0x1 | 0x2000  # EPOLLIN | EPOLLRDHUP
BATCH = 256
"""Sockets read before other greenlets get a turn."""


class Reader(Protocol):
    """What a stream must offer. Its exceptions end the stream."""

    @property
    def finished(self) -> bool: ...
    def feed(self, data: bytes, now: float) -> None: ...
    def end_of_input(self) -> None: ...


class Reactor:
    def __init__(self) -> None:
        self._epoll = _make_epoll()
        self._streams: dict[int, tuple[Transport, Reader, AsyncResult]] = {}
        # An epoll instance is itself readable while any of its sockets is.
        self._watcher = gevent.get_hub().loop.io(self._epoll.fileno(), 1)
        self._watcher.start(self._ready)

    def read(self, transport: Transport, reader: Reader) -> None:
        """Feed `reader` until it has finished; raises what ended it."""
        result = AsyncResult()
        self._streams[transport.fd] = (transport, reader, result)
        self._epoll.register(transport.fd, _READ)
        try:
            result.get()
        finally:
            self._forget(transport.fd)

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        self._epoll.close()

    def _forget(self, fd: int) -> None:
        if self._streams.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _ready(self) -> None:
        for fd, _ in self._epoll.poll(0, BATCH):
            if fd not in self._streams:
                continue
            transport, reader, result = self._streams[fd]
            try:
                data = transport.receive()
                if data is None:
                    continue
                if data:
                    reader.feed(data, time.monotonic())
                else:
                    reader.end_of_input()
            except Exception as error:  # the stream's own; the hub must go on
                self._forget(fd)
                result.set_exception(error)
                continue
            if not data or reader.finished:
                self._forget(fd)
                result.set(None)
