"""What goes back over HTTP: JSON, or server-sent events while they come.

A stream sends a comment when nothing else has come for 15 seconds, so that proxies keep the
connection open. Whatever is being computed for a client is cancelled when the client leaves.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama.server.errors import ApiError

_T = TypeVar("_T")
KEEP_ALIVE_S = 15.0
FIRST_S = 10.0  # then the status is sent, whatever comes
DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer is not ready yet\n\n"


def to_json(content: Any) -> bytes:
    """In UTF-8; half of a surrogate pair, which a client may have sent, as its escape."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


class JsonResponse(Response):
    """An object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2), named by its type where it has one."""
    head = f"event: {content['type']}\n".encode() if "type" in content else b""
    return head + b"data: " + to_json(content) + b"\n\n"


async def unless_client_leaves(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """The result; `ClientDisconnect`, and the work is cancelled, if the client leaves before. A
    TaskGroup would leave a reference cycle of each answer to the garbage collector."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait([working, leaving])


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come. The generator is closed when the client leaves.

    error_events: the last event, of an ApiError that comes after the status was sent; one that
    comes before gets its own status. keep_alive: what is sent while nothing else comes.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_events: Callable[[ApiError], bytes],
        keep_alive: bytes = COMMENT,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # it is not known yet
        self._events, self._error_events, self._keep_alive = events, error_events, keep_alive
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                    first.result()  # raises while a status can still tell
                head = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                tasks.append(asyncio.create_task(self._keep_open(send_part)))
                try:
                    await send_part(await first)
                    async for each in events:
                        await send_part(each)
                except ApiError as e:
                    await send_part(self._error_events(e))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        await send({"type": "http.response.body", "body": b""})

    async def _keep_open(self, send_part: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        self._last_sent = time.monotonic()
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 3)
            if time.monotonic() - self._last_sent >= KEEP_ALIVE_S:
                await send_part(self._keep_alive)
