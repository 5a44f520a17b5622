"""The whole-number arithmetic of sampling, which torch and Triton both run: int64 in, int64 out.

Operators and literals alone, as Triton compiles these very functions (triton/sample_rows.py). What
is said to wrap keeps its low 64 bits.
"""

from torch import Tensor


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A number per (seed, position), from a counter: no state, the same on every device.

    seeds (B) int64 from 0, positions (B) int64 below 2**32 -> (B) int64 from 0 to 2**62, evenly.
    Philox2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the
    counter (position, seed's high word), the key its low word; of each of the two words that it
    gives, 31 bits. The product may wrap.
    """
    left, right, key = positions, seeds >> 32 & 2**32 - 1, seeds & 2**32 - 1
    for _ in range(10):
        product = left * 0xD256D193
        left, right = (product >> 32 ^ key ^ right) & 2**32 - 1, product & 2**32 - 1
        key = key + 0x9E3779B9
    return (left >> 1 << 31) + (right >> 1)


def share(whole: Tensor, part: Tensor) -> Tensor:
    """floor(whole * part / 2**62): whole (B) below 2**60, part (B) up to 2**62."""
    high, low = part >> 31, part & 2**31 - 1
    a, b = whole >> 31, whole & 2**31 - 1
    return high * a + (high * b + low * a + (low * b >> 31) >> 31)


def split_mix(begin: Tensor, n: Tensor) -> Tensor:
    """The n-th number, from 0, of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014), begun at a row's uniform: 64 bits, as int64. It wraps."""
    z = begin + (n + 1) * -0x61C8864680B583EB
    z = (z ^ z >> 30 & 2**34 - 1) * -0x40A7B892E31B1A47
    z = (z ^ z >> 27 & 2**37 - 1) * -0x6B2FB644ECCEEE15
    return z ^ z >> 31 & 2**33 - 1


def exponential(numbers: Tensor, halvings: Tensor) -> Tensor:
    """Numbers of 64 bits -> exponentially distributed ones, above 0, of which log2(e) is 2**-44.

    halvings: the zeros that the low 23 bits begin with, the last of them taken as set. The other
    bits say how much of the last half is left: (-log2(1 - x / 2)) / x by a polynomial of 2**30,
    within 7e-6 of it.
    """
    rest = numbers >> 23 & 2**41 - 1 | 1
    x = rest >> 21
    log = (20484697 * x >> 20) - 15056127
    log = (log * x >> 20) + 39049523
    log = (log * x >> 20) + 60738888
    log = (log * x >> 20) + 193981894
    log = (log * x >> 20) + 774535977
    return (halvings << 44) + (rest * (log >> 10) >> 17)
