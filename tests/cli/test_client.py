"""The client of `--url` and misbehaving servers: each of its waits ends, and the URL is named."""

import contextlib
import json
import socketserver
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from helpers.launch import REPO
from llama.cli import main
from llama.cli.batch.server_job import run_server_batch
from llama.cli.client import Client, ServerError
from llama.cli.model import sampling_params

LIMIT_S = 0.6  # for servers that do not answer
AMPLE_S = 2.0  # for servers that answer, on a busy machine too
MODELS = b'{"data": [{"id": "m"}]}'
EVENTS = b"data: {}\n\n" * 20 + b"data: [DONE]\n\n"
PAUSE_S = 3.0 / len(EVENTS)  # between two bytes of a server that sends one at a time
LATE = "sent no complete answer within {:g} s"

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNK = HEAD + b"Transfer-Encoding: chunked\r\n\r\n100\r\ndata: {}\n"
REFUSAL = b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\nRetry-After: 0\r\n\r\nno"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS)
# The behaviour of a server: what it sends at once, what byte by byte, and whether it disconnects.
ACTIONS: dict[str, tuple[bytes, bytes, bool]] = {
    "never answers": (b"", b"", False),
    "trickles the head": (b"", HEAD + b"Content-Length: 2\r\n\r\n{}", False),
    "trickles the body": (WHOLE, EVENTS, False),
    "sends half a chunk": (CHUNK, b"", False),
    "sends half a chunk and hangs up": (CHUNK, b"", True),
    "hangs up in the body": (WHOLE + EVENTS[:40], b"", True),
    "hangs up": (b"", b"", True),
    "refuses for ever": (REFUSAL, b"", False),
}


class Handler(socketserver.StreamRequestHandler):
    action: str
    lists_models: bool
    heads: list[bytes]

    def handle(self) -> None:
        while head := self.rfile.readline():
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                self.heads.append(line)
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            if self.lists_models and head.startswith(b"GET"):
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(MODELS)
                self.wfile.write(answer + MODELS)
                continue
            at_once, slowly, hangs_up = ACTIONS[self.action]
            self.wfile.write(at_once)
            for i in range(len(slowly)):
                self.wfile.write(slowly[i : i + 1])
                time.sleep(PAUSE_S)
            if hangs_up:
                return

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # the client has left
            super().finish()


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore errors: a client that leaves is what is tested."""


@contextlib.contextmanager
def misbehaving(
    action: str, *, lists_models: bool = True, heads: list[bytes] | None = None
) -> Iterator[str]:
    own = {"action": action, "lists_models": lists_models, "heads": [] if heads is None else heads}
    handler = type("Own", (Handler,), own)
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def call(url: str, make: Callable[[Client], Any]) -> Any:
    """Return the result of a coroutine of a client of that server."""
    with contextlib.closing(Client(url)) as client:
        return client.run(make(client))


async def listed(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


def set_limits(monkeypatch, seconds: float) -> None:
    monkeypatch.setattr("llama.cli.client._ANSWER_S", seconds)
    monkeypatch.setattr("llama.cli.client._CONNECT_S", seconds)


@pytest.mark.parametrize("action", ACTIONS)
def test_each_wait_ends_with_an_error_that_names_the_server(tmp_path, monkeypatch, action):
    """Each wait ends with an error that names the server.

    The cases are an answer, a stream, the list of models, and a batch job that tries once. A server
    that sends a byte now and then would finish after 3 s: the limit applies to the whole answer.
    """
    said = LATE.format(LIMIT_S)
    set_limits(monkeypatch, LIMIT_S)
    if action == "refuses for ever":
        said = "status 503: no"
        set_limits(monkeypatch, 60.0)
    if "hangs up" in action:
        said = "(lost the connection: .|the stream ended without its last event)"
        set_limits(monkeypatch, 60.0)
    with misbehaving(action, lists_models=False) as url:
        wanted = rf"{url}:? {said}|{url}: {said}"
        with pytest.raises(ServerError, match=wanted):
            call(url, lambda client: client.post("/v1/completions", {"prompt": "x"}))
        with pytest.raises(ServerError, match=wanted):
            call(url, lambda client: listed(client.events("/v1/completions", {"prompt": "x"})))
        with pytest.raises(ServerError, match=wanted):
            call(url, lambda client: client.model(None))
    (tmp_path / "in").write_text("hello\n" * 3)
    with misbehaving(action) as url:
        report = run_server_batch(
            url, str(tmp_path / "in"), str(tmp_path / "out"), sampling_params(), retry_s=0
        )
        assert (report.written, report.failed) == (3, 3)
    for line in (tmp_path / "out").read_text().splitlines():
        assert url in json.loads(line)["error"]["message"]


def test_a_late_answer_does_not_spoil_the_next(monkeypatch):
    """A late answer does not affect the next request.

    The connection is abandoned with the late answer; the limit of a request starts with the
    request.
    """
    set_limits(monkeypatch, AMPLE_S)
    with misbehaving("trickles the body") as url, contextlib.closing(Client(url)) as client:
        for _ in range(3):
            assert client.run(client.model(None)) == ("m", None)
            time.sleep(AMPLE_S / 2)
        with pytest.raises(ServerError, match=LATE.format(AMPLE_S)):
            client.run(client.post("/v1/completions", {}))
        assert client.run(client.model(None)) == ("m", None)


def test_what_the_environment_has_for_others_stays_here(monkeypatch):
    """Settings of the environment for other services are not used.

    A key of OpenAI's service and a proxy are not meant for the server of --url.
    """
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    heads: list[bytes] = []
    with misbehaving("hangs up", heads=heads) as url:
        assert call(url, lambda client: client.model(None)) == ("m", None)
    assert heads and b"secret" not in b"".join(heads)
    assert b"authorization" not in b"".join(heads).lower()


@pytest.mark.parametrize("command", [["chat"], ["batch", "IN", "OUT"]])
def test_the_extra_is_named_where_it_is_not_installed(monkeypatch, capsys, command):
    loaded = ("client", "batch.server_job", "chat.server_session")
    for name in loaded:
        monkeypatch.delitem(sys.modules, f"llama.cli.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    for how, flags in (("--url", ["--url", "http://localhost:1"]), ("server", ["--resident"])):
        assert main([*command, *flags]) == 2
        told = capsys.readouterr().err
        assert f"{how} needs httpx2" in told and f"-e '{REPO}[client]'" in told


def test_what_a_server_says_cannot_move_the_cursor():
    assert str(ServerError("\x1b[2J\r\nno\x00 \u202e")) == "\\x1b[2J\\r\\nno\\x00 \\u202e"
