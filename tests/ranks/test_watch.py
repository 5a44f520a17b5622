"""The state that a rank publishes for the others, see `llama.ranks.stalls`."""

import threading
from unittest.mock import Mock

import torch

from llama.ranks.collectives import ModelParallel
from llama.ranks.peers import Peers
from llama.ranks.placement import Placement
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.watch import Watch


def test_a_rank_that_waits_in_a_collective_says_so() -> None:
    """The state says what a rank waits in, and whether it is inside of a collective."""
    is_inside, may_leave = threading.Event(), threading.Event()

    class Sum:
        def can_sum(self, x: torch.Tensor) -> bool:
            is_inside.set()
            return may_leave.wait(60)

        def all_reduce(self, x: torch.Tensor) -> None:
            pass

    peers = Peers(0)
    watch = Watch(peers, range(2), Rendezvous(peers, 2, Mock(), "", 60.0, 30.0))
    parallel = ModelParallel(Placement(rank=0, size=2), shared=Sum(), watch=watch)  # type: ignore[arg-type]

    def run() -> None:
        with parallel.step():
            parallel.all_reduce(torch.zeros(1))

    assert watch._state() == {"activity": "", "in_collective": False, "steps": 0}
    waiter = threading.Thread(target=run)
    waiter.start()
    try:
        assert is_inside.wait(60)
        assert watch._state() == {"activity": "a step", "in_collective": True, "steps": 1}
    finally:
        may_leave.set()
        waiter.join()
    with parallel.step():  # of a rank that computes
        assert watch._state() == {"activity": "a step", "in_collective": False, "steps": 2}
