"""Seeds that are derived from others."""

import hashlib


def derived_seed(seed: int, number: int, *, of: str = "place") -> int:
    """Return `seed` itself for number 0, else 63 bits of a SHA-256 hash of seed and number.

    Args:
        seed: The seed that others are derived from.
        number: The index of a prompt in its call or of an answer in its request, or the number of a
            call without a seed.
        of: "place" for an index, "call" for a call. The texts are hashed: another text would
            change the answers of every seed.
    """
    if number == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {of} {number}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
