"""Images at URLs, fetched from the hosts that the operator allows.

In: a URL, and the names of these hosts. Out: the bytes of a file, or a ValueError. A client chooses
the URL, so it must not reach what only this machine can: a name is resolved once, all its addresses
must be public, and the connection goes to one of them. Redirects and proxies are not followed.
"""

import asyncio
import ipaddress
import re
import ssl
from urllib.parse import SplitResult, urlsplit

import httptools

from llama.common.checks import FieldError

LIMIT_S = 10.0
MAX_BYTES = 20 << 20
_MAX_HEAD = 64 << 10
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")
_TARGET = re.compile("[!-~]*")
# IPv6 addresses that stand for others: those of NAT64, and of 6to4.
_TRANSLATED = [ipaddress.ip_network(name) for name in ("64:ff9b::/32", "2002::/16")]


def is_url(source: str) -> bool:
    """Return whether the source of an image is a URL of a file on another machine."""
    return source.startswith(("http://", "https://"))


def host_names(text: str | None) -> frozenset[str]:
    """Return the hosts of the flag --image_hosts, names with a port where it is unusual.

    Raises:
        FieldError: One is no name of a host.
    """
    names = frozenset(name.strip().lower() for name in text.split(",")) if text else frozenset()
    for name in names:
        if not _HOST.fullmatch(name):
            problem = f"={name!r} is no name of a host: give names such as images.org"
            raise FieldError.of("image_hosts", problem)
    return names


async def fetch(url: str, hosts: frozenset[str]) -> bytes:
    """Return the file at a URL.

    Args:
        url: The URL.
        hosts: What `host_names` returns.

    Raises:
        ValueError: The host is not allowed, cannot be reached in time, or sends no file.
    """
    parts, port = _split(url, hosts)
    host = parts.hostname
    try:
        async with asyncio.timeout(LIMIT_S):
            address = await _address(host or "", port)
            return await _get(parts, address, port)
    except TimeoutError:
        raise ValueError(f"{host} takes more than {LIMIT_S:.0f} s to send the image") from None
    except OSError:  # A failed check of its certificate is one, too.
        raise ValueError(f"{host} cannot be reached") from None


def _split(url: str, hosts: frozenset[str]) -> tuple[SplitResult, int]:
    """Return the parts of a URL with its port."""
    if not hosts:
        raise ValueError(
            "this server fetches no images, as --image_hosts names no host: send a data: URL"
        )
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise ValueError("it is no URL") from None
    name = parts.hostname or ""
    is_usual = port == _PORTS[parts.scheme]
    if (name if is_usual else f"{name}:{port}") not in hosts:
        raise ValueError("its host is not among those of --image_hosts: send a data: URL")
    if parts.username is not None or not _TARGET.fullmatch(parts.path + parts.query):
        raise ValueError("its URL must have no user, and other characters than ASCII escaped")
    return parts, port


async def _address(host: str, port: int) -> str:
    """Return the address of a host, all of whose addresses are public."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port)
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(_is_public, addresses)):
        raise ValueError(f"{host} has an address that is not public")
    return addresses[0]


def _is_public(address: str) -> bool:
    """Return whether an address is one of the internet, as that of a server is."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip.version == 6 and ip in network for network in _TRANSLATED):
        return False
    return ip.is_global and not ip.is_multicast


def _tls() -> ssl.SSLContext:
    """Return what checks the certificates of hosts."""
    return ssl.create_default_context()


class _Answer:
    """An answer of HTTP, as its parser reads it."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.has_head = False
        self.is_complete = False
        self.is_measured = False  # whether the end of its body can be told

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        self.is_measured |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note that the headers have come."""
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self.body += data

    def on_message_complete(self) -> None:
        """Note that the body has come."""
        self.is_complete = True


async def _get(parts: SplitResult, address: str, port: int) -> bytes:
    """Return the body of the answer to a request."""
    is_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        address,
        port,
        ssl=_tls() if is_tls else None,
        server_hostname=parts.hostname if is_tls else None,
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: llama\r\nAccept: image/*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        return await _read(reader, parts.hostname or "")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, host: str) -> bytes:
    """Read an answer; a status other than 200 is an error."""
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    num_bytes = 0
    while not answer.is_complete:
        data = await reader.read(1 << 16)
        if not data:
            break
        num_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            raise ValueError(f"{host} does not speak HTTP") from None
        if not answer.has_head and num_bytes > _MAX_HEAD:
            raise ValueError(f"{host} sends too many headers")
        if answer.has_head and parser.get_status_code() != 200:
            status = parser.get_status_code()
            raise ValueError(f"{host} answers with status {status}, and no other URL is followed")
        if len(answer.body) > MAX_BYTES:
            raise ValueError(f"the file has more than {MAX_BYTES >> 20} MiB")
    if not answer.has_head or (answer.is_measured and not answer.is_complete):
        raise ValueError(f"{host} ended its answer early")
    return bytes(answer.body)
