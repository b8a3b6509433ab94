"""HTTP requests for weights: which addresses may be asked, and how fast they must answer.

An address is `https://`, or `http://` on this machine. What a public server redirects to must be public, too: services
on this machine and in private networks often trust everybody who reaches them. That is checked for the IP address to
which the connection is then made, because a name can have another address the next time it is looked up.
"""

import http.client
import io
import ipaddress
import socket
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from vitrail.core.errors import UsageError

PATIENCE = 30.0
"""Seconds in which a server must connect, in which its headers must come, and then every `CHUNK`."""
CHUNK = 30_000
"""Bytes."""
_MOST_ADDRESSES = 16  # of one name that are tried


class RefusedError(Exception):
    """The address gives no file; the message says why."""


def open_address(address: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """The answer to a request, after redirects. Read it in pieces of `CHUNK`: each must come within `PATIENCE`."""
    route = _Route()
    opener = urllib.request.build_opener(_Redirects(), _PlainHandler(route), _SecureHandler(route))
    return opener.open(urllib.request.Request(address, headers=dict(headers)), timeout=PATIENCE)


def parse_address(address: str) -> SplitResult:
    """The parts of an address that may be asked for: https, or http on this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        parts.port  # noqa: B018 - raises if it is none
    except ValueError:
        host = ""
    if not host or "%" in host or not address.isascii() or not address.isprintable() or " " in address:
        raise UsageError(f"Address must be https://host/path/file, got {address!r}.")
    if parts.username is not None:
        raise UsageError("Address must be without a name and password, got one with them.")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise UsageError(f"Address must begin with https:// (http:// only on this machine), got {address!r}.")
    return parts


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Whether an IP address is one of the public internet. A name is taken for public, unless it is `localhost`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address):
        # IPv4 within IPv6: mapped, 6to4, and translated by a network without IPv4 (RFC 6052).
        translated = ipaddress.IPv4Address(int(address) % 2**32) if address in _TRANSLATED else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _UNICAST
    return address.is_global and not address.is_multicast


_TRANSLATED, _UNICAST = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2000::/3")


class _Route:
    """The connections of one request. The first is to the host that the user typed, the others are redirects."""

    def __init__(self) -> None:
        self._is_public: bool | None = None  # the first host

    def connection(self, kind: type[http.client.HTTPConnection], request: Any) -> Callable[..., Any]:
        """A function that makes a connection as urllib wants it, which connects to allowed addresses alone."""
        parts = urlsplit(request.full_url)
        is_proxied = request.host != unquote(parts.netloc)

        def connect(place: tuple[str, int], timeout: float, *_: object) -> socket.socket:
            if not is_proxied:
                return self._connect(*place, timeout)
            (host,) = self._allow([parts.hostname or ""])  # the proxy looks the name up
            self._remember(host)
            return socket.create_connection(place, timeout)

        def make(host: str, **options: Any) -> http.client.HTTPConnection:
            connection = kind(host, **options)
            connection.response_class = _Response
            vars(connection)["_create_connection"] = connect  # http.client's own hook for that
            return connection

        return make

    def _connect(self, host: str, port: int, timeout: float) -> socket.socket:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure = OSError("the name has no address")
        for address in self._allow(list(dict.fromkeys(str(row[4][0]) for row in rows)))[:_MOST_ADDRESSES]:
            try:
                connected = socket.create_connection((address, port), timeout)
            except OSError as error:
                failure = error
            else:
                self._remember(address)
                return connected
        raise failure

    def _remember(self, host: str) -> None:
        if self._is_public is None:
            self._is_public = is_public(host)

    def _allow(self, hosts: list[str]) -> list[str]:
        """The hosts to which a connection may be made."""
        allowed = [host for host in hosts if is_public(host)] if self._is_public else hosts
        if hosts and not allowed:
            raise RefusedError(f"it leads to {hosts[0]}, which is not a public address")
        return allowed


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, route: _Route) -> None:
        super().__init__()
        self._route = route

    def http_open(self, req: Any) -> Any:
        return self.do_open(self._route.connection(http.client.HTTPConnection, req), req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, route: _Route) -> None:
        super().__init__()
        self._route = route

    def https_open(self, req: Any) -> Any:
        return self.do_open(self._route.connection(http.client.HTTPSConnection, req), req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to addresses that could have been typed, and never from https to http."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()  # urllib would read it into memory, to its end
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            scheme = parse_address(newurl).scheme
        except UsageError:
            scheme = ""
        if not scheme or (scheme == "http" and req.full_url.startswith("https:")):
            raise RefusedError(f"it leads to {newurl.partition('?')[0]!r}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Response(http.client.HTTPResponse):
    """An answer whose headers, and whose every `read`, must come within `PATIENCE`."""

    def __init__(self, sock: socket.socket, *options: Any, **named: Any) -> None:
        super().__init__(sock, *options, **named)
        self._timed = _Timed(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._timed)

    def read(self, amt: int | None = None) -> bytes:
        self._timed.restart()
        return super().read(amt)


class _Timed(io.RawIOBase):
    """The bytes of a socket, until a deadline."""

    def __init__(self, raw: Any, sock: socket.socket) -> None:
        self._raw, self._socket = raw, sock
        self.restart()

    def restart(self) -> None:
        """Begin to measure time."""
        self._deadline = time.monotonic() + PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            if (left := self._deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"less than {CHUNK:,} bytes came in {PATIENCE:g} seconds") from None

    def close(self) -> None:
        self._raw.close()
        super().close()
