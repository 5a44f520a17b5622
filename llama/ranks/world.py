"""The ranks of a job, as torchrun's variables and the arguments of `Llama.build` describe them.

In: environment variables, and the sizes that a user asks for. Out: the sizes of the groups, or an
error that names the variable or the argument at fault; the network interface that gloo uses. No
group is made here.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from llama.common.checks import FieldError, torchrun_number
from llama.ranks.placement import stage_of


def started_processes() -> int:
    """Return the number of processes that torchrun's variables describe; 1 without variables.

    Raises:
        ValueError: names a variable that is missing or wrong.
    """
    size = torchrun_number("WORLD_SIZE")
    if size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} also needs {', '.join(missing)}: launch with torchrun, or "
            "unset WORLD_SIZE for one process"
        )
    local_size = torchrun_number("LOCAL_WORLD_SIZE", size + 1)
    torchrun_number("LOCAL_RANK", local_size if "LOCAL_WORLD_SIZE" in os.environ else size)
    torchrun_number("RANK", size)
    torchrun_number("MASTER_PORT", 2**16)
    return size


@dataclass(frozen=True)
class GroupSizes:
    """The number of ranks in a model-parallel group, of pipeline stages, and of all ranks."""

    group: int
    stages: int
    world: int

    @classmethod
    def of(cls, world: int, stages: int, group: int | None) -> "GroupSizes":
        """Return the sizes that `Llama.build` was asked for.

        Args:
            world: The number of processes.
            stages: The argument `pipeline_parallel_size`.
            group: The argument `model_parallel_size`; None: as many as there are ranks for each
                stage.

        Raises:
            ValueError: The sizes do not divide the number of processes.
        """
        if not _divides(stages, world):
            raise FieldError.of(
                "pipeline_parallel_size",
                f"={stages!r} does not divide the {world} processes that were started: start a "
                "multiple of it (--ranks; --nproc_per_node of torchrun), or leave it out",
            )
        per_stage = world // stages
        size = per_stage if group is None else group
        if not _divides(size, per_stage):
            each = f" for each of {stages} pipeline stages" if stages > 1 else ""
            raise FieldError.of(
                "model_parallel_size",
                f"={size!r} does not divide the {per_stage} processes that were started{each}: "
                "start a multiple of it (--ranks; --nproc_per_node of torchrun), or leave it out",
            )
        return cls(size, stages, world)

    @property
    def copy(self) -> int:
        """The number of ranks that share a copy of the model."""
        return self.group * self.stages

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return stage_of(rank, self.group, self.stages)


def _divides(size: object, count: int) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0 and count % size == 0


def check_interfaces(names: str | None) -> None:
    """Raise a ValueError for an unknown interface in GLOO_SOCKET_IFNAME.

    gloo's own error names no remedy.
    """
    present = [name for _, name in socket.if_nameindex()]
    if names is not None and not set(names.split(",")) <= set(present):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names} names no interface of this machine, which has "
            f"{', '.join(present)}: name the one that the machines share, or unset it"
        )


@contextlib.contextmanager
def loopback_if_alone() -> Iterator[None]:
    """Keep gloo off the network in the block, if all ranks are on this machine."""
    name = "GLOO_SOCKET_IFNAME"  # without it, gloo listens on the address of the host's name
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    loopback = next((i for _, i in socket.if_nameindex() if i.startswith("lo")), None)
    if not alone or loopback is None or name in os.environ:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]
