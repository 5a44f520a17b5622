"""A stack of all layers gives the bytes of the modules, and runs only where that is correct.

It is one native call, or a sequence of ops.
"""

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.batches import in_8_bits
from llama import ModelArgs, Transformer
from llama.checkpoint.packing import pack_model
from llama.kernels.cpu import native
from llama.kernels.cpu.layers import NativeLayers
from llama.kernels.cuda.table import NAMES, table
from llama.model import Attention, kinds, layers
from llama.model.execution import NOTHING_WATCHED, OpLayers, SubLayer
from llama.ops.batch import Batch
from llama.ops.kernels import Kernels
from llama.ops.kv_cache import AS_COMPUTED, FORMATS, KVFormat
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights import weight as weights
from llama.weights.plain import PlainWeight

CPU = torch.device("cpu")
PAGE_SIZE = 16
PARAMS: dict[str, Any] = {
    "dim": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256,
    "multiple_of": 96, "norm_eps": 1e-5, "rope_theta": 500000.0, "max_seq_len": 1024,
}  # fmt: skip
_rng = random.Random(11)
BATCHES = [  # (earlier tokens, new tokens) of each sequence: decode, prefill, both
    [(0, 1)], [(300, 1)], [(30, 1)] * 17, [(0, 40)], [(5, 1), (600, 1), (17, 70)], [(0, 300)],
] + [
    sorted(
        ((_rng.randint(0, 300), _rng.choice([1, 1, 2, 15, 60])) for _ in range(_rng.randint(1, 9))),
        key=lambda sequence: sequence[1],
    )
    for _ in range(4)
]  # fmt: skip


def make_model(
    *,
    quantize: str | None = None,
    ranks: int = 1,
    packed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: str | None = None,
    **changes: Any,
) -> Transformer:
    """Make a model; with two ranks, the share of rank 1, which doubles what it would sum."""
    parallel = Parallel(Placement(rank=ranks - 1, size=ranks))
    if ranks > 1:
        object.__setattr__(parallel, "all_reduce", lambda x: x.mul_(2))
    kv_format = FORMATS[kv_cache_dtype] if kv_cache_dtype else AS_COMPUTED
    args = ModelArgs(**PARAMS | changes)
    model = Transformer(args, parallel=parallel, dtype=dtype, kv_format=kv_format)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        scale = 0.1 if weight.dim() == 2 else 1.0
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    if packed:
        pack_model(model, quantize=quantize)
    return model


def pack(sequences: list[tuple[int, int]]) -> tuple[Tensor, Batch, int]:
    """Return tokens, the batch that asks for all rows, and the number of pages that it needs."""
    starts, lens = [s for s, _ in sequences], [n for _, n in sequences]
    held = [-(-(s + n) // PAGE_SIZE) for s, n in sequences]
    order = torch.randperm(sum(held), generator=torch.Generator().manual_seed(1)).tolist()
    pages = [[order.pop() for _ in range(n)] for n in held]
    ids = [(7 * i) % PARAMS["vocab_size"] for i in range(sum(lens))]
    rows = list(range(sum(lens)))
    return *Batch.pack(ids, starts, lens, pages, PAGE_SIZE, rows, CPU), sum(held)


def run(model: Transformer, sequences: list[tuple[int, int]]) -> list[Tensor]:
    """Return hidden states, and the keys and values after the step, as bits."""
    tokens, batch, num_pages = pack(sequences)
    kv_cache = model.new_kv_cache(num_pages, PAGE_SIZE)
    shape = (*kv_cache.shape[:-1], model.plan.head_dim)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    kv_cache.copy_(in_8_bits(numbers) if kv_cache.dtype is torch.int8 else numbers)
    with torch.inference_mode():
        hidden = model.hidden_states(tokens, batch, kv_cache)
    return [hidden.view(torch.uint8), kv_cache.view(torch.uint8)]


def run_modules(model: Transformer, sequences: list[tuple[int, int]]) -> list[Tensor]:
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    result = run(model, sequences)
    handle.remove()
    return result


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Check equality bit for bit.

    Both paths run the same kernels, or the same calls of torch, on the same values in one process.
    """
    return all(map(torch.equal, a, b))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """A list of the native functions that are called, in order."""
    names: list[str] = []
    call = native.call

    def counted(name: str, *args: Any) -> int:
        names.append(name)
        return call(name, *args)

    monkeypatch.setattr(native, "call", counted)
    return names


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8", "fp8", "int4"])
def test_the_call_gives_the_bytes_of_the_modules(kernels, calls, quantize, ranks):
    model = make_model(quantize=quantize, ranks=ranks)
    for sequences in BATCHES:
        wanted = run_modules(model, sequences)
        assert "layers_bf16" not in calls and "linear_packed" in calls
        for threads in (1, 3):
            calls.clear()
            torch.set_num_threads(threads)  # conftest restores the number
            assert same(run(model, sequences), wanted), (sequences, threads)
            count = 1 if ranks == 1 else 2 * PARAMS["n_layers"]
            assert calls == ["layers_workspace", *["layers_bf16"] * count, "rms_norm_bf16"]
        calls.clear()
        torch.set_num_threads(1)


@pytest.mark.parametrize("head_size", [64, 96])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_call_takes_heads_of_another_size(kernels, calls, quantize, head_size):
    """Heads of 64 or 96 elements in a model of 128 columns, whose share would be 32."""
    model = make_model(quantize=quantize, head_size=head_size)
    for sequences in BATCHES[2:6]:
        wanted = run_modules(model, sequences)
        calls.clear()
        assert same(run(model, sequences), wanted), sequences
        assert "layers_bf16" in calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_call_gives_the_bytes_of_the_modules_in_8_bits(kernels, calls, ranks):
    """The native call gives the bytes of the modules with an 8-bit cache.

    Hidden states, keys and values are compared; they differ from those of a cache in bf16.
    """
    model = make_model(ranks=ranks, kv_cache_dtype="int8")
    for sequences in BATCHES[1:6]:
        wanted = run_modules(model, sequences)
        calls.clear()
        assert same(run(model, sequences), wanted)
        count = 1 if ranks == 1 else 2 * PARAMS["n_layers"]
        assert calls.count("layers_bf16") == count
    assert not torch.equal(run(make_model(ranks=ranks), sequences)[0], wanted[0])


class Fp32Format(KVFormat):
    """A format that the CPU kernels do not have: rows of D elements in float32."""

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim, torch.float32

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        super().store(plane, slots, x.float())

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return super().load(plane, slots, dtype).to(dtype)


def test_a_cache_in_a_format_without_kernels_is_left_to_the_modules(kernels, calls, monkeypatch):
    monkeypatch.setitem(FORMATS, "fp32", Fp32Format())
    monkeypatch.setitem(FORMATS, None, FORMATS["fp32"])  # what `format_of` finds for float32
    model = make_model(kv_cache_dtype="fp32")
    executor = model.execution_path()
    assert isinstance(executor, NativeLayers)
    assert not executor.supports(model.new_kv_cache(4, PAGE_SIZE))
    for sequences in BATCHES[:5]:
        assert same(run(model, sequences), run_modules(model, sequences))
    assert "linear_packed" in calls and "layers_bf16" not in calls


# in use for no dtype: ops keep their PyTorch implementation
OP_STACK = table(frozenset(NAMES), frozenset())


@pytest.fixture
def op_stack(monkeypatch) -> list[OpLayers]:
    """A list of the sequences of ops that ran."""
    ran: list[OpLayers] = []
    run_stack = OpLayers.run

    def counted(stack: OpLayers, *args: Any) -> Tensor:
        ran.append(stack)
        return run_stack(stack, *args)

    monkeypatch.setattr(OpLayers, "run", counted)
    return ran


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_the_sequence_of_ops_gives_the_bytes_of_the_modules(op_stack, kind, ranks):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    quantize = "int8" if kind == "int8" else None
    model = make_model(quantize=quantize, ranks=ranks, packed=kind != "fp32", dtype=dtype)
    model.use_kernels(OP_STACK)
    for sequences in BATCHES[2:7]:
        wanted = run_modules(model, sequences)
        assert not op_stack
        assert same(run(model, sequences), wanted)
        assert len(op_stack) == 1
        op_stack.clear()
    wrong = model.new_kv_cache(4, PAGE_SIZE)[1:]
    path = model.execution_path()
    assert path is not None and not path.supports(wrong)


@pytest.mark.parametrize("way", ["modules", "operators"])
def test_the_kernels_of_a_model_reach_every_operator(monkeypatch, way):
    """And the batch of the step every product of a layer, by whose rows an adapter is chosen."""
    model = make_model(packed=False, dtype=torch.float32)
    model.use_kernels(OP_STACK)
    model.use_modules(way == "modules")
    contexts: list[Any] = []
    kernels: dict[str, list[Kernels]] = {}
    linear = PlainWeight.linear

    def product(
        weight: PlainWeight, x: Tensor, dtype: Any = None, context: Any = None, updates: Any = None
    ) -> Tensor:
        contexts.append(context)
        return linear(weight, x, dtype, context, updates)

    def spy(module: Any, name: str, find: Callable[..., Kernels]) -> None:
        op = getattr(module, name)

        def called(*args: Any, **options: Any) -> Any:
            kernels.setdefault(name, []).append(find(*args))
            return op(*args, **options)

        monkeypatch.setattr(module, name, called)

    monkeypatch.setattr(PlainWeight, "linear", product)
    for name in ("rms_norm", "add_norm", "silu_mul"):
        spy(weights, name, lambda *args: args[-1])
    spy(layers, "rms_norm", lambda *args: args[-1])
    for name in ("silu_mul", "rope_and_store"):
        spy(kinds, name, lambda *args: args[-1])
    spy(kinds, "paged_attention", lambda queries, kv_cache, batch: batch.kernels)
    tokens, batch, num_pages = pack(BATCHES[4])
    hidden = model.hidden_states(tokens, batch, model.new_kv_cache(num_pages, PAGE_SIZE))
    assert len(contexts) == 4 * PARAMS["n_layers"]
    assert all(isinstance(x, Batch) and x.slots is batch.slots for x in contexts)
    model.logits(hidden)
    assert all(x.kernels is OP_STACK for x in contexts)
    n = PARAMS["n_layers"]
    norms = {"rms_norm": 2 * n + 1} if way == "modules" else {"rms_norm": 2, "add_norm": 2 * n - 1}
    counts = norms | dict.fromkeys(("silu_mul", "rope_and_store", "paged_attention"), n)
    assert {name: len(seen) for name, seen in kernels.items()} == counts
    assert all(x is OP_STACK for seen in kernels.values() for x in seen)


class Halved(nn.Module):
    """A part of a layer with the signature that Meta's has."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) / 2


def test_parts_with_metas_signature_run_in_a_layer_and_hooks_see_its_arguments():
    model: Any = make_model(packed=False, dtype=torch.float32)
    before = run(model, BATCHES[3])[0].view(torch.float32)
    seen: list[int] = []
    names = ("attention_norm", "feed_forward", "feed_forward.w2", "attention.wqkv", "ffn_norm")
    for name in names:
        part = model.layers[1].get_submodule(name)
        part.register_forward_pre_hook(lambda _, args: seen.append(len(args)))
    model.norm.register_forward_hook(lambda _, args, out: seen.append(len(args)))
    assert torch.equal(run(model, BATCHES[3])[0].view(torch.float32), before)
    assert seen == [1] * 6
    for layer in model.layers:
        layer.feed_forward.w2 = Halved(layer.feed_forward.w2)
        layer.ffn_norm = Halved(layer.ffn_norm)
        layer.attention.wqkv = Halved(layer.attention.wqkv)
    changed = run(model, BATCHES[3])
    for layer in model.layers:
        layer.feed_forward.w2 = layer.feed_forward.w2.part
        layer.feed_forward.w2.weight.values.mul_(0.5)
        layer.ffn_norm = layer.ffn_norm.part
        layer.ffn_norm.weight.data.mul_(0.5)
        layer.attention.wqkv = layer.attention.wqkv.part
        layer.attention.wqkv.weight.values.mul_(0.5)
    assert same(changed, run(model, BATCHES[3]))
    model.layers[0].feed_forward = Halved(model.layers[0].feed_forward)
    changed = run(model, BATCHES[3])
    model.layers[0].feed_forward = model.layers[0].feed_forward.part
    model.layers[0].feed_forward.w2.weight.values.mul_(0.5)
    assert same(changed, run(model, BATCHES[3]))


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_both_executors_add_a_bias_to_the_first_product(kernels, quantize):
    model = make_model(quantize=quantize)
    tokens, batch, num_pages = pack(BATCHES[4])
    batch = batch.with_kernels(model.kernels)
    x = model.tok_embeddings(tokens)
    freqs_cis = model.freqs_cis[batch.positions]
    plain: list[SubLayer] = []
    for spec, layer in zip(model.plan.layers, model.blocks(), strict=True):
        plain += layer.sublayers(spec.kv_plane)
    generator = torch.Generator().manual_seed(8)
    added = [
        dataclasses.replace(y, bias=torch.randn(y.first.shape[0], generator=generator).bfloat16())
        for y in plain
    ]
    outputs = []
    for sublayers in (plain, added):
        for executor in (NativeLayers, OpLayers):
            kv_cache = model.new_kv_cache(num_pages, PAGE_SIZE)
            stack = executor(model.plan, sublayers, model.parallel)
            outputs.append([stack.run(x, freqs_cis, kv_cache, batch, NOTHING_WATCHED), kv_cache])
    assert same(outputs[0], outputs[1]) and same(outputs[2], outputs[3])
    assert not torch.equal(outputs[0][0], outputs[2][0])
    wrong = [dataclasses.replace(plain[0], bias=torch.zeros(3).bfloat16()), *plain[1:]]
    with pytest.raises(ValueError, match="not for the CPU's kernels"):
        NativeLayers(model.plan, wrong, model.parallel)


class ScaledAttention(Attention):
    """Attention whose body reads a further weight of the module."""

    scale: nn.Parameter

    def body(self, *args: Any) -> Tensor:
        return super().body(*args) * self.scale


def test_a_body_reads_further_weights_of_its_module(kernels):
    model = make_model()
    for layer in model.blocks():
        layer.attention.__class__ = ScaledAttention
        layer.attention.scale = nn.Parameter(torch.tensor(0.5).bfloat16(), requires_grad=False)
    tokens, batch, num_pages = pack(BATCHES[3])
    x = model.tok_embeddings(tokens)
    sublayers: list[SubLayer] = []
    for spec, layer in zip(model.plan.layers, model.blocks(), strict=True):
        sublayers += layer.sublayers(spec.kv_plane)
    stack = OpLayers(model.plan, sublayers, model.parallel)
    caches = [model.new_kv_cache(num_pages, PAGE_SIZE) for _ in range(3)]
    by_modules = model._run_modules(x, batch, caches[0])
    by_operators = stack.run(x, model.freqs_cis[batch.positions], caches[1], batch)
    assert same([by_modules, caches[0]], [by_operators, caches[1]])
    for layer in model.blocks():
        layer.attention.scale.fill_(1)
    assert not torch.equal(by_modules, model._run_modules(x, batch, caches[2]))


class OtherAttention(Attention):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) * 0


def hook(model: Any) -> Callable[[], None]:
    return model.layers[1].attention.wo.register_forward_hook(lambda *args: args[2] * 0).remove


def pre_hook(model: Any) -> Callable[[], None]:
    block = model.layers[2].feed_forward
    return block.register_forward_pre_hook(lambda _, args: (args[0] * 0,)).remove


def global_hook(model: Any) -> Callable[[], None]:
    def double(module: nn.Module, _: object, out: Tensor) -> Any:
        return out * 2 if module is model.layers[0].ffn_norm else None

    return nn.modules.module.register_module_forward_hook(double).remove


def other_forward(model: Any) -> Callable[[], None]:
    model.layers[1].forward = lambda x, *_: x
    return lambda: delattr(model.layers[1], "forward")


def other_class(model: Any) -> Callable[[], None]:
    model.layers[0].attention.__class__ = OtherAttention
    return lambda: setattr(model.layers[0].attention, "__class__", Attention)


def other_module(model: Any) -> Callable[[], None]:
    before = model.layers[0]
    model.layers[0] = copy.deepcopy(before)
    model.layers[0].attention.__class__ = OtherAttention
    return lambda: setattr(model.layers, "0", before)


def patched_class(model: Any) -> Callable[[], None]:
    """Patch a class and undo it; no instance is set, so that the model must be told."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Attention, "forward", lambda self, x, *_: x)
    model.use_modules(False)

    def undo() -> None:
        patch.undo()
        model.use_modules(False)

    return undo


def use_modules(model: Any) -> Callable[[], None]:
    """Stop using the stack, and check it with a layer changed without torch's knowledge."""
    part = model.layers[1].attention.wo
    model.use_modules()
    part.__dict__["forward"] = lambda x: x * 0

    def undo() -> None:
        del part.__dict__["forward"]
        model.use_modules(False)

    return undo


CHANGES = [
    use_modules,
    hook,
    pre_hook,
    global_hook,
    other_forward,
    other_class,
    other_module,
    patched_class,
]


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_into_the_layers_is_run(kernels, calls, change):
    """Modules that are put into the layers run; once they are removed, the call gives the old
    result.
    """
    model = make_model()
    before = run(model, BATCHES[3])
    undo = change(model)
    calls.clear()
    changed = run(model, BATCHES[3])
    assert "layers_bf16" not in calls and not same(changed, before)
    undo()
    assert same(run(model, BATCHES[3]), before)
    assert calls.count("layers_bf16") == 1


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_into_the_layers_is_run_in_place_of_ops(op_stack, change):
    model = make_model(packed=False, dtype=torch.float32)
    model.use_kernels(OP_STACK)
    before = run(model, BATCHES[3])
    op_stack.clear()
    undo = change(model)
    assert not same(run(model, BATCHES[3]), before) and not op_stack
    undo()
    assert same(run(model, BATCHES[3]), before) and len(op_stack) == 1


def set_data(model: Any) -> None:
    model.layers[1].ffn_norm.weight.data = model.layers[1].ffn_norm.weight.data * 2


def set_weight(model: Any) -> None:
    other = model.layers[0].feed_forward.w2
    model.layers[1].feed_forward.w2.weight = other.weight


def load_state(model: Any) -> None:
    model.load_state_dict({name: x.flip(0) for name, x in model.state_dict().items()})


def set_eps(model: Any) -> None:
    for layer in model.blocks():
        layer.attention_norm.eps = layer.ffn_norm.eps = 0.5


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
@pytest.mark.parametrize("change", [set_data, set_weight, load_state, set_eps])
def test_weights_that_change_are_used(kernels, calls, change):
    model = make_model()
    before = run(model, BATCHES[3])
    change(model)
    calls.clear()
    after = run(model, BATCHES[3])
    assert calls.count("layers_bf16") == 1
    assert same(after, run_modules(model, BATCHES[3])) and not same(after, before)


@pytest.mark.parametrize("change", [set_data, set_weight, load_state, set_eps])
def test_weights_that_change_are_used_by_the_ops(op_stack, change):
    model = make_model(packed=False, dtype=torch.float32)
    model.use_kernels(OP_STACK)
    before = run(model, BATCHES[3])
    change(model)
    after = run(model, BATCHES[3])
    assert len(op_stack) == 2 and not same(after, before)
    assert same(after, run_modules(model, BATCHES[3]))


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
def test_a_copy_of_a_model_has_weights_of_its_own(kernels):
    model = make_model()
    before = run(model, BATCHES[3])
    other = copy.deepcopy(model)
    set_data(other)
    assert same(run(model, BATCHES[3]), before)
    assert same(run(other, BATCHES[3]), run_modules(other, BATCHES[3]))
    assert not same(run(other, BATCHES[3]), before)


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
def test_what_the_kernels_do_not_take_goes_through_the_modules(kernels, calls, monkeypatch):
    plain = make_model(packed=False)
    run(plain, BATCHES[3])
    mixed: Any = make_model()
    mixed.layers[1].ffn_norm.eps = 0.1  # a stack has a single eps
    assert same(run(mixed, BATCHES[3]), run_modules(mixed, BATCHES[3]))
    model = make_model()
    tokens, batch, num_pages = pack(BATCHES[0])
    strided = model.new_kv_cache(2 * num_pages, PAGE_SIZE)[:, :, ::2]
    model.hidden_states(tokens, batch, strided)
    assert "layers_bf16" not in calls
    run(model, BATCHES[0])
    assert "layers_bf16" in calls
    monkeypatch.setattr(native, "kernels", lambda: None)
    calls.clear()
    model.use_modules(False)  # looks at the kernels again
    run(model, BATCHES[0])
    assert calls == []


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
@pytest.mark.parametrize("fault", ["slots", "query_starts", "seq_lens", "page_table", "x", "freqs"])
def test_a_batch_that_does_not_fit_together_is_refused(kernels, fault):
    model = make_model()
    _, batch, num_pages = pack(BATCHES[4])
    parts = {
        name: getattr(batch, name) for name in ("slots", "query_starts", "seq_lens", "page_table")
    }
    parts |= {"x": torch.ones(72, 128).bfloat16(), "freqs": model.freqs_cis[batch.positions]}
    cut = parts[fault][:, :2].contiguous() if fault == "page_table" else parts[fault][1:]
    stack = model.execution_path()
    assert stack is not None
    kv_cache = model.new_kv_cache(num_pages, PAGE_SIZE)

    def run_stack(x: Tensor, freqs: Tensor, **rest: Any) -> None:
        stack.run(x, freqs, kv_cache, dataclasses.replace(batch, **rest), NOTHING_WATCHED)

    run_stack(**parts)
    with pytest.raises(AssertionError):
        run_stack(**parts | {fault: cut})
