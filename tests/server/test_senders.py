"""Senders share a server: keys where there are several, and else addresses."""

import asyncio
import functools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from helpers.launch import DEMO
from helpers.services import service_of
from helpers.waiting import wait_until
from llama import Llama
from llama.server.auth import ApiKeys, AuthAndLimits
from llama.server.limits import Limits
from llama.server.memory import SharedMemory
from llama.server.process import Server

TEXT = "/v1/completions"
SMALL = {"prompt": "One day", "max_tokens": 3, "ignore_eos": True}
KEYS = ("first-key", "second-key")
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def llama() -> Llama:
    """Return a model with a batch of four."""
    return Llama.build(str(DEMO), max_seq_len=128, max_batch_size=4, dtype="fp32", device="cpu")


@contextmanager
def served(llama: Llama, api_keys: list[str], **limits: Any) -> Iterator[Server]:
    """Serve a model in this process."""
    service = service_of(limits=Limits(**limits))
    server = Server(service, host="127.0.0.1", port=0, api_keys=api_keys)
    server.start()
    service.start(llama)
    try:
        yield server
    finally:
        service.close()
        server.stop()


def client_of(server: Server, *, key: str = "none", address: str = ADDRESSES[0]) -> httpx.Client:
    """Return a client with a key, at an address of this machine."""
    return httpx.Client(
        base_url=f"http://127.0.0.1:{server.port}",
        headers={"Authorization": f"Bearer {key}"},
        transport=httpx.HTTPTransport(local_address=address, limits=httpx.Limits()),
        timeout=60,
    )


@pytest.mark.parametrize("by", ["key", "address"])
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
def test_many_requests_of_one_sender_take_no_turn_of_another(llama, monkeypatch, by, path):
    """A small request runs at once alongside as many requests of one sender as keep the batch full.

    So few steps run until it has ended that none of the others can have ended before.
    """
    count = 12
    body: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "n": 1}
    body |= {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    step, may_step = llama.engine.step, threading.Semaphore(0)

    def counted_step(*args: Any, **options: Any) -> Any:
        assert may_step.acquire(timeout=60)
        return step(*args, **options)

    monkeypatch.setattr(llama.engine, "step", counted_step)
    keys = list(KEYS) if by == "key" else []
    first, second = ({by: name} for name in (KEYS if by == "key" else ADDRESSES))
    answers: list[httpx.Response] = []
    with served(llama, keys) as server:

        def send() -> None:
            with client_of(server, **first) as client:
                answers.append(client.post(path, json=body))

        threads = [threading.Thread(target=send) for _ in range(count)]
        for thread in threads:
            thread.start()
        with client_of(server, **second) as client:
            wait_until(lambda: server.service.num_unfinished() == count)
            may_step.release(20)
            wait_until(lambda: may_step._value == 0)
            may_step.release(8)
            found = client.post(TEXT, json=SMALL)
            assert found.status_code == 200, found.text
            assert found.json()["usage"]["completion_tokens"] == 3
            assert server.service.num_unfinished() == count, "it waited for another sender"
            may_step.release(10_000)
        for thread in threads:
            thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * count


@pytest.mark.parametrize("by", ["key", "address"])
@pytest.mark.parametrize(
    "body",
    [{}, {"stream": True}, {"n": 3}, {"n": 6, "stream": True}, {"prompt": ["x", "y"]}],
    ids=["one", "stream", "n", "n-stream", "prompts"],
)
def test_who_fills_the_queue_gives_way_to_another_sender(llama, monkeypatch, by, body):
    """The newest request of whoever has most gets 503, also in a stream that has begun.

    The batch and the queue take 12 sequences. The first sender is refused beyond them; each of the
    second one's requests is taken, until it has as many as the first one.
    """
    step, may_step = llama.engine.step, threading.Semaphore(0)

    def counted_step(*args: Any, **options: Any) -> Any:
        assert may_step.acquire(timeout=60)
        return step(*args, **options)

    monkeypatch.setattr(llama.engine, "step", counted_step)
    long = {"prompt": "x", "max_tokens": 40, "ignore_eos": True} | body
    size = len(long["prompt"]) * long.get("n", 1)
    keys = list(KEYS) if by == "key" else []
    first, second = ({by: name} for name in (KEYS if by == "key" else ADDRESSES))
    answers: dict[str, list[httpx.Response]] = {"first": [], "second": []}

    def send(name: str, sent: dict[str, Any], **sender: str) -> None:
        with client_of(server, **sender) as client:
            answers[name].append(client.post(TEXT, json=sent))

    def started(*args: Any, **options: str) -> threading.Thread:
        thread = threading.Thread(target=send, args=args, kwargs=options)
        thread.start()
        return thread

    with served(llama, keys, max_queue=8) as server, client_of(server, **first) as client:

        def has_unfinished(count: int) -> bool:
            return server.service.num_unfinished() == count

        def has_refused(count: int) -> bool:
            return len(answers["first"]) == count

        threads = []
        for i in range(12 // size):
            threads.append(started("first", long, **first))
            wait_until(functools.partial(has_unfinished, size * (i + 1)))
            may_step.release(3)
            wait_until(lambda: may_step._value == 0)
        assert client.post(TEXT, json=long).status_code == 503
        for i in range(6):
            threads.append(started("second", SMALL, **second))
            wait_until(functools.partial(has_refused, -(-(i + 1) // size)))
        refused = answers["first"].copy()
        threads.append(started("second", {**SMALL, "n": 6}, **second))
        wait_until(lambda: answers["second"])
        assert answers["second"][0].status_code == 503, "it would have more than the first one"
        may_step.release(10_000)
        for thread in threads:
            thread.join(60)
    for answer in refused:
        has_begun = answer.status_code == 200 and "stream" in body
        assert has_begun or (answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0)
        assert "queue is full" in answer.text
    others = [answer for answer in answers["first"] if answer not in refused]
    assert len(others) == 12 // size - len(refused)
    assert all(x.status_code == 200 and "queue is full" not in x.text for x in others)
    assert [x.status_code for x in answers["second"]] == [503] + [200] * 6


@pytest.mark.parametrize(
    ("client", "forwarded", "sender"),
    [
        (("10.0.0.1", 9), ["10.0.0.2"], b"10.0.0.1"),
        (("10.0.0.1", 9), [], b"10.0.0.1"),
        (None, ["10.0.0.2"], b"10.0.0.2"),
        (None, ["10.0.0.3, 10.0.0.2", "2001:db8::1"], b"2001:db8::1"),
        (None, ["10.0.0.3, 10.0.0.2"], b"10.0.0.2"),
        (None, [], b""),
    ],
)
def test_the_proxy_at_a_unix_socket_names_the_sender(client, forwarded, sender):
    """What a client itself forwards counts nowhere: the proxy's address is the last one."""
    found: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["state"]["sender"])

    answers = SharedMemory(1, 1, "")
    checked = AuthAndLimits(app, ApiKeys([]), answers, [], loopback=False)
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": client}
    asyncio.run(checked(scope, None, None))  # type: ignore[arg-type]
    assert found == [sender]


# Bodies whose answers are reckoned as 0.4 MiB and more, and are more than the system takes at once.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (
        TEXT,
        {"prompt": [7] * 100, "echo": True, "logprobs": 20, "n": 3, "max_tokens": 1},
    ),
    "stream": (
        TEXT,
        {"prompt": [7] * 9, "logprobs": 20, "n": 3, "max_tokens": 100, "stream": True}
        | {"ignore_eos": True},
    ),
    "ids": ("/tokenize", {"prompt": "a cat " * 60_000}),
}


def _unread(server: Server, path: str, body: dict[str, Any], address: str) -> socket.socket:
    """Send a request whose answer nobody reads yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.bind((address, 0))
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def _read(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(2**20):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("kind", LARGE)
def test_answers_that_nobody_reads_have_one_limit(llama, monkeypatch, kind):
    """Answers of one sender take half of the memory, from before the engine until all is read.

    What is beyond it is refused before the engine has it. Another sender is answered, and the first
    one again once it has read.
    """
    path, body = LARGE[kind]
    monkeypatch.setattr(socket.socket, "listen", _with_small_buffers(socket.socket.listen))
    with served(llama, [], max_answer_mb=1) as server:
        app: Any = server._uvicorn.config.app
        memory = app.answers
        held: list[socket.socket] = []
        for _ in range(20):
            connection = _unread(server, path, body, ADDRESSES[0])
            status = connection.recv(12)
            if status != b"HTTP/1.1 200":
                break
            held.append(connection)
        assert status == b"HTTP/1.1 503" and b"read at once" in _read(connection)
        assert 2 <= len(held) < 8 and 2**20 < memory.used <= 2 * 2**20
        wait_until(lambda: server.service.num_unfinished() == 0)
        before = llama.llm_engine.core.stats.steps
        with client_of(server) as client, client_of(server, address=ADDRESSES[1]) as other:
            refused = client.post(path, json=body)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            assert "read at once" in refused.json()["error"]["message"]
            assert llama.llm_engine.core.stats.steps == before
            assert client.post(TEXT, json=SMALL).status_code == 200
            assert other.post(path, json=body).status_code == 200
            used = memory.used
            answer = _read(held.pop())
            assert answer.startswith(b" OK")
            wait_until(lambda: memory.used < used)
            assert client.post(path, json=body).status_code == 200
            held.pop().close()
            for connection in held:
                assert _read(connection).startswith(b" OK")
            wait_until(lambda: memory.used == 0)


def _with_small_buffers(listen: Any) -> Any:
    """Return `socket.listen` for sockets whose connections hold little that is not read."""

    def small(self: socket.socket, *args: Any) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listen(self, *args)

    return small
