"""The connections of a server: how many may be open, and how long each may be silent.

In: the connections that uvicorn accepts. Out: its HTTP protocol with limits, so that no client
keeps others out. A connection beyond the limits gets 503, headers and bodies must arrive in time,
and answers must be read. uvicorn itself closes connections without requests. This file knows
neither routes nor models.
"""

import asyncio
import logging
import os
import resource
import time
import weakref
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llama.server.encoding import WRITER, to_json
from llama.server.errors import MAX_HEADER_BYTES, ApiError, headers_too_large

log = logging.getLogger("llama.server")
FLUSH_S = 2.0  # time for responses that are being sent when the server ends
TAKEN = "+"  # says of a connection that is handed over that it is taken; other texts refuse it
HEAD_S = 30.0  # limit for the headers of a request, counted from its connection
BODY_S = 60.0  # limit for the body, counted from the end of the headers
UNREAD_S = 60.0  # time in which a client must take some of an answer that waits for it
_RESERVED_DESCRIPTORS = 24  # descriptors for refused connections, for files, for the engine
_LINGER_S = 0.5  # time for a client to read why it is refused
_WITHOUT_CHUNKS = ("0.9", "1.0")  # versions of HTTP
_LOG_INTERVAL_S = 10.0  # minimum time between two lines of the log


class Connections:
    """The open connections of a server, and how many there may be.

    Attributes:
        max_open: connections that may be open; fewer than asked for where the process has too few
            file descriptors.
        max_per_address: connections that one address may have open.
    """

    def __init__(self, max_open: int, max_per_address: int | None) -> None:
        """Raise the process's limit of descriptors where that is needed and allowed.

        Args:
            max_open: connections that may be open.
            max_per_address: those of one address; None stands for three quarters of all.
        """
        if max_open < 1 or (max_per_address is not None and max_per_address < 1):
            raise ValueError(
                "a server needs at least 1 connection: see --max_connections and --max_per_address"
            )
        self.max_open = min(max_open, _free_descriptors(max_open))
        if self.max_open < max_open:
            log.warning(
                "at most %d connections: there are no more file descriptors; see ulimit -n",
                self.max_open,
            )
        if max_per_address is None:
            max_per_address = max(1, self.max_open * 3 // 4)
        self.max_per_address = min(self.max_open, max_per_address)
        self._num_of_address: Counter[str] = Counter()
        self._num_open = 0
        self._num_refused = 0
        self._last_logged = float("-inf")

    def open(self, address: str) -> ApiError | None:
        """Count a new connection; return an error if it must be refused.

        The caller calls `close` for each connection, refused or not.
        """
        self._num_open += 1
        self._num_of_address[address] += 1
        if self._num_open > self.max_open:
            reason = f"{self.max_open} connections are open, the most that this server takes"
        elif self._num_of_address[address] > self.max_per_address:
            reason = f"{self.max_per_address} connections are open from one address, the limit"
        else:
            return None
        self._log_refused(reason, address)
        return ApiError(503, f"{reason}: close some, or try again")

    def _log_refused(self, reason: str, address: str) -> None:
        """Count a refused connection, and write a line if the last one is old enough."""
        self._num_refused += 1
        if time.monotonic() - self._last_logged <= _LOG_INTERVAL_S:
            return
        log.warning(
            "%s: %d refused since the last such line, now one from %s; see --max_connections",
            reason,
            self._num_refused,
            address,
        )
        self._last_logged = time.monotonic()
        self._num_refused = 0

    def close(self, address: str) -> None:
        """Count a connection as closed."""
        self._num_open -= 1
        self._num_of_address[address] -= 1
        if not self._num_of_address[address]:
            del self._num_of_address[address]

    @property
    def is_crowded(self) -> bool:
        """Whether so many are being refused that no descriptor is left to tell one more why."""
        return self._num_open > self.max_open + _RESERVED_DESCRIPTORS // 2


class HandedOver:
    """A connection that the process which accepted it has counted, and may have refused."""

    is_crowded = False

    def __init__(self, refusal: str, closed: Callable[[str], None]) -> None:
        """Hold what is known of a connection.

        Args:
            refusal: why it is refused; `TAKEN` if it is not.
            closed: called with the address when it is closed.
        """
        self._refusal = refusal
        self._closed = closed

    def open(self, address: str) -> ApiError | None:
        """Return the error of a connection that is refused."""
        return None if self._refusal == TAKEN else ApiError(503, self._refusal)

    def close(self, address: str) -> None:
        """Let the other process count the connection as closed."""
        self._closed(address)


def _free_descriptors(num_wanted: int) -> int:
    """Return for how many connections this process has descriptors, after raising its soft limit.

    The soft limit is raised only as far as `num_wanted` connections need.
    """
    num_used = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_needed = num_used + _RESERVED_DESCRIPTORS + num_wanted
    if soft != resource.RLIM_INFINITY and soft < num_needed:
        soft = num_needed if hard == resource.RLIM_INFINITY else min(num_needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return num_wanted
    return max(1, soft - num_used - _RESERVED_DESCRIPTORS)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the close of the connection end a response without a length (RFC 9112, section 6.3).

    uvicorn would send it in chunks, which a client of HTTP/1.0 takes for a part of the body.

    Args:
        cycle: a request that has not been answered yet.
    """
    send_by_length = cycle.send
    has_length = False

    async def send(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            )
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_by_length(message)

    cycle.send = send  # type: ignore[method-assign]
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False


class CycleWriter:
    """Writes parts of the body of uvicorn's response without waiting; see `pushed.Writer`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # A weak reference, as the cycle has the scope, and the scope has this.
        self._cycle = weakref.ref(cycle)

    @property
    def is_ready(self) -> bool:
        """Whether the client has read what was written."""
        cycle = self._cycle()
        return cycle is not None and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a part of the body, in chunks if the response has them."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return  # Nobody reads it; uvicorn drops it, too.
        if cycle.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        cycle.transport.write(body)


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP connection with limits.

    uvicorn limits neither the time of headers and bodies nor, with httptools, the size of headers,
    so that a client could send them without end. Headers that arrive in one read are counted by
    `AuthAndLimits`.

    A connection keeps this protocol until it is closed. After an upgrade, the transport would
    report its end to another protocol, and the connection would be counted as open forever.
    """

    def __init__(self, connections: Connections | HandedOver, **options: Any) -> None:
        """Make the protocol of one connection.

        Args:
            connections: the connections of the whole server, or this one of them.
            options: arguments of uvicorn's protocol.
        """
        super().__init__(**options)
        self._connections = connections
        self._address = ""
        self._is_refused = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many, or wait for its headers."""
        super().connection_made(transport)
        # Whatever the system does not take at once then counts as unread.
        transport.set_write_buffer_limits(0)
        self._address = self.client[0] if self.client else ""
        refusal = self._connections.open(self._address)
        self._is_refused = refusal is not None
        if refusal is None:
            self._set_deadline("headers", HEAD_S)
        elif self._connections.is_crowded:
            transport.abort()
        else:
            self._end_with(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection as closed, and stop its timers."""
        self._connections.close(self._address)
        self._clear_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what the client sent, and count the bytes of headers that take several reads."""
        if self._is_refused:
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if not (was_in_head and self._is_in_head):
            return
        # Both before and after this read the headers are incomplete: all of it belongs to them.
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._end_with(headers_too_large())

    def _has_body(self) -> bool:
        """Return whether the headers of the request announce a body."""
        headers = dict(self.headers)
        return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers

    def _should_upgrade(self) -> bool:
        """Return whether to hand the connection to a WebSocket protocol, if there is one."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered without its upgrade (RFC 9110, section 7.8)."""

    def on_message_begin(self) -> None:
        """Wait for the headers of a request."""
        self._is_in_head = True
        self._num_head_bytes = 0
        self._set_deadline("headers", HEAD_S)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Wait for the body of a request."""
        self._is_in_head = False
        self._set_deadline("body", BODY_S)
        super().on_headers_complete()
        self.scope["extensions"] = {WRITER: CycleWriter(self.cycle)}  # type: ignore[dict-item]
        if self.parser.get_http_version() in _WITHOUT_CHUNKS:
            _send_without_chunks(self.cycle)
        if self.parser.should_upgrade() and self._has_body():
            # httptools reads no body of such a request. What follows is no new request.
            problem = "an upgrade cannot be asked for with a body: leave out the Upgrade header"
            self._end_with(ApiError(400, problem))

    def on_message_complete(self) -> None:
        """Stop the deadline: the request has arrived."""
        self._clear_deadline()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads its answer."""
        super().pause_writing()
        self._check_unread(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """Stop the watch: the client has read all that was sent."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().resume_writing()

    def _check_unread(self, num_unread_before: int) -> None:
        """Check again later, or abort if the client has read nothing since the last check."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread < num_unread_before:
            self._unread_timer = self.loop.call_later(UNREAD_S, self._check_unread, num_unread)
            return
        log.warning(
            "%s has read nothing for %.0f s of its answer: the connection is closed",
            self._address,
            UNREAD_S,
        )
        self.transport.abort()

    def _set_deadline(self, part: str, limit_s: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(limit_s, self._end_late, part, limit_s)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late(self, part: str, limit_s: float) -> None:
        """End with 408, unless an earlier request of the connection is still being answered."""
        if self.pipeline:  # Nothing more is read until these requests are answered.
            self._set_deadline(part, limit_s)
        elif (
            self.cycle is None
            or self.cycle.response_complete
            or (self.cycle.more_body and not self.cycle.response_started)
        ):
            self._end_with(ApiError(408, f"the {part} did not arrive within {limit_s:.0f} s"))
        else:
            self.cycle.keep_alive = False  # The connection ends with this answer.

    def _end_with(self, error: ApiError) -> None:
        """Send an error, and close the connection."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # uvicorn then drops what the app still sends.
            self.cycle.message_event.set()
        self.transport.write(_last_response(error))
        self.loop.call_later(_LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def http_config(app: Any, protocol: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for an app whose connections have this protocol."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",  # There is no WebSocket route. See `BoundedProtocol`.
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=int(FLUSH_S),
    )


def _last_response(error: ApiError) -> bytes:
    """Return the last bytes of a connection.

    The path may not be known yet, so the error object is always that of OpenAI.
    """
    body = to_json(error.body())
    headers = {
        **error.headers(),
        "Content-Type": "application/json",
        "Connection": "close",
        "Content-Length": str(len(body)),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
