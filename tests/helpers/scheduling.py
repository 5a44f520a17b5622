"""A look into the scheduler, for tests that must know that somebody was preempted."""

from llama.engine.scheduler import Scheduler
from llama.engine.sequence import Sequence


def watch_releases(scheduler: Scheduler, monkeypatch) -> list[bool]:
    """A list that gets, whenever a sequence gives its pages back, whether it had finished."""
    finished: list[bool] = []
    release = scheduler._release

    def watched(seq: Sequence) -> None:
        finished.append(seq.finished)
        release(seq)

    monkeypatch.setattr(scheduler, "_release", watched)
    return finished
