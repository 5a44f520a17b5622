"""When an API process counts as one that hangs: it has been given processor time, or wants none."""

import asyncio
import itertools
import os
import time
from collections.abc import Iterable

import pytest

from llama.server.api_processes import processor_s, until_done

LIMIT_S = 0.02


def wait(worked: Iterable[float], answers_after: int) -> None:
    """Wait for a process that has worked for so long at each look at it."""
    seconds = iter(worked)
    looks = itertools.count()

    async def run() -> None:
        answer = asyncio.Event()

        def worked_s() -> float:
            if next(looks) == answers_after:
                answer.set()
            return next(seconds)

        await until_done(answer.wait(), worked_s, LIMIT_S)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_process_that_gets_little_of_the_processors_is_waited_for():
    """Each look finds that it has worked a little: others have the processors."""
    wait((LIMIT_S / 100 * i for i in itertools.count()), answers_after=30)


def test_a_process_that_hangs_is_not():
    """It sleeps, or works for longer than the limit."""
    with pytest.raises(TimeoutError):
        wait(itertools.repeat(1.0), answers_after=30)
    with pytest.raises(TimeoutError):
        wait((LIMIT_S / 10 * i for i in itertools.count()), answers_after=30)


def test_a_pause_of_this_process_ends_no_other():
    """After one, a single look finds that the other has not worked."""
    wait([0.0, 0.0, 0.001, 0.001, 0.002, 0.002], answers_after=5)


def test_the_processor_time_of_a_process_is_known():
    before, began = processor_s(os.getpid()), time.process_time()
    while time.process_time() < began + 0.1:
        pass
    assert processor_s(os.getpid()) >= before + 0.05
