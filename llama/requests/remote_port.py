"""The port to an engine in another process.

In: sequences. Out: messages; and from the messages and reports of the engine, calls of the owners.
Each sequence of this process is the mirror of one of the engine: reports extend it, and what reads
a sequence reads a mirror in the same way. Where reports are read, owners are called.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from llama.common.checks import FieldError
from llama.engine.sequence import SequenceState
from llama.requests.adapters import AdapterNames
from llama.requests.formats import RemoteConstraint
from llama.requests.messages import Add, AddedGroup, Message, Refuse, Remove
from llama.requests.port import Group, Owner, Port, RefusedError
from llama.requests.reports import apply_report


class Sender(Protocol):
    """Sends a message to the engine without waiting."""

    def __call__(self, message: Message) -> None:
        """Send a message."""


class RemotePort(Port):
    """The mirrors of this process, for any number of owners.

    Attributes:
        failure: Why the engine computes nothing more; None while it does.
    """

    def __init__(self, send: Sender, send_pixels: Callable[[bytes, bytes], None]) -> None:
        """Begin without sequences.

        Args:
            send: Sends a message to the engine.
            send_pixels: Sends the digest and the pixels of an image of the next message.
        """
        self.lock = threading.RLock()
        self.adapters = AdapterNames()
        self.failure: Exception | None = None
        self._send = send
        self._send_pixels = send_pixels
        self._num_added = 0
        self._mirrors: dict[int, SequenceState] = {}
        self._numbers: dict[SequenceState, int] = {}
        self._owners: dict[SequenceState, Owner] = {}

    def add(self, groups: Sequence[Group], owner: Owner) -> None:
        """Send the sequences of a call to the engine; see `Port.add`.

        Raises:
            RuntimeError: The engine computes nothing more.
        """
        if self.failure is not None:
            raise RuntimeError("the engine has ended") from self.failure
        added = []
        pixels: dict[bytes, np.ndarray] = {}
        for group in groups:
            numbers = []
            for seq in group.sequences:
                number = self._num_added
                self._num_added += 1
                self._mirrors[number] = seq
                self._numbers[seq] = number
                self._owners[seq] = owner
                numbers.append(number)
                pixels |= seq.pixels
                seq.pixels = {}  # The engine has them.
            first = group.sequences[0]
            rule = first.constraint
            text = rule.answer_format.to_json() if isinstance(rule, RemoteConstraint) else ""
            added.append(AddedGroup(numbers, first.spec, group.seed, text))
        for digest, tiles in pixels.items():
            self._send_pixels(digest, tiles.tobytes())
        self._send(Add(added))

    def remove(self, sequences: Iterable[SequenceState]) -> None:
        """Forget mirrors at once, and let the engine remove their sequences; see `Port.remove`."""
        numbers = [self._forget(seq) for seq in sequences if seq in self._numbers]
        if numbers and self.failure is None:
            self._send(Remove(numbers))

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Return at once: the engine runs steps by itself."""

    def check_shared(self) -> None:
        """Do nothing: the engine's process is alone or leads."""

    def wake(self) -> None:
        """Do nothing: no thread waits for steps."""

    def take_report(self, data: bytes) -> None:
        """Read the report of a step, and call the owners of its sequences."""
        with self.lock:
            of_owners: dict[Owner, list[SequenceState]] = {}
            for seq in apply_report(data, self._mirrors):
                of_owners.setdefault(self._owners[seq], []).append(seq)
                if seq.finish_reason is not None:
                    self._forget(seq)
            for owner, sequences in of_owners.items():
                owner.moved(sequences)

    def take_refusal(self, refusal: Refuse) -> None:
        """End sequences that the engine does not compute, with an error."""
        error: Exception = RefusedError(refusal.reason, refusal.text)
        if refusal.reason == "field":
            error = FieldError(refusal.field, refusal.text)
        with self.lock:
            known = [self._mirrors[x] for x in refusal.numbers if x in self._mirrors]
            self._end(error, known)

    def fail(self, error: Exception) -> None:
        """End all sequences, because the engine computes nothing more."""
        with self.lock:
            self.failure = self.failure or error
            self._end(error, list(self._numbers))

    def _end(self, error: Exception, sequences: list[SequenceState]) -> None:
        of_owners: dict[Owner, list[SequenceState]] = {}
        for seq in sequences:
            of_owners.setdefault(self._owners[seq], []).append(seq)
            self._forget(seq)
        for owner, own in of_owners.items():
            owner.failed(error, own)

    def _forget(self, seq: SequenceState) -> int:
        """Forget a mirror, and return its number."""
        number = self._numbers.pop(seq)
        del self._mirrors[number]
        del self._owners[seq]
        return number
