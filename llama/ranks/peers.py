"""The other ranks as one rank sees them: their records, and the state of local processes.

In: records from torch's store (`rendezvous`), and what /proc reports. Out: which ranks have left,
ended or stopped. It must not know why a job fails.
"""

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
    """A rank: its own record, and what another rank has observed of it.

    Attributes:
        rank: its global rank.
        host: the name of its host.
        pid: its process id.
        machine: see `processes.machine_id`.
        group_size: the size of the model-parallel groups that it was asked for.
        gpu: the id of its GPU; empty where it has none, or may share it.
        stages: the number of pipeline stages that it was asked for.
        pidfd: a pidfd of its process; None on another machine, or if the system has none.
        gone_at: when its process was seen to have ended.
        stopped_s: how long it has been stopped while this rank ran.
        has_left: it has left in order; its script may continue alone.
        beats: the heartbeat count of its record in the store.
        heard: when the heartbeat count last changed.
        state: see `stalls.rank_state`.
    """

    rank: int
    host: str
    pid: int
    machine: str
    group_size: int
    gpu: str = ""
    stages: int = 1
    pidfd: int | None = None
    gone_at: float | None = None
    stopped_s: float = 0.0
    has_left: bool = False
    beats: int = 0
    heard: float = 0.0
    state: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Name of the rank in messages."""
        return f"rank {self.rank}{self.stage_name} on {self.host}"

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers that all ranks of a job must have been asked for."""
        return self.stages, self.group_size

    @property
    def stage_name(self) -> str:
        """The pipeline stage of the rank in messages; empty without a pipeline."""
        if self.stages == 1:
            return ""
        stage = self.stages - 1 - self.rank // self.group_size % self.stages
        return f" (stage {stage} of {self.stages})"

    @property
    def is_over(self) -> bool:
        """Whether the rank has left in order, or its process has ended."""
        return self.has_left or self.gone_at is not None

    def introduction(self) -> list[Any]:
        """Return the fields that a rank publishes of itself, in the order of the constructor."""
        asked = [self.group_size, self.gpu, self.stages]
        return [self.rank, self.host, self.pid, self.machine, *asked]


class Peers:
    """This rank, and the other ranks that have arrived.

    One thread adds ranks; other threads may read.
    """

    def __init__(self, rank: int, group_size: int = 1, gpu: str = "", stages: int = 1) -> None:
        host = socket.gethostname()
        machine = processes.machine_id()
        self.own = PeerInfo(rank, host, os.getpid(), machine, group_size, gpu, stages)
        self.all: dict[int, PeerInfo] = {}  # the other ranks

    def add(self, peer: PeerInfo) -> None:
        """Add a rank that has arrived; a rank on this machine is observed from now on."""
        if peer.machine == self.own.machine:
            peer.pidfd = processes.open_process(peer.pid)
        self.all[peer.rank] = peer

    @property
    def in_order(self) -> list[PeerInfo]:
        """All ranks that have arrived, this one among them, by rank."""
        return sorted([self.own, *self.all.values()], key=lambda peer: peer.rank)

    @property
    def local(self) -> list[PeerInfo]:
        """The other ranks of this machine."""
        return [peer for peer in list(self.all.values()) if peer.machine == self.own.machine]

    @property
    def are_spread(self) -> bool:
        """Whether some ranks are on another machine."""
        return len(self.local) < len(self.all)

    @property
    def awaits_remote(self) -> bool:
        """Whether a rank of another machine may still work with this one."""
        remote = [p for p in list(self.all.values()) if p.machine != self.own.machine]
        return not all(peer.has_left for peer in remote)

    @property
    def is_first(self) -> bool:
        """Whether no lower rank of this machine can still act."""
        lower = [peer for peer in self.local if peer.rank < self.own.rank]
        return all(peer.is_over or processes.is_stopped(peer.pid) for peer in lower)

    def note_ends(self) -> None:
        """Record which processes of this machine have ended."""
        for peer in self.local:
            if peer.gone_at is None and processes.has_ended(peer.pid):
                peer.gone_at = time.monotonic()

    def note_stops(self, seconds: float) -> None:
        """Record which processes of this machine are stopped.

        Args:
            seconds: how long this rank has run since the last call. A rank that was stopped
                together with this one therefore does not count as stopped.
        """
        for peer in self.local:
            is_stopped = not peer.is_over and processes.is_suspended(peer.pid)
            peer.stopped_s = peer.stopped_s + seconds if is_stopped else 0.0

    def outlive(self, limit_s: float) -> None:
        """Wait until the other processes of this machine have ended or are stopped."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.note_ends()
            remaining = [peer.pid for peer in self.local if peer.gone_at is None]
            if all(map(processes.is_stopped, remaining)):
                return
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL to the other processes of this machine that still exist."""
        for peer in self.local:
            if peer.pidfd is not None and peer.gone_at is None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfds."""
        for peer in self.local:
            if peer.pidfd is not None:
                os.close(peer.pidfd)
                peer.pidfd = None
