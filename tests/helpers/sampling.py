"""A row of logits and a sequence for tests of sampling, and the comparison of distributions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sequences import state_of
from llama.engine.sequence import SequenceState

INF = float("inf")
PROMPT, OUTPUT = [1, 2, 3, 2], [3, 4, 4]
LOGITS = torch.tensor([0.3, 1.5, -0.7, 2.1, 1.1, -2.0, 0.9, 1.9, -0.1, 0.0, 1.2, -3.0])


def sequence(
    prompt: list[int] = PROMPT,
    output: list[int] = OUTPUT,
    *,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    **params,
) -> SequenceState:
    params["logit_bias"] = tuple(params.get("logit_bias", {}).items())
    seq = state_of(prompt, 10**6, seed, stop_ids=frozenset(stop_ids), **params)
    seq.tokens += output
    return seq


def assert_close(values: Tensor, expected: Tensor) -> None:
    """Compare float32 values as torch.testing would, which imports SymPy and more."""
    assert values.shape == expected.shape
    assert values.flatten().tolist() == close_to(expected, rel=1.3e-6, abs=1e-5)


def assert_same(shares: Tensor, probs: Tensor) -> None:
    """Compare the shares of 4,096 draws with the probabilities."""
    assert shares.shape == probs.shape
    assert shares.tolist() == close_to(probs, rel=0, abs=1.01 / 4096)
    assert not shares[probs == 0].any()


def close_to(expected: Tensor, *, rel: float, abs: float) -> Any:
    return pytest.approx(expected.flatten().tolist(), rel=rel, abs=abs)
