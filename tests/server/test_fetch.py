"""Images at URLs: hosts that are allowed, addresses that are not public, and limits."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama.server import fetch as module
from llama.server.fetch import fetch, host_names

FILE = b"\x89PNG" * 1000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(FILE) + FILE
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def answer_of(
    answer: bytes | Answer, path: str = "/a.png?b=1", scheme: str = "http", **server: Any
) -> tuple[Any, list[bytes]]:
    """Fetch from a server of this machine; return the file or the error, and the requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            await answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, **server)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        hosts = host_names(f"localhost:{port}")
        try:
            return await fetch(f"{scheme}://localhost:{port}{path}", hosts), requests
        except ValueError as error:
            return error, requests


@pytest.fixture
def loopback_is_public(monkeypatch) -> Iterator[None]:
    """Let the tests' own server be reached."""
    monkeypatch.setattr(module, "_is_public", lambda address: address in ("127.0.0.1", "::1"))

    async def address(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(module, "_address", address)
    yield


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.0 200 OK\r\n\r\n" + FILE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfa0\r\n" + FILE + b"\r\n0\r\n\r\n",
    ],
)
def test_a_file_is_fetched(loopback_is_public, answer):
    found, (request,) = asyncio.run(answer_of(answer))
    assert found == FILE
    assert request.startswith(b"GET /a.png?b=1 HTTP/1.1\r\nHost: localhost:")


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(25):
        writer.write(b"\0" * (1 << 20))
        await writer.drain()


async def slow(writer: asyncio.StreamWriter) -> None:
    for byte in OK:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "status 302, and no other"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (OK[:-1], "ended its answer early"),
        (b"", "ended its answer early"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "too many headers"),
        (endless, "more than 20 MiB"),
        (slow, "takes more than"),
    ],
)
def test_other_answers_are_refused(loopback_is_public, monkeypatch, answer, problem):
    if answer is slow:
        monkeypatch.setattr(module, "LIMIT_S", 0.3)
    found, requests = asyncio.run(answer_of(answer))
    assert isinstance(found, ValueError) and problem in str(found)
    assert len(requests) == 1


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1",
     "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1"],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(monkeypatch, address):
    async def resolve(*_: Any, **__: Any) -> Any:
        return [(0, 0, 0, "", ("8.8.8.8", 80)), (0, 0, 0, "", (address, 80))]

    async def run() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
        with pytest.raises(ValueError, match="has an address that is not public"):
            await module._address("images.org", 80)

    asyncio.run(run())


def test_a_server_of_this_machine_is_not_reached():
    found, requests = asyncio.run(answer_of(OK))
    assert "localhost has an address that is not public" in str(found) and not requests


@pytest.mark.parametrize(
    ("url", "hosts", "problem"),
    [
        ("http://images.org/a", "", "--image_hosts names no host"),
        ("http://other.org/a", "images.org", "not among those of --image_hosts"),
        ("http://images.org.evil/a", "images.org", "not among"),
        ("http://images.org@evil/a", "images.org", "not among"),
        ("http://images.org:22/a", "images.org", "not among"),
        ("http://images.org./a", "images.org", "not among"),
        ("http://user@images.org/a", "images.org", "must have no user"),
        ("http://images.org/a b", "images.org", "ASCII escaped"),
        ("http://images.org:x/a", "images.org", "no URL"),
    ],
)
def test_other_urls_are_refused(url, hosts, problem):
    with pytest.raises(ValueError, match=problem):
        asyncio.run(fetch(url, host_names(hosts)))


def test_names_of_hosts_are_checked():
    assert host_names("A.org, b.org:8080") == {"a.org", "b.org:8080"}
    with pytest.raises(ValueError, match=r"'http://a\.org' is no name of a host"):
        host_names("http://a.org")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_certificates_are_those_of_the_name(loopback_is_public, monkeypatch, tmp_path: Path):
    """The connection goes to an address, and the certificate must be that of the name."""
    found = []
    for name in ("localhost", "other.org"):
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-keyout", key, "-out", certificate, "-subj", f"/CN={name}",
             "-addext", f"subjectAltName=DNS:{name}"],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        trusting = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(module, "_tls", lambda made=trusting: made)
        found.append(asyncio.run(answer_of(OK, scheme="https", ssl=context))[0])
    assert found[0] == FILE
    assert isinstance(found[1], ValueError) and "localhost cannot be reached" in str(found[1])
