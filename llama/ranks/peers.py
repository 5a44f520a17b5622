"""The other ranks, as one rank sees them: what each said of itself, and short messages.

In: what ranks said of themselves in torch's store. Out: which processes of this machine ended, and
what was said before. Messages are datagrams on unix sockets with abstract names: they arrive at
once, also when their sender ends in the next moment, and leave no file. The kernel names the
sender. Only Linux has these; elsewhere there is no watch, and nobody asks for them.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llama.ranks import processes

_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred, unix(7)


@dataclass
class PeerInfo:
    """A rank: what it says of itself, and what another rank has seen of it since it came.

    Without a pidfd it is on another machine, or the system has none to give.
    """

    rank: int
    host: str
    pid: int
    machine: str
    address: str  # of its socket, in hex
    group_size: int  # that it was asked to make
    pidfd: int | None = None
    has_left: bool = False  # it said so, and its script may go on alone
    is_gone: bool = False
    beats: int = 0  # of its record in the store
    heard: float = 0.0  # when the beats changed
    state: dict[str, Any] | None = None  # as `stalls.rank_state` has it, if it is told

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def introduction(self) -> list[Any]:
        """The fields that a rank says of itself, in order."""
        return [self.rank, self.host, self.pid, self.machine, self.address, self.group_size]


class Peers:
    """This rank, and those of the others that have come. One thread adds, others may read."""

    def __init__(self, rank: int, group_size: int = 1) -> None:
        address = ""
        if sys.platform == "linux":
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.socket.bind("")  # the kernel chooses an abstract name
            address = self.socket.getsockname().hex()
        host, machine = socket.gethostname(), processes.machine_id()
        self.own = PeerInfo(rank, host, os.getpid(), machine, address, group_size)
        self.all: dict[int, PeerInfo] = {}  # the others
        self.token = ""  # of this job, once the store is reached: the same on all ranks
        self._reporter: socket.socket | None = None

    def add(self, peer: PeerInfo) -> None:
        """A rank has come: it is looked after from now on, if it is on this machine."""
        if peer.machine == self.own.machine:
            peer.pidfd = processes.open_process(peer.pid)
        self.all[peer.rank] = peer

    @property
    def local(self) -> list[PeerInfo]:
        return [peer for peer in list(self.all.values()) if peer.machine == self.own.machine]

    @property
    def is_first(self) -> bool:
        """Whether no lower rank of this machine has come that is still there."""
        return all(peer.rank > self.own.rank or peer.is_gone for peer in self.local)

    def tell(self, **message: Any) -> None:
        """Send a message to every rank of this machine. One that cannot be reached is left out."""
        data = json.dumps(message).encode()
        for peer in self.local:
            with contextlib.suppress(OSError):
                self.socket.sendto(data, bytes.fromhex(peer.address))

    def read(self) -> list[tuple[PeerInfo, dict[str, Any]]]:
        """The messages that came since the last call, each with its sender."""
        by_pid = {peer.pid: peer for peer in self.local}
        found: list[tuple[PeerInfo, dict[str, Any]]] = []
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(_MESSAGE_BYTES, 64)
            except OSError:
                return found
            for level, kind, value in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, uid, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                    if pid in by_pid and uid == os.getuid():
                        found.append((by_pid[pid], json.loads(data)))

    def newly_gone(self) -> list[PeerInfo]:
        """Peers whose process ended since the last call."""
        looked_at = [peer for peer in self.local if not peer.is_gone]
        readable = select.poll()
        for peer in looked_at:
            if peer.pidfd is not None:
                readable.register(peer.pidfd, select.POLLIN)
        ended = {fd for fd, _ in readable.poll(0)}
        gone = [
            peer
            for peer in looked_at
            if (peer.pidfd in ended if peer.pidfd else not processes.is_there(peer.pid))
        ]
        for peer in gone:
            peer.is_gone = True
        return gone

    def elect_reporter(self) -> bool:
        """Whether this rank is the first of its machine to ask: the one that says what is wrong.

        A name can be bound once; it is free again when its owner ends, or calls `resign`. Where the
        store was never reached, it is the first rank of each torchrun.
        """
        if not self.token:
            return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK") == "0"
        if self._reporter is None:
            mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                mine.bind(f"\0llama-{self.token}-reports")
            except OSError:
                mine.close()
                return False
            self._reporter = mine
        return True

    def resign(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL to these ranks, if they are on this machine and still there."""
        for peer in self.local:
            if peer.pidfd is not None and not peer.is_gone and peer.rank in set(ranks):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.resign()
        self.socket.close()
        for peer in self.local:
            if peer.pidfd is not None:
                os.close(peer.pidfd)
                peer.pidfd = None
