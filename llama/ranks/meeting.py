"""The meeting of all ranks, before they make groups.

In: torchrun's variables, or groups that the program has made itself, whose store serves. Out: a
`Watch` of ranks that have arrived and agree on their sizes, or an error that says who is missing or
differs.
"""

import functools
import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist

# torch.distributed exports it without declaring it, so type checkers look here.
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from llama.ranks import torch_private
from llama.ranks.launch import STORE_FD
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.watch import LATER_S, Watch
from llama.ranks.world import GroupSizes


def meet_all(sizes: GroupSizes, timeout_s: float, silence_s: float, gpu: str = "") -> Watch:
    """Wait until all ranks have arrived, and watch them from then on.

    Raises:
        RankError: a rank does not arrive.
        ValueError: the ranks differ in the size of their groups, or two have the same GPU.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    peers = Peers(rank, sizes.group, gpu, sizes.stages)
    limit = timedelta(seconds=timeout_s + LATER_S)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    first = rank - rank % sizes.copy
    open_store = functools.partial(_open_store, rank=rank, limit=limit)
    rendezvous = Rendezvous(peers, sizes.world, open_store, address, timeout_s, silence_s)
    watch = Watch(peers, range(first, first + sizes.copy), rendezvous)
    watch.meet()
    if problem := _mismatch(peers.in_order, rank):
        watch.stop()
        raise ValueError(problem)
    return watch


def _mismatch(peers: list[PeerInfo], rank: int) -> str:
    """Return what the ranks that have arrived cannot agree on; an empty text for nothing."""
    own = next(peer for peer in peers if peer.rank == rank)
    other = next((peer for peer in peers if peer.sizes != own.sizes), None)
    if other is not None:
        low, high = sorted([own, other], key=lambda peer: peer.rank)
        name = "model_parallel_size" if own.stages == other.stages else "pipeline_parallel_size"
        values = [x.group_size if own.stages == other.stages else x.stages for x in (low, high)]
        return (
            f"{name} differs: it is {values[0]} on rank {low.rank}, and {values[1]} on rank "
            f"{high.rank} (this is rank {rank}). Give every rank the same"
        )
    rank_of: dict[str, int] = {}
    for peer in peers:
        if peer.gpu and rank_of.setdefault(peer.gpu, peer.rank) != peer.rank:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            return (
                f"ranks {rank_of[peer.gpu]} and {peer.rank} have the same GPU, which nccl refuses "
                f"(CUDA_VISIBLE_DEVICES={visible} on rank {rank}): show the ranks of a machine all "
                "of its GPUs, of which each takes its own, or show each rank another one"
            )
    return ""


def _open_store(rendezvous: Rendezvous, rank: int, limit: timedelta) -> Store:
    """Return the store where the ranks meet.

    It is the store of groups that the program has made, else the one that torchrun's variables
    name: torchrun's own, or that of rank 0. With --max-restarts torchrun keeps its store, which
    then has the addresses of ranks that have ended (pytorch issue 135712), so each start uses keys
    of its own. This works on one machine only, as agents of several machines count their restarts
    separately.
    """
    if dist.is_initialized():
        return torch_private.default_store()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_ours = rank == 0 and not is_agents
    if not is_ours:
        rendezvous.wait_for_listener((host, port), is_agents)
    fd = _listener(host, port) if is_ours else None
    store: Store = TCPStore(
        host,
        port,
        is_master=is_ours,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=fd,
    )
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if count != "0" and on_one_machine:
        store = PrefixStore(f"restart-{count}", store)
    return store


def _listener(host: str, port: int) -> int | None:
    """Return a listening socket for the store of rank 0, or None where torch shall open one.

    torch would listen for IPv6 and IPv4 in one socket. Its store asks for the name of each client
    before it serves the next request, and the address of a client of IPv4 in such a socket is in no
    hosts file: a DNS server that is slow or silent would keep all ranks from meeting.
    """
    if fd := os.environ.pop(STORE_FD, ""):
        return int(fd)
    try:
        address = ipaddress.IPv4Address(host)
        listener = socket.create_server((host if address.is_loopback else "", port))
    except (ValueError, OSError):  # a name; or a port in use, which torch shares or reports
        return None
    return listener.detach()
