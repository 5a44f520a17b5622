"""The Transformer as research scripts use it: forward, hooks, parts of it, and state dicts.

The oracle is Meta's own model, hooked and loaded by the same statements.
"""

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import meta as oracle
from helpers.kernels import HAS_KERNELS
from helpers.prompts import prompts_of
from llama import ModelArgs, Transformer
from llama.checkpoint.find import find
from llama.checkpoint.loader import load
from llama.checkpoint.packing import pack_model

TOKENS = torch.tensor(prompts_of([12, 12], seed=4))


@pytest.fixture(scope="module")
def meta():
    oracle.join_a_world_of_one()
    yield oracle
    oracle.leave_the_world()


@pytest.fixture(scope="module")
def ours(checkpoint_dir) -> Transformer:
    folder, _, params = checkpoint_dir
    model = Transformer(ModelArgs(**params, max_seq_len=32, max_batch_size=2))
    load(find(folder), model)
    return model


@pytest.mark.parametrize("written", oracle.MODELS)
def test_the_raw_transformer_keeps_metas_forward(ours, written, checkpoint_dir, meta):
    """The raw transformer keeps Meta's forward.

    forward(tokens, start_pos) takes a batch, a prompt in two parts, and single tokens.
    """
    _, state, params = checkpoint_dir
    theirs = meta.MODELS[written](state, params, max_seq_len=32)
    for start, end in ((0, 5), (5, 10), (10, 11), (11, 12)):
        wanted = theirs.forward(TOKENS[:, start:end], start)
        torch.testing.assert_close(ours(TOKENS[:, start:end], start), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="max_batch_size=2 and max_seq_len=32"):
        ours(TOKENS, 30)


def test_the_forward_runs_with_its_gpu_as_the_current_one(ours, monkeypatch):
    """The forward runs with its GPU as the current one, where Triton launches kernels."""
    now: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        now.append(device)
        yield
        now.pop()

    monkeypatch.setattr("llama.model.transformer.current", current, raising=False)
    seen: list[torch.device] = []
    ends = [ours.layers[0], ours.output]
    handles = [x.register_forward_hook(lambda *_: seen.extend(now)) for x in ends]
    ours(TOKENS[:, :3], 0)
    assert seen == [TOKENS.device] * 2 and not now
    for handle in handles:
        handle.remove()


def activations(model: Any, names: list[str]) -> dict[str, Tensor]:
    """Return the inputs and outputs that hooks on parts of a model see for the tokens."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[f"{name} in"], seen[f"{name} out"] = inputs[0].clone(), output.clone()

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    model.forward(TOKENS, 0)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("written", oracle.MODELS)
def test_hooks_see_what_metas_see(ours, written, checkpoint_dir, meta):
    """Hooks see what Meta's see.

    That is the residual stream after each layer, and the parts within one, as (B, S, E).
    """
    _, state, params = checkpoint_dir
    theirs = meta.MODELS[written](state, params, max_seq_len=32)
    names = [f"layers.{i}" for i in range(params["n_layers"])] + ["norm", "tok_embeddings"]
    names += ["layers.1.attention", "layers.1.feed_forward", "layers.1.ffn_norm"]
    names += ["layers.1.attention.wo", "layers.1.feed_forward.w2"]
    wanted, found = activations(theirs, names), activations(ours, names)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4, msg=name)


def test_a_hook_can_change_what_goes_on(ours):
    """A hook can change the result.

    In activation patching, the stream of one layer is replaced by that of other tokens.
    """
    wanted = activations(ours, ["layers.0"])["layers.0 out"].flip(0)
    handle = ours.layers[0].register_forward_hook(lambda *_: wanted)
    patched = ours(TOKENS, 0)
    handle.remove()
    torch.testing.assert_close(patched, ours(TOKENS.flip(0), 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lens_reads_tensors_of_any_leading_dimensions(ours, dtype):
    """The lens reads tensors of any leading dimensions.

    model.output(model.norm(h)), the logit lens, takes (E), (S, E) and (B, S, E), in h's dtype.
    """
    model = copy.deepcopy(ours).to(dtype)
    if HAS_KERNELS:
        pack_model(model)
    h = torch.randn(2, 5, model.params.dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = model.output(model.norm(h))
    assert whole.dtype == dtype and whole.shape == (2, 5, model.params.vocab_size)
    torch.testing.assert_close(model.output(model.norm(h[0])), whole[0])
    torch.testing.assert_close(model.output(model.norm(h[0, 0])), whole[0, 0])


def test_freqs_cis_are_metas(ours, checkpoint_dir, meta):
    _, state, params = checkpoint_dir
    theirs = meta.model(state, params, max_seq_len=32).freqs_cis
    assert ours.freqs_cis.dtype == theirs.dtype
    torch.testing.assert_close(ours.freqs_cis, theirs[:32])
    assert (ours.vocab_size, ours.n_layers) == (params["vocab_size"], params["n_layers"])


@pytest.mark.parametrize("written", oracle.MODELS)
def test_a_state_dict_has_metas_names_and_weights(ours, written, checkpoint_dir, meta):
    """A state dict has Meta's names and weights, bit for bit, since they are copied."""
    _, state, params = checkpoint_dir
    theirs = meta.MODELS[written](state, params, max_seq_len=32)
    found = ours.state_dict()
    assert found.keys() == theirs.state_dict().keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    theirs.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    theirs.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(ours(TOKENS, 0), theirs.forward(TOKENS, 0), atol=1e-4, rtol=1e-4)
    layer = ours.layers[1].state_dict()
    assert torch.equal(layer["attention.wk.weight"], state["layers.1.attention.wk.weight"])
    layer["attention.wk.weight"].add_(1)  # a view: research code edits weights in this way
    assert not torch.equal(
        ours.layers[1].attention.parts()["wk"], theirs.layers[1].attention.wk.weight
    )
    layer["attention.wk.weight"].copy_(state["layers.1.attention.wk.weight"])


@pytest.mark.parametrize("kind", ["float32", "bf16", "packed", "int8", "tied", "tied packed"])
def test_a_state_dict_loads_into_every_layout(kind, make_checkpoint):
    """A state dict loads into every layout, with the logits of a model built with its weights."""
    if not HAS_KERNELS and kind not in ("float32", "bf16", "tied"):
        pytest.skip("no kernels: nothing is packed")
    folder, _, params = make_checkpoint(seed=31, dim=128)
    args = ModelArgs(**params, max_seq_len=32, max_batch_size=2, tied_output="tied" in kind)
    dtype = torch.float32 if kind in ("float32", "tied") else torch.bfloat16
    filled, other = (Transformer(args, dtype=dtype) for _ in range(2))
    load(find(folder), filled)
    for weight in other.parameters():
        weight.data.zero_()
    if "packed" in kind or kind == "int8":
        for model in (filled, other):
            pack_model(model, quantize="int8" if kind == "int8" else None)
    given = filled.state_dict()
    assert not other(TOKENS, 0).any()
    result = other.load_state_dict(given)
    assert not result.missing_keys and not result.unexpected_keys
    assert (other.output.weight is other.tok_embeddings.weight) == ("tied" in kind)
    assert other.blocks()[0].attention.wqkv.weight.shape == (
        filled.blocks()[0].attention.wqkv.weight.shape
    )
    torch.testing.assert_close(other(TOKENS, 0), filled(TOKENS, 0))
    if kind != "int8":
        assert all(torch.equal(tensor, given[name]) for name, tensor in other.state_dict().items())


def test_a_state_dict_that_does_not_fit_is_named(ours, checkpoint_dir):
    _, state, _ = checkpoint_dir
    name = "layers.0.attention.wq.weight"
    for bad, message in (
        ({key: tensor for key, tensor in state.items() if key != name}, f"Missing.*{name}"),
        (state | {"layers.0.attention.wx.weight": state[name]}, "Unexpected.*attention.wx.weight"),
        (state | {name: state[name][:-1]}, f"{name} has shape .*, the model's is"),
        (state | {"norm.weight": state["norm.weight"][:-1]}, "norm.weight"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            copy.deepcopy(ours).load_state_dict(bad)
    loose = copy.deepcopy(ours)
    result = loose.load_state_dict({name: state[name] + 1}, strict=False)
    assert "layers.0.attention.wk.weight" in result.missing_keys
    parts = loose.layers[0].attention.parts()
    assert torch.equal(parts["wq"], state[name] + 1)
    assert torch.equal(parts["wk"], state["layers.0.attention.wk.weight"])


def test_what_is_not_there_is_answered_with_what_is(ours):
    attention, feed_forward = ours.layers[0].attention, ours.layers[0].feed_forward
    with pytest.raises(AttributeError, match=r"cache_k.*not kept in the layers.*kv_cache"):
        _ = attention.cache_k
    with pytest.raises(AttributeError, match="'wq': it is part of wqkv; state_dict"):
        _ = attention.wq
    with pytest.raises(AttributeError, match="'w3': it is part of w13; state_dict"):
        _ = feed_forward.w3
    assert not hasattr(attention, "nonsense")
