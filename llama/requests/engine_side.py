"""The engine's side of the stream to a process with text.

In: one end of a pair of sockets. Out: calls with sequences, which somebody admits, and reports of
their steps. Besides sequences, each side asks the other by name.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping

from llama.requests.hosted import HostedCall, HostedSequences
from llama.requests.local_port import LocalPort
from llama.requests.messages import Add, Message, Remove
from llama.requests.peer import Handler, Peer


class EngineSide(Peer):
    """The engine's end of the stream to one process."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handlers: Mapping[str, Handler],
        ended: Callable[[], None],
    ) -> None:
        """Begin to read; see `Peer`."""
        super().__init__(end, loop, handlers, ended)
        self._hosted: HostedSequences | None = None
        self._admit: Callable[[EngineSide, HostedCall], None] | None = None

    def serve(self, port: LocalPort, admit: Callable[["EngineSide", HostedCall], None]) -> None:
        """Take sequences from now on.

        Args:
            port: Where they are computed.
            admit: Called with each call, of which it starts or refuses the sequences.
        """
        self._hosted = HostedSequences(port, self.send_report, self.send)
        self._admit = admit

    def close(self) -> None:
        """Close the stream, and remove the sequences of the other process."""
        super().close()
        if self._hosted is not None:
            self._hosted.close()

    def take_report(self, data: bytes) -> None:
        """Ignore a report: the engine makes them."""

    def take_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Keep the pixels of an image for the sequences that come next."""
        assert self._hosted is not None, "no model has been described"
        self._hosted.keep_pixels(digest, pixels)

    def take_message(self, message: Message) -> None:
        """Take new sequences, or numbers of those that are not wanted any more."""
        assert self._hosted is not None and self._admit is not None, "no model has been described"
        if isinstance(message, Add):
            self._admit(self, self._hosted.open(message))
        elif isinstance(message, Remove):
            self._hosted.remove(message.numbers)
