"""The first and the last of making groups: where the ranks meet, and what went wrong in between.

In: torchrun's variables. Out: torch's store, once every rank has come to it and the watch runs. The
groups themselves are made by groups.py.
"""

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from llama.ranks import torch_private
from llama.ranks.errors import RankError
from llama.ranks.meeting import Meeting
from llama.ranks.watch import current_watch, start_watch

LATER_S = 5.0  # a collective gives up later than the watch, which can say whom it waited for

_meetings = itertools.count()  # of this process; as many on each rank


def meet_all(size: int, world_size: int, timeout_s: float) -> dist.Store:
    """Wait until all ranks have come, and watch them from then on: the store where they met.

    RankError where one does not come, and ValueError where they differ in the size of their groups.
    """
    if current_watch() is not None:  # an earlier call of this process
        return torch_private.default_store()
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    meeting = Meeting(rank, world_size, place, timeout_s)
    if dist.is_initialized():  # by the caller
        store = torch_private.default_store()
    else:
        store = _open_store(meeting, rank, timedelta(seconds=timeout_s + LATER_S))
    number, names = next(_meetings), map(str, itertools.count())

    def exchange(own: bytes) -> list[bytes]:
        return meeting.exchange(store, f"{number}/{next(names)}", own)

    sizes = [int(text) for text in exchange(str(size).encode())]
    if other := next((r for r in range(world_size) if sizes[r] != sizes[0]), None):
        raise ValueError(
            f"model_parallel_size differs: it is {sizes[0]} on rank 0, and {sizes[other]} on rank "
            f"{other} (this is rank {rank}). Give every rank the same"
        )
    if sys.platform == "linux":  # it stands on pidfds; elsewhere gloo's own limits end a job
        first = rank - rank % size
        start_watch(rank, range(first, first + size), exchange, torch_private.clone_store(store))
    meeting.close()
    return store


def _open_store(meeting: Meeting, rank: int, limit: timedelta) -> dist.Store:
    """The store that torchrun's variables name: torchrun's own, or that of rank 0.

    With --max-restarts torchrun keeps its store, in which the addresses and counters of the ranks
    that have ended still are: new ranks would try to reach those (pytorch issue 135712). So each
    start has names of its own. Agents of several machines count their restarts each for itself.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_ours = rank == 0 and not is_agents
    make = functools.partial(
        dist.TCPStore,
        *address,
        is_master=is_ours,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
    )
    store: dist.Store = meeting.open(make, None if is_ours else address, is_agents)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if count != "0" and on_one_machine:
        store = dist.PrefixStore(f"restart-{count}", store)
    return store


@contextlib.contextmanager
def errors_of_groups(timeout_s: float) -> Iterator[None]:
    """While groups are made: the watch's limit, and one line for what torch says of a connection.

    torch's error may only follow from the end of another rank, of which the watch tells.
    """
    watch = current_watch()
    waiting = watch.waiting("the making of the groups", timeout_s) if watch else None
    try:
        with waiting or contextlib.nullcontext():
            yield
    except RankError:
        raise
    except RuntimeError as error:
        if watch is not None:
            watch.wait_for_news(error)
        raise RankError(
            f"the ranks have met, but cannot reach each other ({str(error).splitlines()[0]}): open "
            "the ports that the kernel hands out (net.ipv4.ip_local_port_range) between the "
            "machines, or name the interface that they share by GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME"
        ) from error
