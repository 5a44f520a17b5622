"""The threads that wait for outputs: one of them runs the model, while the others sleep.

In: the condition that each thread waits for, and a function that runs one step. Out: steps, one at
a time, until the condition is true. (A dedicated engine thread would cost two thread switches per
streamed token, measured as 4 to 15 % of the demo model's processor time.)

This module owns the lock of the engine, and knows nothing of requests.
"""

import threading
from collections.abc import Callable

from llama.requests.interrupts import DeferredInterrupt

_MAX_SLEEP_S = 1.0  # after which a thread checks whether another one still runs the model


class StepThreads:
    """The threads of one engine that run its steps or wait for them.

    Attributes:
        lock: Protects the state of the engine; it is released while a step runs. It is reentrant
            because the garbage collector may close an abandoned stream while this thread owns it.
        num_steps: The number of steps that have ended.
    """

    def __init__(self, step: Callable[[], None], settle: Callable[[], None]) -> None:
        """Prepare the steps of an engine.

        Args:
            step: Runs the model once. It is called without the lock.
            settle: Does what had to wait for the end of a step. It is called with the lock after
                each step, also after one that failed.
        """
        self.lock = threading.RLock()
        self.num_steps = 0
        self._step = step
        self._settle = settle
        self._stepper: int | None = None  # identifier of the thread that runs the model
        # For each sleeping thread, the lock that wakes it and the condition that it waits for.
        self._waiters: dict[threading.Lock, Callable[[], bool]] = {}

    @property
    def is_stepping(self) -> bool:
        """Whether a step is running. Read it with the lock."""
        return self._stepper is not None

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()` is true.

        Args:
            is_ready: The condition. It is called with the lock.
        """
        bell = threading.Lock()
        try:
            while not self._run_model(is_ready, bell):
                if bell in self._waiters:
                    bell.acquire(timeout=_MAX_SLEEP_S)
        finally:
            with self.lock:
                self._waiters.pop(bell, None)
                if self._stepper is None and self._waiters:
                    # This thread leaves: another one must run the model now.
                    self._ring(list(self._waiters)[:1])

    def wake_ready(self) -> None:
        """Wake the sleeping threads whose condition is true. Call it with the lock."""
        self._ring([bell for bell, is_ready in self._waiters.items() if is_ready()])

    def _run_model(self, is_ready: Callable[[], bool], bell: threading.Lock) -> bool:
        """Run the model until `is_ready()`, unless another thread runs it.

        Returns:
            True if `is_ready()`. False if another thread runs the model: then `bell` is released
            when this thread is ready or has to run the model. Also False after an interrupt.
        """
        with DeferredInterrupt() as interrupts:
            while not interrupts:
                with self.lock:
                    if is_ready():
                        return True
                    if self._stepper not in (None, threading.get_ident()):
                        # The lock may have been released since the last sleep.
                        bell.acquire(blocking=False)
                        self._waiters[bell] = is_ready
                        return False
                    self._stepper = threading.get_ident()
                self._run_step()
        return False

    def _run_step(self) -> None:
        """Run the model once, and let another thread run it next."""
        try:
            self._step()
        finally:
            with self.lock:
                self._stepper = None
                self.num_steps += 1
                self._settle()
                self.wake_ready()

    def _ring(self, bells: list[threading.Lock]) -> None:
        """Wake the threads that sleep on these locks."""
        for bell in bells:
            del self._waiters[bell]
            bell.release()
