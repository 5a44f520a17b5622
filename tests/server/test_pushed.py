"""Streams that the outputs write: the limit of the first one, and a client that does not read.

The app, the engine and the sockets are real; the ids follow a script.
"""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from helpers.scripted import ScriptedServer
from helpers.services import service_of
from helpers.waiting import wait_until
from llama.engine.step import Step
from llama.server.app import make_app
from llama.server.limits import Limits
from llama.server.process import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


@pytest.fixture
def scripted(llama_for_tools):
    made = ScriptedServer(llama_for_tools)
    yield made
    llama_for_tools.engine.runner = made.runner


@pytest.mark.parametrize("stream", [True, False])
def test_a_first_token_that_takes_too_long_is_an_error(scripted, monkeypatch, stream):
    may_start = threading.Event()
    start = scripted.script.start
    monkeypatch.setattr(scripted.script, "start", lambda step: may_start.wait(60) and start(step))
    scripted.says("late")

    async def ask() -> httpx.Response:
        service = service_of("tiny", Limits(max_wait_s=0.05))
        service.start(scripted.llama)
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                body = {**CHAT, "stream": stream}
                return await client.post("/v1/chat/completions", json=body, timeout=60)
            finally:
                may_start.set()
                service.close()

    response = asyncio.run(ask())
    assert response.status_code == 503 and "no token came within" in response.text


def test_a_client_that_does_not_read_gets_all_of_its_text_later(scripted, monkeypatch):
    """A client that does not read gets all of its text later.

    Steps go on meanwhile, and their outputs come as few events. The buffers of the sockets are
    small, as the system would take all of the answer otherwise.
    """
    told = "".join(f"{i} stories, " for i in range(80))
    scripted.says(told)
    start = scripted.script.start

    def slow_start(step: Step) -> Any:
        time.sleep(0.002)  # The loop could write every output meanwhile.
        return start(step)

    monkeypatch.setattr(scripted.script, "start", slow_start)
    num_tokens = len(scripted.script.ids)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    service = service_of("tiny")
    server = Server(
        service, host="127.0.0.1", port=listener.getsockname()[1], api_keys=[], listener=listener
    )
    service.start(scripted.llama)
    server.start()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            wait_until(lambda: client.connect_ex(listener.getsockname()) == 0)
            body = json.dumps({**CHAT, "stream": True}).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            wait_until(lambda: service.is_busy)
            wait_until(lambda: service.num_unfinished() == 0)
            with client.makefile("rb") as answer:
                lines = [line for line in answer if line.startswith(b"data: {")]
    finally:
        service.close()
        server.stop()
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == told
    assert choices[-1]["finish_reason"] == "stop" and len(choices) < num_tokens / 2
