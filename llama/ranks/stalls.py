"""Finds the rank that others wait for, when a step does not end.

In: the states of the ranks, from their records in torch's store, and local processes. Out: the text
of a message that names the rank. It must not know how a job ends.
"""

import faulthandler
import re
import tempfile
from pathlib import Path
from typing import Any

from llama.ranks import processes
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import SILENCE_S

# The lines of faulthandler: a thread, then its frames.
_THREAD_LINE = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_COLLECTIVES = tuple(
    f'File "{Path(__file__).with_name(name)}"'.encode("ascii", "backslashreplace").decode()
    for name in ("collectives.py", "groups.py", "stage_link.py")
)


def rank_state(thread: int | None, activity: str, steps: int) -> dict[str, Any]:
    """Return the state of this rank, which it publishes in the store.

    Args:
        thread: the thread that waits for other ranks, if there is one.
        activity: what it waits in; empty if this rank waits for nobody.
        steps: the number of steps begun.

    Returns:
        the activity, the steps, and whether the rank is inside of a collective: this distinguishes
        a rank that waits from one that computes or is stuck.
    """
    in_collective = thread is not None and _is_in_collective(thread)
    return {"activity": activity, "in_collective": in_collective, "steps": steps}


def _is_in_collective(thread: int) -> bool:
    """Return whether a thread, which may be running, is inside of a collective.

    A thread whose place is unknown counts as inside, so that no rank is named without a reason.

    faulthandler writes where all threads are and makes no frame objects. Walking along `f_back`
    makes them, which is not safe for a thread that runs: a garbage collection may begin meanwhile,
    and a destructor may release the GIL, as those of tensors do. Then the thread returns from its
    function, and the frame object describes memory that has another use (CPython 3.11 crashes).
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # there is no folder for temporary files
        return True
    is_known = is_asked = False
    for line in lines:
        if header := _THREAD_LINE.match(line):
            is_asked = int(header[1], 16) == thread
            is_known = is_known or is_asked
        elif is_asked and line.strip().startswith(_COLLECTIVES):
            return True
    return not is_known  # faulthandler writes at most 100 threads


def find_left_early(peers: Peers, group: range) -> str:
    """Return a message if a rank of the group has left in order, else an empty text."""
    for rank in group:
        peer = peers.all.get(rank)
        if peer is not None and peer.has_left:
            return f"the script of {peer.name} ended while the others were still working"
    return ""


def find_stalled_rank(
    peers: Peers, group: range, own: dict[str, Any], overdue: float, read_at: float
) -> str | None:
    """Return which rank is elsewhere while others wait, such as "rank 1 on HOST is stopped ...".

    Args:
        peers: the ranks of the job.
        group: the ranks that make steps together.
        own: the state of this rank.
        overdue: when the wait of this rank reached its limit; only later records count.
        read_at: when the store was last read.

    Returns:
        None if all ranks are at the same point, as one of them may be slow. A silent rank of
        another machine is left to the limit of its silence.
    """
    local = [peer for peer in peers.local if not peer.is_over]
    for peer in local:
        if processes.is_stopped(peer.pid):
            return f"{peer.name} is stopped (by SIGSTOP or a debugger)"
    silent = [peer for peer in local if peer.heard < overdue]
    if silent:
        return f"{silent[0].name} does not respond" if read_at > overdue + SILENCE_S else None
    heard = [p for p in peers.all.values() if p.rank in group and p.heard > overdue and p.state]
    return _find_behind([(peers.own, own), *((peer, peer.state or {}) for peer in heard)])


def _find_behind(states: list[tuple[PeerInfo, dict[str, Any]]]) -> str | None:
    """Return the lowest rank whose state is behind those of the others."""
    states = sorted(states, key=lambda entry: entry[0].rank)
    max_steps = max(state["steps"] for _, state in states)
    for peer, state in states:
        # A stage of a pipeline can have finished its step while others are still in theirs.
        is_early = peer.stages > 1 and state["steps"] == max_steps
        if not state["activity"] and not is_early:
            return f"{peer.name} is not in a step, but runs other code"
    states = [(peer, state) for peer, state in states if state["activity"]]
    for peer, state in states:
        if state["steps"] < max_steps:
            return f"{peer.name} is behind the others, in step {state['steps']} of {max_steps}"
    if all(state["in_collective"] for _, state in states):
        return None
    if not any(state["in_collective"] for _, state in states):
        return None
    peer = next(peer for peer, state in states if not state["in_collective"])
    return f"{peer.name} is in the step, but does not reach the collective that the others wait in"
