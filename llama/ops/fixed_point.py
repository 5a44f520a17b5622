"""The integer arithmetic of sampling, which both PyTorch and Triton run: int64 in, int64 out.

The functions have operators and literals alone, because Triton compiles them as they are
(triton/sample_rows.py). Where a docstring says that a product wraps, its low 64 bits are kept.
Probabilities and requests must not be known here.
"""

from torch import Tensor


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a uniform number per seed and position, from 0 to 2**62.

    It has no state and is the same on every device. Philox2x32-10 (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011): the counter is (position, high word of the seed), and
    the key is the low word of the seed. 31 bits of each of the two resulting words are taken. The
    product may wrap.

    Args:
        seeds: (B) int64 from 0.
        positions: (B) int64 below 2**32.
    """
    left = positions
    right = (seeds >> 32) & (2**32 - 1)
    key = seeds & (2**32 - 1)
    for _ in range(10):
        product = left * 0xD256D193
        left = ((product >> 32) ^ key ^ right) & (2**32 - 1)
        right = product & (2**32 - 1)
        key = key + 0x9E3779B9
    return ((left >> 1) << 31) + (right >> 1)


def share(whole: Tensor, part: Tensor) -> Tensor:
    """Return floor(whole * part / 2**62).

    Args:
        whole: (B) below 2**60.
        part: (B) up to 2**62.
    """
    part_high = part >> 31
    part_low = part & (2**31 - 1)
    whole_high = whole >> 31
    whole_low = whole & (2**31 - 1)
    low_product = (part_low * whole_low) >> 31
    middle = part_high * whole_low + part_low * whole_high + low_product
    return part_high * whole_high + (middle >> 31)


def split_mix(begin: Tensor, n: Tensor) -> Tensor:
    """Return the n-th number of SplitMix64, counted from 0: 64 bits, as int64. Products wrap.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        begin: The state to start from, a row's uniform.
        n: Which number.
    """
    z = begin + (n + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & (2**33 - 1))


def exponential(bits: Tensor, halvings: Tensor) -> Tensor:
    """Return exponentially distributed integers above 0, of mean log2(e) * 2**44.

    Args:
        bits: 64 random bits each.
        halvings: The number of leading zeros of the low 23 bits, the last of which counts as set.
            The other bits decide how much of the last half is left: (-log2(1 - x / 2)) / x, by a
            polynomial of 2**30 that is within 7e-6 of it.
    """
    rest = ((bits >> 23) & (2**41 - 1)) | 1
    x = rest >> 21
    log = ((20484697 * x) >> 20) - 15056127
    log = ((log * x) >> 20) + 39049523
    log = ((log * x) >> 20) + 60738888
    log = ((log * x) >> 20) + 193981894
    log = ((log * x) >> 20) + 774535977
    return (halvings << 44) + ((rest * (log >> 10)) >> 17)
