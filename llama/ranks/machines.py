"""Several machines: what torchrun's variables say of them, before any rank is met.

In: the environment. Out: an error for an interface that is not there, and one warning where a
model-parallel group spans machines. Nothing here sends or waits.
"""

import functools
import math
import os
import socket
import sys


def check_interfaces() -> None:
    """ValueError where GLOO_SOCKET_IFNAME names none: gloo's own error has no remedy."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    present = [name for _, name in socket.if_nameindex()]
    if names is not None and not set(names.split(",")) <= set(present):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names} names no interface of this machine, which has "
            f"{', '.join(present)}: name the one that the machines share, or unset it"
        )


@functools.cache  # said once in a process, however many models it loads
def warn_if_groups_span(size: int, world_size: int) -> None:
    """On rank 0: one line on stderr where groups of `size` ranks do not stay inside machines.

    Groups are consecutive ranks, and torchrun numbers the ranks of each machine in a row, as many
    on each: a group stays inside where its size divides that number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if os.environ.get("RANK") != "0" or not text.isdecimal() or not 0 < int(text) < world_size:
        return
    inside = math.gcd(size, int(text))
    if inside == size:
        return
    remedy = "a larger machine for the weights would save that"
    if inside > 1:
        remedy = f"if the weights fit on {inside} ranks, model_parallel_size={inside} saves that"
    print(
        f"llama: a model-parallel group of {size} ranks spans machines of {text} rank"
        f"{'s' * (text != '1')} each: every layer waits for the network twice in each step; "
        f"{remedy}",
        file=sys.stderr,
        flush=True,
    )
