"""A connection that never blocks the process: plain TCP, or TLS on top of it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent.socket
from gevent.monkey import get_original

from assay_load.errors import InputError
from assay_load.stream.errors import CLOSED, CONNECT, StreamError

_socket: Any = get_original("socket", "socket")
RECEIVE = 256 * 1024
CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    base: str
    """Path in front of `/v1`, without a slash at the end."""

    @classmethod
    def of(cls, url: str) -> Address:
        """From `http://host:8000` or `https://host/base`; raises InputError."""
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            port = parts.port
        except ValueError as error:
            raise InputError(f"url {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"url {url!r}: must look like http://host:port or https://host")
        if parts.query or parts.fragment or parts.username:
            raise InputError(f"url {url!r}: may hold a host, a port and a path only")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, base)

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """The bytes of an HTTP/1.1 request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Transport:
    """`send` waits (the calling greenlet only); `receive` never does."""

    __slots__ = ("_sock", "_tls", "_tls_in", "_tls_out", "fd")

    def __init__(self, address: Address, context: ssl.SSLContext | None) -> None:
        try:
            made = gevent.socket.create_connection(
                (address.host, address.port), timeout=CONNECT_SECONDS
            )
        except OSError as error:
            raise StreamError(CONNECT, str(error)) from error
        self._sock = _socket(made.family, made.type, made.proto, made.detach())
        self._sock.setblocking(False)
        # A request must not wait for the acknowledgement of the one before it.
        self._sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
        self.fd: int = self._sock.fileno()
        self._tls: ssl.SSLObject | None = None
        if address.tls:
            self._tls_in, self._tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = context or ssl.create_default_context()
            self._tls = context.wrap_bio(self._tls_in, self._tls_out, False, address.host)
            try:
                self._handshake(self._tls)
            except BaseException:
                self.close()
                raise

    def _handshake(self, tls: ssl.SSLObject) -> None:
        try:
            while True:
                try:
                    tls.do_handshake()
                    return
                except ssl.SSLWantReadError:
                    self._flush()
                    gevent.socket.wait_read(self.fd, CONNECT_SECONDS)
                    if not (data := self._sock.recv(RECEIVE)):
                        raise StreamError(CONNECT, "closed in the TLS handshake") from None
                    self._tls_in.write(data)
                finally:
                    self._flush()
        except OSError as error:
            raise StreamError(CONNECT, str(error)) from error

    def send(self, data: bytes) -> None:
        try:
            if self._tls is None:
                self._send_plain(data)
            else:
                self._tls.write(data)
                self._flush()
        except OSError as error:
            raise StreamError(CLOSED, str(error)) from error

    def _send_plain(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                gevent.socket.wait_write(self.fd)

    def _flush(self) -> None:
        if self._tls_out.pending:
            self._send_plain(self._tls_out.read())

    def receive(self) -> bytes | None:
        """What is there; None if nothing is, b"" at the end of input. Raises StreamError."""
        try:
            data: bytes = self._sock.recv(RECEIVE)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamError(CLOSED, str(error)) from error
        if self._tls is None:
            return data
        return self._decrypt(self._tls, data)

    def _decrypt(self, tls: ssl.SSLObject, data: bytes) -> bytes | None:
        if data:
            self._tls_in.write(data)
        else:
            self._tls_in.write_eof()
        plain = []
        try:
            while piece := tls.read(RECEIVE):
                plain.append(piece)
            ended = True
        except ssl.SSLWantReadError:
            ended = False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            ended = True
        except ssl.SSLError as error:
            raise StreamError(CLOSED, f"TLS: {error.reason}") from error
        if plain:
            # If the end came along, the next call meets it again.
            return b"".join(plain)
        return b"" if ended else None

    def close(self) -> None:
        self._sock.close()
