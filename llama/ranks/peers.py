"""The other ranks as one rank sees them: their records, and the state of local processes.

In: records from torch's store (`rendezvous`), and what /proc reports of the processes that the
launcher of this rank has started, also before they arrive. Out: which ranks have left, ended or
stopped. It must not know why a job fails.
"""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from llama.ranks import processes
from llama.ranks.launch import LAUNCHER, agent
from llama.ranks.placement import stage_of


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
        status: its wait status then; None if it is unknown.
        stopped_s: how long it has been stopped while this rank ran.
        has_left: it has left in order; its script may continue alone.
        beats: the heartbeat count of its record in the store.
        heard: when the heartbeat count last changed.
        state: what it waits in (an empty text: nothing), the steps that it has begun, and whether
            it is inside of a collective.
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
    status: int | None = None
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
        stage = stage_of(self.rank, self.group_size, self.stages)
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
    """This rank, and the others that have arrived or that run here.

    One thread adds ranks that arrive, and another one those that run here. Any thread may read.

    Attributes:
        own: this rank.
        all: the other ranks that have arrived.
        launcher: the process that has started the ranks here; 0 without one.
        awaited: the ranks that torchrun has started here, until they arrive.
        sees_started: whether these can be found: this rank is among the children of torchrun.
    """

    def __init__(self, rank: int, group_size: int = 1, gpu: str = "", stages: int = 1) -> None:
        host = socket.gethostname()
        machine = processes.machine_id()
        self.own = PeerInfo(rank, host, os.getpid(), machine, group_size, gpu, stages)
        self.all: dict[int, PeerInfo] = {}
        self.awaited: dict[int, PeerInfo] = {}
        self.sees_started = False
        self.launcher = agent()

    def add(self, peer: PeerInfo) -> None:
        """Add a rank that has arrived; a rank on this machine is observed from now on."""
        if peer.machine == self.own.machine:
            peer.pidfd = processes.open_process(peer.pid)
        self.all[peer.rank] = peer

    def look_for_awaited(self) -> None:
        """Observe the ranks that torchrun has started here and that have not arrived yet.

        (`llama --ranks` itself observes those that it has started.)
        """
        if not self.launcher or LAUNCHER in os.environ:
            return
        own = self.own
        started = processes.ranks_started_by(self.launcher)
        self.sees_started |= own.rank in started
        for rank, pid in started.items():
            if rank != own.rank and rank not in self.all and rank not in self.awaited:
                peer = PeerInfo(rank, own.host, pid, own.machine, own.group_size, stages=own.stages)
                peer.pidfd = processes.open_process(pid)
                self.awaited[rank] = peer

    @property
    def in_order(self) -> list[PeerInfo]:
        """All ranks that have arrived, this one among them, by rank."""
        return sorted([self.own, *self.all.values()], key=lambda peer: peer.rank)

    @property
    def local(self) -> list[PeerInfo]:
        """The other ranks of this machine, those that have not arrived yet among them."""
        awaited = [p for p in list(self.awaited.values()) if p.rank not in self.all]
        arrived = [p for p in list(self.all.values()) if p.machine == self.own.machine]
        return arrived + awaited

    @property
    def are_spread(self) -> bool:
        """Whether some ranks are on another machine."""
        return any(peer.machine != self.own.machine for peer in list(self.all.values()))

    @property
    def is_first(self) -> bool:
        """Whether no lower rank of this machine can still act, as far as this rank can see."""
        if self.launcher and not self.sees_started and not self.all:  # it can see none
            return os.environ.get("LOCAL_RANK", "0") == "0"
        lower = [peer for peer in self.local if peer.rank < self.own.rank]
        return all(peer.is_over or processes.is_stopped(peer.pid) for peer in lower)

    def note_ends(self) -> None:
        """Record which processes of this machine have ended."""
        for peer in self.local:
            if peer.gone_at is None and processes.has_ended(peer.pid):
                peer.status = processes.wait_status(peer.pid)
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

    def kill(self, *, stopped_only: bool = False) -> None:
        """Send SIGKILL to the other processes of this machine that still exist.

        Args:
            stopped_only: spare those that run: torchrun ends them, but would wait 30 s for these.
        """
        for peer in self.local:
            is_wanted = peer.stopped_s > 0 or not stopped_only
            if is_wanted and peer.pidfd is not None and peer.gone_at is None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfds."""
        for peer in [*self.all.values(), *self.awaited.values()]:
            if peer.pidfd is not None:
                os.close(peer.pidfd)
                peer.pidfd = None
