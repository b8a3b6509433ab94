"""HTTP requests for weights, restricted to allowed addresses and with a time limit for every read.

An address is `https://`, or `http://` on this machine. A public server may redirect only to public addresses, because
services on this machine and in private networks often trust every client that reaches them. The check applies to the
IP address of the connection itself, because a name can resolve to another address the next time.
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
"""Time limit in seconds: for the connection, for the headers, and for each `CHUNK` of the body."""
CHUNK = 30_000
"""Bytes per read of the body."""
_MAX_ADDRESSES = 16  # IP addresses of a host name that are tried


class RefusedError(Exception):
    """No file can be fetched from an address. The message is the reason."""


def open_address(address: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Request an address and return the response, after redirects.

    Read the response in chunks of `CHUNK` bytes: each read raises TimeoutError after `PATIENCE` seconds.
    """
    route = _Route()
    opener = urllib.request.build_opener(_RedirectHandler(), _PlainHandler(route), _SecureHandler(route))
    return opener.open(urllib.request.Request(address, headers=dict(headers)), timeout=PATIENCE)


def parse_address(address: str) -> SplitResult:
    """Split an address into its parts. Raise UsageError unless it is https, or http on this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        parts.port  # noqa: B018 - raises ValueError for an invalid port
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
    """Return whether an IP address is public. A host name counts as public, unless it is `localhost`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address):
        # IPv4 within IPv6: mapped, 6to4, and translated by NAT64 (RFC 6052).
        translated = ipaddress.IPv4Address(int(address) % 2**32) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _GLOBAL_UNICAST
    return address.is_global and not address.is_multicast


_NAT64, _GLOBAL_UNICAST = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2000::/3")


class _Route:
    """The connections of one request: the first to the host that the user typed, the others to redirects.

    If the first host is public, connections to private addresses are refused.
    """

    def __init__(self) -> None:
        self._starts_public: bool | None = None  # whether the first host is public

    def connection_factory(
        self, connection_class: type[http.client.HTTPConnection], request: Any
    ) -> Callable[..., Any]:
        """Return a function that urllib calls for a connection, which connects only to allowed addresses."""
        parts = urlsplit(request.full_url)
        is_proxied = request.host != unquote(parts.netloc)

        def connect(address: tuple[str, int], timeout: float, *_: object) -> socket.socket:
            if not is_proxied:
                return self._connect(*address, timeout)
            (host,) = self._filter_hosts([parts.hostname or ""])  # the proxy resolves the name
            self._record_first_host(host)
            return socket.create_connection(address, timeout)

        def create_connection(host: str, **options: Any) -> http.client.HTTPConnection:
            connection = connection_class(host, **options)
            connection.response_class = _TimedResponse
            vars(connection)["_create_connection"] = connect  # the hook of http.client
            return connection

        return create_connection

    def _connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Connect to the first allowed IP address of a host that can be reached."""
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure = OSError("the name has no address")
        for address in self._filter_hosts(list(dict.fromkeys(str(row[4][0]) for row in rows)))[:_MAX_ADDRESSES]:
            try:
                connected = socket.create_connection((address, port), timeout)
            except OSError as error:
                failure = error
            else:
                self._record_first_host(address)
                return connected
        raise failure

    def _record_first_host(self, host: str) -> None:
        if self._starts_public is None:
            self._starts_public = is_public(host)

    def _filter_hosts(self, hosts: list[str]) -> list[str]:
        """Return the hosts to which a connection is allowed. Raise RefusedError if none is."""
        allowed = [host for host in hosts if is_public(host)] if self._starts_public else hosts
        if hosts and not allowed:
            raise RefusedError(f"it redirects to {hosts[0]}, which is not a public address")
        return allowed


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, route: _Route) -> None:
        super().__init__()
        self._route = route

    def http_open(self, req: Any) -> Any:
        return self.do_open(self._route.connection_factory(http.client.HTTPConnection, req), req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, route: _Route) -> None:
        super().__init__()
        self._route = route

    def https_open(self, req: Any) -> Any:
        return self.do_open(self._route.connection_factory(http.client.HTTPSConnection, req), req)


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follow redirects only to addresses that the user could have typed, and never from https to http."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()  # otherwise urllib reads the whole body into memory
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            scheme = parse_address(newurl).scheme
        except UsageError:
            scheme = ""
        if not scheme or (scheme == "http" and req.full_url.startswith("https:")):
            raise RefusedError(f"it redirects to {newurl.partition('?')[0]!r}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _TimedResponse(http.client.HTTPResponse):
    """A response whose headers, and each `read`, must arrive within `PATIENCE` seconds."""

    def __init__(self, sock: socket.socket, *options: Any, **named: Any) -> None:
        super().__init__(sock, *options, **named)
        self._stream = _TimedStream(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._stream)

    def read(self, amt: int | None = None) -> bytes:
        self._stream.restart()
        return super().read(amt)


class _TimedStream(io.RawIOBase):
    """The bytes of a socket, which must arrive before a deadline."""

    def __init__(self, raw: Any, sock: socket.socket) -> None:
        self._raw, self._socket = raw, sock
        self.restart()

    def restart(self) -> None:
        """Set the deadline to `PATIENCE` seconds from now."""
        self._deadline = time.monotonic() + PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            if (remaining := self._deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"less than {CHUNK:,} bytes arrived in {PATIENCE:g} seconds") from None

    def close(self) -> None:
        self._raw.close()
        super().close()
