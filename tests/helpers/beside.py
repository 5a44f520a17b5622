"""What a small request costs the event loop of a server while a large one is being answered."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from helpers.services import service_of
from llama import Llama
from llama.compat.fastchat import FastChatWorker
from llama.prompts import ToolFormat
from llama.server.limits import Limits
from llama.server.process import Server
from llama.server.service import Service

SMALL = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
_PAUSE_S = 0.05  # between two small requests
HEADERS = {"Content-Type": "application/json"}


@dataclass
class Cost:
    """The largest figures of all small requests alongside a large one.

    Attributes:
        status: the status of the large request.
        num_bytes: the bytes of its answer.
        loop_s: processor time of the event loop's thread during a small request.
        step_s: the same of the thread that runs the model.
        wall_s: time of a small request.
        num_small: the number of small requests.
        error: the beginning of the large request's error.
    """

    status: int = 0
    num_bytes: int = 0
    loop_s: float = 0.0
    step_s: float = 0.0
    wall_s: float = 0.0
    num_small: int = 0
    error: str = ""


@contextlib.contextmanager
def running_server(llama: Llama, **limits: Any) -> Iterator[Server]:
    """Run a server with all routes in this process."""

    def host_routes(service: Service, port: int) -> Any:
        return FastChatWorker(service, "http://127.0.0.1:9", "http://127.0.0.1", 3600).router()

    service = service_of(limits=Limits(**limits), given_format=ToolFormat("llama3.1"))
    server = Server(service, host="127.0.0.1", port=0, api_keys=[], host_routes=host_routes)
    server.start()
    server.open(llama)
    try:
        yield server
    finally:
        service.close()
        server.stop()


def cost_beside(server: Server, path: str, body: bytes) -> Cost:
    """Return what small requests cost while the server answers a large one."""
    cost = Cost()
    thread = threading.Thread(target=_send, args=(server.port, path, body, cost))
    small = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    _ask(small)
    clocks = [_clock(server._thread.ident), _clock(_step_thread(server))]
    thread.start()
    is_last = False
    while not is_last:
        is_last = not thread.is_alive()
        began = [time.monotonic(), *map(time.clock_gettime, clocks)]
        _ask(small)
        ended = [time.monotonic(), *map(time.clock_gettime, clocks)]
        wall, loop, step = (end - begin for begin, end in zip(began, ended, strict=True))
        cost.wall_s = max(cost.wall_s, wall)
        cost.loop_s = max(cost.loop_s, loop)
        cost.step_s = max(cost.step_s, step)
        cost.num_small += 1
        thread.join(_PAUSE_S)
    thread.join()
    small.close()
    return cost


def _send(port: int, path: str, body: bytes, cost: Cost) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, body, HEADERS)
    response = connection.getresponse()
    cost.status = response.status
    while part := response.read(1 << 16):
        cost.num_bytes += len(part)
        if response.status != 200:
            cost.error += part.decode()[:300]
    connection.close()


def _ask(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/v1/completions", SMALL, HEADERS)
    response = connection.getresponse()
    content = response.read()
    assert response.status == 200, content


def _clock(ident: int | None) -> int:
    assert ident is not None
    return time.pthread_getcpuclockid(ident)


def _step_thread(server: Server) -> int | None:
    engine = server.service.default.engine
    assert engine is not None
    (thread,) = engine._thread._threads
    return thread.ident
