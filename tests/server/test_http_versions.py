"""Clients of HTTP/1.0 get bodies without chunks, which end with the connection or by their length.

The client is Python's http.client, which knows no chunks in HTTP/1.0: they would be in the body.
"""

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

ASKED: Any = [{"role": "user", "content": "Tell me a story about a cat"}]
SHORT = {"max_tokens": 6, "temperature": 0}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon", "stream": True, **SHORT}),
    ("/v1/chat/completions", {"messages": ASKED, "stream": True, **SHORT}),
    ("/v1/responses", {"input": "Hi", "stream": True, "max_output_tokens": 6, "temperature": 0}),
    ("/v1/messages", {"messages": ASKED, "stream": True, **SHORT}),
    ("/api/generate", {"prompt": "Once upon", "options": {"num_predict": 6, "temperature": 0}}),
]
# One response is larger than a piece, and so has no length, either.
WHOLE: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("HEAD", "/", None),
    ("GET", "/nowhere", None),
    ("POST", "/v1/completions", {"prompt": "Once upon", **SHORT}),
    (
        "POST",
        "/v1/completions",
        {"prompt": [7] * 480, "echo": True, "logprobs": 20, "n": 3, **SHORT},
    ),
]


def answered(
    server: Any, version: int, method: str, path: str, body: dict[str, Any] | None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the response to a request of HTTP/1.0 or HTTP/1.1, and its body."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version - 10}"  # type: ignore[attr-defined]
    headers = {"Content-Type": "application/json"}
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    try:
        return response, response.read()
    finally:
        connection.close()


def text_of(data: bytes) -> str:
    """Return the text of a stream; each of its lines must be one of an event."""
    text = ""
    for line in filter(None, data.decode().splitlines()):
        if line == "data: [DONE]" or line.startswith("event: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        (choice,) = event.get("choices") or [event]
        delta = choice.get("delta", choice.get("text", choice.get("response", "")))
        if isinstance(delta, dict):
            delta = delta.get("content", delta.get("text", ""))
        text += delta if isinstance(delta, str) else ""
    return text


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_ends_with_the_connection(server, path, body):
    old, old_data = answered(server, 10, "POST", path, body)
    new, new_data = answered(server, 11, "POST", path, body)
    assert old.status == new.status == 200
    assert new.getheader("transfer-encoding") == "chunked"
    assert old.getheader("transfer-encoding") is None is old.getheader("content-length")
    assert old.getheader("connection") == "close"
    assert text_of(old_data) == text_of(new_data) != ""


@pytest.mark.parametrize(("method", "path", "body"), WHOLE)
def test_a_whole_response_is_the_same_in_both_versions(server, method, path, body):
    old, old_data = answered(server, 10, method, path, body)
    new, new_data = answered(server, 11, method, path, body)
    assert old.status == new.status
    assert old.getheader("transfer-encoding") is None
    assert old.getheader("content-length") == new.getheader("content-length")
    if path == "/v1/completions":
        assert json.loads(old_data)["choices"] == json.loads(new_data)["choices"]
        assert (len(old_data) > 2**18) == (old.getheader("content-length") is None)
    else:
        assert old_data == new_data


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_no_interim_response_comes_before_the_only_one(server, expect):
    """A client of HTTP/1.0 takes the first status line for that of the response."""
    host, port = urlsplit(server.url).netloc.split(":")
    body = json.dumps({"prompt": "Once", "stream": True, "max_tokens": 2})
    head = (
        "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"{expect}Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        connection.sendall(body.encode())
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.startswith(b"HTTP/1.1 200 ") and data.count(b"HTTP/1.1") == 1
    assert data.partition(b"\r\n\r\n")[2].startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")
