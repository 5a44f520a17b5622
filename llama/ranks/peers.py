"""The ranks of this machine, as one rank sees them: their processes, and short messages.

In: what each rank says of itself when the groups are made. Out: which processes ended, and what was
said before. Messages are datagrams on unix sockets with abstract names: they arrive at once, also
when their sender ends in the next moment, and leave no file. The kernel names the sender.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llama.ranks import processes

_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred, unix(7)


@dataclass
class Peer:
    """Another rank. Without a pidfd it is on another machine, or gone when it was looked for."""

    rank: int
    host: str
    pid: int
    machine: str
    address: bytes
    pidfd: int | None = None
    has_left: bool = False  # it said so, and its script may go on alone
    is_gone: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def ended_early(self) -> str:
        return f"the script of {self.name} ended while the others were still working"


@dataclass
class Peers:
    """All other ranks; those of this machine can be heard and seen."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    all: dict[int, Peer] = field(default_factory=dict)
    token: str = ""  # of this job: rank 0's

    def __post_init__(self) -> None:
        self.machine = processes.machine_id()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind("")  # the kernel chooses an abstract name
        self._claim: socket.socket | None = None

    def introduction(self) -> bytes:
        """What every rank is told of this one, as JSON; of rank 0 also the token of the job."""
        own = [self.host, os.getpid(), self.machine, self.socket.getsockname().hex()]
        return json.dumps([*own, os.urandom(8).hex()]).encode()

    def meet(self, introductions: list[bytes]) -> None:
        """Learn of all ranks, in their order, from what each said."""
        for rank, text in enumerate(introductions):
            host, pid, machine, address, token = json.loads(text)
            self.token = self.token or token
            if rank == self.rank:
                continue
            peer = Peer(rank, host, pid, machine, bytes.fromhex(address))
            self.all[rank] = peer
            if machine == self.machine:
                peer.pidfd = processes.open_process(pid)
                peer.is_gone = peer.pidfd is None

    @property
    def local(self) -> list[Peer]:
        return [peer for peer in self.all.values() if peer.machine == self.machine]

    def tell(self, **message: Any) -> None:
        """Send a message to every rank of this machine. One that cannot be reached is left out."""
        data = json.dumps(message).encode()
        for peer in self.local:
            with contextlib.suppress(OSError):
                self.socket.sendto(data, peer.address)

    def read(self) -> list[tuple[Peer, dict[str, Any]]]:
        """The messages that came since the last call, each with its sender."""
        by_pid = {peer.pid: peer for peer in self.local}
        found: list[tuple[Peer, dict[str, Any]]] = []
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

    def newly_gone(self) -> list[Peer]:
        """Peers whose process ended since the last call."""
        watched = [p for p in self.local if p.pidfd is not None and not p.is_gone]
        readable = select.poll()
        for peer in watched:
            readable.register(peer.pidfd or 0, select.POLLIN)
        ended = {fd for fd, _ in readable.poll(0)}
        gone = [peer for peer in watched if peer.pidfd in ended]
        for peer in gone:
            peer.is_gone = True
        return gone

    def claim(self) -> bool:
        """Whether this rank is the first of its machine to ask: the one that speaks for all.

        A name can be bound once; it is free again when its owner ends, or calls `unclaim`.
        """
        if self._claim is None:
            mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                mine.bind(f"\0llama-{self.token}-speaks")
            except OSError:
                mine.close()
                return False
            self._claim = mine
        return True

    def unclaim(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL to these ranks, if they are on this machine and still there."""
        for peer in self.local:
            if peer.pidfd is not None and not peer.is_gone and peer.rank in set(ranks):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.unclaim()
        self.socket.close()
        for peer in self.local:
            if peer.pidfd is not None:
                os.close(peer.pidfd)
                peer.pidfd = None
