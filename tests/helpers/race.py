"""The race that draws a token, computed with Python numbers and an exact logarithm."""

import math
from collections.abc import Iterable

_GROUP = 256


def split_mix(seed: int, n: int) -> int:
    """Return the n-th number, counted from 0, of Vigna's splitmix64.c for a seed."""
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def exponential(number: int) -> float:
    """Return an exponential variate: the number of halvings, plus a fraction from 23 bits."""
    halvings = 23 - (number % 2**23 | 1).bit_length()
    return halvings - math.log2(1 - (number >> 23 | 1) / 2**42)


def finish(uniform: int, token: int, weight: float) -> float:
    of_group = split_mix(uniform, token // _GROUP + 2**32)
    time = exponential(of_group) / _GROUP
    if (of_group >> 23) % _GROUP != token % _GROUP:
        time += exponential(split_mix(uniform, token))
    return time / weight


def winners(entries: Iterable[tuple[int, int]], uniform: int) -> set[int]:
    """Return the ids that win the race with these weights.

    There is more than one where a logarithm is not exact enough to decide.
    """
    times = {i: finish(uniform, i, weight) for i, weight in entries if weight}
    limit = min(times.values()) * (1 + 1e-5)
    return {i for i, time in times.items() if time <= limit}
