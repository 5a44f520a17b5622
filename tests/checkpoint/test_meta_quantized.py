"""Meta's FP8 files are read as llama-models reads them, on any number of ranks."""

import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import random_state, shard_of, write_meta
from helpers.kernels import HAS_KERNELS
from helpers.weights import expect_shards, flip_a_bit, loaded
from llama.checkpoint.find import find
from llama.checkpoint.loader import load
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.packing import pack_model
from llama.checkpoint.verify import LoadCheck, verify
from llama.checkpoint.write.convert import convert
from llama.model import Transformer
from llama.model.layers import Matrix
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.bytes import Fp8Weight

PARAMS = {
    "dim": 128, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 128,
    "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
SHARDS = 4


@pytest.fixture(autouse=True, scope="module")
def load_fp8():
    """Return llama-models' function; it uses PyTorch alone, but its file imports GPU kernels."""
    names = ["fbgemm_gpu", "fbgemm_gpu.experimental", "fbgemm_gpu.experimental.gen_ai"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        return importlib.import_module("llama_models.quantize_impls").load_fp8


def write_fp8(folder: Path, load_fp8: Any, *, is_column: bool = False) -> dict[str, Tensor]:
    """Write a checkpoint of four shards; return the full matrices that llama-models multiplies
    with.
    """
    state = {name: x.bfloat16() for name, x in random_state(PARAMS).items()}
    write_meta(folder, PARAMS, state, SHARDS, torch.bfloat16)
    for w in ("w1", "w2", "w3"):  # layer 1 alone: the first and the last layer stay in bf16
        name, parts = f"layers.1.feed_forward.{w}.weight", []
        for rank in range(SHARDS):
            path, key = folder / f"consolidated.{rank:02d}.pth", f"1_feed_forward.{w}_{rank}"
            shard = torch.load(path, weights_only=True)
            scale = shard[name].float().abs().amax(1) / 448
            codes = (shard[name].float() / scale[:, None]).to(torch.float8_e4m3fn)
            torch.save(shard | {name: codes}, path)
            file = folder / f"fp8_scales_{rank}.pt"
            scales = torch.load(file, weights_only=True) if file.exists() else {}
            torch.save(scales | {key: scale[:, None] if is_column else scale}, file)
            theirs = load_fp8(codes, scale, 1200.0)
            parts.append(theirs.weight.float() * theirs.scale[:, None])
        state[name] = torch.cat(parts, 1 if w == "w2" else 0)
    return {name: x.float() for name, x in state.items()}


@pytest.mark.parametrize("is_column", [False, True])
def test_each_rank_holds_its_slices(tmp_path, load_fp8, is_column):
    state = write_fp8(tmp_path, load_fp8, is_column=is_column)
    found = find(tmp_path)
    assert found.is_quantized and found.file_type == "fp8"
    for rank, size in ((0, 1), (1, 2), (2, 4), (5, 8), (0, 3), (2, 3)):
        expect_shards(loaded(found, rank, size), state, PARAMS)
        if not HAS_KERNELS:
            continue
        in_codes = replace(found, in_codes=True)
        parallel = Parallel(Placement(rank=rank, size=size))
        model = Transformer(found.params, parallel=parallel, dtype=torch.bfloat16)
        load(in_codes, model, filled=partial(pack_model, model))
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        assert held == bytes_of(
            in_codes, parallel.placement, torch.bfloat16, None, torch.device("cpu")
        )
        modules = model.get_submodule("layers.1.feed_forward").modules()
        matrices = [x for x in modules if isinstance(x, Matrix)]
        assert all(isinstance(x.weight, Fp8Weight) for x in matrices)
        for matrix in matrices:
            shares = [shard_of(x, state[x], PARAMS, rank, size) for x in matrix.names]
            weight: Any = matrix.weight
            torch.testing.assert_close(weight.exact(), torch.cat(shares), rtol=1e-6, atol=0)


def test_it_is_converted_and_verified(tmp_path, load_fp8):
    state = write_fp8(tmp_path / "fp8", load_fp8)
    lines = verify(tmp_path / "fp8")
    assert any(line.startswith("fp8_scales_3.pt: CRC-32 of its") for line in lines), lines
    convert(tmp_path / "fp8", tmp_path / "hf")
    rounded = {name: x.bfloat16().float() for name, x in state.items()}
    expect_shards(loaded(find(tmp_path / "hf")), rounded, PARAMS)
    flip_a_bit(tmp_path / "fp8" / "fp8_scales_3.pt", "1_feed_forward.w2_3")
    for check in (verify, lambda folder: LoadCheck(find(folder), warns=False)):
        with pytest.raises(ValueError, match=r"fp8_scales_3\.pt .*is damaged"):
            check(tmp_path / "fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"fp8_scales_2\.pt is missing: download it"),
        ({"1_feed_forward.w2_2": None}, r"has no 1_feed_forward\.w2_2 with a scale .*layers\.1\."),
        ({"1_feed_forward.w2_2": torch.ones(64)}, r"has no 1_feed_forward\.w2_2 with a scale"),
        ({"1_feed_forward.w2_2": torch.ones(128).byte()}, r"has no 1_feed_forward\.w2_2 with"),
        ({"0_feed_forward.w2_2": torch.ones(128)}, r"has scales of 0_feed_forward\.w2_2, which is"),
        (
            {"1_feed_forward.w2_2": torch.full((128,), torch.nan)},
            r"02\.pth .*has a number or a scale of layers\.1\.feed_forward\.w2\.weight that is not",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, load_fp8, change, message):
    write_fp8(tmp_path, load_fp8)
    file = tmp_path / "fp8_scales_2.pt"
    if change is None:
        file.unlink()
    else:
        scales = torch.load(file, weights_only=True) | change
        torch.save({key: x for key, x in scales.items() if x is not None}, file)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        loaded(find(tmp_path))
