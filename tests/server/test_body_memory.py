"""The memory of bodies and answers: what one sender holds leaves room for others."""

import asyncio
import contextlib

import pytest

from llama.server import memory as memory_module
from llama.server.errors import ApiError
from llama.server.exchange import body_memory
from llama.server.memory import Holding, SharedMemory

MIB = 2**20


def _fill(memory: SharedMemory, stack: contextlib.ExitStack, sender: bytes, count: int) -> int:
    """Begin bodies of 8 MiB that never end; return how many were not refused."""
    num_taken = 0
    for _ in range(count):
        held = stack.enter_context(memory.held(sender))
        try:
            held.grow_to(8 * MIB - 1)
        except ApiError as error:
            assert error.status == 503 and error.headers()["Retry-After"]
        else:
            num_taken += 1
    return num_taken


@pytest.mark.parametrize("sender", [b"192.0.2.1", b"tenant"])
def test_the_slow_bodies_of_one_sender_leave_half_to_the_others(sender):
    memory = body_memory(64 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, sender, 9) == 4
        assert _fill(memory, stack, b"192.0.2.2", 3) == 3
        assert _fill(memory, stack, b"another", 9) == 1  # all together have their limit, too
    assert memory.used == 0 and not memory.used_by


def test_small_bodies_always_come_through():
    memory = body_memory(64 * MIB)
    with contextlib.ExitStack() as stack:
        _fill(memory, stack, b"a", 9)
        for sender in (b"a", b"b", b""):
            held = stack.enter_context(memory.held(sender))
            held.grow_to(16 * 1024)
            assert held.num_bytes == 16 * 1024


def test_one_body_may_be_as_large_as_its_limit():
    memory = body_memory(8 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, b"a", 2) == 1
        stack.enter_context(memory.held(b"a")).grow_to(16 * 1024)


def test_a_sender_of_which_nothing_is_known_has_no_share():
    memory = body_memory(64 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, b"", 9) == 8


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("newcomer", [b"a", b"c"])
def test_slow_bodies_give_way_to_others(monkeypatch, is_slow, newcomer):
    """A body that arrives too slowly ends where others need its memory, and no body that is quick.

    Two senders hold all of it. A third one gets some of either, and a fourth body of the first
    sender some of its own.
    """
    monkeypatch.setattr(memory_module, "SLOW_S", -1.0 if is_slow else 60.0)
    memory = SharedMemory(4 * MIB, 0, "full")
    ended: list[tuple[bytes, int]] = []

    async def arrive(sender: bytes, done: asyncio.Event) -> None:
        with memory.held(sender) as held:
            try:
                async with memory.arriving(held):
                    held.grow_to(MIB)
                    await done.wait()
            except ApiError as error:
                ended.append((sender, error.status))

    async def run() -> None:
        done = asyncio.Event()
        senders = [b"a", b"a", b"b", b"b", newcomer]
        tasks = [asyncio.create_task(arrive(sender, done)) for sender in senders]
        for _ in range(5):
            await asyncio.sleep(0)
        assert memory.used == 4 * MIB
        done.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert len(ended) == 1 and ended[0][1] == 503
    if is_slow:
        assert ended[0][0] == (b"a" if newcomer == b"a" else ended[0][0]) != b"c"
    else:
        assert ended[0][0] == newcomer
    assert memory.used == 0 and not memory.used_by


def test_what_has_arrived_never_gives_way(monkeypatch):
    monkeypatch.setattr(memory_module, "SLOW_S", -1.0)
    memory = SharedMemory(MIB, 0, "full")

    async def run() -> None:
        with memory.held(b"a") as held, memory.held(b"b") as other:
            async with memory.arriving(held):
                held.grow_to(MIB)
            with pytest.raises(ApiError, match="full"):
                other.grow_to(1)
            assert (held.num_bytes, other.num_bytes, memory.used) == (MIB, 0, MIB)

    asyncio.run(run())


def test_a_holding_never_shrinks_until_it_is_given_back():
    memory = SharedMemory(100, 10, "full")
    with memory.held(b"a") as held:
        for size, counted in ((5, 0), (60, 50), (30, 50), (61, 51)):
            held.grow_to(size)
            assert memory.used == memory.used_by[b"a"] == counted
        with pytest.raises(ApiError):
            held.grow_to(111)
        assert memory.used == 51
        assert isinstance(held, Holding)
    assert memory.used == 0


@pytest.mark.parametrize(("num_bytes", "pause_s"), [(8 * MIB, 3.0), (1, 0.5), (MIB // 10, 1.0)])
def test_a_body_counts_as_slow_however_much_of_it_came_at_first(monkeypatch, num_bytes, pause_s):
    """A body that comes at less than 128 KiB/s for two seconds is slow, whatever came at first.

    One that comes at that rate is never slow.
    """
    now = [100.0]
    monkeypatch.setattr(memory_module.time, "monotonic", lambda: now[0])
    memory = body_memory(64 * MIB)
    with memory.held(b"a") as slow, memory.held(b"b") as quick:
        slow.grow_to(num_bytes)
        for _ in range(40):
            assert quick.late_s < 0
            now[0] += pause_s
            quick.grow_to(quick.num_bytes + int(pause_s * 130 * 1024))
            if slow.late_s > 0:
                break
            slow.grow_to(slow.num_bytes + 1)
        else:
            pytest.fail("it is not slow")
        assert now[0] <= 100 + 2 + num_bytes / memory_module.MIN_RATE + 2 * pause_s
        assert num_bytes < MIB or now[0] == 103.0
