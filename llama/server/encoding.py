"""Encode answers for HTTP: as JSON, or as events as they come.

In: objects. Out: their bytes, and ASGI responses. Work for a client is cancelled when the client
leaves. Large objects are encoded in pieces, outside of the event loop. This file knows no API.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
_PART_ITEMS = 64  # items of a list that are encoded at a time; Python's lock is held meanwhile
PIECE_BYTES = 256 * 1024  # bytes of a large answer that are sent at a time
WRITER = "llama.writer"  # the extension of an ASGI scope that has a `Writer`
DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer is not ready yet\n\n"
HOLE = f"hole {secrets.token_hex(16)}"  # No text of a client equals it.


_to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(content: Any) -> bytes:
    """Return an object as JSON in UTF-8.

    A lone surrogate, which a client may have sent, becomes its escape.
    """
    return _to_text(content).encode(errors="backslashreplace")


class SharedItems:
    """The first items of several lists, which are encoded once for all of them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    @cached_property
    def encoded(self) -> bytes:
        """The items as JSON, separated by commas."""
        return b",".join(_item_parts(self.items))


class ContinuedList(list[Any]):
    """A list that begins with shared items.

    Attributes:
        start: the shared items.
    """

    def __init__(self, start: SharedItems, rest: list[Any]) -> None:
        super().__init__([*start.items, *rest])
        self.start = start


def _item_parts(items: list[Any]) -> Iterator[bytes]:
    """Yield the JSON of a few items at a time, without the brackets of their list."""
    for first in range(0, len(items), _PART_ITEMS):
        yield to_json(items[first : first + _PART_ITEMS])[1:-1]


def _json_parts(content: Any) -> Iterator[bytes]:
    """Yield the bytes of `to_json` in many parts; an iterator is encoded as a list."""
    if isinstance(content, dict):
        separator = b"{"
        for name, value in content.items():
            yield separator + to_json(name) + b":"
            yield from _json_parts(value)
            separator = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, Iterator):
        separator = b"["
        for item in content:
            yield separator
            yield from _json_parts(item)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    elif isinstance(content, list) and len(content) > _PART_ITEMS:
        yield from _list_parts(content)
    elif isinstance(content, list):
        yield from _json_parts(iter(content))
    else:
        yield to_json(content)


def _list_parts(content: list[Any]) -> Iterator[bytes]:
    """Yield the JSON of a long list, whose shared items have been encoded before."""
    start = content.start if isinstance(content, ContinuedList) else SharedItems([])
    separator = b"["
    if start.items:
        yield b"[" + start.encoded
        separator = b","
    for part in _item_parts(content[len(start.items) :]):
        yield separator + part
        separator = b","
    yield b"]"


def json_pieces(content: Any) -> Iterator[bytes]:
    """Yield the bytes of `to_json` in pieces of about `PIECE_BYTES`, the last of which is smaller.

    An iterator in `content` is encoded as a list, and each of its items is made when it is needed.
    """
    return _joined(_json_parts(content))


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


async def beside_loop(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield pieces, each of which is made in a thread."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


class JsonResponse(Response):
    """A response whose body is an object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body."""
        return to_json(content)


def _event_head(content: dict[str, Any]) -> bytes:
    """Return what comes before the data of a server-sent event: its name, if it has a type."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: "


class StreamFormat(NamedTuple):
    """How the events of a stream are written.

    Attributes:
        media_type: the media type of the response.
        head: returns the bytes before the JSON of an event.
        end: the bytes after it.
    """

    media_type: str
    head: Callable[[dict[str, Any]], bytes]
    end: bytes

    def encode(self, content: dict[str, Any]) -> bytes:
        """Return the bytes of an event."""
        return self.head(content) + to_json(content) + self.end

    def template(self, content: dict[str, Any]) -> "EventTemplate":
        """Return the bytes of events that differ in the values that are a `HOLE` in `content`."""
        return EventTemplate(self.encode(content))

    def pieces(self, contents: Iterator[dict[str, Any]]) -> Iterator[bytes]:
        """Yield the bytes of several events in pieces; see `json_pieces`."""
        return _joined(self._parts(contents))

    def _parts(self, contents: Iterator[dict[str, Any]]) -> Iterator[bytes]:
        for content in contents:
            yield self.head(content)
            yield from _json_parts(content)
            yield self.end


class EventTemplate:
    """The bytes of an event around the values that are filled in."""

    def __init__(self, event: bytes) -> None:
        self._parts = event.split(to_json(HOLE))

    def fill(self, *values: Any) -> bytes:
        """Return the bytes of an event with these values in the places of the holes."""
        pieces = [self._parts[0]]
        for value, part in zip(values, self._parts[1:], strict=True):
            pieces += to_json(value), part
        return b"".join(pieces)


# WHATWG HTML, section 9.2.
SERVER_SENT_EVENTS = StreamFormat("text/event-stream", _event_head, b"\n\n")
JSON_LINES = StreamFormat("application/x-ndjson", lambda _: b"", b"\n")


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


class PieceResponse(Response):
    """A JSON response that is sent in pieces, of which few are in memory at a time."""

    media_type = "application/json"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        """Make a response of its first piece, and of a generator of the others."""
        super().__init__()
        del self.headers["content-length"]  # It is not known yet.
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces until they end or the client leaves."""
        with contextlib.suppress(ClientDisconnect):
            await unless_client_leaves(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for piece in rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
