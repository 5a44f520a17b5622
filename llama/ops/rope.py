"""Rotary position embedding (Su et al., 2021) in Meta's layout: neighbours 2i, 2i + 1 are a pair.

In: positions and the rows of queries or keys. Out: the rows turned. Angles are made and applied in
float32. `scale_frequencies` is Llama 3.1's stretch of the context from 8,192 to 131,072 tokens.
"""

import math

import torch
from torch import Tensor

_ORIGINAL_CONTEXT = 8192  # of Llama 3, before it was stretched
_LOW, _HIGH = 1.0, 4.0  # wavelengths over 8192/1 are divided, under 8192/4 kept, between: blended


def scale_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """(D/2) -> (D/2): divide the slow ones by `factor` (8 for Llama 3.1 and 3.3, 32 for 3.2)."""
    turns = _ORIGINAL_CONTEXT * frequencies / (2 * math.pi)  # turns within the original context
    keep = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)


def rope_table(head_dim: int, length: int, theta: float, factor: float | None) -> Tensor:
    """Complex unit numbers (length, D/2): row p turns each pair of a head at position p."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if factor is not None:
        frequencies = scale_frequencies(frequencies, factor)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rope(x: Tensor, turns: Tensor) -> Tensor:
    """x (T, H, D), turns (T, D/2) complex -> (T, H, D) in x's type."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)
