"""The stream of messages between the process of an engine and a process with text.

In: messages, over one end of a pair of Unix sockets. Out: the same messages, whole and in order, in
an event loop; and calls, whose replies are awaited. Neither process waits until the other reads:
what the system does not take at once is kept, up to a limit. A message is its length and its bytes.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from llama.common.checks import FieldError
from llama.requests.adapters import AdapterInUseError
from llama.requests.messages import Message, Reply, Tell, from_bytes, to_bytes

log = logging.getLogger("llama")
Handler = Callable[..., Awaitable[Any]]  # takes the values of a call by name, returns its value

_REPORT = b"R"  # begins a report; JSON begins with a brace
_PIXELS = b"P"  # begins the pixels of an image, after their digest
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 15  # a larger buffer is mapped and unmapped at each read, which takes 60 us
_MAX_UNSENT = 1 << 30  # bytes that a process may be behind before it counts as gone
# The errors that a call can have, by their names in a reply.
_ERRORS: dict[str, type[Exception]] = {
    "in use": AdapterInUseError,
    "system": OSError,
    "value": ValueError,
    "other": RuntimeError,
}


class Peer(ABC):
    """One end of the stream, in one event loop."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handlers: Mapping[str, Handler],
        ended: Callable[[], None],
    ) -> None:
        """Begin to read.

        Args:
            end: The end of the pair.
            loop: The event loop, which calls everything else; only sending is for any thread.
            handlers: What the other process may ask for, by name.
            ended: Called once, when the other process is gone or does not read any more.
        """
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._handlers = handlers
        self._ended = ended
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._received = bytearray()
        self._is_open = True
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        loop.add_reader(end, self._read)

    @abstractmethod
    def take_report(self, data: bytes) -> None:
        """Get a report of a step."""

    def take_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Get the pixels of an image of the next message."""
        raise NotImplementedError

    @abstractmethod
    def take_message(self, message: Message) -> None:
        """Get a message that is neither a call nor a reply."""

    def send_report(self, data: bytes) -> None:
        """Send a report without waiting; any thread may call it."""
        self._send(_REPORT + data)

    def send_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Send the pixels of an image, which the next message has; any thread may call it."""
        self._send(_PIXELS + digest + pixels)

    def send(self, message: Message) -> None:
        """Send a message without waiting; any thread may call it."""
        self._send(to_bytes(message))

    def tell(self, name: str, /, **values: Any) -> None:
        """Let a handler of the other process be called, without a reply."""
        self.send(Tell(name, values))

    async def ask(self, name: str, limit_s: float, /, **values: Any) -> Any:
        """Return what a handler of the other process returns.

        Raises:
            TimeoutError: It takes too long.
            ConnectionError: The other process is gone.
            FieldError, AdapterInUseError, OSError, ValueError, RuntimeError: The handler raised it.
        """
        if not self._is_open:
            raise ConnectionError("the other process is gone")
        number = next(self._numbers)
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies[number] = reply
        try:
            self.send(Tell(name, values, number))
            async with asyncio.timeout(limit_s):
                return await reply
        finally:
            del self._replies[number]

    def close(self) -> None:
        """Close the stream; what was sent before may be lost."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        with self._sending:
            self._end.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the other process is gone"))

    def _send(self, data: bytes) -> None:
        message = _LENGTH.pack(len(data)) + data
        with self._sending:
            if not self._is_open:
                return
            had_unsent = bool(self._unsent)
            num_sent = 0 if had_unsent else self._try_send(message)
            self._unsent += message[num_sent:]
            needs_writer = bool(self._unsent) and not had_unsent
            is_behind = len(self._unsent) > _MAX_UNSENT
        if needs_writer:
            self._loop.call_soon_threadsafe(self._watch)
        if is_behind:
            self._loop.call_soon_threadsafe(self._end_now)

    def _try_send(self, data: bytes | bytearray) -> int:
        """Send what the system takes; the end of the other process is noticed by reading."""
        try:
            return self._end.send(data)
        except (BlockingIOError, OSError):
            return 0

    def _watch(self) -> None:
        if self._is_open:
            self._loop.add_writer(self._end, self._flush)

    def _flush(self) -> None:
        """Send what was kept, as far as the system takes it."""
        with self._sending:
            num_sent = self._try_send(self._unsent)
            del self._unsent[:num_sent]
            is_empty = not self._unsent
        if is_empty:
            self._loop.remove_writer(self._end)

    def _read(self) -> None:
        """Take the messages that have arrived."""
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end_now()
            return
        self._received += data
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            first = start + _LENGTH.size
            if first + length > len(self._received):
                break
            start = first + length
            self._take(bytes(self._received[first:start]))
        del self._received[:start]

    def _take(self, data: bytes) -> None:
        if data[:1] == _REPORT:
            self.take_report(data[1:])
            return
        if data[:1] == _PIXELS:
            first = 1 + _DIGEST_BYTES
            self.take_pixels(data[1:first], data[first:])
            return
        message = from_bytes(data)
        if isinstance(message, Tell):
            task = self._loop.create_task(self._handle(message))
            self._tasks.add(task)  # The loop keeps a weak reference alone.
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Reply):
            self._take_reply(message)
        else:
            self.take_message(message)

    async def _handle(self, message: Tell) -> None:
        """Call a handler, and reply if that is asked for."""
        reply = Reply(message.call)
        try:
            reply.value = await self._handlers[message.name](**message.values)
        except FieldError as error:
            reply = Reply(message.call, error="field", field=error.field, text=error.message)
        except Exception as error:
            kind = next(name for name, each in _ERRORS.items() if _is_kind(error, each))
            reply = Reply(message.call, error=kind, text=str(error))
            if kind == "other":
                log.error("%s", message.name, exc_info=error)
        if message.call:
            self.send(reply)

    def _take_reply(self, message: Reply) -> None:
        reply = self._replies.get(message.call)
        if reply is None or reply.done():  # nobody waits for it any more
            return
        if not message.error:
            reply.set_result(message.value)
        elif message.error == "field":
            reply.set_exception(FieldError(message.field, message.text))
        else:
            reply.set_exception(_ERRORS[message.error](message.text))

    def _end_now(self) -> None:
        """Close the stream, and say so."""
        if self._is_open:
            self.close()
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon(self._ended)


def _is_kind(error: Exception, kind: type[Exception]) -> bool:
    return isinstance(error, kind) or kind is RuntimeError
