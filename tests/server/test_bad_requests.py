"""Each bad request of the table gets its expected answer, and the server goes on.

The answer has the status, the field at fault, a message that says what is wrong, at most 4 KB, and
neither a path of this machine nor a trace. The next good request is answered.
"""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from helpers.bad_requests import BAD_REQUESTS, KEY, TEXT, BadRequest
from helpers.launch import REPO
from helpers.server import RunningServer, run_server
from helpers.web import web

INSIDE = ("Traceback", "body'", 'File "', ".py", "site-packages", str(REPO), "llama.")


@pytest.fixture(scope="module")
def tool_server() -> Iterator[RunningServer]:
    flags = ("--max_seq_len", "512", "--dtype", "fp32", "--tool_format", "llama3.1")
    with run_server(*flags, "--api_key", "k") as running:
        yield running


@pytest.fixture(scope="module")
def connection() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def test_the_table_has_a_row_for_each_fault():
    assert (
        len({repr(case._replace(message="")) for case in BAD_REQUESTS}) == len(BAD_REQUESTS) > 300
    )


@pytest.mark.parametrize("case", BAD_REQUESTS, ids=lambda case: case.name)
def test_a_bad_request_gets_its_own_error(tool_server, server, connection, case: BadRequest):
    url = (tool_server if case.has_tools else server).url
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    found = connection.request(
        case.method,
        url + case.path,
        content=body if case.method == "POST" else None,
        headers={"Content-Type": "application/json", **KEY, **case.headers},
    )
    assert found.status_code == case.status, found.text
    error = json.loads(found.content.decode())["error"]
    if case.path.startswith("/v1/messages"):
        assert found.json().keys() == {"type", "error"} and found.json()["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == case.param, error
    assert case.message in error["message"]
    assert len(found.content) < 4096
    assert not [word for word in INSIDE if word in found.text], found.text
    assert found.headers["x-request-id"]
    good = connection.post(url + TEXT, json={"prompt": "x", "max_tokens": 1}, headers=KEY)
    assert (good.status_code, good.json()["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize("sent", [b"X: " + b"a" * 3_000_000, b"X: a\r\n" * 500_000])
def test_headers_without_end_are_cut(tool_server, sent):
    """Endless headers are cut off: they come before the key is checked, and must not accumulate."""
    address = urlsplit(tool_server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        answer = b""
        try:
            client.sendall(head + sent)
            while part := client.recv(65536):
                answer += part
        except ConnectionError:  # the rest is refused, and the answer may be lost with it
            pass
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    good = web.post(tool_server.url + TEXT, json={"prompt": "x", "max_tokens": 1}, headers=KEY)
    assert good.status_code == 200


def test_a_body_in_chunks_is_cut(tool_server, connection):
    """A chunked body, which declares no length, is cut off at the limit."""
    parts = (b"a" * 2**20 for _ in range(20))
    headers = {"Content-Type": "application/json", **KEY}
    found = connection.post(tool_server.url + TEXT, content=parts, headers=headers)
    assert (found.status_code, found.json()["error"]["type"]) == (413, "request_too_large")
