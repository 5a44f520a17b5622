"""Sequences of the engine, from a prompt and what is asked for."""

from collections.abc import Sequence
from typing import Any

from llama.engine.request import Constraint, SequenceSpec
from llama.engine.sequence import SequenceState


def state_of(
    tokens: Sequence[int],
    max_len: int,
    seed: int = 0,
    *,
    constraint: Constraint | None = None,
    **fields: Any,
) -> SequenceState:
    """Return a sequence that has not run; fields: the others of `SequenceSpec`."""
    is_constrained = constraint is not None
    spec = SequenceSpec(tuple(tokens), max_len, seed=seed, is_constrained=is_constrained, **fields)
    return SequenceState(spec, constraint)
