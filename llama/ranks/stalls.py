"""Finds the rank that others wait for, when a step does not end.

In: the states of the ranks, from their records in torch's store, and local processes. Out: the text
of a message that names the rank. It must not know how a job ends.
"""

import threading
from typing import Any

from llama.ranks import processes
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import STOPPED_S


class Inside:
    """The threads of this rank that are inside of a block, such as a collective.

    This distinguishes a rank that waits in a collective from one that computes or is stuck.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.discard(threading.get_ident())

    def __contains__(self, thread: object) -> bool:
        return thread in self._threads


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
        return f"{silent[0].name} does not respond" if read_at > overdue + STOPPED_S else None
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
