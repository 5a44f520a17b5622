"""Short spins of OpenMP's threads while tasks wait for cores, as an option of a core.

In: a `SpinController`. Out: a `StepHook` that polls it. Results do not change.
"""

from llama.common.openmp import SpinController
from llama.engine.hooks import StepHook


class ShortSpins(StepHook):
    """Adapts the spins at each step to how long tasks have waited for a core."""

    def __init__(self, controller: SpinController) -> None:
        self._controller = controller

    def begin(self) -> None:
        """Adapt the spins."""
        self._controller.poll()

    def close(self) -> None:
        """Let the threads spin again as they do by default."""
        self._controller.spin.turn_off()
