"""No client shuts others out by large requests, silent connections or half-sent bodies.

A server with small limits runs in this process; a second signal needs a process of its own.
"""

import asyncio
import contextlib
import http.client
import json
import re
import select
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from helpers.server import run_server
from helpers.services import service_of
from helpers.waiting import wait_until
from helpers.web import web
from llama.cli.flags import UsageError
from llama.cli.serve import _keys
from llama.ranks.signals import _SAME_SIGNAL_S
from llama.server import connections, memory
from llama.server.auth import is_loopback
from llama.server.connections import Connections
from llama.server.limits import Limits
from llama.server.process import Server

TEXT = "/v1/completions"
SMALL = {"prompt": "x", "max_tokens": 1}
LIMITS = Limits(max_queue=200, max_bodies_bytes=100_000, max_connections=12, max_per_address=8)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def connections_of_server() -> Iterator[list[Connections]]:
    """A list that gets the connections of the module's server when it is made."""
    made: list[Connections] = []

    class Noted(Connections):
        def __init__(self, *limits: Any) -> None:
            super().__init__(*limits)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama.server.process.Connections", Noted)
        yield made


@pytest.fixture(scope="module")
def url(demo, connections_of_server) -> Iterator[str]:
    server = Server(service_of(limits=LIMITS), host="127.0.0.1", port=0, api_keys=[])
    # inherited by all of its connections
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.start()
    server.service.start(demo)
    yield f"http://127.0.0.1:{server.port}"
    server.service.close()
    server.stop()


@pytest.fixture
def connect(url, connections_of_server) -> Iterator[Callable[..., socket.socket]]:
    """Return a function that opens a connection and sends bytes.

    At the end, the server has seen that all connections are closed.
    """
    port = int(url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:

        def opened(data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
            address = ("127.0.0.1", port)
            found = socket.create_connection(address, timeout=30, source_address=(source, 0))
            stack.enter_context(found)
            found.sendall(data)
            return found

        yield opened
    wait_until(lambda: not any(each._num_open for each in connections_of_server))


def all_of(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def ask(url: str, **body: Any) -> httpx.Response:
    with httpx.Client(timeout=60) as client:
        return client.post(url + TEXT, json=SMALL | body)


@pytest.mark.parametrize(
    "body",
    [{"prompt": ["x"] * 200, "n": 64}, {"prompt": ["x"] * 200, "best_of": 2}],
)  # fmt: skip
def test_what_never_fits_is_told_the_limit(url, demo, body):
    found = ask(url, **body)
    most = demo.model.params.max_batch_size + 100
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt"), found.text
    assert f"at most {most} at once" in found.json()["error"]["message"]


def test_a_small_request_does_not_wait_for_a_large_one(url, demo, monkeypatch):
    """A small request does not wait for a large one.

    The large one has the maximal size; the small one is admitted and gets a slot at once. So few
    steps run until it has ended that no part of the large one can have ended before.
    """
    step, may_step = demo.engine.step, threading.Semaphore(0)

    def counted_step(*args: Any) -> Any:
        assert may_step.acquire(timeout=60)
        return step(*args)

    monkeypatch.setattr(demo.engine, "step", counted_step)
    count = demo.model.params.max_batch_size + 100
    large: list[httpx.Response] = []
    body = {"prompt": ["x"] * count, "max_tokens": 30, "ignore_eos": True}
    thread = threading.Thread(target=lambda: large.append(ask(url, **body)))
    thread.start()
    with httpx.Client(base_url=url, timeout=60) as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == count)
        may_step.release(20)
        assert client.post(TEXT, json=SMALL).status_code == 200, "it waited for the large one"
        assert client.get("/load").json()["server_load"] == count
        may_step.release(1000)
    thread.join(60)
    assert large[0].status_code == 200 and len(large[0].json()["choices"]) == count


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        POST,
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /version HT",
    ],
    ids=["idle", "head", "body", "chunk", "unread", "second"],
)
def test_silence_ends(url, connect, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "BODY_S", 0.3)
    began = time.monotonic()
    answer = all_of(connect(sent))
    assert time.monotonic() - began < 15, "the usual limits are 30 s and 60 s"
    assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
    assert ask(url).status_code == 200


@pytest.mark.parametrize("reads", [False, True], ids=["never", "slowly"])
def test_an_answer_that_is_not_read_ends(url, monkeypatch, caplog, reads):
    """An answer that is not read ends, and its request is aborted.

    A client that reads slowly gets all of it.
    """
    monkeypatch.setattr(connections, "UNREAD_S", 3.0 if reads else 1.0)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "n": 4, "stream": True}
    text = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(text) + text)
        got = b""
        if not reads:
            wait_until(lambda: "127.0.0.1 has read nothing for" in caplog.text)
        for _ in range(18 * reads):
            time.sleep(0.2)
            got += connection.recv(8192)
        got += all_of(connection)
    assert (b"data: [DONE]" in got) == reads
    assert ("127.0.0.1 has read nothing for" in caplog.text) != reads
    with httpx.Client(base_url=url) as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == 0, "it was not aborted")


def test_connections_have_limits(url, connect, caplog):
    """Connections are limited per address and in total.

    Beyond the limit of one address, another address is still accepted; beyond the total, nobody is.
    A refused client gets an error; a request on an existing connection goes on.
    """
    caplog.set_level("WARNING", "llama.server")
    held = [connect() for _ in range(8)]
    refused = all_of(connect())
    assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Retry-After: 5\r\n" in refused
    assert b"8 connections are open from one address" in refused
    held += [connect(source="127.0.0.2") for _ in range(3)]
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    held[0].sendall(get)
    assert all_of(held[0]).startswith(b"HTTP/1.1 200 ")
    held += [connect(), connect(source="127.0.0.2")]
    assert b"12 connections are open, " in all_of(connect(source="127.0.0.3"))
    assert "1 refused since the last such line, now one from 127.0.0.1" in caplog.text
    for each in held:
        each.close()
    wait_until(lambda: ask(url).status_code == 200, "the server has not seen that they are closed")


class SilentProtocol(asyncio.Protocol):
    """A WebSocket protocol, of which uvicorn finds one wherever a library for it is installed."""

    def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
        pass


@pytest.mark.parametrize("path", ["/health", "/v1/realtime"])
@pytest.mark.parametrize("is_forced", [False, True])
def test_upgrades_use_up_no_connections(path, is_forced, monkeypatch, caplog):
    """Hundreds of upgrades leave all connections of their address free.

    They are answered as other requests are, and cost no further lines of the log. That is so where
    a library for WebSockets is installed, and where uvicorn is even told to use it.
    """
    automatic = "uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol"
    monkeypatch.setattr(automatic, SilentProtocol)
    caplog.set_level("INFO", "llama.server")
    server = Server(service_of(limits=LIMITS), host="127.0.0.1", port=0, api_keys=[])
    if is_forced:
        server._uvicorn.config.ws = SilentProtocol
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    status = b"HTTP/1.1 200 " if path == "/health" else b"HTTP/1.1 404 "
    server.start()
    try:
        for name in [b"websocket"] * 200 + [b"h2c"]:
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
                client.sendall(head + b"Connection: Upgrade\r\nUpgrade: " + name + b"\r\n\r\n")
                assert client.recv(65536).startswith(status)
                client.sendall(head + b"Connection: close\r\n\r\n")
                assert status in all_of(client), "the connection is of no use after an upgrade"
        assert web.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    finally:
        server.stop()
    refused = 0 if path == "/health" else 2 * 201
    assert len(caplog.records) == refused, "an upgrade has lines of its own"
    assert {record.name for record in caplog.records} <= {"llama.server"}


@pytest.mark.parametrize("length", [b"Content-Length: 60", b"Transfer-Encoding: chunked"])
def test_an_upgrade_with_a_body_is_refused_by_name(url, connect, length):
    """The parser skips the body of such a request, and would read a late one as a new request."""
    head = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + length + b"\r\n\r\n"
    connection = connect(head)
    time.sleep(0.05)
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"leave out the Upgrade header" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert ask(url).status_code == 200


def test_descriptors_are_kept_back(monkeypatch):
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, both: kept.append(both))
    monkeypatch.setattr(connections.os, "listdir", lambda path: [str(i) for i in range(10)])
    assert Connections(4096, None).max_open == 30
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (64, 1000))
    assert Connections(500, None).max_open == 500
    assert kept == [(64, 64), (534, 1000)]
    with pytest.raises(ValueError, match="max_connections"):
        Connections(0, None)


def test_half_bodies_have_one_bound(url, connect):
    """Half-sent bodies share one bound.

    The later one of two is refused, whichever the server reads first.
    """
    head = POST + b"Content-Length: 200000\r\n\r\n"
    both = [connect(head + b" " * 90_000) for _ in range(2)]
    (refused,), _, _ = select.select(both, [], [], 60)
    answer = http.client.HTTPResponse(refused)
    answer.begin()
    assert answer.status == 503 and b"too many large requests" in answer.read()
    assert ask(url).status_code == 200
    for each in both:
        each.close()
    large = {"prompt": "x", "user": " " * 90_000}
    wait_until(lambda: ask(url, **large).status_code == 200, "the half body is still counted")


@pytest.mark.parametrize("framing", [b"Content-Length: 99000", b"Transfer-Encoding: chunked"])
def test_a_slow_body_gives_way_to_a_quick_one(url, connect, monkeypatch, framing):
    """Of two bodies that do not fit together, the one that has stalled ends with an error."""
    monkeypatch.setattr(memory, "SLOW_S", 0.1)
    part = b" " * 90_000 if b"Length" in framing else b"%x\r\n" % 90_000 + b" " * 90_000
    stalled = connect(POST + framing + b"\r\n\r\n" + part)
    time.sleep(0.5)
    assert ask(url, prompt="x", user=" " * 90_000).status_code == 200
    answer = all_of(stalled)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"came slowly" in answer


def test_pipelined_requests_are_no_large_headers(connect):
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 900 + b"\r\n"
    connection = connect((get + b"\r\n") * 150 + get)
    connection.sendall(b"Connection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+) ", all_of(connection)) == [b"200"] * 151


def test_a_form_that_is_too_large_is_the_clients_mistake(url, demo):
    body = {
        "max_tokens": 400,
        "structured_outputs": {"regex": "(.{1,300}){1,300}"},
        "logit_bias": {str(token): -100 for token in demo.tokenizer.stop_tokens},
    }
    found = ask(url, **body)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "structured_outputs"), found.text
    assert "too large to go on with" in error["message"] and "NaN" not in error["message"]
    with web.stream("POST", url + TEXT, json=SMALL | body | {"stream": True}) as response:
        assert '"param":"structured_outputs"' in response.read().decode()
    assert ask(url).status_code == 200


def test_a_second_signal_ends_streams_with_an_error():
    flags = ("--max_seq_len", "512", "--dtype", "fp32", "--max_batch_size", "1")
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 60, "stream": True}
    with run_server(*flags) as server:
        with web.stream("POST", server.url + TEXT, json=body, timeout=60) as response:
            parts = response.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: web.get(f"{server.url}/ready").status_code != 200)
            time.sleep(_SAME_SIGNAL_S + 0.1)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        code, log = server.ended()
        assert code == 128 + signal.SIGTERM
    error, done = text.split("\n\n")[-3:-1]
    assert done == "data: [DONE]"
    assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert "Traceback" not in log, log


@pytest.mark.parametrize("key", ["  ", " k", "k\n", "k\ny", "schlüssel"])
def test_a_key_that_nobody_can_send_is_refused(key):
    with pytest.raises(UsageError, match="printable ASCII"):
        _keys(Namespace(api_key=key, api_key_file=None))


def test_every_loopback_address_is_one():
    assert all(map(is_loopback, ["127.0.0.1", "127.0.0.2", "::1", "localhost", "LocalHost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "::", "localhost.example.org", ""]))
