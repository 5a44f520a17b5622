"""The race that draws a token, computed by NumPy with an exact logarithm."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GROUP = 256
_Numbers = NDArray[np.uint64]
_Times = NDArray[np.float64]


def split_mix(seed: int, n: ArrayLike) -> _Numbers:
    """Return the n-th numbers, counted from 0, of Vigna's splitmix64.c for a seed."""
    z: Any = np.asarray(n, np.uint64)
    with np.errstate(over="ignore"):  # NumPy warns of scalars whose product wraps
        z = np.uint64(seed) + (z + 1) * 0x9E3779B97F4A7C15
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
        z = (z ^ z >> 27) * 0x94D049BB133111EB
    numbers: _Numbers = z ^ z >> 31
    return numbers


def exponential(numbers: _Numbers) -> _Times:
    """Return exponential variates: the number of halvings, plus a fraction from 23 bits."""
    _, bit_lengths = np.frexp(numbers % 2**23 | 1)
    rest = (numbers >> 23 | 1) / 2**42
    return 23 - bit_lengths - np.log2(1 - rest)


def finishes(uniform: int, tokens: NDArray[Any], weights: NDArray[Any]) -> _Times:
    """Return when tokens of the given weights finish the race."""
    of_groups = split_mix(uniform, tokens // _GROUP + 2**32)
    is_first = (of_groups >> 23) % _GROUP == tokens % _GROUP
    after_first = exponential(split_mix(uniform, tokens))
    times = exponential(of_groups) / _GROUP + np.where(is_first, 0, after_first)
    return times / weights


def winners(entries: Iterable[tuple[int, int]], uniform: int) -> set[int]:
    """Return the ids that win the race with these weights.

    There is more than one where a logarithm is not exact enough to decide.
    """
    ids, weights = np.array([entry for entry in entries if entry[1]], np.int64).T
    times = finishes(uniform, ids, weights)
    return set(ids[times <= times.min() * (1 + 1e-5)].tolist())
