"""The side of a process with text of the stream to the engine.

In: one end of a pair of sockets. Out: a port to the engine. Besides sequences, each side asks the
other by name.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping

from llama.requests.messages import Message, Refuse
from llama.requests.peer import Handler, Peer
from llama.requests.remote_port import RemotePort


class TextSide(Peer):
    """The end of the stream of a process with text.

    Attributes:
        port: The port to the engine.
    """

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handlers: Mapping[str, Handler],
        ended: Callable[[], None],
    ) -> None:
        """Begin to read; see `Peer`."""
        super().__init__(end, loop, handlers, ended)
        self.port = RemotePort(self.send, self.send_pixels)

    def take_report(self, data: bytes) -> None:
        """Give the mirrors the results of a step."""
        self.port.take_report(data)

    def take_message(self, message: Message) -> None:
        """End the sequences that the engine refuses."""
        assert isinstance(message, Refuse)
        self.port.take_refusal(message)
