"""A step that does not end: which rank is it that the others wait for, or which one has left?"""

import sys
from pathlib import Path
from typing import Any

from llama.ranks import processes
from llama.ranks.peers import Peers
from llama.ranks.rendezvous import SILENCE_S

_WAITING = {str(Path(__file__).with_name(name)) for name in ("collectives.py", "groups.py")}


def rank_state(thread: int | None, what: str, steps: int) -> dict[str, Any]:
    """The state of this rank: what it waits for others in ("": nothing), and since which step.
    `waits` tells a rank that waits inside a collective from one that computes, or is stuck."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    waits = False
    while frame is not None:
        waits = waits or frame.f_code.co_filename in _WAITING
        frame = frame.f_back
    return {"what": what, "waits": waits, "steps": steps}


def find_left_early(peers: Peers, group: range) -> str:
    """What to say where a rank of the group has left in order, else nothing."""
    for rank in group:
        peer = peers.all.get(rank)
        if peer is not None and peer.has_left:
            return f"the script of {peer.name} ended while the others were still working"
    return ""


def find_stalled_rank(
    peers: Peers, group: range, own: dict[str, Any], overdue: float, read_at: float
) -> str | None:
    """Who is elsewhere while others wait, and what it does: "rank 1 on HOST is stopped ...".
    overdue: when this rank's wait reached its limit; only what was heard after it counts. read_at:
    when the store was last read. None where all are in the same place, as one may be slow; a rank
    of another machine that says nothing is left to the limit of its silence."""
    here = [peer for peer in peers.local if not peer.is_over]
    for peer in here:
        if processes.is_stopped(peer.pid):
            return f"{peer.name} is stopped (by SIGSTOP or a debugger)"
    silent = [peer for peer in here if peer.heard < overdue]
    if silent:
        return f"{silent[0].name} does not respond" if read_at > overdue + SILENCE_S else None
    heard = [p for p in peers.all.values() if p.rank in group and p.heard > overdue and p.state]
    states = {peer.rank: peer.state or {} for peer in heard} | {peers.own.rank: own}
    names = {peers.own.rank: peers.own.name} | {peer.rank: peer.name for peer in heard}
    for rank, state in sorted(states.items()):
        if not state["what"]:
            return f"{names[rank]} is not in a step, but runs other code"
    most = max(state["steps"] for state in states.values())
    for rank, state in sorted(states.items()):
        if state["steps"] < most:
            return f"{names[rank]} is behind the others, in step {state['steps']} of {most}"
    if len({state["waits"] for state in states.values()}) > 1:
        rank = min(rank for rank, state in states.items() if not state["waits"])
        return f"{names[rank]} is in the step, but does not come to what the others wait for"
    return None
