"""Messages between the pipeline stages of one copy of a model.

In: hidden states, and the results of the last stage. Out: the same tensors on the next stage, and
on all other stages. Each rank talks to the ranks of the same index in the groups of the other
stages. Both sides know the size and the tag of each message, so that a receiver can wait for
several at once. It must not know what is computed.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_TAGS = 8  # tags of a step: its hidden states, then its results
_MAX_STEPS = 1 << 27  # steps after which the same tags are used again

_Arrival = Callable[[], Tensor]


class StageGroups(NamedTuple):
    """The groups in which a rank receives and sends hidden states, on the device's backend.

    Attributes:
        pipeline: the ranks of the same index in all stages, first the rank of the last stage.
        previous: has this rank and that of the stage before.
        next: has this rank and that of the next stage.
    """

    pipeline: dist.ProcessGroup
    previous: dist.ProcessGroup
    next: dist.ProcessGroup

    @classmethod
    def shared(cls, pipeline: dist.ProcessGroup) -> "StageGroups":
        """Return the use of one group for both directions."""
        return cls(pipeline, pipeline, pipeline)

    @classmethod
    def of_pairs(
        cls,
        pipeline: dist.ProcessGroup,
        stage: int,
        new_group: Callable[[Sequence[int]], dist.ProcessGroup],
    ) -> "StageGroups":
        """Make a group for each pair of neighbours; all ranks of the job call this.

        torch runs the messages of an nccl group that is bound to a GPU one after the other,
        whatever rank they are for, and warns of it: a stage would not receive the next step before
        it has sent this one.

        Each rank makes two groups, as torch names them by their number and divides nccl's
        communicator of all ranks: first the pairs 0-1, 2-3 and so on, then 1-2, 3-4 and so on. A
        stage that is left over makes a group of its own.

        Args:
            pipeline: the ranks of the same index in all stages.
            stage: the stage of this rank.
            new_group: makes a group of these ranks, which alone call it.
        """
        in_order = _in_order(pipeline)
        groups = []
        for first in range(2):
            start = stage - (stage - first) % 2
            groups.append(new_group(in_order[max(start, 0) : start + 2]))
        return cls(pipeline, previous=groups[(stage - 1) % 2], next=groups[stage % 2])


def _in_order(pipeline: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a pipeline, that of the first stage first."""
    ranks: Sequence[int] = dist.get_process_group_ranks(pipeline)
    return list(reversed(ranks))


class StageLink:
    """One rank's connections to the other stages.

    Args:
        groups: the groups for hidden states.
        control: all ranks of this copy of the model, on gloo.
        stage: the stage of this rank.
        max_in_flight: maximum number of messages that this rank has sent and that may not have
            arrived; the sender waits for the oldest then.
        inside: a context for each wait, which shows others that this rank waits.
    """

    def __init__(
        self,
        groups: StageGroups,
        control: dist.ProcessGroup,
        stage: int,
        max_in_flight: int,
        inside: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        self.groups = groups
        self.control = control
        in_order = _in_order(groups.pipeline)
        self.previous = in_order[stage - 1] if stage else None
        self.next = in_order[stage + 1] if stage + 1 < len(in_order) else None
        self.last = in_order[-1]
        self.before_last = in_order[:-1]
        self.uses_nccl = dist.get_backend(groups.pipeline) == "nccl"
        self._max_in_flight = max_in_flight
        self._inside = inside or contextlib.nullcontext()
        self._steps = itertools.count()
        # Tensors must stay until they are sent.
        self._sent: deque[tuple[list[dist.Work], Tensor]] = deque()

    def new_step(self) -> "StepMessages":
        """Return the messages of a step; every rank calls this for each step, in the same order."""
        return StepMessages(self, next(self._steps) % _MAX_STEPS * _TAGS)

    def keep(self, works: list[dist.Work | None], x: Tensor) -> None:
        """Keep a tensor that is being sent."""
        self._sent.append(([_started(work) for work in works], x))
        while len(self._sent) > self._max_in_flight:
            for work in self._sent.popleft()[0]:
                self.wait(work)

    def flush(self) -> None:
        """Wait until all that this rank has sent has arrived.

        What is still on its way when the link is dropped would be lost.
        """
        while self._sent:
            for work in self._sent.popleft()[0]:
                self.wait(work)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for the end of a message."""
        with self._inside:
            _started(work).wait()


class StepMessages:
    """The messages of one step. They have tags of their own, as steps of several models can cross.

    Args:
        link: the connections.
        tag: the first of the tags of the step.
    """

    def __init__(self, link: StageLink, tag: int) -> None:
        self._link = link
        self._tag = tag
        self._result_tags = iter(range(tag + 1, tag + _TAGS))

    def expect_hidden(self, shape: tuple[int, ...], like: Tensor) -> _Arrival:
        """Begin to receive hidden states from the stage before this one.

        Args:
            shape: their shape.
            like: a tensor of their type and device.

        Returns:
            a function that waits for them. With nccl it is the GPU that waits; it receives once the
            steps before are computed, so that no waiting kernel takes part of the GPU from them.
        """
        link = self._link
        assert link.previous is not None, "the first stage has none before it"
        device = like.device if link.uses_nccl else torch.device("cpu")
        x = torch.empty(shape, dtype=like.dtype, device=device)
        work = dist.irecv(x, link.previous, link.groups.previous, self._tag)

        def arrived() -> Tensor:
            link.wait(work)
            return x.to(like.device)

        return arrived

    def send_hidden(self, x: Tensor) -> None:
        """Begin to send hidden states to the next stage. They must not be changed afterwards."""
        link = self._link
        assert link.next is not None, "the last stage has none after it"
        x = x.contiguous() if link.uses_nccl else x.contiguous().cpu()
        link.keep([dist.isend(x, link.next, link.groups.next, self._tag)], x)

    def expect_results(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Arrival:
        """Begin to receive a tensor in host memory from the last stage."""
        x = torch.empty(shape, dtype=dtype)
        link = self._link
        work = dist.irecv(x, link.last, link.control, next(self._result_tags))

        def arrived() -> Tensor:
            link.wait(work)
            return x

        return arrived

    def send_results(self, x: Tensor) -> None:
        """Begin to send a tensor in host memory from the last stage to all others."""
        x = x.contiguous()
        link = self._link
        tag = next(self._result_tags)
        link.keep([dist.isend(x, rank, link.control, tag) for rank in link.before_last], x)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
