"""Meta's INT4_EO8 files (QLoRA, SpinQuant) are read as llama-models' loader reads them."""

import contextlib
import importlib
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import meta
from helpers.checkpoints import (
    change_params,
    random_state,
    shard_of,
    write_byte_tokenizer,
    write_meta,
)
from helpers.kernels import KERNELS_RUN
from helpers.weights import change_shard, flip_a_bit, loaded, sylvester
from llama import Llama
from llama.checkpoint import packed
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.loader import load
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.packing import pack_model
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.cli import main
from llama.kernels.cpu.layers import NativeLayers
from llama.model import Transformer
from llama.model.layers import Matrix
from llama.ops.batch import Batch
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.nibbles import NibblesWeight

PARAMS = {
    "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
ARGS = {"scheme": "int4_weight_int8_dynamic_activation", "group_size": 32, "spinquant": False}
LORA = {"rank": 16, "scale": 2.0}
KINDS = {"QLORA_INT4_EO8": LORA, "SPINQUANT_INT4_EO8": None}
TOKENS = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(7))
needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")


class FourBits(nn.Module):
    """A replacement for torchao's Int8DynActInt4WeightLinear that does not quantize x."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, in_features, out_features, groupsize, **_: Any) -> None:
        super().__init__()
        groups = out_features, in_features // groupsize
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(groups))
        self.register_buffer("zeros", torch.zeros(groups))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.weight.float().view(*self.scales.shape, -1) - self.zeros[..., None]
        return F.linear(x, (groups * self.scales[..., None]).flatten(1))


class Rotated(nn.Module):
    """Sylvester's matrix before w2, as SpinQuant's helpers in llama-stack insert it."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner, self.matrix = inner, sylvester(size).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.matrix)


def write(folder: Path, kind: str, *, zeros: bool = False) -> Path:
    """Write a checkpoint in Meta's format."""
    lora, draw = KINDS[kind], torch.Generator().manual_seed(5)
    state = {name: x.bfloat16() for name, x in random_state(PARAMS).items()}
    for name, x in list(state.items()):
        stem, is_end, (n, *k) = name.removesuffix("weight"), "layers" not in name, x.shape
        if not k:
            continue
        bits = 128 if is_end else 8
        state[name] = torch.randint(-bits, bits, x.shape, generator=draw).to(torch.int8)
        unit = 1.7 * float(x.float().std()) / bits
        shape = (n, 1 if is_end else k[0] // 32)
        state[f"{stem}scales"] = unit * (0.5 + torch.rand(shape, generator=draw))
        if zeros and not is_end:
            state[f"{stem}zeros"] = torch.randint(-2, 3, shape, generator=draw).float()
        if lora and not is_end:
            down, up = torch.randn(16, *k, generator=draw), torch.randn(n, 16, generator=draw)
            state[f"{stem}adaptor.A.weight"] = (down * k[0] ** -0.5).bfloat16()
            state[f"{stem}adaptor.B.weight"] = (up * 0.1).bfloat16()
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "consolidated.00.pth")
    write_meta(folder, PARAMS, {}, 0)
    write_byte_tokenizer(folder)
    change_params(folder, quantization_args=ARGS | {"spinquant": "SPIN" in kind}, lora_args=lora)
    return folder


def oracle(folder: Path, kind: str, loader: Any) -> nn.Module:
    """Return llama-models' Transformer with the weights of the folder, in float32."""
    args = importlib.import_module("llama_models.llama3.args")
    model = importlib.import_module("llama_models.llama3.model")
    extra = {"quantization_args": ARGS} | ({"lora_args": LORA} if KINDS[kind] else {})
    sizes = args.ModelArgs(**PARAMS, **extra, max_seq_len=64, max_batch_size=4)
    built = loader.convert_to_quantized_model(model.Transformer(sizes), str(folder), "int4_mixed")
    built.load_state_dict(torch.load(folder / "consolidated.00.pth", weights_only=True))
    for layer in built.layers if "SPIN" in kind else ():
        w2 = layer.feed_forward.w2
        layer.feed_forward.w2 = Rotated(w2, w2.weight.shape[1])
    return built.eval()


def state_of(built: Any) -> dict[str, Tensor]:
    """Return the matrix of each module, found by applying it to an identity, and its norms."""
    names = [f"layers.{i}.{x}" for i in range(2) for x in
             ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1",
              "feed_forward.w2", "feed_forward.w3")]  # fmt: skip
    widths = {name: 512 if "w2" in name else 128 for name in names}
    state = {f"{x}.weight": built.get_submodule(x)(torch.eye(k)).T for x, k in widths.items()}
    ends = ("tok_embeddings.weight", "output.weight", "norm.weight")
    own = built.state_dict()
    return state | {name: own[name] for name in [*ends, *(x for x in own if "_norm" in x)]}


@dataclass(frozen=True)
class Threads(Parallel):
    """Ranks that are threads of one process."""

    parts: list = field(default_factory=list)
    barrier: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        self.parts.append(x)
        self.barrier.wait()
        total = torch.stack(list(self.parts)).sum(0)
        self.barrier.wait()
        self.parts.clear()
        self.barrier.wait()
        return x.copy_(total)

    def all_gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        widths = widths or [x.shape[-1]] * self.size
        whole = torch.zeros(*x.shape[:-1], sum(widths), dtype=x.dtype)
        whole.split(list(widths), -1)[self.rank].copy_(x)
        return self.all_reduce(whole)


def logits(found: Checkpoint, size: int, dtype: torch.dtype) -> Tensor:
    """Return the logits of rank 0 of a group of this size."""
    parts: list[Tensor] = []
    barrier, out = threading.Barrier(size, timeout=60), {}

    def run(rank: int) -> None:
        parallel = Threads(Placement(rank=rank, size=size), parts=parts, barrier=barrier)
        model = Transformer(found.params, parallel=parallel, dtype=dtype)
        load(found, model, filled=partial(pack_model, model))
        out[rank] = model.forward(TOKENS, 0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out[0]


@contextlib.contextmanager
def llama_models() -> Iterator[Any]:
    """Import llama-models' loader with stand-ins for GPU kernels, torchvision and torchao."""
    vision = "llama_models.llama3.multimodal"
    stubs: dict[str, dict[str, Any]] = {
        "fbgemm_gpu": {}, "fbgemm_gpu.experimental": {}, "fbgemm_gpu.experimental.gen_ai": {},
        vision: {}, f"{vision}.model": {"CrossAttentionTransformer": nn.Module},
        "torchao": {}, "torchao.quantization": {},
        "torchao.quantization.GPTQ": {"Int8DynActInt4WeightLinear": FourBits},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in stubs.items():
            module = ModuleType(name)
            vars(module).update(contents)
            patch.setitem(sys.modules, name, module)
        meta.join_a_world_of_one()
        yield importlib.import_module("llama_models.llama3.quantization.loader")
        meta.leave_the_world()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        kind: write(tmp_path_factory.mktemp(kind), kind, zeros=kind[0] == "Q") for kind in KINDS
    }


@pytest.fixture(scope="module")
def said(folders) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return llama-models' logits, and the values of each matrix."""
    with llama_models() as loader, torch.inference_mode():
        built = {kind: oracle(folder, kind, loader) for kind, folder in folders.items()}
        return {kind: (model(TOKENS, 0), state_of(model)) for kind, model in built.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_llama_models(folders, said, kind):
    """The logits equal llama-models'.

    They are compared in float32, where adapters and rotations are merged, and on the CPU in 4 bits,
    where x is bf16 between layers.
    """
    found, (expected, state) = find(folders[kind]), said[kind]
    assert found.is_quantized and found.file_type == kind
    for rank, size in ((0, 1), (1, 2), (3, 4), (2, 3)):
        for name, shard in loaded(found, rank, size).named_shards().items():
            wanted = shard_of(name, state[name], PARAMS, rank, size)
            torch.testing.assert_close(shard, wanted, rtol=1e-5, atol=1e-6)
    for size in (1, 2, 3):
        ours = logits(found, size, torch.float32)
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-4)
        if KERNELS_RUN:
            bf16, in_codes = found, replace(found, in_codes=True)
            off, merged = ((logits(x, size, torch.bfloat16) - expected).abs().mean()
                           for x in (in_codes, bf16))  # fmt: skip
            assert off < 0.02 * expected.std() and off < 1.3 * merged


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu_nothing_is_merged(folders, said, kind):
    """On the CPU nothing is merged, and one native call runs all layers.

    The result has the bytes that the modules give, for a sequence alone and in a batch.
    """
    found = replace(find(folders[kind]), in_codes=True)
    model = Transformer(found.params, dtype=torch.bfloat16)
    load(found, model, filled=partial(pack_model, model))
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert 0 <= bytes_of(found, Placement(), torch.bfloat16, None, torch.device("cpu")) - held < 16
    for matrix in (x for x in model.layers.modules() if isinstance(x, Matrix)):
        weight: Any = matrix.weight
        assert type(weight) is NibblesWeight
        assert (weight.adapter is not None) == ("QLORA" in kind)
        assert (weight.rotated is not None) == ("SPIN" in kind and "w2" in matrix.names[0])
        wanted = torch.cat([said[kind][1][name] for name in matrix.names])
        torch.testing.assert_close(weight.exact(), wanted, rtol=1e-5, atol=1e-6)
    assert isinstance(model.execution_path(), NativeLayers)
    tokens = TOKENS.view(4, 10)
    together = model.forward(tokens, 0)
    for row in range(4):
        assert torch.equal(model.forward(tokens[row : row + 1], 0)[0], together[row])
    cache = model.new_kv_cache(1, 40)
    _, batch = Batch.pack([], [0], [40], [[0]], 40, list(range(40)), torch.device("cpu"))
    native = model.hidden_states(TOKENS[0], batch, cache)
    model.use_modules()
    assert torch.equal(model.hidden_states(TOKENS[0], batch, cache.zero_()), native)


@needs_kernels
def test_a_build_says_what_it_runs(folders, capsys):
    folder = str(folders["QLORA_INT4_EO8"])
    with Llama.build(folder, None, 64, 2, device="cpu") as llama:
        assert llama.generate([[256, 65, 66]], max_gen_len=4, temperature=0)[0]
    assert "cpu, QLORA_INT4_EO8, model_parallel_size=1" in capsys.readouterr().out
    with Llama.build(folder, None, 64, 2, device="cpu", quantize="int8"):
        assert "cpu, int8 from QLORA_INT4_EO8" in capsys.readouterr().out
    assert main(["doctor", folder]) == 0
    assert "QLORA_INT4_EO8" in capsys.readouterr().out


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_mapped_as_they_are(folders, tmp_path, kind):
    pack(folders[kind], tmp_path / "packed")
    found, source = find(tmp_path / "packed"), replace(find(folders[kind]), in_codes=True)
    model = Transformer(found.params, dtype=torch.bfloat16)
    packed.attach(found, model)
    assert found.file_type == kind
    assert torch.equal(model.forward(TOKENS, 0), logits(source, 1, torch.bfloat16))
    name = "layers.1.feed_forward.w2.int4.adaptor"
    if name not in (tensors := load_file(found.shards[0])):
        return
    for damaged in (tensors[name][:-32], tensors[name].double(), tensors[name][:0]):
        save_file(tensors | {name: damaged.clone()}, found.shards[0], found.packed)
        with pytest.raises(ValueError, match=r"packed\.safetensors: 'layers\.1\.feed_forward"):
            packed.attach(found, Transformer(found.params, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_converted_and_resharded_merged(folders, said, tmp_path, kind):
    """A conversion or resharding merges the weights: the result is a plain bf16 Llama."""
    convert(folders[kind], tmp_path / "hf")
    reshard(folders[kind], tmp_path / "two", 2)
    for folder in ("hf", "two"):
        found = find(tmp_path / folder)
        assert not found.is_quantized and not found.params.tied_output
        for name, x in loaded(found).named_shards().items():
            torch.testing.assert_close(
                x, said[kind][1][name].bfloat16().float(), rtol=2**-7, atol=1e-6
            )


def test_the_same_codes_with_other_scales_are_not_tied(folders, tmp_path):
    path = shutil.copytree(folders["SPINQUANT_INT4_EO8"], tmp_path / "in") / "consolidated.00.pth"
    shard = torch.load(path, weights_only=True)
    change_shard(path, output__weight=shard["tok_embeddings.weight"].clone())
    convert(tmp_path / "in", tmp_path / "apart")
    change_shard(path, output__scales=shard["tok_embeddings.scales"].clone())
    convert(tmp_path / "in", tmp_path / "one")
    assert [find(tmp_path / x).params.tied_output for x in ("apart", "one")] == [False, True]
    weight = shard["tok_embeddings.weight"]  # stored once in the file, under two names
    change_shard(path, tok_embeddings__weight=weight, output__weight=weight)
    assert loaded(find(tmp_path / "in")).params.tied_output is False


def test_every_byte_is_verified(folders, tmp_path):
    folder = shutil.copytree(folders["QLORA_INT4_EO8"], tmp_path / "in")
    assert "CRC-32 of its" in verify(folder)[0]
    flip_a_bit(folder / "consolidated.00.pth", "layers.1.attention.wo.scales")
    for check in (
        lambda: verify(folder),
        lambda: Llama.build(str(folder), None, 64, 1, device="cpu", verify=True),
    ):
        with pytest.raises(ValueError, match=r"consolidated\.00\.pth .*is damaged"):
            check()


W2, WQ = "layers__1__feed_forward__w2__", "layers__0__attention__wq__"


APART = "do not fit one another"
WQ_NAME = r"layers\.0\.attention\.wq\.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{W2}scales": None}, r"layers\.1\.feed_forward\.w2 has .*cannot be read as 'QLORA"),
        ({f"{W2}scales": torch.ones(128, 5)}, f"w2 has .*{APART}"),
        ({f"{W2}scales": torch.ones(64, 16)}, f"w2 has .*{APART}"),
        ({f"{W2}scales": torch.ones(0)}, "w2 has .*cannot be read"),
        ({f"{W2}scales": torch.ones(128, 16).int()}, f"w2 has .*{APART}"),
        ({f"{W2}scales": torch.ones(1, 1).expand(2**40, 2**20)}, "w2 has .*cannot be read"),
        ({f"{W2}zeros": torch.ones(128, 8)}, f"w2 has .*{APART}"),
        ({f"{WQ}adaptor__A__weight": None}, r"wq has .*cannot be read as 'QLORA.*adaptor\.A"),
        ({f"{WQ}adaptor__B__weight": torch.ones(16, 128)}, f"wq has .*{APART}"),
        ({f"{WQ}adaptor__A__weight": torch.ones(8, 128)}, f"wq has .*{APART}"),
        ({f"{WQ}adaptor__C__weight": torch.ones(8, 128)}, f"wq has .*{APART}"),
        ({"output__zeros": torch.ones(512, 1)}, f"output has .*{APART}"),
        ({f"{WQ}scales": torch.full((128, 4), torch.nan)}, f"of {WQ_NAME} that is not finite"),
        (
            {f"{WQ}adaptor__B__weight": torch.full((128, 16), torch.inf)},
            f"of {WQ_NAME} that is not finite",
        ),
        ({f"{WQ}weight": torch.full((128, 128), 8).char()}, f"pth: {WQ_NAME}: an element does not"),
        (
            {f"{WQ}weight": torch.full((128, 128), -9).char()},
            f"pth: {WQ_NAME}: an element does not",
        ),
        (
            {f"{WQ}weight": torch.full((128, 128), 127).char()},
            f"pth: {WQ_NAME}: an element does not",
        ),
        ({f"{WQ}weight": torch.zeros(64, 128).char()}, f"wq has .*{APART}"),
        ({f"{WQ}weight": torch.zeros(128, 128)}, f"wq has .*{APART}"),
        ({"extra__scales": torch.ones(3)}, r"'extra\.scales' has no place in the model"),
    ],
)
def test_what_does_not_fit_is_named(folders, tmp_path, changes, message):
    folder = shutil.copytree(folders["QLORA_INT4_EO8"], tmp_path / "in")
    change_shard(folder / "consolidated.00.pth", **changes)
    with pytest.raises(ValueError, match=message) as error:
        loaded(find(folder))
    assert "consolidated.00.pth" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_args": ARGS | {"scheme": "int2"}},
            r"params\.json: quantization_args=.*int2",
        ),
        ({"quantization_args": ARGS | {"spinquant": "yes"}}, r"params\.json: quantization_args="),
        ({"quantization_args": [1]}, r"params\.json: quantization_args=\[1\]: only int4_weight_"),
        ({"lora_args": {"rank": 0, "scale": 2.0}}, r"params\.json: lora_args\.rank=0 must be"),
        ({"lora_args": {"rank": 16}}, r"params\.json: lora_args\.scale=None must be a number"),
        ({"lora_args": "16"}, r"params\.json: lora_args\.rank=None must be"),
        ({"lora_args": {"rank": 8, "scale": 2.0}}, "wq has .*do not fit one another"),
        ({"lora_args": None}, "wq has .*do not fit one another"),
        ({"quantization_args": None}, "unknown key 'lora_args'"),
        (
            {"quantization_args": ARGS | {"spinquant": True}, "multiple_of": 96},
            r"w2 has .*do not fit one another",
        ),
    ],
)
def test_params_that_do_not_fit_are_named(folders, tmp_path, changes, message):
    folder = shutil.copytree(folders["QLORA_INT4_EO8"], tmp_path / "in")
    change_params(folder, **changes)
    if "multiple_of" in changes:  # 384 columns
        change_shard(
            folder / "consolidated.00.pth",
            **{f"{W2}weight": torch.zeros(128, 384).char(), f"{W2}scales": torch.ones(128, 12),
               f"{W2}zeros": None, f"{W2}adaptor__A__weight": torch.ones(16, 384)},
        )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        loaded(find(folder))


def test_two_shards_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders["QLORA_INT4_EO8"], tmp_path / "in")
    shutil.copyfile(folder / "consolidated.00.pth", folder / "consolidated.01.pth")
    with pytest.raises(ValueError, match=r"params\.json: .* in one shard"):
        find(folder)
