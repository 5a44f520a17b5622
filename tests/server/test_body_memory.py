"""The memory of bodies that are being received: what one sender holds leaves room for others."""

import contextlib

import pytest

from llama.server.errors import ApiError
from llama.server.exchange import BodyMemory

MIB = 2**20


def _fill(memory: BodyMemory, stack: contextlib.ExitStack, sender: bytes, count: int) -> int:
    """Begin bodies of 8 MiB that never end; return how many were not refused."""
    num_taken = 0
    for _ in range(count):
        data = stack.enter_context(memory.new_body(sender))
        try:
            memory.add(sender, data, bytes(8 * MIB - 1))
        except ApiError as error:
            assert error.status == 503 and error.headers()["Retry-After"]
        else:
            num_taken += 1
    return num_taken


@pytest.mark.parametrize("sender", [b"192.0.2.1", b"tenant"])
def test_the_slow_bodies_of_one_sender_leave_half_to_the_others(sender):
    memory = BodyMemory(8 * MIB, 64 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, sender, 9) == 4
        assert _fill(memory, stack, b"192.0.2.2", 3) == 3
        assert _fill(memory, stack, b"another", 9) == 1  # all together have their limit, too
    assert memory.used == 0 and not memory.used_by


def test_small_bodies_always_come_through():
    memory = BodyMemory(8 * MIB, 64 * MIB)
    with contextlib.ExitStack() as stack:
        _fill(memory, stack, b"a", 9)
        for sender in (b"a", b"b", b""):
            data = stack.enter_context(memory.new_body(sender))
            memory.add(sender, data, bytes(16 * 1024))
            assert len(data) == 16 * 1024


def test_one_body_may_be_as_large_as_its_limit():
    memory = BodyMemory(8 * MIB, 8 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, b"a", 2) == 1
        data = stack.enter_context(memory.new_body(b"a"))
        memory.add(b"a", data, bytes(16 * 1024))


def test_a_sender_of_which_nothing_is_known_has_no_share():
    memory = BodyMemory(8 * MIB, 64 * MIB)
    with contextlib.ExitStack() as stack:
        assert _fill(memory, stack, b"", 9) == 8
