"""The interface to the other ranks of a job, for the model, the engine and requests.

In: the placement of this rank. Out: `Parallel`, which itself is a process alone; `ModelParallel`
(collectives.py) implements it for several ranks. This file must not know how ranks
reach, watch or end each other, and needs torch for types alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from llama.ranks.placement import WHOLE, Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The remedy for prompts and parameters that differ between ranks.
SAME_CALLS = (
    "Every rank of a group must make the same calls with the same arguments: read the input on one "
    "rank, or from the same file."
)


class RankError(RuntimeError):
    """Another rank failed; its message is passed on, so that every rank stops for one reason."""


class Messages(Protocol):
    """The messages of one step between pipeline stages.

    `expect_*` begins to receive a tensor and returns a function that waits for it. `send_*` begins
    to send one, which must not be changed afterwards.
    """

    def expect_hidden(self, shape: tuple[int, ...], like: "Tensor") -> Callable[[], "Tensor"]:
        """Begin to receive hidden states of this shape, of the type and the device of `like`."""
        ...

    def send_hidden(self, x: "Tensor") -> None:
        """Begin to send hidden states to the next stage."""
        ...

    def expect_results(
        self, shape: tuple[int, ...], dtype: "torch.dtype"
    ) -> Callable[[], "Tensor"]:
        """Begin to receive a tensor in host memory from the last stage."""
        ...

    def send_results(self, x: "Tensor") -> None:
        """Begin to send a tensor in host memory from the last stage to all others."""
        ...


class Link(Protocol):
    """The connection of a rank to the other pipeline stages."""

    def new_step(self) -> Messages:
        """Return the messages of a step; every rank calls this for each step, in the same order."""
        ...

    def flush(self) -> None:
        """Wait until all that this rank has sent has arrived."""
        ...


@dataclass(frozen=True)
class Parallel:
    """One rank among its peers; this class is a process alone.

    With a placement of several ranks it describes a rank that does not run, for estimates: its
    sizes are right, and a collective fails.

    Attributes:
        placement: the part of a model that this rank holds.
        data_rank: the copy of the model that this rank belongs to.
        data_size: the number of copies of the model.
        timeout_s: maximum time to wait for another rank.
        link: the connection to the other pipeline stages; None without a pipeline.
        spans_machines: whether the ranks of the group are on several machines.
    """

    placement: Placement = WHOLE
    data_rank: int = 0
    data_size: int = 1
    timeout_s: float = 600.0
    link: Link | None = None
    spans_machines: bool = False

    # Every step asks for these, so each is computed once: no field of this class changes.
    @functools.cached_property
    def rank(self) -> int:
        """This rank within its model-parallel group."""
        return self.placement.rank

    @functools.cached_property
    def size(self) -> int:
        """Number of ranks in the model-parallel group."""
        return self.placement.size

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides what the ranks of one model copy do."""
        return self.rank == 0 and self.placement.is_last

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether this rank holds a whole copy of the model by itself."""
        return self.num_ranks == 1

    @functools.cached_property
    def num_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.placement.stages * self.size

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.data_size * self.num_ranks

    @property
    def global_rank(self) -> int:
        """This rank among all ranks of the job."""
        return self.first_of_group + self.rank

    @property
    def first_of_group(self) -> int:
        """The first rank of the model-parallel group among all ranks of the job; see `stage_of`."""
        groups_before = self.placement.stages - 1 - self.placement.stage
        return self.data_rank * self.num_ranks + groups_before * self.size

    def placed(self, placement: Placement) -> Self:
        """Return this rank among the same peers, with another part of a model."""
        assert (placement.rank, placement.size) == (self.rank, self.size), placement
        return replace(self, placement=placement)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a block that the ranks run together.

        If the block raises, or does not end, the job ends. The exception is raised, so that
        `finally` blocks run; the process ends 2 seconds later.
        """
        return contextlib.nullcontext()

    def ranks_alive(self) -> list[bool]:
        """Return for each rank whether it is alive, as rank 0 sees it, also on other machines."""
        return [True] * self.num_ranks

    def shares_memory_of(self, x: "Tensor") -> bool:
        """Return whether `x` is exchanged in shared memory: on the CPU of one machine."""
        return False

    @property
    def is_on_nccl(self) -> bool:
        """Whether the group exchanges tensors by nccl, which a CUDA graph can capture."""
        return False

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """Sum over the ranks of the group, in place."""
        return self._own(x)

    def all_gather(self, x: "Tensor", widths: Sequence[int] = ()) -> "Tensor":
        """Concatenate the tensors of all ranks along their last dimension.

        Args:
            x: (..., N); N may differ between ranks, the other dimensions may not.
            widths: N of each rank, the same on every rank; empty if all have the same N.

        Returns:
            (..., the sum of all N), the same on every rank.
        """
        return self._own(x)

    def broadcast(self, x: "Tensor") -> "Tensor":
        """Replace `x` by the values of the group's first rank, in place."""
        return self._own(x)

    def _own(self, x: "Tensor") -> "Tensor":
        if self.size > 1:
            raise RankError(f"rank {self.rank} of {self.size} has no groups: it is an estimate")
        return x

    def all_hold(self, condition: bool) -> bool:
        """Return whether a condition holds on all ranks of the group; all of them call it."""
        return condition

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest `value` of all ranks of the world."""
        return value

    def lowest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest number at each place, of all ranks of this copy of the model.

        Args:
            values: the numbers of this rank; as many on every rank.
        """
        return list(values)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the whole numbers of each rank of the world, which all have as many."""
        return [list(values)]

    def gather_replicas(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of the leader of each copy of the model, on every rank of the world.

        Args:
            values: the numbers of this rank; as many on every rank.
        """
        return [list(values)]

    def broadcast_bytes(self, data: bytes, *, is_idle: bool = False) -> bytes:
        """Return the leader's bytes on every rank of this copy of the model.

        One thread of each rank may call it.

        Args:
            data: the bytes, on the leader.
            is_idle: the leader may be silent for any time. Ranks in shared memory then sleep
                without a limit; the wait of gloo keeps its limit.
        """
        return data

    @contextlib.contextmanager
    def agree(
        self, what: str, *, world: bool = False, remedy: str = SAME_CALLS
    ) -> Iterator[list[object]]:
        """Run a block on every rank of this copy of the model or world, and agree on its outcome.

        Every rank must reach the block within `timeout_s`. The block gets a list; what it appends
        (anything with an exact repr) must be the same on every rank.

        Args:
            what: the name of the compared values in errors.
            world: whether all ranks take part, or those of this copy.
            remedy: the end of the error about lists that differ: what the user can do.

        Raises:
            Exception: the block has raised on this rank.
            RankError: the block has raised on another rank.
            ValueError: the lists differ; it names the first text that differs.
        """
        yield []
