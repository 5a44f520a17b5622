"""The other ranks, as one rank sees them: what each said of itself, and which processes ended."""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from llama.ranks import processes


@dataclass
class PeerInfo:
    """A rank: what it says of itself, and what another rank has seen of it since it came."""

    rank: int
    host: str
    pid: int
    machine: str
    group_size: int  # that it was asked to make
    pidfd: int | None = None  # None: on another machine, or the system has none to give
    gone_at: float | None = None  # when its process was seen to have ended
    stopped_s: float = 0.0  # for how long it has been stopped while this rank ran
    has_left: bool = False  # it said so, and its script may go on alone
    beats: int = 0  # of its record in the store
    heard: float = 0.0  # when the beats changed
    state: dict[str, Any] | None = None  # as `stalls.rank_state` has it

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def is_over(self) -> bool:
        """Whether it has left in order, or is gone."""
        return self.has_left or self.gone_at is not None

    def introduction(self) -> list[Any]:
        """The fields that a rank says of itself, in order."""
        return [self.rank, self.host, self.pid, self.machine, self.group_size]


class Peers:
    """This rank, and those of the others that have come. One thread adds, others may read."""

    def __init__(self, rank: int, group_size: int = 1) -> None:
        host, machine = socket.gethostname(), processes.machine_id()
        self.own = PeerInfo(rank, host, os.getpid(), machine, group_size)
        self.all: dict[int, PeerInfo] = {}  # the others

    def add(self, peer: PeerInfo) -> None:
        """A rank has come: it is looked after from now on, if it is on this machine."""
        if peer.machine == self.own.machine:
            peer.pidfd = processes.open_process(peer.pid)
        self.all[peer.rank] = peer

    @property
    def local(self) -> list[PeerInfo]:
        return [peer for peer in list(self.all.values()) if peer.machine == self.own.machine]

    @property
    def are_spread(self) -> bool:
        """Whether some are on another machine."""
        return len(self.local) < len(self.all)

    @property
    def is_first(self) -> bool:
        """Whether no lower rank of this machine has come that can still do anything."""
        lower = [peer for peer in self.local if peer.rank < self.own.rank]
        return all(peer.is_over or processes.is_stopped(peer.pid) for peer in lower)

    def note_ends(self) -> None:
        """Look at the processes of this machine: which have ended since the last look?"""
        for peer in self.local:
            if peer.gone_at is None and processes.has_ended(peer.pid):
                peer.gone_at = time.monotonic()

    def note_stops(self, seconds: float) -> None:
        """Which processes of this machine are stopped? seconds: of this rank since it last looked,
        so that none counts where all were stopped, and go on again."""
        for peer in self.local:
            is_stopped = not peer.is_over and processes.is_suspended(peer.pid)
            peer.stopped_s = peer.stopped_s + seconds if is_stopped else 0.0

    def outlive(self, limit_s: float) -> None:
        """Wait until the others of this machine have ended, but for those that are stopped."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.note_ends()
            left = [peer.pid for peer in self.local if peer.gone_at is None]
            if all(map(processes.is_stopped, left)):
                return
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to all others of this machine that are still there."""
        for peer in self.local:
            if peer.pidfd is not None and peer.gone_at is None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for peer in self.local:
            if peer.pidfd is not None:
                os.close(peer.pidfd)
                peer.pidfd = None
