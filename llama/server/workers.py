"""The threads in which a model's requests are prepared, where a client chooses what that costs.

In: functions that encode dialogs or texts, compile grammars or read images. Out: what they return,
or an `ApiError` where they take too long or cannot begin in time. Each kind has threads of its own,
so that none holds up the others, and each sender at most half of them. This file knows no model.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from llama.prompts.picture_process import NUM_PROCESSES, PictureProcesses
from llama.prompts.pictures import Picture
from llama.server.errors import ApiError
from llama.server.metrics import Metrics
from llama.server.worker_pool import PoolBusyError, WorkerPool

PREPARE_S = 5.0  # limit for encoding a prompt, and for compiling a grammar
IMAGES_S = 30.0  # limit for reading the images of a request
NUM_THREADS = 4  # threads of each kind, but for images
_TOO_SLOW = (
    f"the request took more than {PREPARE_S:.0f} s to prepare: send less at once, or ask for a "
    "simpler response format"
)
_BUSY = "the server is preparing other requests: try again"
_TOO_SLOW_IMAGES = f"the images took more than {IMAGES_S:.0f} s to read: send fewer or smaller ones"
_T = TypeVar("_T")


class Workers:
    """The threads of one model; all methods are called in one event loop.

    Attributes:
        pictures: the processes that read images.
    """

    def __init__(self, max_waiting: int, metrics: Metrics) -> None:
        """Make the pools; threads start when they are needed.

        Args:
            max_waiting: calls of each kind that may wait for a thread.
            metrics: counts the calls that are refused.
        """
        self._grammars = WorkerPool("llama-grammar", NUM_THREADS, max_waiting)
        self._dialogs = WorkerPool("llama-dialog", NUM_THREADS, max_waiting)
        self._texts = WorkerPool("llama-text", NUM_THREADS, max_waiting)
        self._images = WorkerPool("llama-image", NUM_PROCESSES, max_waiting)
        self.pictures = PictureProcesses()
        self._metrics = metrics

    async def compile(self, sender: bytes, work: Callable[[], _T]) -> _T:
        """Call a function that compiles a grammar; see `in_time`."""
        return await self._grammars.run(work, PREPARE_S, sender)

    async def encode_dialog(self, sender: bytes, work: Callable[..., _T], *args: object) -> _T:
        """Call a function that waits for the process of a chat template.

        Raises:
            ApiError: 400 if it takes too long, 503 if it cannot begin in time.
        """
        with self.in_time("messages"):
            return await self._dialogs.run(functools.partial(work, *args), PREPARE_S, sender)

    async def collect(self, sender: bytes, items: Iterator[_T], field: str) -> list[_T]:
        """Return what an iterator encodes.

        Nothing further is encoded after the time limit, or once the caller is cancelled.

        Args:
            sender: whoever sent the request.
            items: the iterator, which a thread reads.
            field: the field of the body that an error is about.

        Raises:
            ApiError: 400 if it takes too long, 503 if it cannot begin in time.
        """
        with self.in_time(field):
            return await self._texts.collect(items, PREPARE_S, sender)

    async def read_images(self, sender: bytes, pictures: Iterator[Picture]) -> list[Picture]:
        """Return the pictures that an iterator reads with `pictures`.

        No further one is read after the time limit, or once the caller is cancelled.

        Raises:
            ApiError: 400 if it takes too long, 503 if it cannot begin in time.
        """
        began = time.monotonic()
        try:
            return await self._images.collect(pictures, IMAGES_S, sender)
        except PoolBusyError:
            self._metrics.refused.inc()
            raise ApiError(503, _BUSY) from None
        except TimeoutError:
            raise ApiError(400, _TOO_SLOW_IMAGES) from None
        finally:
            self._metrics.image_read.observe(time.monotonic() - began)

    def close(self) -> None:
        """End the processes that read images."""
        self.pictures.close()

    @contextlib.contextmanager
    def in_time(self, field: str) -> Iterator[None]:
        """Turn the limits of a pool into errors, of which 400 is about a field of the body.

        Raises:
            ApiError: 400 after a `TimeoutError`, 503 after a `PoolBusyError`.
        """
        try:
            yield
        except PoolBusyError:
            self._metrics.refused.inc()
            raise preparing_refusal("busy", field) from None
        except TimeoutError:
            raise preparing_refusal("slow", field) from None


def preparing_refusal(reason: str, field: str) -> ApiError:
    """Return the error of work that did not begin in time ("busy") or takes too long ("slow")."""
    return ApiError(503, _BUSY) if reason == "busy" else ApiError(400, _TOO_SLOW, param=field)
