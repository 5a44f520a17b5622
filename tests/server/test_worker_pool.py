"""The pool of threads for work that may take too long, against asyncio's own error handler."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from llama.server.worker_pool import WorkerPool


def test_an_error_after_the_time_limit_is_not_logged():
    """The client got its answer at the limit, so that clients could fill the log with errors."""
    release = threading.Event()
    reported: list[dict[str, Any]] = []

    def fail() -> None:
        release.wait(10)
        raise ValueError("the grammar is wrong")

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: reported.append(each))
        pool = WorkerPool("test", 1, 4)
        with pytest.raises(TimeoutError):
            await pool.run(fail, 0.01)
        release.set()
        await pool.run(lambda: None, 10)  # it gets the thread once the first call has ended
        gc.collect()

    asyncio.run(work())
    assert not reported
