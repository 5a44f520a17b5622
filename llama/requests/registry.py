"""The requests that an engine has accepted, and the request of each of their sequences.

In: checked requests, and sequences that have new tokens. Out: sequences for a port, which computes
them, and requests whose output can be taken.

The lock of the port protects all of this: every method is called with it. Nothing here knows
threads, ranks or the core.
"""

import functools
from collections.abc import Iterable

from llama.common.checks import brief
from llama.engine.sequence import SequenceState
from llama.requests.answer import Answer
from llama.requests.port import Port, RefusedError
from llama.requests.request import Request


class RequestRegistry:
    """The requests of one engine, until their last output is taken.

    Attributes:
        requests: All requests, in the order in which they were queued.
        due: The requests that `LLMEngine.step` reports next.
    """

    def __init__(self, port: Port) -> None:
        """Make an empty registry.

        Args:
            port: Where the sequences are computed.
        """
        self.requests: dict[Request, None] = {}
        self.due: dict[Request, None] = {}
        self._port = port
        self._names: dict[str, Request] = {}
        # The request and the answer of each sequence that the port has.
        self._owner: dict[SequenceState, tuple[Request, Answer]] = {}

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id, or None."""
        return self._names.get(request_id)

    def listen(self, requests: Iterable[Request]) -> None:
        """Make the requests without a listener due whenever they have an output."""
        for request in requests:
            if request.listener is None:
                request.listener = functools.partial(self.due.setdefault, request)

    def queue(self, requests: list[Request]) -> None:
        """Add the requests of one call; their sequences enter the core at the next step.

        Raises:
            ValueError: An id is in use, or an adapter has been dropped. Nothing has been queued.
        """
        named = [request.request_id for request in requests if request.request_id]
        for name in named:
            if name in self._names or named.count(name) > 1:
                raise ValueError(
                    f"request_id={brief(name)} is in use by a request not yet finished: choose "
                    "another id"
                )
        self._port.add([request.group() for request in requests], self)
        self._names |= {request.request_id: request for request in requests if request.request_id}
        self.requests |= dict.fromkeys(requests)
        for request in requests:
            for answer in request.answers:
                self._owner[answer.sequence] = request, answer

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.requests.pop(request, None)
        self.due.pop(request, None)
        if self._names.get(request.request_id) is request:
            del self._names[request.request_id]

    def end(self, request: Request) -> None:
        """End a request; unfinished answers get finish_reason "abort"."""
        if not request.finished:
            request.end("abort")
        self._release([answer.sequence for answer in request.answers])

    def moved(self, sequences: list[SequenceState]) -> None:
        """Decode the new tokens of sequences, and announce the outputs of their requests."""
        for seq in sequences:
            if seq not in self._owner:  # aborted during the step
                continue
            request, answer = self._owner[seq]
            answer.read()
            if answer.finish_reason is not None:
                self._release([seq])
            request.note_output()

    def failed(self, error: Exception, sequences: list[SequenceState]) -> None:
        """End the requests of sequences that end with an exception; see `Owner.failed`."""
        reason = error.finish_reason if isinstance(error, RefusedError) else "error"
        for request in dict.fromkeys(self._owner[seq][0] for seq in sequences):
            self._release([answer.sequence for answer in request.answers])
            request.exception = error
            request.end(reason)

    def _release(self, sequences: list[SequenceState]) -> None:
        """Let the port remove sequences that no request needs any more."""
        for seq in sequences:
            self._owner.pop(seq, None)
        self._port.remove(sequences)
