"""GGUF files written by llama.cpp's package `gguf`: blocks, shares, tokenizer, and bad files."""

import functools
import math
import random
import shutil
import struct
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from llama_models.llama3 import tokenizer as metas_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.checkpoints import shard_of, write_byte_tokenizer, write_meta
from helpers.gguf_files import MIXED, PARAMS, SCALES, random_blocks, write_gguf
from helpers.kernels import HAS_KERNELS
from helpers.launch import DEMO
from helpers.weights import expect_shards, from_hf, hf_logits, hf_model, loaded, scaled_rope
from llama import Llama, Tokenizer
from llama.checkpoint.find import find
from llama.checkpoint.gguf import blocks as gguf_blocks
from llama.checkpoint.gguf.blocks import GGUFMatrix
from llama.checkpoint.loader import load
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.packing import pack_model
from llama.checkpoint.quantized_matrix import PackTarget
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, reshard
from llama.kernels.cpu import native
from llama.model import Transformer
from llama.model.layers import Matrix
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.storage.gguf import (
    TENSOR_TYPES,
    TensorInfo,
    TensorType,
    _HeaderReader,
    read_header,
)
from llama.weights.blocks import BlockedWeight
from llama.weights.choice import packed
from llama.weights.coded import Coded, CodedRows, alike
from llama.weights.groups import GroupedWeight
from llama.weights.nibbles import SixBitsWeight

PROMPTS = ["Once upon a time", "a"]
METAS = Path(metas_tokenizer.__file__).with_name("tokenizer.model")
TYPES = {tensor_type.name: tensor_type for tensor_type in TENSOR_TYPES.values()}
CPU = torch.device("cpu")


def matrix_of(
    name: str, rows: np.ndarray, k: int, path: Path = Path("none.gguf"), offset: int = 0
) -> GGUFMatrix:
    """A matrix of K columns of which a file has these blocks, perhaps from an offset on."""
    shape = torch.Size((len(rows), k))
    info = TensorInfo(tuple(shape), TYPES[name], offset, rows.nbytes)
    return GGUFMatrix(shape, path, info, torch.from_numpy(rows))


def pack_into(
    matrix: GGUFMatrix, rows: range, columns: slice, like: Coded, kind: int, *tensors: torch.Tensor
) -> bool:
    return matrix.pack(rows, columns, PackTarget(like, kind, *tensors))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The files that most tests read: one model in one file and in three parts, and a reference.

    The reference is in Meta's layout, with the values that `gguf` reads.
    """
    folder = tmp_path_factory.mktemp("gguf")
    write_byte_tokenizer(folder)
    vocabulary = folder / "tokenizer.model"
    state = write_gguf(folder / "one.gguf", PARAMS, MIXED, tokenizer=vocabulary)
    write_gguf(folder / "parts.gguf", PARAMS, MIXED, tokenizer=vocabulary, parts=3)
    write_meta(folder / "meta", PARAMS, state, tokenizer=vocabulary)
    return folder


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A copy of the file that a test may damage."""
    return Path(shutil.copyfile(folder / "one.gguf", tmp_path / "model.gguf"))


@pytest.mark.parametrize("in_torch", [False, True], ids=["in C++", "in torch"])
@pytest.mark.parametrize("name", SCALES)
def test_each_kind_of_block_has_the_numbers_that_llama_cpp_reads(name, in_torch, monkeypatch):
    if in_torch:
        monkeypatch.setattr(native, "kernels", lambda: None)
    block_size = TYPES[name].block_size
    k = 3 * block_size
    rows = random_blocks(name, 32, k, std=1.0)
    oracle = torch.from_numpy(gguf.quants.dequantize(rows, GGMLQuantizationType[name]))
    matrix = matrix_of(name, rows, k)
    whole = matrix.read(slice(0, 32), slice(0, k), CPU)
    assert torch.equal(whole.plain(), oracle)
    for begin, end in ((0, block_size), (block_size, 2 * block_size), (16, k - 48 % block_size)):
        some = matrix.read(slice(3, 9), slice(begin, end), CPU)
        assert torch.equal(some.plain(), oracle[3:9, begin:end]), (begin, end)


def test_a_share_of_columns_reads_the_blocks_that_hold_it(monkeypatch):
    seen = []
    unpack = gguf_blocks._unpack

    def watched(rows: torch.Tensor, tensor_type: TensorType) -> Coded:
        seen.append(rows.shape)
        return unpack(rows, tensor_type)

    monkeypatch.setattr(gguf_blocks, "_unpack", watched)
    matrix = matrix_of("Q4_K", random_blocks("Q4_K", 4, 1024, std=1.0), 1024)
    matrix.read(slice(1, 3), slice(256 + 64, 512 + 32), CPU)
    assert seen == [(2, 2 * 144)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_holds_its_slices_of_what_the_file_stands_for(folder, size):
    """Each rank loads its slices of the matrices; with 3 ranks and more, columns are cut inside
    blocks of 256.
    """
    state = torch.load(folder / "meta" / "consolidated.00.pth", weights_only=True)
    for rank in range(size):
        model = loaded(find(folder / "one.gguf"), rank, size)
        expect_shards(model, state, PARAMS)


def in_codes(path: Path, rank: int = 0, size: int = 1) -> Transformer:
    """Load in codes, as a build on the CPU does by default."""
    found = replace(find(path), in_codes=True)
    parallel = Parallel(Placement(rank=rank, size=size))
    model = Transformer(found.params, parallel=parallel, dtype=torch.bfloat16)
    load(found, model, filled=partial(pack_model, model))
    return model


def expect_exact(model: Transformer, state: dict[str, torch.Tensor], params: dict) -> set[str]:
    """Check that every matrix has its rank's values in float32; return the classes of all."""
    rank, size, kinds = model.parallel.rank, model.parallel.size, set()
    for module in model.modules():
        if isinstance(module, Matrix):
            names = [name if name in state else "tok_embeddings.weight" for name in module.names]
            shares = [shard_of(name, state[name], params, rank, size) for name in names]
            assert torch.equal(cast(BlockedWeight, module.weight).exact(), torch.cat(shares)), names
            kinds.add(type(module.weight).__name__)
    return kinds


needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")


@needs_kernels
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_scales_of_blocks_of_256_are_held_in_ten_bits(name):
    """Ten bits suffice for the scales of blocks of 256.

    Scales of Q6_K range from -128 to 127 and are multiplied by a number of either sign.
    """
    matrix = matrix_of(name, random_blocks(name, 64, 512, std=0.02), 512)
    coded = matrix.read(slice(0, 64), slice(0, 512), CPU)
    weight = cast(GroupedWeight, packed(coded))
    assert weight.scales.dtype is torch.uint8
    assert torch.equal(weight.exact(), coded.plain())


@needs_kernels
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_on_the_cpu_matrices_stay_as_the_file_has_them(folder, size):
    """On the CPU matrices keep the precision of the file: 4 bits in 4, 8 in 8, the rest in 6.

    This includes wqkv, whose parts have different block types.
    """
    state = torch.load(folder / "meta" / "consolidated.00.pth", weights_only=True)
    for rank in range(size):
        model = in_codes(folder / "one.gguf", rank, size)
        assert expect_exact(model, state, PARAMS) == {
            "NibblesWeight",
            "SixBitsWeight",
            "BytesWeight",
        }
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        found = replace(find(folder / "one.gguf"), in_codes=True)
        cpu, gpu = torch.device("cpu"), torch.device("cuda")  # a GPU takes six bits as bytes
        placement = Placement(rank=rank, size=size)
        assert bytes_of(found, placement, torch.bfloat16, None, cpu) == held
        more = sum(
            x.weight.values.nbytes // 3
            for x in model.modules()
            if isinstance(x, Matrix) and type(x.weight) is SixBitsWeight
        )
        if size == 1:
            assert (
                more
                and bytes_of(found, Placement(size=size), torch.bfloat16, None, gpu) == held + more
            )


@needs_kernels
@pytest.mark.parametrize("name", SCALES)
def test_blocks_go_from_a_file_into_a_weight(name, tmp_path):
    """Blocks go from a file into a weight.

    Whole matrices and some of their rows and columns are read; they are stored in bytes where the
    matrix has parts of other types.
    """
    data, path = random_blocks(name, 96, 1024, std=0.02), tmp_path / "blocks"
    path.write_bytes(b"head" + data.tobytes())
    matrix = matrix_of(name, data, 1024, path, offset=4)
    oracle = torch.from_numpy(gguf.quants.dequantize(data, GGMLQuantizationType[name]))
    parts = [
        (range(96), slice(0, 1024)),
        (range(32, 82), slice(0, 1024)),  # the last block is not full
        (range(32, 96), slice(256, 768)),
    ]
    for rows, columns in parts:
        few = matrix.read(slice(rows.start, rows.start + 32), columns, CPU)
        exact = oracle[rows.start : rows.stop, columns]
        wide = alike([few, replace(few, table=torch.arange(-128.0, 128))])
        for like in (few, wide[0]) if wide else (few,):
            fill = functools.partial(pack_into, matrix, rows, columns)
            weight = packed(CodedRows(len(rows), like, lambda: pytest.fail("slow"), fill))
            assert torch.equal(cast(GroupedWeight, weight).exact(), exact)
    # a float32 weight
    assert not fill(like, 1, torch.empty(2, 1, dtype=torch.uint8), torch.empty(2, 1))
    path.write_bytes(data.tobytes()[: data.nbytes // 2])
    with pytest.raises(ValueError, match=r"blocks .* became shorter while it was read"):
        packed(CodedRows(len(rows), like, lambda: like, fill))


@needs_kernels
def test_a_load_unpacks_the_first_rows_alone(folder, monkeypatch):
    """A load unpacks the first rows alone, because the codes of a layer are larger than its
    weights.
    """
    seen, unpack = [0], gguf_blocks._unpack

    def unpack_and_count(rows: torch.Tensor, tensor_type: TensorType) -> Coded:
        coded = unpack(rows, tensor_type)
        seen.append(coded.codes.numel())
        return coded

    monkeypatch.setattr(gguf_blocks, "_unpack", unpack_and_count)
    model = in_codes(folder / "one.gguf")
    held = [math.prod(x.weight.shape) for x in model.modules() if isinstance(x, Matrix)]
    assert 0 < sum(seen) < sum(held) // 4


@needs_kernels
@pytest.mark.parametrize("vocab_size", [PARAMS["vocab_size"], 514])
def test_a_tied_matrix_is_held_once_and_a_part_in_floats_makes_a_matrix_bf16(vocab_size, tmp_path):
    tied = PARAMS | {"tied_output": True, "vocab_size": vocab_size}
    path = tmp_path / "model.gguf"
    state = write_gguf(path, tied, {"attn_k": "BF16", "token_embd": "Q6_K"}, default="IQ4_NL")
    model = in_codes(path)
    assert model.output.weight is model.tok_embeddings.weight
    block = model.blocks()[0]
    names = [type(x.weight).__name__ for x in (model.output, block.feed_forward.w13)]
    assert names == ["SixBitsWeight", "NibblesWeight"]
    parts = [state[f"layers.0.attention.{x}.weight"] for x in ("wq", "wk", "wv")]
    assert torch.equal(block.attention.wqkv.weight.plain(), torch.cat(parts).bfloat16())
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert (
        bytes_of(
            replace(find(path), in_codes=True),
            Placement(),
            torch.bfloat16,
            None,
            torch.device("cpu"),
        )
        == held
    )


@needs_kernels
def test_an_output_as_large_as_wo_is_cut_in_its_own_way(tmp_path):
    """lm_head is cut along its rows although wo, of the same size and type, is cut along its
    columns.
    """
    square = PARAMS | {"vocab_size": PARAMS["dim"], "n_layers": 1}
    state = write_gguf(tmp_path / "model.gguf", square, "Q4_0")
    for rank in range(2):
        expect_exact(in_codes(tmp_path / "model.gguf", rank, 2), state, square)


@pytest.mark.parametrize(
    "name", ["one.gguf", "parts-00001-of-00003.gguf", "parts-00003-of-00003.gguf"]
)
def test_a_model_answers_as_the_same_numbers_in_metas_layout(folder, name):
    llamas = [
        Llama.build(str(folder / x), None, 128, 4, device="cpu", dtype="fp32")
        for x in ("meta", name)
    ]
    a, b = (x.text_completion(PROMPTS, temperature=0, max_gen_len=8, logprobs=True) for x in llamas)
    assert a == b


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_files_of_one_kind_load(tmp_path, kind):
    state = write_gguf(tmp_path / "model.gguf", PARAMS, kind)
    found = find(tmp_path)
    assert found.file_type == kind
    expect_shards(loaded(found), state, PARAMS)


def test_a_build_reads_the_header_once(folder, monkeypatch):
    """A build reads the header once; that of Llama 3 has 400,000 strings."""
    seen, strings = [], _HeaderReader.strings

    def watched(reader: _HeaderReader, count: int) -> list[str]:
        seen.append(count)
        return strings(reader, count)

    monkeypatch.setattr(_HeaderReader, "strings", watched)
    Llama.build(str(folder / "one.gguf"), None, 128, 4, device="cpu")
    assert sorted(seen)[-2] < max(seen) == 512


def test_a_build_says_what_the_file_is_and_reads_its_tokenizer(folder, tmp_path, capsys):
    path = tmp_path / "model.gguf"
    kinds = {"general.file_type": 15}
    vocabulary = folder / "tokenizer.model"
    write_gguf(path, PARAMS, MIXED, tokenizer=vocabulary, metadata=kinds)
    llamas = []
    for given, kind in (
        (None, "Q4_K_M" if HAS_KERNELS else "bf16 from Q4_K_M"),
        ("bf16", "bf16 from Q4_K_M"),
        ("fp32", "fp32 from Q4_K_M"),
    ):
        llamas.append(Llama.build(str(tmp_path), None, 128, 4, device="cpu", dtype=given))
        assert f"cpu, {kind}, " in capsys.readouterr().out
    as_it_is, _, exact = (
        llama.text_completion(PROMPTS, 0, max_gen_len=1, logprobs=True, echo=True)
        for llama in llamas
    )
    for one, other in zip(as_it_is, exact, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=0.3)


def test_a_tied_model_with_scaled_rope(tmp_path):
    """A tied model with scaled RoPE is read.

    transformers provides llama3's frequencies; output.weight is left out.
    """
    path, sizes = tmp_path / "model.gguf", {"hidden_size": 256, "num_attention_heads": 8}
    plain, scaled = hf_model(**sizes), hf_model(**sizes, **scaled_rope(32.0))
    turns = [x.model.rotary_emb.inv_freq for x in (plain, scaled)]
    divisors = (turns[0] / turns[1]).numpy()
    tied = PARAMS | {"tied_output": True}
    state = write_gguf(path, tied, "Q8_0", rope_freqs__weight=divisors)
    params = find(path).params
    assert (params.rope_factor, params.tied_output) == (32.0, True)
    expect_shards(loaded(find(path)), state, tied)
    divisors[3] *= 1.001
    write_gguf(path, tied, "Q8_0", rope_freqs__weight=divisors)
    with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs.weight does not hold the divi"):
        find(path)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.5}, 2.5),
        ({"rope.scaling.factor": 3.0, "rope.scaling.type": "linear", "rope.scale_linear": 7.0}, 3),
        ({"rope.scaling.factor": 3.0, "rope.scaling.type": "none"}, 1.0),
        ({"rope.scaling.factor": 0.0, "rope.scaling.attn_factor": 1.0}, 1.0),
    ],
)
def test_a_linear_rope_scaling_divides_the_frequencies(tmp_path, keys, factor):
    """The frequencies are those of transformers, and the file may be written again."""
    path = tmp_path / "model.gguf"
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    write_byte_tokenizer(tmp_path)
    write_gguf(path, PARAMS, metadata=metadata, tokenizer=tmp_path / "tokenizer.model")
    rope = scaled_rope(factor, rope_type="linear")
    rope["rope_parameters"]["rope_theta"] = PARAMS["rope_theta"]
    heads = PARAMS["n_heads"]
    theirs = hf_model(hidden_size=PARAMS["dim"], num_attention_heads=heads, **rope)
    angles = theirs.model.rotary_emb.inv_freq
    convert(path, tmp_path / "again.gguf")
    for file in (path, tmp_path / "again.gguf"):
        model = loaded(find(file))
        torch.testing.assert_close(model.freqs_cis[1].angle(), angles, atol=1e-7, rtol=1e-6)


WIDE_HEADS = PARAMS | {"head_size": 64}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 512}


@pytest.mark.parametrize(
    ("params", "keys", "theirs"),
    [
        (WIDE_HEADS, {}, {"rope_type": "default"}),
        (PARAMS | {"head_size": 16}, {}, {"rope_type": "default"}),
        (
            PARAMS,
            YARN_KEYS | {"rope.scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0},
        ),
        (
            WIDE_HEADS,
            YARN_KEYS
            | {
                "rope.scaling.factor": 8.0,
                "rope.scaling.attn_factor": 0.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                # As llama.cpp multiplies the key by its own factor.
                "attention_factor": 0.5 * (1 + 0.1 * math.log(8)),
            },
        ),
    ],
)
def test_heads_of_any_size_and_yarn_give_the_logits_of_transformers(tmp_path, params, keys, theirs):
    """The file, and what converts it: to Hugging Face's layout, to Meta's, and to GGUF again."""
    path = tmp_path / "model.gguf"
    write_byte_tokenizer(tmp_path)
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    tokenizer = tmp_path / "tokenizer.model"
    write_gguf(path, params, "BF16", metadata=metadata, tokenizer=tokenizer)
    convert(path, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta")
    convert(tmp_path / "meta", tmp_path / "again.gguf")
    rope = theirs | {"rope_theta": PARAMS["rope_theta"]}
    if theirs["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = 512
    config = LlamaConfig.from_pretrained(tmp_path / "hf", rope_parameters=rope)
    assert config.head_dim == params.get("head_size", 32)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path / "hf", config=config, dtype=torch.float32)
    tokens = torch.randint(512, (1, 700), generator=torch.Generator().manual_seed(7))
    expected = hf_logits(oracle.eval(), tokens)
    for file in (path, tmp_path / "hf", tmp_path / "meta", tmp_path / "again.gguf"):
        found = find(file)
        found = replace(found, params=replace(found.params, max_seq_len=700))
        torch.testing.assert_close(loaded(found)(tokens, 0), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"original_max_position_embeddings": 64},
        {"low_freq_factor": 0.5},
        {"low_freq_factor": 2.0, "high_freq_factor": 20.0, "original_max_position_embeddings": 256},
    ],
)
def test_another_scaling_of_llama_3_1_is_read_off_its_divisors(tmp_path, rope):
    """The file has what each frequency is divided by, and neither turns nor original context."""
    theirs = hf_model(vocab_size=512, head_dim=64, **scaled_rope(8.0, **rope))
    for weight in theirs.parameters():
        weight.data = weight.bfloat16().float()  # as the file has them
    theirs.save_pretrained(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        field = reader.get_field(f"llama.{key}")
        assert field is not None and field.contents() == 64, key
    (info,) = [tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    plain = 5e5 ** -(torch.arange(0, 64, 2) / 64)
    expected = plain / theirs.model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(info.data), expected, rtol=1e-5, atol=0)
    convert(tmp_path / "out.gguf", tmp_path / "again")
    tokens = torch.randint(512, (1, 300), generator=torch.Generator().manual_seed(7))
    for file in (tmp_path / "out.gguf", tmp_path / "again"):
        found = find(file)
        found = replace(found, params=replace(found.params, max_seq_len=300))
        logits = loaded(found)(tokens, 0)
        torch.testing.assert_close(logits, hf_logits(theirs, tokens), atol=2e-4, rtol=1e-4)


def test_yarn_that_gguf_has_no_key_for_is_not_converted(tmp_path):
    rope = scaled_rope(4.0, rope_type="yarn", truncate=False)
    hf_model(vocab_size=512, **rope).save_pretrained(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"GGUF has no key .* YaRN with truncate=false"):
        convert(tmp_path / "hf", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("source", [DEMO / "tokenizer.model", METAS], ids=["demo", "128256"])
def test_the_tokenizer_is_that_of_tokenizer_model(tmp_path, source):
    path, oracle = tmp_path / "model.gguf", Tokenizer(source, llama_3_0=True)
    write_gguf(path, PARAMS, tokenizer=source)
    found = Tokenizer(path, llama_3_0=True)
    assert found.model._mergeable_ranks == oracle.model._mergeable_ranks
    assert found.special_tokens == oracle.special_tokens
    assert found.stop_tokens == oracle.stop_tokens
    text = "Ein Käse für 1234567 €, and it's\r\n\r\n  \t漢字 <|eot_id|>🧀"
    ids = found.encode(text, bos=True, eos=True)
    assert ids == oracle.encode(text, bos=True, eos=True) and found.decode(ids[1:-1]) == text


def test_convert_writes_hugging_faces_layout(folder, tmp_path):
    """A GGUF file converts to Hugging Face's layout, and from there to Meta's.

    The values are the file's, rounded to bf16.
    """
    convert(folder / "one.gguf", tmp_path / "hf")
    from_hf(tmp_path / "hf")
    state = torch.load(folder / "meta" / "consolidated.00.pth", weights_only=True)
    rounded = {n: t.bfloat16() if t.dim() == 2 else t for n, t in state.items()}
    expect_shards(loaded(find(tmp_path / "hf")), rounded, PARAMS)
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert not (tmp_path / "hf" / "original").exists()  # the GGUF file is not a tokenizer.model
    convert(tmp_path / "hf", tmp_path / "meta")
    expect_shards(loaded(find(tmp_path / "meta")), rounded, PARAMS)
    with pytest.raises(ValueError, match=r"one\.gguf is not in Meta's layout: convert it first"):
        reshard(folder / "one.gguf", tmp_path / "out", 2)


def test_verify_says_what_is_there(folder):
    lines = verify(folder / "one.gguf")
    assert lines[0].startswith("one.gguf: 21 tensors")
    assert lines[-1].startswith(f"{folder / 'one.gguf'}: complete, ")


def test_a_folder_of_several_models_asks_which(folder):
    with pytest.raises(ValueError, match=r"holds 2 models: give the path of one: one\.gguf, parts"):
        find(folder)


def test_a_missing_part_is_named(folder, tmp_path):
    name = "parts-00001-of-00003.gguf"
    shutil.copyfile(folder / name, tmp_path / name)
    with pytest.raises(
        FileNotFoundError, match=r"parts-00002-of-00003\.gguf and 1 more are missing"
    ):
        find(tmp_path)
    for i in (2, 3):  # renamed parts
        shutil.copyfile(folder / name, tmp_path / f"parts-0000{i}-of-00003.gguf")
    with pytest.raises(
        ValueError, match=r"parts-00002-of-00003\.gguf says that it is part 0 .from 0. of 3"
    ):
        find(tmp_path)


def test_a_name_that_is_no_part_is_an_error(folder, tmp_path):
    """A name whose part number is beyond its count is an error, in a folder too."""
    for name in ("m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf"):
        path = tmp_path / name
        path.write_bytes((folder / "one.gguf").read_bytes())
        number, count = int(name[2:7]), int(name[11:16])
        for given in (path, tmp_path):
            with pytest.raises(ValueError, match=f"{name} is by its name part {number} of {count}"):
                find(given)
        path.unlink()


def test_many_parts_are_looked_for_in_one_listing(folder, tmp_path, monkeypatch):
    """The parts of a model are looked for in one listing of the folder, not one by one."""
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes((folder / "one.gguf").read_bytes())
    looked_at = []
    exists = type(path).exists

    def look(other: Path) -> bool:
        looked_at.append(other)
        return exists(other)

    monkeypatch.setattr(type(path), "exists", look)
    for given in (path, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"m-00002-of-99999\.gguf and 99997 more are mis"
        ):
            find(given)
    assert len(looked_at) < 100


def test_overlapping_tensors_are_refused(folder, tmp_path):
    """Tensors that share bytes are refused, as llama.cpp does."""
    header = read_header(folder / "one.gguf")
    first, second = sorted(header.tensors, key=lambda name: header.tensors[name].offset)[:2]
    content = (folder / "one.gguf").read_bytes()
    # The description of a tensor ends in its offset within the tensor data.
    name = second.encode()
    info = struct.pack("<Q", len(name)) + name
    dimensions = len(header.tensors[second].shape)
    at = content.index(info) + len(info) + 4 + 8 * dimensions + 4
    path = tmp_path / "one.gguf"
    path.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
    with pytest.raises(ValueError, match=f"is damaged: '{second}|{first}' begins inside"):
        find(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "qwen2", "a 'model' of the architecture 'qwen2'"),
        ("general.type", "adapter", "a 'adapter' of the architecture 'llama'"),
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type is 'longrope'"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor is 0.5"),
        ("llama.rope.scaling.attn_factor", 1.2, "attn_factor is 1.2"),
        ("llama.attention.causal", False, "llama.attention.causal is False"),
        ("llama.logit_scale", 0.5, "llama.logit_scale is 0.5"),
        ("llama.attention.sliding_window", 512, "llama.attention.sliding_window is 512"),
        ("llama.attention.key_length", 64, "rope.dimension_count is 32: this runtime needs 64"),
        ("llama.attention.value_length", 64, "value_length is 64: this runtime needs 32"),
        ("llama.attention.head_count", [8, 8], r"num_attention_heads=\(8, 8\) must be"),
        ("llama.block_count", 3, r"blk\.2\.attn_q\.weight and 8 more are missing"),
        ("llama.feed_forward_length", 512, r"ffn_gate\.weight has shape \(768, 256\)"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "norm_eps=0.0 must be"),
        ("general.alignment", 12, "general.alignment=12"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, key, value, message):
    write_gguf(tmp_path / "model.gguf", PARAMS, "Q8_0", metadata={key: value})
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        loaded(find(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "no tokenizer of Llama 3 .*give tokenizer_path"),
        ("tokenizer.ggml.pre", "smollm", "no tokenizer of Llama 3 .*is 'smollm'"),
        ("tokenizer.ggml.merges", ["a b", "b c"], "not the file of a byte-level BPE"),
        ("tokenizer.ggml.token_type", [1] * 512, r"has no <\|begin_of_text\|>"),
    ],
)
def test_another_tokenizer_is_refused(folder, tmp_path, key, value, message):
    path, vocabulary = tmp_path / "model.gguf", folder / "tokenizer.model"
    write_gguf(path, PARAMS, "Q8_0", tokenizer=vocabulary, metadata={key: value})
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        Tokenizer(path, llama_3_0=True)


def test_merges_in_another_order_are_another_tokenizer(tmp_path):
    """Merges in another order make another tokenizer, whose ranks are not its ids."""
    path = tmp_path / "model.gguf"
    write_gguf(path, PARAMS, tokenizer=DEMO / "tokenizer.model")
    merges = read_header(path).metadata["tokenizer.ggml.merges"]
    metadata = {"tokenizer.ggml.merges": [merges[1], merges[0]]}
    write_gguf(path, PARAMS, tokenizer=DEMO / "tokenizer.model", metadata=metadata)
    with pytest.raises(ValueError, match="its merges are not in the order of ids"):
        Tokenizer(path, llama_3_0=True)


@pytest.mark.parametrize("at", [0, 2])
def test_a_scale_that_is_no_number_is_named(tmp_path, at):
    """A scale that is not a number is reported with its tensor; all blocks are checked, to the
    last.
    """
    path = tmp_path / "model.gguf"
    write_gguf(path, PARAMS, "Q4_1")
    info = read_header(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 20 + at)
        file.write(np.float16(np.nan).tobytes())
    for load_it in (lambda: loaded(find(path)), lambda: in_codes(path)):
        message = r"model\.gguf.* a scale of .*1\.feed_forward\.w3\.weight"
        with pytest.raises(ValueError, match=message):
            load_it()


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (16, "IQ2_XXS"),
        (31, "Q4_0_4_4"),
        (39, "MXFP4"),
        (139, r"IQ4_K \(139\) of ik_llama.cpp, .*llama-quantize --allow-requantize IN\.gguf"),
        (153, r"IQ2_KT \(153\) of ik_llama"),
        (340, r"that has no name here \(340\) of ik_llama"),
    ],
)
def test_a_type_that_is_not_read_is_named_with_what_to_take(copy, number, name):
    data = copy.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    copy.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    message = rf"'blk\.0\.ffn_up\.weight' is of type {name}.*, .*take the model's file in Q4_K_M"
    with pytest.raises(ValueError, match=message) as error:
        find(copy)
    assert "again" not in str(error.value)


HUGE = (2**63 + 5).to_bytes(8, "little")
MANY = (2**31).to_bytes(8, "little")


@pytest.mark.parametrize("number", [HUGE, MANY], ids=["of 2**63", "of 2**31"])
@pytest.mark.parametrize(
    ("before", "skip"),
    [
        (b"GGUF", 4),  # number of tensors
        (b"GGUF", 12),  # number of key-value pairs
        (b"llama.block_count", -25),  # length of a key
        (b"tokenizer.ggml.model", 4),  # length of a string
        (b"tokenizer.ggml.tokens", 8),  # number of strings in an array
        (b"tokenizer.ggml.tokens", 16),  # length of the array's first string
        (b"tokenizer.ggml.token_type", 8),  # number of integers in an array
        (b"token_embd.weight", 4),  # number of columns of a tensor
        (b"token_embd.weight", 24),  # offset of a tensor
    ],
)
def test_a_number_beyond_the_file_is_an_error_at_once(copy, before, skip, number):
    data = copy.read_bytes()
    at = data.index(before) + len(before) + skip
    copy.write_bytes(data[:at] + number + data[at + 8 :])
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model\.gguf .*is (damaged|cut short)"):
        read_header(copy)
    assert time.process_time() - began < 1


def test_a_file_type_that_is_no_number_is_that_of_the_tensors(tmp_path):
    metadata = {"general.file_type": ["Q4_K_M"]}
    write_gguf(tmp_path / "model.gguf", PARAMS, "Q8_0", metadata=metadata)
    assert find(tmp_path).file_type == "Q8_0"


def test_whatever_a_header_says_is_read_or_refused_with_the_file_s_name(copy):
    """A damaged header is read or refused with an error that names the file.

    A good file is cut at any byte of its header, or some of the bytes there are changed.
    """
    draw, good = random.Random(0), copy.read_bytes()
    length = min(info.offset for info in read_header(copy).tensors.values())
    refused = 0
    for i in range(300):
        data = bytearray(good[:length])
        if i % 2:
            del data[draw.randrange(length) :]
        else:
            for _ in range(draw.choice((1, 2, 8))):
                data[draw.randrange(length)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
            data += good[length:]
        copy.write_bytes(data)
        try:
            found = find(copy)
            assert not found.is_guard
            CheckpointReader(found)
            Tokenizer(copy, llama_3_0=True)
        except (ValueError, OSError) as e:
            refused += 1
            assert "model.gguf" in str(e) and len(str(e)) < 2000, e
    assert refused > 150


def test_llama_guard_is_known_by_its_template(tmp_path):
    template = "Task ... <BEGIN UNSAFE CONTENT CATEGORIES> ..."
    write_gguf(tmp_path / "m.gguf", PARAMS, metadata={"tokenizer.chat_template": template})
    assert find(tmp_path).is_guard
    write_gguf(tmp_path / "m.gguf", PARAMS, metadata={"tokenizer.chat_template": "Task"})
    assert not find(tmp_path).is_guard
