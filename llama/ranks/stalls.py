"""A step that does not end: which rank is it that the others wait for?

In: what the ranks of one machine answered when they were asked where they are, and what the first
ranks of the others said last. Out: the name of the one at fault, or None where all wait alike.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

from llama.ranks import processes
from llama.ranks.peers import PeerInfo, Peers

_WAITING = {str(Path(__file__).with_name(name)) for name in ("collectives.py", "groups.py")}


def rank_state(thread: int | None, what: str, steps: int) -> dict[str, Any]:
    """The state of this rank: what it waits for others in ("": nothing), and since which step.

    `waits` tells a rank that waits inside a collective from one that computes, or is stuck.
    """
    frame = sys._current_frames().get(thread) if thread is not None else None
    waits = False
    while frame is not None:
        waits = waits or frame.f_code.co_filename in _WAITING
        frame = frame.f_back
    return {"what": what, "waits": waits, "steps": steps}


def stack_of(thread: int | None) -> str:
    """The Python stack of a thread, as in a traceback."""
    frame = sys._current_frames().get(thread or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (ended)"


def find_stalled_rank(
    peers: Peers,
    group: range,
    own: dict[str, Any],
    replies: dict[int, dict[str, Any]],
    remote: dict[int, dict[str, Any]],
) -> str | None:
    """Who is elsewhere while others wait, and what it does: "rank 1 on HOST is stopped ...".

    replies: of the ranks of this machine that answered; remote: of the first of other machines.
    """
    for peer in peers.local:
        if peer.rank not in replies:
            return f"{peer.name} {_silence(peer)}"
    others = replies | remote
    states = {peers.own.rank: own} | {r: state for r, state in others.items() if r in group}
    names = {peers.own.rank: peers.own.name} | {rank: peer.name for rank, peer in peers.all.items()}
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


def _silence(peer: PeerInfo) -> str:
    if processes.is_stopped(peer.pid):
        return "is stopped (by SIGSTOP or a debugger)"
    return "does not respond"
