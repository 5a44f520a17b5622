"""Speculation in the steps of a core: drafts in, steps that verify them out.

In: a `Drafter`. Out: a `StepHook` that asks it before each decode step. Steps do not overlap then,
since a draft follows the last token.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from llama.engine.core import EngineCore
from llama.engine.hooks import StepHook
from llama.engine.step import Step
from llama.options.speculation.drafter import Drafter
from llama.options.speculation.lookup import Speculator
from llama.ranks.parallel import Parallel


@dataclass(frozen=True)
class DrafterKind:
    """A drafter that needs no draft model.

    Attributes:
        make: Makes the drafter of `max_drafts` and a rank among its peers. The last argument says
            whether it may use the texts of other requests.
        can_share: Whether it has a use for these texts, so that `speculate_shared` is allowed.
    """

    make: Callable[[int, Parallel, bool], Drafter]
    can_share: bool = False


# The drafters, by the value of `speculate`. Every other value is a draft model.
DRAFTERS = {"lookup": DrafterKind(Speculator, can_share=True)}


class Speculation(StepHook):
    """Adds the drafts of a drafter to decode steps, which then verify them."""

    def __init__(self, drafter: Drafter, core: EngineCore) -> None:
        self.drafter = drafter
        self.wanted_states = drafter.wanted_states
        self._core = core
        core.runner.async_scheduling = False

    def before_pack(self, step: Step) -> None:
        """Add drafts to a decode step."""
        if step.is_decode:
            sequences = [item.sequence for item in step.items]
            drafts = self.drafter.draft(sequences, self._core.stats.generate_seconds)
            self._core.scheduler.add_drafts(step, drafts)

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        """Pass hidden states to the drafter."""
        self.drafter.see(step, states)

    def close(self) -> None:
        """Close the drafter."""
        self.drafter.close()


def speculate(core: EngineCore, drafter: Drafter | None) -> None:
    """Let a core speculate from now on with a drafter, and with no other one; None: no longer."""
    core.hooks[:] = [hook for hook in core.hooks if not isinstance(hook, Speculation)]
    if drafter is not None:
        core.hooks.append(Speculation(drafter, core))
