"""Messages between the pipeline stages of one copy of a model.

In: hidden states, and the results of the last stage. Out: the same tensors on the next stage, and
on all other stages. Each rank talks to the ranks of the same index in the groups of the other
stages. Messages have a size that both sides know, and those of a kind arrive in the order in which
they were sent, so that a receiver can wait for several at once. It must not know what is computed.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_HIDDEN = 1  # tag of hidden states
_RESULTS = 2  # tag of results

_Arrival = Callable[[], Tensor]


class StageLink:
    """One rank's connections to the other stages.

    Args:
        group: the ranks of the same index in all stages, on the device's backend, first the rank of
            the last stage.
        control: all ranks of this copy of the model, on gloo.
        stage: the stage of this rank.
        max_in_flight: maximum number of messages of a kind that this rank has sent and that may
            not have arrived; the sender waits for the oldest then.
    """

    def __init__(
        self, group: dist.ProcessGroup, control: dist.ProcessGroup, stage: int, max_in_flight: int
    ) -> None:
        self._group = group
        self._control = control
        ranks: Sequence[int] = dist.get_process_group_ranks(group)
        in_order = list(reversed(ranks))  # the rank of the first stage comes first
        self._previous = in_order[stage - 1] if stage else None
        self._next = in_order[stage + 1] if stage + 1 < len(ranks) else None
        self._last = in_order[-1]
        self._before_last = in_order[:-1]
        self._uses_nccl = dist.get_backend(group) == "nccl"
        self._max_in_flight = max_in_flight
        # Tensors must stay until they are sent.
        self._sent: deque[tuple[list[dist.Work], Tensor]] = deque()

    def expect_hidden(self, shape: tuple[int, ...], like: Tensor) -> _Arrival:
        """Begin to receive hidden states from the stage before this one.

        Args:
            shape: their shape.
            like: a tensor of their type and device.

        Returns:
            a function that waits for them. On a GPU it is the GPU that waits.
        """
        assert self._previous is not None, "the first stage has none before it"
        device = like.device if self._uses_nccl else torch.device("cpu")
        x = torch.empty(shape, dtype=like.dtype, device=device)
        work = dist.irecv(x, self._previous, self._group, _HIDDEN)

        def arrived() -> Tensor:
            _wait(work)
            return x.to(like.device)

        return arrived

    def send_hidden(self, x: Tensor) -> None:
        """Begin to send hidden states to the next stage. They must not be changed afterwards."""
        assert self._next is not None, "the last stage has none behind it"
        x = x.contiguous() if self._uses_nccl else x.contiguous().cpu()
        self._keep([_started(dist.isend(x, self._next, self._group, _HIDDEN))], x)

    def expect_results(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Arrival:
        """Begin to receive a tensor in host memory from the last stage."""
        x = torch.empty(shape, dtype=dtype)
        work = dist.irecv(x, self._last, self._control, _RESULTS)

        def arrived() -> Tensor:
            _wait(work)
            return x

        return arrived

    def send_results(self, x: Tensor) -> None:
        """Begin to send a tensor in host memory from the last stage to all others."""
        x = x.contiguous()
        works = [
            _started(dist.isend(x, rank, self._control, _RESULTS)) for rank in self._before_last
        ]
        self._keep(works, x)

    def _keep(self, works: list[dist.Work], x: Tensor) -> None:
        self._sent.append((works, x))
        while len(self._sent) > self._max_in_flight:
            for work in self._sent.popleft()[0]:
                _wait(work)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _wait(work: dist.Work | None) -> None:
    """Wait for a message, up to the limit of its group."""
    _started(work).wait()
