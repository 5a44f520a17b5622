"""The connections of a server: how many there may be, and how long each may be silent.

uvicorn's HTTP, on connections that cannot shut others out: beyond the limits, a new one gets 503;
headers and bodies must come in time, and answers be read. uvicorn ends idle ones itself.
"""

import asyncio
import logging
import os
import resource
import time
from collections import Counter
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llama.server.encoding import to_json
from llama.server.errors import MAX_HEADER_BYTES, ApiError, headers_too_large

log = logging.getLogger("llama.server")
HEAD_S = 30.0  # for a client to send its headers, from its connection on
BODY_S = 60.0  # then, to send its body
UNREAD_S = 60.0  # for a client to take some of the answer that waits for it
_KEPT_BACK = 24  # descriptors: of connections that are being refused, of files, of the engine
_LINGER_S = 0.5  # for a client to read why it is refused
_LOG_S = 10.0  # between two lines of the log


class Connections:
    """How many are open. most_of_one: from one address; None is three quarters of all."""

    def __init__(self, most: int, most_of_one: int | None) -> None:
        if min(most, most if most_of_one is None else most_of_one) < 1:
            raise ValueError("a server needs 1 connection at least: see --max_connections")
        self.most = min(most, _free_descriptors(most))
        if self.most < most:
            words = "%d connections at most: there are no more file descriptors; see ulimit -n"
            log.warning(words, self.most)
        self.most_of_one = min(self.most, most_of_one or max(1, self.most * 3 // 4))
        self._of_address: Counter[str] = Counter()
        self._num_open = self._num_refused = 0
        self._last_logged = float("-inf")

    def open(self, address: str) -> ApiError | None:
        """Count one more; why it is refused, if it is. Each is to be closed, in either case."""
        self._num_open += 1
        self._of_address[address] += 1
        if self._num_open > self.most:
            what = f"{self.most} connections are open, the most that this server takes"
        elif self._of_address[address] > self.most_of_one:
            what = f"{self.most_of_one} connections are open from one address, the most of one"
        else:
            return None
        self._num_refused += 1
        if time.monotonic() - self._last_logged > _LOG_S:
            log.warning(
                "%s: %d refused since the last such line, now one from %s; see --max_connections",
                what, self._num_refused, address,
            )  # fmt: skip
            self._last_logged, self._num_refused = time.monotonic(), 0
        return ApiError(503, f"{what}: close some, or try again")

    def close(self, address: str) -> None:
        self._num_open -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    @property
    def is_crowded(self) -> bool:
        """So many are being refused that there is no descriptor to tell another one why."""
        return self._num_open > self.most + _KEPT_BACK // 2


def _free_descriptors(wanted: int) -> int:
    """How many connections this process has descriptors for; its soft limit is raised for that."""
    used = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + _KEPT_BACK + wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, soft - used - _KEPT_BACK)


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits. uvicorn has none for the time of headers and bodies, nor, with
    httptools, for the size of headers, so that a client could send them without end. Headers that
    end in one read are counted by `AuthAndLimits`. allowed: one for all connections of a server."""

    def __init__(self, allowed: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._allowed = allowed
        self._address = ""
        self._is_refused = self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # what the system does not take is unread
        self._address = self.client[0] if self.client else ""
        refusal = self._allowed.open(self._address)
        self._is_refused = refusal is not None
        if refusal is None:
            self._expect("headers", HEAD_S)
        elif self._allowed.is_crowded:
            transport.abort()
        else:
            self._end_with(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._allowed.close(self._address)
        self._expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if not (was_in_head and self._is_in_head):  # else all of it belongs to these headers
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._end_with(headers_too_large())

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect("headers", HEAD_S)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._expect("body", BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expect_nothing()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_unread(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _end_unread(self, before: int) -> None:
        """Look again later, or end it where nothing was taken of the bytes that waited before."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._unread = self.loop.call_later(UNREAD_S, self._end_unread, left)
            return
        log.warning("%s has read nothing for %.0f s of its answer: ended", self._address, UNREAD_S)
        self.transport.abort()

    def _expect(self, what: str, limit_s: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(limit_s, self._end_late, what, limit_s)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late(self, what: str, limit_s: float) -> None:
        """408; but while an earlier request is answered, its answer is the connection's last."""
        if self.pipeline:  # nothing is read until it is answered
            self._expect(what, limit_s)
        elif (
            self.cycle is None
            or self.cycle.response_complete
            or (self.cycle.more_body and not self.cycle.response_started)
        ):
            self._end_with(ApiError(408, f"the {what} did not come within {limit_s:.0f} s"))
        else:
            self.cycle.keep_alive = False

    def _end_with(self, error: ApiError) -> None:
        """Say why, and close."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app has nothing more to say
            self.cycle.message_event.set()
        self.transport.write(_last_response(error))
        self.loop.call_later(_LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _last_response(error: ApiError) -> bytes:
    """The last bytes of a connection; its path is not known for sure, so the form is OpenAI's."""
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
