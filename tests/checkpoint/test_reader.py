"""Any shard count loads on any number of ranks, and names and shapes are checked before copying.

`checkpoints.py` cuts the shards by its own rules: the loader is compared with it.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.checkpoints import random_state, shard_of, write_meta
from helpers.kernels import KERNELS_RUN
from helpers.weights import PARAMS, STATE, change_json, change_shard, expect_shards, loaded
from llama.checkpoint import files
from llama.checkpoint.files import FileReader
from llama.checkpoint.find import find
from llama.checkpoint.loader import load
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.packing import pack_model
from llama.checkpoint.table import shard_shapes
from llama.checkpoint.write import convert
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("num_shards", SIZES)
def test_any_number_of_shards_loads_on_any_number_of_ranks(tmp_path, num_shards):
    """Any number of shards loads on any number of ranks.

    The reference needs as many ranks as shards, and with 4 kv heads at most 4 of either.
    """
    found = find(write_meta(tmp_path, PARAMS, STATE, num_shards))
    assert len(found.shards) == num_shards and found.layout == "meta"
    for size in (*SIZES, 3, 7):
        for rank in sorted({0, size // 3, size - 1}):
            expect_shards(loaded(found, rank, size), STATE, PARAMS)


def test_kv_heads_are_replicated_in_order(tmp_path):
    """KV heads are replicated in order.

    llama-models gives eight ranks heads 0..3, 0..3, although their queries need 0, 0, 1, 1, ...
    """
    found = find(write_meta(tmp_path, PARAMS, STATE))
    heads = STATE["layers.1.attention.wk.weight"].chunk(4)
    for rank in range(8):
        shard = loaded(found, rank, 8).named_shards()["layers.1.attention.wk.weight"]
        assert torch.equal(shard, heads[rank // 2])  # each head has copies


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_converted(tmp_path, stored):
    found = find(write_meta(tmp_path, PARAMS, STATE, 2, stored))
    state = {name: tensor.to(stored) for name, tensor in STATE.items()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = loaded(found, 1, 4, dtype)
        assert model.norm.weight.dtype == dtype
        expect_shards(model, state, PARAMS)


@pytest.fixture
def pieces(monkeypatch) -> list[int]:
    """A list of the size of each piece that is read."""
    read, sizes = FileReader.read, []

    def watched(self: FileReader, into: Tensor, file: Path, offset: int) -> None:
        sizes.append(into.nbytes)
        read(self, into, file, offset)

    monkeypatch.setattr(FileReader, "read", watched)
    return sizes


def test_weights_of_the_model_s_type_are_read_and_not_faulted_in(tmp_path, pieces):
    found = find(write_meta(tmp_path, PARAMS, STATE, 2))
    expect_shards(loaded(found), STATE, PARAMS)
    by_column = ("wo.weight", "w2.weight")  # split over two shards: their rows are in two files
    assert sum(pieces) == sum(t.nbytes for n, t in STATE.items() if not n.endswith(by_column))
    pieces.clear()
    loaded(found, dtype=torch.bfloat16)
    assert not pieces


@pytest.fixture
def staged(monkeypatch) -> None:
    """Load weights as for a GPU: their bytes go through staging buffers, here of 1,000 bytes."""
    start = FileReader.__init__
    monkeypatch.setattr(files, "_BUFFER", 1000)
    monkeypatch.setattr(FileReader, "__init__", lambda self, _: start(self, torch.device("mps")))


@pytest.mark.parametrize("layout", ["meta", "hf"])
def test_through_the_buffers_of_a_gpu_come_the_same_bytes(tmp_path, staged, pieces, layout):
    """Staging buffers for a GPU deliver the same bytes.

    The cases are whole tensors, rows and columns of shards, other dtypes, and Hugging Face's order
    of q and k.
    """
    found = find(write_meta(tmp_path / "meta", PARAMS, STATE, 2))
    if layout == "hf":
        convert.convert(tmp_path / "meta", tmp_path / "hf")
        found = find(tmp_path / "hf")
    for dtype in (torch.float32, torch.bfloat16):
        for rank, size in ((0, 1), (1, 2), (3, 4)):
            pieces.clear()
            expect_shards(loaded(found, rank, size, dtype), STATE, PARAMS)
            assert len(pieces) > 10


@pytest.mark.parametrize("num_shards", [0, 2, 8])
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_each_byte_of_a_rank_is_taken_once_by_the_threads(
    tmp_path, monkeypatch, pieces, num_shards, device
):
    """The threads of a rank copy each byte exactly once.

    It holds for Hugging Face's files (0 shards) and Meta's. A past fault: one thread copied parts
    of the rows of wo and w2 alone.
    """
    write_meta(tmp_path / "meta", PARAMS, STATE, num_shards or 1)
    if not num_shards:
        convert.convert(tmp_path / "meta", tmp_path / "hf")
    found = find(tmp_path / ("meta" if num_shards else "hf"))
    start, fill, by_row = FileReader.__init__, FileReader._fill, []
    monkeypatch.setattr(FileReader, "__init__", lambda self, _: start(self, torch.device(device)))
    monkeypatch.setattr(files, "_PIECE", 64)

    calls: list[int] = []

    def watched(self: FileReader, target: Tensor, fills: Callable) -> None:
        def counted(memory: np.ndarray, first: int) -> None:
            calls.append(memory.nbytes)
            fills(memory, first)

        by_row.append(target.nbytes * (target.dim() > 1))
        fill(self, target, counted)

    monkeypatch.setattr(FileReader, "_fill", watched)
    pieces.clear()
    model = loaded(found, 3, 4)
    expect_shards(model, STATE, PARAMS)
    shards = model.named_shards()

    def size(*ends: str) -> int:
        return sum(x.nbytes for name, x in shards.items() if name.endswith(ends))

    turned = size("wq.weight", "wk.weight") if (num_shards, device) == (0, "cpu") else 0
    assert sum(pieces) + sum(by_row) == size("weight") - turned
    # contiguous in their file, and adjacent in the loaded weight
    are_whole = (num_shards, device) == (8, "mps")
    assert sum(by_row) == (0 if are_whole else size("wo.weight", "w2.weight"))
    # At most one call for each whole tensor, and one for each tensor that is smaller than a piece.
    assert len(calls) <= 1.3 * (size("weight") - turned) / 64 + len(shards)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (8, torch.bfloat16)])
def test_bytes_of_one_rank_are_told_before_loading(tmp_path, size, dtype):
    found = find(write_meta(tmp_path, PARAMS, STATE, 2))
    shards = [shard_of(name, t, PARAMS, 0, size).to(dtype) for name, t in STATE.items()]
    assert bytes_of(found, Placement(size=size), dtype, None, torch.device("cpu")) == sum(
        shard.nbytes for shard in shards
    )


@pytest.mark.parametrize("quantize", ["int8", "int4"] if KERNELS_RUN else ["int8"])
def test_bytes_of_quantized_weights_are_what_packing_leaves(tmp_path, quantize):
    """Loading a quantized model accounts for the bytes that remain after packing.

    Norms and the embedding stay in bf16; while one part is packed, only the next one is read.
    """
    params = PARAMS | {"dim": 128, "vocab_size": 256}
    found = find(write_meta(tmp_path, params, random_state(params), 2))
    model = Transformer(found.params, dtype=torch.bfloat16)
    whole = model.named_shards()
    for shard in whole.values():
        shard.zero_()
    loaded_so_far = []

    def filled(module: torch.nn.Module, _: object) -> None:
        loaded_so_far.append([name for name, shard in whole.items() if shard.any()])
        pack_model(model, module, quantize=quantize)

    load(found, model, filled=filled)
    counts = [len(names) for names in loaded_so_far]
    through = [1, 10, 19, 20, 21, 21]  # the embedding, 2 layers of 9, the norm, lm_head
    limits = itertools.pairwise(through)
    assert all(a <= n <= b for n, (a, b) in zip(counts, limits, strict=True)), counts
    assert loaded_so_far[-1] == list(whole)
    held = [x.nbytes for x in (*model.parameters(), *model.buffers())]
    assert bytes_of(found, Placement(), torch.bfloat16, quantize, torch.device("cpu")) == sum(held)


def test_the_bar_is_drawn_only_where_it_is_asked_for(meta, capsys):
    model = loaded(find(meta))
    assert capsys.readouterr() == ("", "")
    load(find(meta), model, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "Loading" in err


def test_rope_freqs_are_passed_over(meta):
    """The buffer rope.freqs, which Meta's files of the first Llamas contain, is ignored."""
    change_shard(meta / "consolidated.01.pth", rope__freqs=torch.ones(2))
    expect_shards(loaded(find(meta)), STATE, PARAMS)


NORM = "layers__1__ffn_norm__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, r"01\.pth: layers\.1\.ffn_norm\.weight is missing"),
        ({NORM: None, "norm__weight": None}, r"01\.pth: layers\.1\.ffn_norm\.weight and 1 more"),
        (
            {NORM: torch.ones(63)},
            r"01\.pth: layers\.1\.ffn_norm\.weight has shape \(63,\).*\(64,\)",
        ),
        (
            {NORM: torch.ones(64).char()},
            r"01\.pth: layers\.1\.ffn_norm\.weight has type torch\.int8",
        ),
        ({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, r"float8_e4m3fn: it looks quantized"),
        (
            {"layers__2__ffn_norm__weight": torch.ones(64)},
            r"'layers\.2\.ffn_norm\.weight' has no place",
        ),
        ({"lora__weight": torch.ones(2)}, r"01\.pth: 'lora\.weight' has no place"),
        ({"step": 7}, r"01\.pth: the entry 'step' is not a tensor"),
        ({"n" * 10**6: torch.ones(2)}, r"01\.pth: 'nnn.{,200}has no place"),
    ],
)
def test_every_shard_is_checked_before_anything_is_copied(meta, changes, message):
    change_shard(meta / "consolidated.01.pth", **changes)
    found = find(meta)
    model = Transformer(found.params)
    for shard in model.named_shards().values():
        shard.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        load(found, model)
    assert all(bool((shard == 7.0).all()) for shard in model.named_shards().values())


def test_llama_2_s_shards_are_refused(meta):
    """Llama 2's shards are refused.

    They cut the embedding along dim 1: read as Llama 3's, each row would be wrong.
    """
    for i in range(2):
        half = STATE["tok_embeddings.weight"].chunk(2, dim=1)[i].clone()
        change_shard(meta / f"consolidated.{i:02d}.pth", tok_embeddings__weight=half)
    with pytest.raises(ValueError, match="dim 1, as Llama 2's"):
        loaded(find(meta))


def test_missing_last_shards_are_told_by_the_shapes(meta):
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match=r"is one of 2 shards .* but 1 are in .*download the rest"):
        loaded(find(meta))


def test_params_of_another_model_do_not_fit(meta):
    change_json(meta / "params.json", dim=128)
    with pytest.raises(ValueError, match=r"has shape .*params\.json .*do not belong together"):
        loaded(find(meta))
    change_json(meta / "params.json", dim=64, n_heads=1, n_kv_heads=1)
    with pytest.raises(ValueError, match=r"has 2 shards, which do not fit params\.json"):
        loaded(find(meta))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_shapes_need_no_model(size, tied):
    """Shapes follow from params.json without a model; they are compared with the Transformer's."""
    args = ModelArgs.from_params(PARAMS | {"tied_output": tied}, "params")
    model = Transformer(args, parallel=Parallel(Placement(size=size)), device="meta")
    expected = {name: shard.shape for name, shard in model.named_shards().items()}
    assert shard_shapes(args, size) == expected
    with pytest.raises(ValueError, match="does not divide"):
        shard_shapes(args, 3 * size)
