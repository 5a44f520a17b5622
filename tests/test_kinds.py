"""A kind of half layer that the package does not have: all that it needs is in the kind."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from llama import Llama
from llama.checkpoint import table
from llama.checkpoint.table import is_rotated, name_in, rank_shapes, whole_shapes
from llama.model import ModelArgs, plan, transformer
from llama.model.kinds import KINDS, FeedForward, FeedForwardKind, TensorEntry
from llama.model.layers import unfilled
from llama.ops.batch import Batch
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512, "multiple_of": 32,
    "norm_eps": 1e-5,
}  # fmt: skip
GATES = [f"layers.{i}.feed_forward.gate" for i in range(2)]


class Gated(FeedForward):
    """A feed-forward block whose result a gate multiplies, after the sum over the ranks."""

    def __init__(self, kind: FeedForwardKind, dim: int, parallel: Parallel) -> None:
        super().__init__(kind, dim, parallel)
        self.gate = unfilled(dim)


@dataclass(frozen=True)
class GatedKind(FeedForwardKind):
    module: ClassVar[type[FeedForward]] = Gated
    tensors: ClassVar[dict[str, TensorEntry]] = {
        **FeedForwardKind.tensors,
        "gate": TensorEntry("mlp.gate", "ffn_gate_all", "E", None),
    }
    body_name: ClassVar[str | None] = None

    def after_sum(self, module: Any, part: Tensor, batch: Batch) -> Tensor:
        gated: Tensor = part * module.gate.tanh()
        return gated


@pytest.fixture
def gated(monkeypatch):
    """Let every model have the kind, as the lines in `KINDS` and `LayerPlan.of` would."""
    monkeypatch.setattr(plan, "FeedForwardKind", GatedKind)
    monkeypatch.setattr(table, "_OF_LAYERS", table._in_layer((*KINDS, GatedKind)))
    monkeypatch.setitem(transformer._LAYER_FORWARDS, Gated, Gated.forward)


def logits(folder, *, uses_modules: bool) -> Tensor:
    llama = Llama.build(
        str(folder), device="cpu", dtype="fp32", max_seq_len=64, max_batch_size=2, verbose=False
    )
    llama.model.use_modules(uses_modules)
    assert (llama.model.execution_path() is None) == uses_modules
    (states,) = llama.hidden_states([[5, 9, 300, 7]], ["norm"])
    return torch.as_tensor(states["norm"])


def test_a_kind_with_a_gate_loads_and_runs(gated, tmp_path):
    """Its tensors are loaded by name, and its gate scales the sum in both executions."""
    state = random_state(PARAMS)
    found = {}
    for value in (1.0, 0.0):
        gates = {name: torch.full((64,), value) for name in GATES}
        folder = write_meta(tmp_path / str(value), PARAMS, state | gates)
        write_byte_tokenizer(folder)
        found[value] = logits(folder, uses_modules=False)
        assert torch.equal(found[value], logits(folder, uses_modules=True))
    without = dict(state)
    for name in state:
        if ".feed_forward.w2" in name:
            without[name] = torch.zeros_like(state[name])
    folder = write_meta(tmp_path / "none", PARAMS, without | gates)
    write_byte_tokenizer(folder)
    assert torch.equal(found[0.0], logits(folder, uses_modules=False))
    assert not torch.equal(found[0.0], found[1.0])


def test_the_table_has_the_tensors_of_the_kinds(gated):
    """Names, shapes and shares of a rank follow from the entries of the kinds."""
    args = ModelArgs(**PARAMS)
    shapes = whole_shapes(args)
    assert [tuple(shapes[name]) for name in GATES] == [(64,), (64,)]
    assert list(shapes)[-1] == "output.weight" and len(shapes) == 3 + 2 * 10
    assert name_in("hf", GATES[1]) == "model.layers.1.mlp.gate"
    assert name_in("gguf", GATES[1]) == "blk.1.ffn_gate_all"
    assert rank_shapes(args, Placement(size=2, rank=1))[GATES[0]] == (64,)
    assert [name for name in shapes if is_rotated(name) and "layers.0" in name] == [
        "layers.0.attention.wq.weight",
        "layers.0.attention.wk.weight",
    ]
