"""The state that a rank publishes for the others, see `llama.ranks.stalls`."""

import time

from llama.ranks import watch
from llama.ranks.watch import Watch


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
