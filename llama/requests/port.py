"""The port between the text of requests and the process that computes their sequences.

In: groups of sequences to compute, and sequences that nobody wants any more. Out: calls of their
owner, with the sequences that got tokens or ended. `LocalPort` computes them in this process. All
that stands above a port is the same, wherever the sequences are.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llama.engine.sequence import FinishReason, SequenceState
from llama.requests.adapters import AdapterNames
from llama.requests.seeds import derived_seed


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences of the answers of one request.

    Attributes:
        sequences: The sequences, in the order of the answers.
        seed: The seed of the first one; None: the port chooses it.
    """

    sequences: Sequence[SequenceState]
    seed: int | None = None


class RefusedError(RuntimeError):
    """The engine does not compute a request.

    Attributes:
        reason: Why: see `messages.Reason`.
        finish_reason: The finish_reason of its answers.
    """

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or f"the engine refused the request: {reason}")
        self.reason = reason
        self.finish_reason: FinishReason = "abort" if reason == "gave way" else "error"


class Owner(Protocol):
    """An owner of sequences of a port, which calls its methods with the lock of the port."""

    def moved(self, sequences: list[SequenceState]) -> None:
        """Get its sequences that a step gave tokens, or ended."""

    def failed(self, error: Exception, sequences: list[SequenceState]) -> None:
        """Get its sequences that end with an exception of a step; the port has removed them."""


class Port(ABC):
    """The place where sequences are computed.

    Attributes:
        lock: Protects the port and its owners; `add` and `remove` are called with it.
        adapters: The adapters that sequences can choose, by name.
    """

    lock: threading.RLock
    adapters: AdapterNames

    @abstractmethod
    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Return once `is_ready()` is true, which is called with the lock.

        Where steps run only while a thread waits for them, this runs them. Elsewhere it returns at
        once, and owners are called all the same.
        """

    @abstractmethod
    def check_shared(self) -> None:
        """Check that any thread may add sequences at any time.

        Raises:
            ValueError: Other ranks would not learn of them.
        """

    @abstractmethod
    def add(self, groups: Sequence[Group], owner: Owner) -> None:
        """Compute the sequences of one call from the next step on.

        Raises:
            FieldError: An adapter has been dropped. Nothing has been added.
        """

    @abstractmethod
    def remove(self, sequences: Iterable[SequenceState]) -> None:
        """Stop computing sequences; of those that have ended, nothing is done."""

    @abstractmethod
    def wake(self) -> None:
        """Let the threads that wait look whether what they wait for has come. Needs the lock."""


def set_seeds(sequences: Iterable[SequenceState], seed: int) -> None:
    """Set the seed of the first answer of a request, and those of the others derived from it."""
    for number, seq in enumerate(sequences):
        seq.spec = replace(seq.spec, seed=derived_seed(seed, number))
