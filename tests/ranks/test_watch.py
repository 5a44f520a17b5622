"""The state that a rank publishes for the others, see `llama.ranks.stalls`."""

import subprocess
import sys
import threading
import time

import torch

from helpers.launch import REPO, environment
from llama.ranks import watch
from llama.ranks.collectives import ModelParallel
from llama.ranks.placement import Placement
from llama.ranks.stalls import rank_state
from llama.ranks.watch import Watch

# One thread asks where another one is, which calls and returns. Garbage is collected meanwhile,
# whose destructor releases the GIL, as that of a tensor does.
_RUNNING = """
import gc, threading, time
from llama.ranks.stalls import rank_state

class Garbage:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        time.sleep(0.0002)

def ask(thread):
    while True:
        Garbage()
        assert not rank_state(thread, "a step", 1)["in_collective"]

def call(depth):
    return call(depth - 1) if depth else sum(range(50))

gc.set_threshold(2)
threading.Thread(target=ask, args=(threading.get_ident(),), daemon=True).start()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for depth in range(200):
        call(depth)
"""


def test_frames_of_a_thread_are_read_in_long_waits_alone(monkeypatch):
    """A thread that runs is left alone; one that waits is looked at before its limit."""
    monkeypatch.setattr(watch, "rank_state", lambda thread, what, steps: (thread, what, steps))
    rank = object.__new__(Watch)
    rank.steps = 3
    rank._waits = {}
    assert rank._state() == (None, "", 3)
    for age, limit_s, thread in ((0.0, 600.0, None), (2.0, 600.0, 7), (0.4, 0.5, 7)):
        rank._waits = {7: watch._Wait("a step", time.monotonic() - age, limit_s)}
        assert rank._state() == (thread, "a step", 3)


def test_where_a_running_thread_is_can_be_asked():
    """A thread that calls and returns meanwhile, and garbage that is collected, do no harm."""
    program = [sys.executable, "-c", _RUNNING]
    done = subprocess.run(program, env=environment(), cwd=REPO, timeout=20, check=False)
    assert done.returncode == 0  # a walk along `f_back` crashes or hangs in a part of all runs


def test_a_thread_inside_of_a_collective_is_recognised(monkeypatch):
    """A thread inside of a collective is told from others, and no frame objects are made."""
    monkeypatch.delattr(sys, "_current_frames")
    is_inside, may_leave = threading.Event(), threading.Event()

    class Sum:
        def can_sum(self, x: torch.Tensor) -> bool:
            is_inside.set()
            return may_leave.wait(60)

        def all_reduce(self, x: torch.Tensor) -> None:
            pass

    parallel = ModelParallel(Placement(rank=0, size=2), shared=Sum())  # type: ignore[arg-type]
    waiter = threading.Thread(target=parallel.all_reduce, args=(torch.zeros(1),))
    waiter.start()
    try:
        assert is_inside.wait(60)
        assert waiter.ident is not None
        assert rank_state(waiter.ident, "a step", 2) == {
            "activity": "a step", "in_collective": True, "steps": 2,
        }  # fmt: skip
        assert not rank_state(threading.get_ident(), "a step", 2)["in_collective"]
        assert not rank_state(None, "", 2)["in_collective"]
        assert rank_state(1, "a step", 2)["in_collective"]  # there is no such thread
    finally:
        may_leave.set()
        waiter.join()
