"""Rotary position embedding (Su et al., 2021) in Meta's layout: columns 2i and 2i + 1 are a pair.

In: positions and the rows of queries, keys and values. Out: the rotated rows, with keys and values
in their slots. Angles are computed and applied in float32. `scale_frequencies` is Llama 3.1's RoPE
scaling, which extends the context from 8,192 to 131,072 tokens, and `Yarn` that of fine-tunes.
Requests and kernels must not be known here.

Shapes: T tokens, H query heads, K kv heads, D head dim, P pages, S slots per page.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.kv_cache import format_of

ORIGINAL_CONTEXT = 8192  # the context of Llama 3, before scaling
# The turns per original context between which Llama 3.1 blends.
LOW_TURNS = 1.0
HIGH_TURNS = 4.0


def turns_of(frequencies: Tensor, context: int) -> Tensor:
    """Return how often the pairs with these frequencies turn in a context."""
    return context * frequencies / (2 * math.pi)


def scale_frequencies(
    frequencies: Tensor,
    factor: float,
    original_context: int = ORIGINAL_CONTEXT,
    low_turns: float = LOW_TURNS,
    high_turns: float = HIGH_TURNS,
) -> Tensor:
    """Return frequencies (D/2) of which the slow ones are divided by a factor.

    Args:
        frequencies: The frequencies (D/2).
        factor: 8 for Llama 3.1 and 3.3, 32 for Llama 3.2.
        original_context: The context of the model before scaling, in tokens.
        low_turns: Frequencies of fewer turns per original context are divided by the factor.
        high_turns: Those of more turns are kept, and those between are blended.
    """
    keep = (turns_of(frequencies, original_context) - low_turns) / (high_turns - low_turns)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)


class Yarn(NamedTuple):
    """YaRN (Peng et al., 2023): fast pairs keep their frequency, slow ones are divided by a factor.

    Attributes:
        factor: The factor.
        beta_fast: The turns per original context of a pair at which the blend begins.
        beta_slow: The turns, fewer, at which it ends.
        truncate: Whether both ends are moved outwards to a whole pair.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def scale(self, frequencies: Tensor, theta: float, original_context: int) -> Tensor:
        """Return scaled frequencies (D/2).

        Args:
            frequencies: The frequencies (D/2).
            theta: Their base, more than 1.
            original_context: The context of the model before scaling, in tokens.
        """
        num_pairs = len(frequencies)
        ends = [
            num_pairs * math.log(original_context / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first = max(ends[0], 0)
        last = min(ends[1], 2 * num_pairs - 1)
        width = last - first or 0.001
        blend = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
        return frequencies * (1 - blend) + frequencies / self.factor * blend


class RopeScaling(NamedTuple):
    """The scaling of the frequencies, and of the rotated heads. By default nothing is scaled.

    Attributes:
        factor: The factor of `scale_frequencies`; None for frequencies that are not scaled so.
        original_context: The context before that scaling or YaRN's, in tokens.
        linear_factor: What all frequencies are divided by (Chen et al., 2023).
        yarn: YaRN's scaling; None for frequencies that are not scaled so.
        magnitude: What queries and keys are multiplied by.
        low_turns: The lower bound of `scale_frequencies`.
        high_turns: The upper bound.
    """

    factor: float | None = None
    original_context: int = ORIGINAL_CONTEXT
    linear_factor: float = 1.0
    yarn: Yarn | None = None
    magnitude: float = 1.0
    low_turns: float = LOW_TURNS
    high_turns: float = HIGH_TURNS


UNSCALED = RopeScaling()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling = UNSCALED) -> Tensor:
    """Return by which angle each pair of a head turns per position, (D/2) float32.

    Args:
        head_dim: D.
        theta: The base of the frequencies.
        scaling: The scaling.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents / scaling.linear_factor
    if scaling.yarn is not None:
        return scaling.yarn.scale(frequencies, theta, scaling.original_context)
    if scaling.factor is None:
        return frequencies
    return scale_frequencies(
        frequencies,
        scaling.factor,
        scaling.original_context,
        scaling.low_turns,
        scaling.high_turns,
    )


def precompute_freqs_cis(
    head_dim: int, length: int, theta: float, scaling: RopeScaling = UNSCALED
) -> Tensor:
    """Return the rotation of each pair at each position, as complex numbers.

    Args:
        head_dim: D.
        length: The number of positions.
        theta: The base of the frequencies.
        scaling: The scaling, whose magnitude the numbers have.

    Returns:
        (length, D/2) complex64.
    """
    frequencies = rope_frequencies(head_dim, theta, scaling)
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.full_like(angles, scaling.magnitude), angles)


def apply_rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Return rotated heads (T, H, D) in the type of x.

    Args:
        x: The heads (T, H, D).
        freqs_cis: The rotations (T, D/2), complex.
    """
    wide = x.float()
    pairs = torch.unflatten(wide, -1, (-1, 2))
    complex_pairs = torch.view_as_complex(pairs)
    rotated = complex_pairs * freqs_cis[:, None]
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def rope_and_store(
    qkv: Tensor,
    freqs_cis: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    kernels: Kernels = NO_KERNELS,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, and return the queries.

    Args:
        qkv: Queries, keys and values (T, H + 2K, D).
        freqs_cis: The rotations (T, D/2), complex.
        kv_cache: The cache of one layer (2, P, S, K, W), in any of its formats.
        slots: The slot of each token (T), page * S + offset.
        kernels: The kernels that may run.

    Returns:
        The rotated queries (T, H, D).
    """
    queries: Tensor | None = kernels.run("rope_and_store", qkv, freqs_cis, kv_cache, slots)
    if queries is not None:
        return queries
    n_kv_heads = kv_cache.shape[3]
    n_heads = qkv.shape[1] - 2 * n_kv_heads
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = qkv.split_with_sizes(sizes, dim=1)
    rotated_keys = apply_rope(k, freqs_cis)
    for plane, x in zip(kv_cache, (rotated_keys, v), strict=True):
        format_of(kv_cache).store(plane, slots, x)
    return apply_rope(q, freqs_cis)
