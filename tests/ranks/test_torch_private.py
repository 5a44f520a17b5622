"""The names of torch that are not public: each is there in this torch, and what happens without."""

import importlib
from datetime import timedelta
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


def test_the_sum_of_symmetric_memory_is_an_operator_of_torch():
    assert torch.ops.symm_mem.one_shot_all_reduce_copy_out is not None


def test_what_happens_without(monkeypatch):
    """A process alone takes gloo, a group keeps torch's limit, and the store of groups that the
    program made is asked for in words."""
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
