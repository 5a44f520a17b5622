"""The private names of torch in use: each exists in this torch, and its absence is handled."""

import importlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama.ranks import torch_private


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
        ("torch.distributed.distributed_c10d", "_get_default_store"),
        ("torch.distributed.distributed_c10d", "_set_pg_timeout"),
        ("torch.distributed", "TCPStore.clone"),
        ("torch.distributed._symmetric_memory", "empty"),
        ("torch.distributed._symmetric_memory", "rendezvous"),
    ],
)
def test_each_is_there(owner, name):
    found: Any = importlib.import_module(owner)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_groups_know_their_gpu():
    assert "bound_device_id" in dir(dist.ProcessGroup)


def test_the_sums_of_symmetric_memory_are_operators_of_torch():
    assert torch.ops.symm_mem.one_shot_all_reduce_out is not None
    assert torch.ops.symm_mem.multimem_all_reduce_ is not None


@pytest.mark.parametrize("multicast", [0, 4096])
def test_sums_are_of_what_lies_in_the_symmetric_memory(monkeypatch, multicast):
    """The values are copied into it first, by an operator of its own."""
    fake: Any = SimpleNamespace(
        one_shot_all_reduce_out=lambda own, how, name, out: out.copy_(own * 3),
        multimem_all_reduce_=lambda own, how, name: own.mul_(2),
        empty=torch.empty,
        rendezvous=lambda buffer, group: SimpleNamespace(multicast_ptr=multicast),
    )
    monkeypatch.setattr(torch.ops, "symm_mem", fake)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    buffer, join = torch_private.symmetric_buffer(64, torch.device("cpu"))
    group: Any = SimpleNamespace(group_name="0")
    small, large = join(group)
    x = torch.ones(4)
    own = buffer.view(torch.float32)[:4].fill_(7)
    small(own, x)
    assert x.tolist() == [3.0] * 4 and (large is not None) == bool(multicast)
    if large is not None:
        large(own, x)
        assert x.tolist() == [6.0] * 4


@pytest.mark.parametrize("gpu", [None, torch.device("cuda", 3)])
def test_groups_on_gloo_split_no_communicator(monkeypatch, gpu):
    """The default group is not bound to its GPU in the block, and is again afterwards."""
    world = SimpleNamespace(bound_device_id=gpu)
    monkeypatch.setattr(dist.distributed_c10d, "GroupMember", SimpleNamespace(WORLD=world))
    with torch_private.without_splits():
        assert world.bound_device_id is None
    assert world.bound_device_id == gpu


def test_what_happens_without(monkeypatch):
    """The absence of private names is handled.

    A single process uses gloo, a group keeps torch's limit, and an error message asks for the store
    of groups that the program made.
    """
    group: Any = object()
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    torch_private.set_timeout(group, timedelta(seconds=1))
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(RuntimeError, match=r"leave out init_process_group, as Llama.build makes"):
        torch_private.default_store()
    monkeypatch.setattr(importlib, "import_module", lambda name: importlib.__import__("no_such"))
    assert not torch_private.register_fake_backend()
    with pytest.raises(ImportError):
        torch_private.symmetric_buffer(16, torch.device("cpu"))
