"""The requests that an engine has accepted, and the request of each of their sequences.

In: checked requests, and sequences that have new tokens. Out: the sequences to add to and remove
from the core at its next step, and requests whose output can be taken.

The lock of the engine protects all of this: every method is called with it. Nothing here knows
threads, ranks or the core.
"""

import functools
from collections.abc import Collection, Iterable

from llama.common.checks import FieldError, brief
from llama.engine.sequence import SequenceState
from llama.requests.adapters import AdapterNames
from llama.requests.answer import Answer
from llama.requests.request import Request


class RequestRegistry:
    """The requests of one engine, until their last output is taken.

    Attributes:
        requests: All requests, in the order in which they were queued.
        due: The requests that `LLMEngine.step` reports next.
    """

    def __init__(self, adapters: AdapterNames) -> None:
        """Make an empty registry.

        Args:
            adapters: The adapters that requests can choose.
        """
        self.requests: dict[Request, None] = {}
        self.due: dict[Request, None] = {}
        self._adapters = adapters
        self._names: dict[str, Request] = {}
        # The request and the answer of each sequence that is queued or in the core.
        self._owner: dict[SequenceState, tuple[Request, Answer]] = {}
        self._added: dict[SequenceState, None] = {}  # sequences to add at the next step
        self._removed: list[SequenceState] = []  # sequences to remove at the next step
        self._num_calls = 0  # calls that have queued requests

    @property
    def sequences(self) -> Collection[SequenceState]:
        """All sequences that are queued or in the core."""
        return self._owner.keys()

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
        for request in requests:
            digest = request.answers[0].sequence.spec.adapter
            if digest and not self._adapters.has_digest(digest):
                raise FieldError("adapter", "the adapter of a request has been dropped")
        self._names |= {request.request_id: request for request in requests if request.request_id}
        self.requests |= dict.fromkeys(requests)
        self._num_calls += 1
        for request in requests:
            request.set_call(self._num_calls)
            for answer in request.answers:
                self._owner[answer.sequence] = request, answer
                self._added[answer.sequence] = None

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
        for answer in request.answers:
            self._release(answer.sequence)

    def read(self, seq: SequenceState) -> None:
        """Decode the new tokens of a sequence and announce the output of its request."""
        if seq not in self._owner:  # aborted during the step
            return
        request, answer = self._owner[seq]
        answer.read()
        if answer.finish_reason is not None:
            self._release(seq)
        request.note_output()

    def _release(self, seq: SequenceState) -> None:
        """Remove a sequence from the core as soon as no step is running."""
        if self._owner.pop(seq, None) is None:
            return
        if seq in self._added:
            del self._added[seq]
        else:
            self._removed.append(seq)

    def take_added(self) -> list[SequenceState]:
        """Return the sequences that were queued since the last step."""
        added = list(self._added)
        self._added = {}
        return added

    def take_removed(self) -> list[SequenceState]:
        """Return the sequences that the core has and no request needs any more."""
        removed = self._removed
        self._removed = []
        return removed

    def num_users(self, digest: bytes) -> int:
        """Return how many unfinished sequences have the adapter with this hash."""
        return sum(seq.spec.adapter == digest for seq in self._owner)

    def take_failed(
        self, live: Iterable[SequenceState]
    ) -> list[tuple[Request, list[SequenceState]]]:
        """Remove the sequences of the requests that a failed step was computing.

        Args:
            live: The sequences that the core still has, as they have not started.

        Returns:
            The requests, each with its sequences among `live` and those that were queued since.
        """
        waiting = {*live, *self._added}
        failed = {request: None for seq, (request, _) in self._owner.items() if seq not in waiting}
        for request in failed:
            for answer in request.answers:
                self._owner.pop(answer.sequence, None)
                self._added.pop(answer.sequence, None)
        return [
            (request, [x.sequence for x in request.answers if x.sequence in waiting])
            for request in failed
        ]
