"""A client of a server with OpenAI's API, for `llama batch --url` and `llama chat --url`.

In: a URL, a key, bodies. Out: the server's answers, or an error that says what to do. It needs
Python's standard library alone, and no model. One `Client` is one connection, for one thread at a
time; `close` may come from another thread, and ends what the first one waits for. Each wait has a
limit: of a request's sending and its answer together, however the bytes come.
"""

import contextlib
import functools
import http.client
import io
import json
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llama.server.openai.client_bodies import ModelCard, error_message, model_card

_CONNECT_S = 10.0
_ANSWER_S = 3600.0  # for a whole answer: one can be slow, but not so slow
_MAX_ANSWER = 256 * 2**20  # bytes
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0  # between two attempts; doubled each time
_MAX_RETRY_AFTER_S = 60.0  # of what a server asks for
_TRANSIENT = {408, 429, 500, 502, 503, 504}  # another attempt, or another replica, may answer
_LOST = (OSError, http.client.HTTPException)


class ServerError(OSError):
    """The server cannot be reached, or refuses. status: of HTTP, if it answered."""

    def __init__(
        self, message: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """Whether the same request may get an answer later."""
        return self.status is None or self.status in _TRANSIENT

    @property
    def is_about_the_key(self) -> bool:
        return self.status in (401, 403)


@dataclass(frozen=True)
class Reply:
    """A response with status 200. request_id: of the server, or ""."""

    body: Any
    request_id: str


class _TimedReader(io.RawIOBase):
    """What a socket receives until `end`, of time.monotonic; TimeoutError then.

    The socket's own timeout is that of one read: a byte now and then would prolong it for ever.
    """

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, end: float) -> None:
        self._sock, self._raw, self._end = sock, raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response whose last byte must come before `end`."""

    def __init__(self, sock: socket.socket, *args: Any, end: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(sock, self.fp.detach(), end))


class Client:
    """One connection. url: with or without /v1 at its end. ValueError for one that is no URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url} must begin with http:// or https:// and name a host")
        if parts.username or parts.query or parts.fragment:
            raise ValueError(f"--url {url} must have no user, ? or #: a key goes into --api_key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the key must be printable ASCII: see --api_key and LLAMA_API_KEY")
        self.url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        host, port = parts.hostname, parts.port
        kind = http.client.HTTPSConnection if parts.scheme == "https" else None
        self._connection = (kind or http.client.HTTPConnection)(host, port, timeout=_CONNECT_S)
        self._socket: socket.socket | None = None
        self._limit_s = _CONNECT_S  # of the request under way
        self._is_closed = False

    def model(self, name: str | None) -> ModelCard:
        """The server's model of that name, or its first. ServerError or ValueError."""
        try:
            with self._response("GET", "/v1/models", None, timeout_s=_CONNECT_S) as response:
                return model_card(_json(self._read(response)), name)
        except ValueError as e:
            raise ValueError(f"{self.url}: {e}") from None

    def post(self, path: str, body: Any, *, request_id: str = "") -> Reply:
        """The answer to one request. ServerError."""
        more = {"X-Request-Id": request_id} if request_id else {}
        with self._response("POST", path, body, more, timeout_s=_ANSWER_S) as response:
            data = self._read(response)
            try:
                found = _json(data)
            except ValueError as e:
                raise ServerError(f"{self.url}{path} {e}", response.status) from None
            return Reply(found, response.headers.get("X-Request-Id", ""))

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The data of each server-sent event of a POST, up to [DONE]. ServerError."""
        with self._response("POST", path, body, timeout_s=_ANSWER_S) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue  # a comment, an event's name, or the end of an event
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        response.read()  # its end: the connection can be used again
                        return
                    yield _json(data)
            except ValueError as e:
                raise ServerError(f"{self.url}: {e}", response.status) from None
            except _LOST as e:
                raise self._lost(e) from None
        raise ServerError(f"{self.url}: the stream ended without its last event")

    def close(self) -> None:
        """End the connection, and what another thread waits for on it."""
        self._is_closed = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200. One that is not read to its end costs the connection."""
        data = None if body is None else json.dumps(body).encode()
        response = self._send(method, path, data, headers or {}, timeout_s)
        try:
            if response.status != 200:
                raise self._refusal(response)
            yield response
        finally:
            if not response.isclosed() or self._is_closed:
                self._connection.close()

    def _send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> http.client.HTTPResponse:
        """On a connection that was used before, a second time if the server had closed it."""
        self._limit_s, end = timeout_s, time.monotonic() + timeout_s
        response_class: Any = functools.partial(_TimedResponse, end=end)
        self._connection.response_class = response_class
        while True:
            was_open = self._connection.sock is not None
            if not was_open:
                self._connect()
            try:
                self._connection.sock.settimeout(timeout_s)  # for all that is sent
                self._connection.request(method, self._path + path, data, self._headers | headers)
                return self._connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as e:
                self._connection.close()
                if not was_open or self._is_closed:
                    raise self._lost(e) from None
            except _LOST as e:
                self._connection.close()
                raise self._lost(e) from None

    def _connect(self) -> None:
        try:
            self._connection.connect()
        except OSError as e:
            self._connection.close()
            raise ServerError(f"{self.url} cannot be reached: {e or type(e).__name__}") from None
        self._socket = self._connection.sock

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        length = response.length  # None where it is not known before the end
        try:
            if length is not None and length <= _MAX_ANSWER:
                return response.read()  # an error where less comes, which read(amount) passes over
            data = response.read(_MAX_ANSWER)
            if response.isclosed() or not response.read(1):
                return data
        except _LOST as e:
            raise self._lost(e) from None
        raise ServerError(f"{self.url}: the answer has over {_MAX_ANSWER} bytes", 413)

    def _lost(self, error: Exception) -> ServerError:
        if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the network's
            return ServerError(f"{self.url} sent no whole answer within {self._limit_s:g} s")
        return ServerError(f"{self.url} broke off: {str(error) or type(error).__name__}")

    def _refusal(self, response: http.client.HTTPResponse) -> ServerError:
        data = self._read(response)
        with contextlib.suppress(ValueError):
            return self._error(response, error_message(_json(data), data))
        return self._error(response, error_message(None, data))

    def _error(self, response: http.client.HTTPResponse, message: str) -> ServerError:
        if response.status in (401, 403):
            message = f"the server refuses the key: give --api_key or LLAMA_API_KEY ({message})"
        after = response.headers.get("Retry-After", "")
        seconds = min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else None
        message = f"{self.url}: status {response.status}: {message}"
        return ServerError(message, response.status, seconds)


def with_retries(attempt: Callable[[], Reply], *, limit_s: float, stops: threading.Event) -> Reply:
    """The reply of an attempt, after waits that grow from 0.5 to 30 s, or that the server asks for.

    A wait is between a half and the whole of that, at random, so that many clients do not come
    back at once. ServerError of the last attempt, if it is no transient one, if the next wait ends
    later than `limit_s` after the first failure, or once `stops` is set.
    """
    wait_s, end = _FIRST_WAIT_S, None
    while True:
        try:
            return attempt()
        except ServerError as e:
            now = time.monotonic()
            end = now + limit_s if end is None else end
            pause_s = max(e.retry_after_s or 0.0, wait_s * random.uniform(0.5, 1.0))
            if not e.is_transient or now + pause_s > end or stops.wait(pause_s):
                raise
        wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(
            f"answered with no JSON ({data[:80]!r}): is it a server of OpenAI's API?"
        ) from None
