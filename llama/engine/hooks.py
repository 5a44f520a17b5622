"""The edge of the core: the interfaces through which options take part in a step.

`StepHook` adds to a step: drafts, adapters, keys and values that are loaded, hidden states that
are read. `Replayer` computes some steps faster than operator by operator. `Stepper`
decides when a step that was started is read. `llama.options` implements them and `llama.assembly`
passes them in; the core knows none of the implementations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from llama.engine.rows import Scheduled
from llama.engine.step import Step, StepResults
from llama.ops.batch import Batch

Inform = Callable[[Step], None] | None  # gets each step once it is scheduled


class StepHook:
    """The part of an option in each step. Each method does nothing by default.

    Attributes:
        wanted_states: The numbers of the hidden states that `see` gets of every step, as
            `llama.model.execution.Watched` counts them.
    """

    wanted_states: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Is called first in each step, before sequences are added."""

    def before_pack(self, step: Step) -> None:
        """May change a scheduled step: its drafts, and the pages that its sequences read."""

    def changes_batch(self, step: Step) -> bool:
        """Return whether `pack` adds what a replayed step cannot have."""
        return False

    def pack(self, step: Step, batch: Batch) -> Batch:
        """Return the batch with what the option adds to its rows."""
        return batch

    def before_pass(self, step: Step) -> None:
        """Is called right before the model computes a step, after all earlier ones have run.

        What it writes to the KV cache is not overwritten by an earlier step.
        """

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        """Get the hidden states of a step on the device, before its rows are computed.

        Args:
            step: The step.
            states: The states of `wanted_states`, by number: (T, E) of all tokens, item after item.
                `step.result_rows` says which of them have results. Other numbers may be there, too.
        """

    def after_rows(self, step: Step, results: StepResults) -> None:
        """Get a step once its sequences have their results; those that ended have their pages."""

    def broke_off(self) -> None:
        """Is called after a step broke off: its sequences ended, and all pages are forgotten."""

    def close(self) -> None:
        """Free what the option holds on the device."""


class Decoded(NamedTuple):
    """The results of a replayed step of R rows, which the next replay overwrites.

    Attributes:
        ids: The top token of each row, (R) int64, as `sampler.sample` computes it.
        logits: (R, V) float32; None where only ids were wanted.
    """

    ids: Tensor
    logits: Tensor | None = None


class Replayer(Protocol):
    """Computes steps without running the operators one by one, with the same results.

    Attributes:
        is_over: Whether it records nothing any more: a step that `prepare` has returned runs
            operator by operator, and no other may follow.
    """

    is_over: bool

    def prepare(self, step: Step, sampled: list[Scheduled]) -> Any | None:
        """Return a step in the form that `run` takes.

        The result holds the sequences as they are now. None: such a step cannot be replayed.

        Args:
            step: The step.
            sampled: What `Step.sampled` returns.
        """

    def run(self, step: Any, x: Tensor | None = None, *, wants_logits: bool) -> Decoded | Tensor:
        """Compute a prepared step.

        Args:
            step: What `prepare` returned.
            x: (n, E), what the stage before has computed; None on the first stage.
            wants_logits: Whether logits are computed, or ids only.

        Returns:
            On the last stage what was decoded; on another one its hidden states, (R, E).
        """

    def close(self) -> None:
        """Free all that was recorded."""


class Loop(Protocol):
    """The requests that a `Stepper` may make of the core."""

    runner: Any

    def schedule(self, inform: Inform) -> Step:
        """Return the next step, which may be empty, and pass it to `inform`."""

    def update(self, step: Step, results: StepResults) -> None:
        """Give the sequences of a step its results."""

    def has_unfinished(self) -> bool:
        """Return whether any sequence runs or waits."""

    def has_ready(self) -> bool:
        """Return whether a sequence may run before more results are read."""


class Stepper(ABC):
    """Starts steps and reads their results, in the order in which they were started."""

    @property
    @abstractmethod
    def has_step_in_flight(self) -> bool:
        """Whether the next call of `advance` reads a step that has been started."""

    @abstractmethod
    def advance(self, core: Loop, inform: Inform) -> list[Step]:
        """Schedule and start the next step, and read those that are due.

        Returns:
            The steps whose time is to be counted now.
        """

    @abstractmethod
    def drain(self, core: Loop) -> None:
        """Run the steps to their end for whose results other ranks wait."""

    @abstractmethod
    def forget(self, *, is_broken: bool) -> None:
        """Forget the steps in flight.

        Args:
            is_broken: Whether one of them broke off, rather than being unwanted.
        """
