"""Encode answers for HTTP: as JSON, or as events as they come.

In: objects, or an async generator of events. Out: ASGI responses. A stream sends a comment when
nothing else has come for 15 seconds, so that proxies keep the connection open. Work for a client
is cancelled when the client leaves. This file knows no API.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama.server.errors import ApiError

_T = TypeVar("_T")
KEEP_ALIVE_S = 15.0
FIRST_S = 10.0  # time to wait for a first event, or an error, before the status is sent
DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer is not ready yet\n\n"


def to_json(content: Any) -> bytes:
    """Return an object as JSON in UTF-8.

    A lone surrogate, which a client may have sent, becomes its escape.
    """
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


class JsonResponse(Response):
    """A response whose body is an object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body."""
        return to_json(content)


def event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event (WHATWG HTML, section 9.2); its type, if any, is its name."""
    head = f"event: {content['type']}\n".encode() if "type" in content else b""
    return head + b"data: " + to_json(content) + b"\n\n"


def json_line(content: dict[str, Any]) -> bytes:
    """Return an object as a line of JSON."""
    return to_json(content) + b"\n"


class StreamFormat(NamedTuple):
    """How the events of a stream are written.

    Attributes:
        media_type: the media type of the response.
        encode: returns the bytes of an event.
    """

    media_type: str
    encode: Callable[[dict[str, Any]], bytes]


SERVER_SENT_EVENTS = StreamFormat("text/event-stream", event)
JSON_LINES = StreamFormat("application/x-ndjson", json_line)


async def unless_client_leaves(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """Return the result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: the client left before the work was done.
    """
    # A TaskGroup would leave a reference cycle of each answer to the garbage collector.
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait([working, leaving])


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events, which are sent as they come."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_events: Callable[[ApiError], bytes],
        keep_alive: bytes = COMMENT,
        media_type: str = SERVER_SENT_EVENTS.media_type,
    ) -> None:
        """Make a response of events.

        Args:
            events: the events; the generator is closed when the client leaves.
            error_events: makes the last events of an ApiError that is raised after the status was
                sent. One that is raised before becomes an ordinary response.
            keep_alive: what is sent while no event comes.
            media_type: the media type of the events.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]  # It is not known yet.
        self._events = events
        self._error_events = error_events
        self._keep_alive = keep_alive
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        with contextlib.suppress(ClientDisconnect):
            await unless_client_leaves(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async def send_part(body: bytes) -> None:
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async with contextlib.aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events))
            tasks: list[asyncio.Future[Any]] = [first]
            try:
                done, _ = await asyncio.wait(tasks, timeout=FIRST_S)
                if done:
                    first.result()  # An error raised here still gets its own status.
                head = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                tasks.append(asyncio.create_task(self._keep_open(send_part)))
                try:
                    await send_part(await first)
                    async for part in events:
                        await send_part(part)
                except ApiError as error:
                    await send_part(self._error_events(error))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        await send({"type": "http.response.body", "body": b""})

    async def _keep_open(self, send_part: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        """Send something whenever nothing was sent for `KEEP_ALIVE_S` seconds."""
        self._last_sent = time.monotonic()
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 3)
            if time.monotonic() - self._last_sent >= KEEP_ALIVE_S:
                await send_part(self._keep_alive)
