"""Speculation in the steps of a core: drafts in, steps that verify them out.

In: a `Drafter`, or the options that name one. Out: a `StepHook` that asks it before each decode
step. Steps do not overlap then, since a draft follows the last token.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llama.engine.core import EngineCore
from llama.engine.hooks import StepHook
from llama.engine.step import Step
from llama.options.engine_options import EngineOptions
from llama.options.speculation.drafter import Drafter
from llama.options.speculation.lookup import Speculator


@dataclass(frozen=True)
class DrafterKind:
    """A drafter that needs no draft model.

    Attributes:
        make: Makes the drafter for a core, as the options ask.
        can_share: Whether it has a use for the texts of other requests, so that `speculate_shared`
            is allowed.
        reads: Whether a folder, which is then the value of `speculate`, holds weights of this kind.
            None: the drafter has no weights, and its name is the value.
    """

    make: Callable[[EngineOptions, EngineCore], Drafter]
    can_share: bool = False
    reads: Callable[[str], bool] | None = None


def _look_up(options: EngineOptions, core: EngineCore) -> Drafter:
    parallel = core.runner.model.parallel
    return Speculator(options.speculate_tokens, parallel, options.speculate_shared)


DRAFTERS = {"lookup": DrafterKind(_look_up, can_share=True)}


def kind_of(speculate: str | None) -> DrafterKind | None:
    """Return the kind of drafter that a value of `speculate` is; None for a draft model."""
    for name, kind in DRAFTERS.items():
        if speculate and (speculate == name if kind.reads is None else kind.reads(speculate)):
            return kind
    return None


class Speculation(StepHook):
    """Adds the drafts of a drafter to decode steps, which then verify them."""

    def __init__(self, drafter: Drafter, core: EngineCore) -> None:
        self.drafter = drafter
        self._core = core
        core.runner.async_scheduling = False

    def before_pack(self, step: Step) -> None:
        """Add drafts to a decode step."""
        if step.is_decode:
            sequences = [item.sequence for item in step.items]
            drafts = self.drafter.draft(sequences, self._core.stats.generate_seconds)
            self._core.scheduler.add_drafts(step, drafts)


def speculate(core: EngineCore, drafter: Drafter | None) -> None:
    """Let a core speculate from now on with a drafter, and with no other one; None: no longer."""
    core.hooks[:] = [hook for hook in core.hooks if not isinstance(hook, Speculation | Drafter)]
    if drafter is not None:
        core.hooks += [drafter, Speculation(drafter, core)]
