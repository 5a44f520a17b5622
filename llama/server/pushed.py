"""The stream of an answer, written by the outputs themselves: no task runs for a token.

In: requests for the engine, and the answer of an API. Out: an ASGI response. The event loop calls
`_push` for each output, which writes its events to the connection. What has to wait is done by the
task of the response: the first output, large ones, those of a client that does not read, the end,
and a comment when nothing else has come for 15 seconds, so that proxies keep the connection open.
While the task is busy no output is taken, so that several steps come as one.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama.api import Request, RequestOutput
from llama.server.answer_size import MAX_IN_LOOP, num_items
from llama.server.blocks import BlockAnswer
from llama.server.encoding import COMMENT, WRITER, beside_loop, unless_client_leaves
from llama.server.errors import ApiError, too_late
from llama.server.openai.answers import Completion
from llama.server.request import ApiRequest

KEEP_ALIVE_S = 15.0
FIRST_S = 10.0  # time to wait for a first event, or an error, before the status is sent

# A block in which requests run: of a function that is called for each request that has an output,
# it makes one that takes an output; see `Serving.pushing`.
Running = Callable[
    [Callable[[Request], None]], AbstractContextManager[Callable[[Request], RequestOutput]]
]


class Writer(Protocol):
    """A connection that can be written to without waiting."""

    @property
    def is_ready(self) -> bool:
        """Whether the client has read what was written."""
        ...

    def write(self, body: bytes) -> None:
        """Write a part of the body of the response, which has begun."""
        ...


class PushedStream(Response):
    """A response of events, which are sent as they come."""

    def __init__(
        self,
        running: Running,
        max_wait_s: float,
        requests: list[Request],
        request: ApiRequest,
        answer: Completion | BlockAnswer,
    ) -> None:
        """Make a response of events.

        Args:
            running: the block in which the requests run.
            max_wait_s: seconds until the first output.
            requests: the engine's request for each prompt.
            request: what the body asks for.
            answer: makes the events. Those of an ApiError that is raised after the status was sent
                are its last ones; one that is raised before becomes an ordinary response.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=answer.stream_format.media_type)
        del self.headers["content-length"]  # It is not known yet.
        self._running = running
        self._max_wait_s = max_wait_s
        self._unfinished = list(requests)
        self._request = request
        self._answer = answer
        self._latest: dict[int, RequestOutput] = {}  # keyed by the index of the prompt
        self._large: RequestOutput | None = None  # an output that the task has to write
        self._error: Exception | None = None
        self._is_open = False  # whether outputs are written as they come
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        self._writer: Writer | None = scope.get("extensions", {}).get(WRITER)
        self._woken = asyncio.Event()
        with contextlib.suppress(ClientDisconnect):
            await unless_client_leaves(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async def send_part(body: bytes) -> None:
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._max_wait_s, self._end_late)
        has_begun = False
        try:
            with self._running(self._push) as self._take_output:
                await self._wait(FIRST_S)
                first = list(self._due())  # An error raised here still gets its own status.
                head = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                has_begun = True
                for output in first:
                    await self._send_events(output, send_part)
                while self._unfinished:
                    await self._push_until_woken(send_part)
                    if self._large is not None:
                        await self._send_pieces(self._large, send_part)
                        self._large = None
                    for output in self._due():
                        await self._send_events(output, send_part)
            await send_part(await self._last_part())
        except ApiError as error:
            if not has_begun:
                raise
            answer = self._answer
            await send_part(answer.stream_format.encode(answer.error_event(error)) + answer.end)
        finally:
            self._deadline.cancel()
            self._is_open = False
            self._error = None  # Its traceback refers to this stream.
        await send({"type": "http.response.body", "body": b""})

    def _push(self, request: Request) -> None:
        """Write the events of an output, or wake the task if that has to wait for something."""
        if not self._is_open or self._writer is None or not self._writer.is_ready:
            self._wake()
        elif request.has_output:
            try:
                output = self._take(request)
                part = self._small_part(output)
            except Exception as error:
                self._error = error
                self._wake()
                return
            if part is None:
                self._large = output
            elif part:
                self._writer.write(part)
                self._last_sent = time.monotonic()
            if part is None or not self._unfinished:
                self._wake()

    def _wake(self) -> None:
        """Leave the outputs to the task."""
        self._is_open = False
        self._woken.set()

    def _end_late(self) -> None:
        """End a request that waits for its first token."""
        self._error = too_late(self._max_wait_s)
        self._wake()

    async def _wait(self, limit_s: float) -> None:
        """Wait until the task has something to do, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._woken.wait()

    async def _push_until_woken(self, send_part: Callable[[bytes], Awaitable[None]]) -> None:
        """Let outputs be written as they come, and write something whenever none came for long."""
        self._woken.clear()
        self._is_open = not any(request.has_output for request in self._unfinished)
        while self._is_open:
            await self._wait(KEEP_ALIVE_S / 3)
            if self._is_open and time.monotonic() - self._last_sent >= KEEP_ALIVE_S:
                idle = self._answer.idle_event
                await send_part(
                    COMMENT if idle is None else self._answer.stream_format.encode(idle)
                )

    def _due(self) -> Iterator[RequestOutput]:
        """Yield the outputs that nobody has taken, also those that come meanwhile."""
        if self._error is not None:
            raise self._error
        while request := next((x for x in self._unfinished if x.has_output), None):
            yield self._take(request)

    def _take(self, request: Request) -> RequestOutput:
        """Take the output of a request."""
        self._deadline.cancel()
        output = self._take_output(request)
        if output.finished:
            self._unfinished.remove(request)
        return output

    def _small_part(self, output: RequestOutput) -> bytes | None:
        """Return the bytes of an output's events; None if they would hold up the event loop."""
        answer = self._answer
        earlier = self._latest.get(output.index)
        self._latest[output.index] = output
        part = answer.next_event(output)
        if part is None and num_items(self._request, output, earlier) <= MAX_IN_LOOP:
            part = b"".join(map(answer.stream_format.encode, answer.events(output)))
        return part

    async def _send_events(
        self, output: RequestOutput, send_part: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send the events of an output."""
        part = self._small_part(output)
        if part is None:
            await self._send_pieces(output, send_part)
        elif part:
            await send_part(part)

    async def _send_pieces(
        self, output: RequestOutput, send_part: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send the events of a large output, which are made off the event loop."""
        answer = self._answer
        pieces = beside_loop(answer.stream_format.pieces(answer.events(output)))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece:
                    await send_part(piece)

    async def _last_part(self) -> bytes:
        """Return the bytes after the last output, which may have all of the text again."""
        answer = self._answer

        def last_part() -> bytes:
            encode = answer.stream_format.encode
            return b"".join(map(encode, answer.last_events())) + answer.end

        # They may also count the tokens of the prediction.
        num_tokens = sum(output.usage.completion_tokens for output in self._latest.values())
        is_small = num_tokens + len(self._request.params.prediction) <= MAX_IN_LOOP
        return last_part() if is_small else await asyncio.to_thread(last_part)
