"""Several servers behind HAProxy: the choice of a replica, deaths, restarts, the end, errors."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from helpers.launch import PROGRAMS, REPO, environment
from helpers.processes import children
from helpers.server import post_and_leave, run_server
from helpers.waiting import wait_until
from llama.cli import main
from llama.cli.flags import UsageError
from llama.cli.replicas import shares
from llama.cli.replicas.haproxy import Config, check_config, find_haproxy, key_rules
from llama.cli.replicas.shares import NUM_SERVERS, parse_cpus
from llama.cli.serve import unix_listener
from llama.server.limits import Limits
from programs.replicas import hit_rate, kill_under_streams, process_of

try:
    PROGRAM = find_haproxy()
except UsageError as error:
    PROGRAM = ""
    REASON = str(error)
else:
    REASON = ""
needs_haproxy = pytest.mark.skipif(not PROGRAM, reason=REASON)
SYSTEM = {"role": "system", "content": "Answer briefly."}
CHAT = "/v1/chat/completions"


# A stream whose chunks divide characters and events.
CHUNKS = (b": \r\n\r\ndata: \xe2\x82", b"\xac\n\n", b"d", b"ata: \x00\xff" + 20_000 * b"y", b"\n\n")


# --- HAProxy with its real configuration, before replicas of a few lines ---


class _Replica(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A server that answers with its name and the path, and notes what it was asked."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.name = path.stem
        self.paths: list[str] = []
        self.lengths: list[int] = []  # bytes of the bodies
        self.forwarded: list[str] = []  # the last address that a proxy has added to each request
        self.status = 200
        self.is_stopped = False  # whether it answers no checks, as after SIGSTOP
        self.num_left = 0  # clients that left before their answer
        self.has_arrived = threading.Event()  # whether the client of a stream has its beginning


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Replica

    def address_string(self) -> str:
        return ""  # A Unix domain socket has no address.

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        while self.server.is_stopped:
            time.sleep(0.05)
        self._answer(200 if self.path == "/ready" else self.server.status)

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.forwarded.append(self.headers.get_all("X-Forwarded-For", [""])[-1])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.lengths.append(len(body))
        if self.path == "/stream":
            self._stream()
            return
        if self.path == "/die":
            self.close_connection = True
            return
        if self.path == "/wait" and not self.connection.recv(1):
            self.server.num_left += 1
            return
        self._answer(self.server.status)

    def _stream(self) -> None:
        self.send_response(200)
        for name in ("X-Request-Id", "X-Own"):
            self.send_header(name, self.headers[name])
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in CHUNKS:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if chunk == CHUNKS[1]:  # It is on its way before there is another one.
                self.server.has_arrived.wait(30)
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int) -> None:
        body = json.dumps({"replica": self.server.name, "path": self.path}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        # A health check reads the status alone, or no longer waits.
        with contextlib.suppress(BrokenPipeError):
            self.end_headers()
            self.wfile.write(body)


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> Iterator[SimpleNamespace]:
    with routing(tmp_path_factory.mktemp("it's # r"), 8, 6) as made:
        yield made


@contextlib.contextmanager
def routing(folder: Path, max_connections: int, max_per_address: int) -> Iterator[SimpleNamespace]:
    """Two replicas behind HAProxy: the URL, the replicas, and a client."""
    sockets = [folder / f"{i}.sock" for i in range(2)]
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(_Replica(path)) for path in sockets]
        for replica in replicas:
            threading.Thread(target=replica.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(replica.shutdown)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        config = Config(
            sockets=sockets,
            listener=listener.fileno(),
            admin=folder / "admin.sock",
            num_threads=1,
            max_connections=max_connections,
            max_per_address=max_per_address,
            drain_s=1,
        )
        path = config.write(folder)
        check_config(PROGRAM, path, listener.fileno())
        process = subprocess.Popen(
            [PROGRAM, "-db", "-f", str(path)],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=30))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield SimpleNamespace(url=url, replicas=replicas, client=client)


def ask(routed: SimpleNamespace, path: str, body: object, **headers: str) -> str:
    """Return the name of the replica that answers."""
    response = routed.client.post(routed.url + path, json=body, headers=headers)
    name: str = response.json()["replica"]
    assert response.status_code == 200 and response.headers["X-Replica"] == name
    return name


def user(text: object) -> dict:
    return {"role": "user", "content": text}


def shown(image: str) -> dict:
    url = f"data:image/png;base64,{image}"
    text = {"type": "text", "text": "What is this?"}
    return user([{"type": "image_url", "image_url": {"url": url}}, text])


def showing(image: str) -> list[tuple[str, dict]]:
    messages = [SYSTEM, shown(image)]
    return [(CHAT, {"messages": messages}), (CHAT, {"messages": [*messages, user("more")]})]


def source(image: str) -> dict:
    given = {"type": "base64", "media_type": "image/png", "data": image}
    return user([{"type": "image", "source": given}, {"type": "text", "text": "What is this?"}])


def input_image(image: str) -> dict:
    text = {"type": "input_text", "text": "What is this?"}
    return user([{"type": "input_image", "image_url": f"data:image/png;base64,{image}"}, text])


# The turns of one dialog, in each API: the first turn, and later ones as clients send them.
DIALOGS: dict[str, Callable[[str], list[tuple[str, dict]]]] = {
    "chat": lambda text: [
        (CHAT, {"messages": messages, "stream": stream})
        for messages, stream in (
            ([SYSTEM, user(text)], True),
            ([SYSTEM, user(text), {"role": "assistant", "content": "A"}, user("more")], False),
            ([{"role": "system", "content": "Answer briefly."}, user(text), user("b")], False),
        )
    ],
    "no system prompt": lambda text: [
        (CHAT, {"messages": [user(text)]}),
        (CHAT, {"messages": [user(text), {"role": "assistant", "content": "A"}, user("more")]}),
    ],
    "parts": lambda text: [
        (CHAT, {"messages": [SYSTEM, user(text)]}),
        (CHAT, {"messages": [SYSTEM, user([{"type": "text", "text": text}]), user("more")]}),
    ],
    "messages": lambda text: [
        ("/v1/messages", {"system": "S", "messages": [user(text)]}),
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "S"}],
                "messages": [user([{"type": "text", "text": text}]), user("more")],
            },
        ),
    ],
    "responses": lambda text: [
        ("/v1/responses", {"instructions": "S", "input": text}),
        ("/v1/responses", {"instructions": "S", "input": [user(text), user("more")]}),
    ],
    "developer": lambda text: [
        ("/v1/responses", {"input": [{"role": "developer", "content": "S"}, user(text)]}),
        (
            "/v1/responses",
            {"input": [{"role": "developer", "content": "S"}, user(text), user("b")]},
        ),
    ],
    "prompt": lambda text: [
        ("/v1/completions", {"prompt": text * 200}),
        ("/v1/completions", {"prompt": text * 200 + " and more"}),
    ],
    "ollama": lambda text: [
        ("/api/chat", {"messages": [user(text)]}),
        ("/api/chat", {"messages": [user(text), user("more")], "stream": False}),
    ],
    "long": lambda text: [  # a question that is longer than the buffer
        (CHAT, {"messages": [SYSTEM, user(text + "x" * 150_000)]}),
        (CHAT, {"messages": [SYSTEM, user(text + "x" * 150_000), user("more")]}),
    ],
    "long system": lambda text: [  # dialogs that differ after the first kilobyte
        (CHAT, {"messages": [{"role": "system", "content": "x" * 50_000 + text + "x" * 150_000}]}),
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": "x" * 50_000 + text + "x" * 150_000},
                    SYSTEM,
                ]
            },
        ),
    ],
    "image": lambda text: showing(text),
    "image longer than the buffer": lambda text: showing(text + "x" * 150_000),
    "image in messages": lambda text: [
        ("/v1/messages", {"system": "S", "messages": [source(text)]}),
        ("/v1/messages", {"system": "S", "messages": [source(text), user("more")]}),
    ],
    "image in responses": lambda text: [
        ("/v1/responses", {"instructions": "S", "input": [input_image(text)]}),
        ("/v1/responses", {"instructions": "S", "input": [input_image(text), user("more")]}),
    ],
    "long dialog": lambda text: [
        (CHAT, {"messages": [SYSTEM, user(text), user("x" * 150_000)]}),
        (CHAT, {"messages": [SYSTEM, user(text), user("y" * 150_000)]}),
    ],
}


@needs_haproxy
@pytest.mark.parametrize("api", DIALOGS)
def test_all_turns_of_a_dialog_have_one_replica(routed, api):
    """All turns of a dialog have one replica, and other dialogs the other one as well."""
    seen = set()
    for i in range(12):
        names = {ask(routed, *turn) for turn in DIALOGS[api](f"Question {i}")}
        assert len(names) == 1
        seen |= names
    assert seen == {"0", "1"}


@needs_haproxy
def test_the_largest_body_passes(routed):
    """A model that reads images takes 32 MiB, which HAProxy does not hold at once."""
    length = Limits().max_image_body_bytes
    body = b'{"messages": "' + b"x" * (length - 16) + b'"}'
    response = routed.client.post(routed.url + CHAT, content=body)
    (replica,) = [each for each in routed.replicas if each.name == response.json()["replica"]]
    assert replica.lengths[-1] == len(body) == length


@needs_haproxy
def test_a_client_may_choose_the_key(routed):
    names = [
        {ask(routed, CHAT, {"messages": [user(str(i))]}, **{"X-Session-Id": key}) for i in range(6)}
        for key in "abcdef"
    ]
    assert all(len(each) == 1 for each in names) and len(set.union(*names)) == 2


@needs_haproxy
def test_a_request_that_a_replica_refuses_goes_to_the_other(routed):
    """A replica that drains, or whose queue is full, answers 503: the other one answers."""
    first, second = routed.replicas
    first.status = 503
    try:
        assert {ask(routed, CHAT, {"messages": [user(str(i))]}) for i in range(8)} == {"1"}
        second.status = 503
        response = routed.client.post(routed.url + CHAT, json={})
        assert response.status_code == 503
    finally:
        first.status = second.status = 200


@needs_haproxy
def test_each_replica_has_a_path_of_its_own(routed):
    for i in range(2):
        response = routed.client.get(f"{routed.url}/replicas/{i}/metrics?a=/b")
        assert response.json() == {"replica": str(i), "path": "/metrics?a=/b"}
        assert response.headers["X-Replica"] == str(i)
    for path in ("/metrics", "/load"):
        response = routed.client.get(routed.url + path)
        assert response.status_code == 404
        assert "/replicas/0 to /replicas/1" in response.json()["error"]["message"]
    names = [routed.client.get(f"{routed.url}/v1/models").json()["replica"] for _ in range(40)]
    assert min(Counter(names)[x] for x in "01") > 5, "without a text they take turns"


@needs_haproxy
def test_streams_pass_byte_for_byte(routed):
    """A stream keeps its bytes and headers, and does not wait for its next event."""
    headers = {"X-Request-Id": "mine", "X-Own": "kept"}
    url = f"{routed.url}/stream"
    with routed.client.stream("POST", url, json={}, headers=headers) as response:
        parts = response.iter_raw()
        received = next(parts)
        while len(received) < len(CHUNKS[0] + CHUNKS[1]):
            received += next(parts)
        for replica in routed.replicas:
            replica.has_arrived.set()
        received += b"".join(parts)
    assert received == b"".join(CHUNKS)
    assert {name: response.headers[name] for name in headers} == headers
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"


@needs_haproxy
def test_an_answer_that_nobody_reads_is_not_waited_for(routed):
    post_and_leave(
        f"{routed.url}/wait", {}, lambda: any("/wait" in each.paths for each in routed.replicas)
    )
    wait_until(lambda: sum(each.num_left for each in routed.replicas) == 1)


@needs_haproxy
@pytest.mark.parametrize("sent", [{}, {"X-Forwarded-For": "10.0.0.1, 10.0.0.2"}])
def test_replicas_know_the_addresses_of_clients(routed, sent):
    """The last address is the one that has connected, whatever a client says."""
    for address in ("127.0.0.1", "127.0.0.2"):
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=30) as client:
            name = client.post(f"{routed.url}/v1/completions", json={}, headers=sent).json()
        (replica,) = (each for each in routed.replicas if each.name == name["replica"])
        assert replica.forwarded[-1] == address


@needs_haproxy
def test_too_many_connections_of_one_address_are_refused(routed):
    """Connections beyond the limit get the error of the API, and the others an answer."""
    port = int(routed.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with httpx.Client(trust_env=False) as client:
            response = client.get(f"{routed.url}/v1/models")
    assert response.status_code == 503 and response.headers["Retry-After"]
    error = response.json()["error"]
    assert error["type"] == "overloaded_error" and "6 connections" in error["message"]


@needs_haproxy
@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_idle_connections_of_one_address_keep_no_other_out(tmp_path, sent):
    """They count before they have sent a request, and hold no place of other addresses."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with contextlib.ExitStack() as stack:
        routed = stack.enter_context(routing(tmp_path, 200, 100))
        port = int(routed.url.rpartition(":")[2])
        for _ in range(300):
            with contextlib.suppress(ConnectionError):  # It may be refused at once.
                connection = socket.create_connection(("127.0.0.1", port))
                stack.enter_context(connection).sendall(sent)
        client = stack.enter_context(httpx.Client(transport=transport, timeout=30))
        for path in ("/v1/models", "/health"):
            assert client.get(routed.url + path).status_code == 200


@needs_haproxy
@pytest.mark.parametrize("path", ["/wait", "/replicas/0/wait", "/replicas/1/wait"])
def test_a_stopped_replica_does_not_keep_its_clients(tmp_path, path):
    """Its connections end once it has answered no check for some seconds."""
    ended: list[int | str] = []

    def ask_it() -> None:
        try:
            with httpx.Client(trust_env=False, timeout=90) as client:
                ended.append(client.post(made.url + path, json={}).status_code)
        except httpx.HTTPError as error:
            ended.append(type(error).__name__)

    with routing(tmp_path, 8, 6) as made:
        client = threading.Thread(target=ask_it)
        client.start()
        wait_until(lambda: any(each.paths for each in made.replicas))
        (stopped,) = (each for each in made.replicas if each.paths)
        stopped.is_stopped = True
        client.join(60)
        assert not client.is_alive() and ended[0] in (502, 503, "RemoteProtocolError")
        (other,) = (each for each in made.replicas if each is not stopped)
        assert {ask(made, "/v1/completions", {"prompt": str(i)}) for i in range(4)} == {other.name}
        stopped.is_stopped = False


@needs_haproxy
def test_a_stopped_replica_makes_the_others_no_less_healthy(tmp_path):
    """/health and /ready are 200 also before it is found out, and 503 once none takes requests."""

    def statuses() -> list[int]:
        paths = ("/health", "/ready") * 4
        return [made.client.get(made.url + path).status_code for path in paths]

    with routing(tmp_path, 8, 6) as made:
        try:
            made.replicas[0].is_stopped = True
            assert set(statuses()) == {200}
            made.replicas[1].is_stopped = True
            wait_until(lambda: set(statuses()) == {503})
        finally:
            for replica in made.replicas:
                replica.is_stopped = False
        wait_until(lambda: set(statuses()) == {200})


@needs_haproxy
def test_a_request_that_ends_its_replica_is_sent_to_no_other(routed):
    """A request that ends its replica would end all of them."""
    # HAProxy 2.6 closes a connection that has had an answer before, without another one.
    with httpx.Client(trust_env=False) as client:
        response = client.post(f"{routed.url}/die", json={})
    assert response.status_code == 502
    error = response.json()["error"]
    assert error["type"] == "server_error" and "the replica ended" in error["message"]
    assert sum(replica.paths.count("/die") for replica in routed.replicas) == 1


@needs_haproxy
def test_the_example_for_machines_chooses_alike(tmp_path):
    """The example for several machines has the same rules, for fixed addresses and for a name."""
    text = (REPO / "torchrun_examples" / "haproxy_machines.cfg").read_text()
    lines = [line.strip() for line in text.splitlines()]
    rules = [line for line in lines if line.startswith("http-request set-var")]
    assert rules == [rule.strip() for rule in key_rules()]
    config = Config([tmp_path / "s"], 3, tmp_path, 1, 8, 6, 1)
    path = config.write(tmp_path)
    routing = [line.strip() for line in path.read_text().splitlines()]
    for name in ("balance", "hash-", "option", "retr", "http-check", "tune."):
        mine = [line for line in routing if line.startswith(name)]
        assert [line for line in lines if line.startswith(name)] == mine != []
    named = re.sub(r"(?m)^    server machine", "    # server", text)
    named = named.replace("# server-template", "server-template")
    for each in (text, named):
        path.write_text(each)
        check_config(PROGRAM, path, 0)


# --- the supervisor, with scripts in place of servers ---

GOOD = "echo 'ready: x'; exec sleep 300"


@contextlib.contextmanager
def supervised(folder: Path, *scripts: str) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """Run the supervisor with these scripts; yield its process, and its log so far."""
    command = [sys.executable, str(PROGRAMS / "fake_replicas.py"), str(folder), *scripts]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(folder))
    )
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        yield process, log
        process.wait(30)
        reader.join(30)
    finally:
        process.kill()
        process.wait()


def children_of(pid: int) -> dict[int, str]:
    """Return the command lines of the children of a process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_replica_that_ends_is_started_again(tmp_path):
    """A replica that was ready starts at once, with nothing left of the last start."""
    leaves = "sleep 299 & echo $! >> $FOLDER/left; echo 'ready: x'; wait"
    with supervised(tmp_path, leaves, GOOD) as (process, log):
        wait_until(lambda: "all are ready\n" in log, log)
        (left,) = (tmp_path / "left").read_text().split()
        (pid,) = (pid for pid, line in children_of(process.pid).items() if "299" in line)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "replica 0 is ready again\n" in log, log)
        assert any("replica 0 was killed by SIGKILL" in x and "again now" in x for x in log)
        wait_until(lambda: is_gone(int(left)), "what a replica has started keeps its memory")
        assert not any("replica 1" in line for line in log)
        process.terminate()
    assert process.returncode == 0 and "closed\n" in log


def test_a_replica_that_fails_again_and_again_waits_longer(tmp_path):
    """The others serve on, and only the end of all of them ends the command."""
    once = "test -e $FOLDER/a && exit 3; touch $FOLDER/a; echo 'ready: x'; sleep 0.3; exit 3"
    with supervised(tmp_path, once, GOOD) as (process, log):
        wait_until(lambda: any("again in 2 s" in line for line in log), log)
        waits = [m[1] for m in re.finditer(r"0 .* again (\S+( \d)?)", "".join(log))]
        assert waits == ["now", "in 2"] or waits == ["now", "in 1", "in 2"]
        process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("echo 'error: --dtype fp7 is no dtype'; exit 2", 2, "error: --dtype fp7 is no dtype"),
        ("echo 'error: no memory'; exit 1", 1, "error: replica 0: no memory"),
        ("kill -9 $$", 1, "error: replica 0: was killed by SIGKILL"),
    ],
)
def test_a_replica_that_never_starts_ends_the_command(tmp_path, script, code, message):
    """The error is one line, and nothing is left of the others."""
    with supervised(tmp_path, script, "sleep 0.2; " + script, "exec sleep 298") as (process, log):
        pass
    assert process.returncode == code
    errors = [line for line in log if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(message)


def test_nothing_outlives_a_killed_supervisor(tmp_path):
    with supervised(tmp_path, GOOD, GOOD + "; true") as (process, log):
        wait_until(lambda: "all are ready\n" in log, log)
        children = children_of(process.pid)
        assert len(children) == 3
        process.kill()
        wait_until(lambda: all(map(is_gone, children)))


def test_a_second_signal_ends_it_at_once(tmp_path):
    """A replica that ignores the first signal, as one that drains does, ends by the second."""
    script = "trap 'test -e $FOLDER/a && exit; touch $FOLDER/a' TERM; echo 'ready: x'; "
    with supervised(tmp_path, script + "while :; do sleep 0.05; done") as (process, log):
        wait_until(lambda: "all are ready\n" in log, log)
        process.terminate()
        wait_until((tmp_path / "a").exists)
        time.sleep(0.6)  # Two signals within half a second count as one.
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM


# --- the whole, with the demo model ---


@needs_haproxy
@pytest.mark.slow
def test_two_replicas_of_the_demo_model():
    """Two replicas share no chat, and one of them can die under load."""
    with run_server("--replicas", "2", "--max_seq_len", "512") as server:
        measure = functools.partial(hit_rate, chats=4, turns=6, at_once=1)
        one = asyncio.run(measure(f"{server.url}/replicas/0", "one"))
        two = asyncio.run(measure(server.url, "two"))
        apart = asyncio.run(measure(server.url, "random", is_random=True))
        assert two >= 0.9 * one > apart
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = [
                client.chat.completions.with_raw_response.create(
                    model="demo", messages=[{"role": "user", "content": f"Hi {i}"}], max_tokens=5
                ).headers["X-Replica"]
                for i in range(8)
            ]
        assert set(answers) == {"0", "1"}
        ends = asyncio.run(kill_under_streams(server, 16))
        assert ends["streams_of_0"] > 0 == ends["complete_of_0"]
        assert ends["streams_of_1"] == ends["complete_of_1"] > 0
        wait_until(lambda: any("replica 0 is ready again" in line for line in server.log))
        pids = [process_of(server, i) for i in range(2)]
        if len(os.sched_getaffinity(0)) > 1:
            assert not os.sched_getaffinity(pids[0]) & os.sched_getaffinity(pids[1])
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) > 200
        code, log = server.ended()
        assert code == 0 and "2 replicas share the memory of" in log
        assert all(map(is_gone, pids))


@needs_haproxy
def test_the_api_processes_of_replicas():
    """Each replica has its own: kill -9 of one ends no request of the other replica."""
    flags = ("--replicas", "2", "--api_processes", "1", "--max_seq_len", "512")
    with run_server(*flags) as server:
        pids = [process_of(server, i) for i in range(2)]
        apis = [children(pid)[0] for pid in pids]
        cores = [os.sched_getaffinity(pid) for pid in [*pids, *apis]]
        assert cores[:2] == cores[2:]
        ends = asyncio.run(kill_under_streams(server, 12, apis[0]))
        assert ends["streams_of_0"] > 0 == ends["complete_of_0"]
        assert ends["streams_of_1"] == ends["complete_of_1"] > 0
        assert [process_of(server, i) for i in range(2)] == pids, "no replica was started again"
        apis = [children(pid)[0] for pid in pids]
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        url = f"{server.url}/replicas/0/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) > 200
        assert server.ended()[0] == 0
        assert all(map(is_gone, [*pids, *apis]))


# --- errors before anything is started, and the shares of the machine ---


@pytest.fixture
def no_haproxy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)


def test_without_haproxy_the_error_names_both_packages(no_haproxy, capfd):
    assert main(["serve", "--replicas", "2"]) == 2
    error = capfd.readouterr().err
    assert (
        error.startswith("error: --replicas needs HAProxy 2.6 or later") and "[replicas]" in error
    )
    assert "the package haproxy of your distribution" in error


def test_an_old_haproxy_is_not_used(no_haproxy, tmp_path):
    """Ubuntu 22.04 has HAProxy 2.4, which has no `balance hash`."""
    program = tmp_path / "haproxy"
    program.write_text("#!/bin/sh\necho 'HAProxy version 2.4.24-0ubuntu0.22.04.1 2023/10/31'\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match=r"haproxy is 2\.4\)"):
        find_haproxy()


@needs_haproxy
@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--background"], 2, "--background cannot be given with --replicas 2"),
        (["--uds", "s"], 2, "--uds cannot be given with --replicas 2"),
        (["--fastchat_controller", "http://a"], 2, "start each of them without --replicas"),
        (["--port", "PORT"], 1, "address already in use"),
    ],
)
def test_flags_that_exclude_each_other(flags, code, message, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if flag == "PORT" else flag for flag in flags]
        assert main(["serve", "--replicas", "2", *given]) == code
    assert message in capfd.readouterr().err


def test_a_socket_that_a_server_left_behind_is_replaced(tmp_path):
    """`--uds` takes a path that is free, or whose server is gone, and no other file."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with unix_listener(str(path)) as listener:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(OSError, match="another server listens there"):
            unix_listener(str(path))
        assert listener.getsockname() == str(path)
    path.unlink()
    path.write_text("kept")
    with pytest.raises(FileExistsError, match="is no socket"):
        unix_listener(str(path))
    assert path.read_text() == "kept"
    with pytest.raises(OSError, match=r"--uds .* too long"):
        unix_listener(str(tmp_path / ("s" * 120)))


@pytest.mark.parametrize("mask", [0, 0o022, 0o177])
def test_only_its_user_can_connect_to_a_socket(tmp_path, mask):
    before = os.umask(mask)
    try:
        with unix_listener(str(tmp_path / "s")):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_replicas_are_for_one_machine(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", "--replicas", "2"]) == 2
    assert "--replicas needs only one process: start it without torchrun" in capfd.readouterr().err


def test_gpus_are_divided(monkeypatch):
    monkeypatch.setattr(shares, "_num_gpus", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def visible(*asked):
        return [share.variables["CUDA_VISIBLE_DEVICES"] for share in shares.shares(*asked)]

    assert visible(3, 2, None) == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-a,3,2,1")
    assert visible(2, 3, "cuda") == ["7,5,GPU-a", "3,2,1"]
    with pytest.raises(UsageError, match="4 with 2 ranks each need 8 GPUs, and torch finds 6"):
        visible(4, 2, None)
    with pytest.raises(UsageError, match="cuda:1 would put all replicas on one GPU"):
        visible(2, 1, "cuda:1")


def test_cores_are_divided_by_node_and_core(monkeypatch, tmp_path):
    """Two nodes of two cores with two threads each, numbered as Linux does."""
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}
    for cpu, node in nodes.items():
        folder = tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(shares, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(nodes))

    def cores(count):
        return [share.cores for share in shares.shares(count, 1, "cpu")]

    assert cores(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cores(4) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert cores(9) == [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}, {0}]
    assert {share.variables[NUM_SERVERS] for share in shares.shares(4, 1, "cpu")} == {"4"}
    assert parse_cpus("0-3,8\n") == [0, 1, 2, 3, 8]


def test_no_gpu_is_looked_for_without_a_driver(monkeypatch):
    """Importing torch takes seconds, and is left out where no driver is loaded."""
    monkeypatch.setattr(shares, "_COUNT_GPUS", "print(3)")
    monkeypatch.setattr(shares, "_DRIVER_FILES", ("/dev/null",))
    assert shares._num_gpus() == 3
    monkeypatch.setattr(shares, "_DRIVER_FILES", ())
    assert shares._num_gpus() == 0
