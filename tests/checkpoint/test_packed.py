"""Packed weights in files: the same bytes as packed at load, shared, and refused where unsuitable.

The files are read by safetensors, which is independent of this project.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_params, random_state, write_byte_tokenizer, write_meta
from helpers.gguf_files import MIXED, PARAMS, write_gguf
from helpers.kernels import KERNELS_RUN
from helpers.weights import tokens_of
from llama import Llama, Transformer, generation
from llama.checkpoint import packed
from llama.checkpoint import table as shares
from llama.checkpoint.files import _mapped_regions
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.loader import load
from llama.checkpoint.packing import pack_model
from llama.checkpoint.verify import LoadCheck, verify
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.cli import main
from llama.kernels.cpu import native
from llama.kernels.cpu.adapters import product_segments
from llama.loading import loaded
from llama.model.layers import Linear, Matrix, RMSNorm
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.blocks import BlockedWeight, workspace
from llama.weights.groups import GroupedWeight

pytestmark = pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
# sizes for which few matrices can be packed
ODD = PARAMS | {"dim": 40, "n_heads": 4, "multiple_of": 8}
# a vocabulary that does not fill its last block; no rank of several begins with a block
PADDED = PARAMS | {"vocab_size": 4 * 65}


@pytest.fixture
def made(tmp_path) -> Path:
    """A packed folder of one bf16 file."""
    source = write_meta(tmp_path / "meta", PARAMS, random_state(PARAMS))
    write_byte_tokenizer(source)
    pack(source, tmp_path / "packed")
    return tmp_path / "packed"


def model_of(found: Checkpoint, fill: Callable, rank: int = 0, size: int = 1) -> Transformer:
    parallel = Parallel(Placement(rank=rank, size=size))
    model = Transformer(found.params, parallel=parallel, dtype=torch.bfloat16)
    fill(found, model)
    return model


def tensors_of(model: Transformer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Matrix):
            kind = type(module.weight).__name__
            found |= {f"{path} {kind} {x}": t for x, t in module.weight.tensors().items()}
        elif isinstance(module, RMSNorm):
            found[path] = module.weight
    return found


@pytest.mark.parametrize(
    ("params", "quantize", "tied"),
    [
        (PARAMS, None, False),
        (PARAMS, "int8", True),
        (PARAMS, "int4", False),
        (PARAMS, "fp8", False),
        (ODD, None, False),
        (PADDED, None, False),
        (PADDED, "int8", True),
    ],
    ids=["bf16", "int8-tied", "int4", "fp8", "odd", "padded", "padded-tied"],
)
def test_the_mapped_weights_are_those_that_are_packed_at_load(params, quantize, tied, tmp_path):
    state = random_state(params)
    if tied:
        del state["output.weight"]
        params = params | {"tied_output": True}
    source = find(write_meta(tmp_path / "meta", params, state))
    pack(source.folder, tmp_path / "packed", quantize=quantize)
    found = find(tmp_path / "packed")
    expected = model_of(
        source, lambda x, m: load(x, m, filled=partial(pack_model, m, quantize=quantize))
    )
    model = model_of(found, packed.attach)
    assert model.quantization == quantize
    wanted, given = tensors_of(expected), tensors_of(model)
    assert wanted.keys() == given.keys()
    assert all(torch.equal(wanted[x].view(torch.uint8), given[x].view(torch.uint8)) for x in given)
    assert all(x.data_ptr() % 64 == 0 for x in model.parameters())
    logits = expected.forward(tokens_of(), 0)
    assert torch.equal(model.forward(tokens_of(), 0), logits)
    numbers = expected.state_dict()
    assert model.state_dict().keys() == numbers.keys()
    assert load_file(found.shards[0]).keys() == packed.attach(found, model).keys()
    for rank, size in ((1, 2), (1, 3), (2, 4)):  # two of four ranks have the same keys and values
        part = model_of(found, packed.attach, rank, size)
        for name, share in part.state_dict().items():
            dim, held = shares.share(part.params, name, Placement(rank=rank, size=size))
            assert torch.equal(share, numbers[name].narrow(dim, held.start, len(held))), name
        is_mapped = size == 2 and params["vocab_size"] % 64 == 0 and params is not ODD
        check_products(part, found.shards[0], is_mapped)
    if quantize != "int4":  # int4 would round a second time
        part.load_state_dict(part.state_dict())  # copies into separate memory
        check_products(part, found.shards[0], False)
        model.load_state_dict(numbers)
        assert torch.equal(model.forward(tokens_of(), 0), logits)


def check_products(model: Transformer, file: Path, is_mapped: bool) -> None:
    """Check that parts at separate addresses give the bits of the same values in one piece."""
    for module in model.modules():
        if not isinstance(module, Linear) or module.weight.native_matrix() is None:
            continue
        weight, (n, k) = module.weight, module.weight.shape
        x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).bfloat16()
        out, room = torch.empty(3, n), workspace("linear_workspace", 3, k, 2)
        matrix = torch.tensor(weight.native_matrix())
        native.call(
            "linear_packed", x, matrix, out, room, *product_segments(None), 0, 3, n, k, True
        )
        ids, copy = torch.arange(n), BlockedWeight.pack(weight.plain().clone())
        if isinstance(weight, GroupedWeight):
            blocks = weight.stored_ids(ids[::32]) // 32
            more = {"scales": weight.scales[blocks], "table": weight.table}
            copy = type(weight)((n, k), weight.values.data[blocks].clone(), **more)
        wanted = copy.linear(x, torch.float32)
        assert torch.equal(out, wanted) and torch.equal(weight.linear(x, torch.float32), wanted)
        assert torch.equal(weight.rows(ids), copy.rows(ids))
        assert not is_mapped or lies_in(file, weight.values)


def lies_in(file: Path, x: torch.Tensor) -> bool:
    return any(low <= x.data_ptr() < high for low, high, _ in _mapped_regions(file))


def test_codes_of_a_gguf_file_stay_codes(tmp_path):
    """The codes of a GGUF file stay codes in a packed folder, and its tokenizer is written too."""
    write_byte_tokenizer(tmp_path)
    write_gguf(tmp_path / "q.gguf", PARAMS, MIXED, tokenizer=tmp_path / "tokenizer.model",
               metadata={"general.file_type": 15})  # fmt: skip
    pack(tmp_path / "q.gguf", tmp_path / "packed")
    source, found = find(tmp_path / "q.gguf"), find(tmp_path / "packed")
    expected = model_of(
        replace(source, in_codes=True), lambda x, m: load(x, m, filled=partial(pack_model, m))
    )
    model = model_of(found, packed.attach)
    assert torch.equal(model.forward(tokens_of(), 0), expected.forward(tokens_of(), 0))
    wanted, given = tensors_of(expected), tensors_of(model)
    assert wanted.keys() == given.keys() and any("SixBitsWeight" in name for name in given)
    assert all(torch.equal(wanted[x].view(torch.uint8), given[x].view(torch.uint8)) for x in given)
    numbers = expected.state_dict()
    for rank, size in ((0, 2), (1, 2), (0, 3), (2, 3)):
        part = model_of(found, packed.attach, rank, size)
        for name, share in part.state_dict().items():
            dim, held = shares.share(part.params, name, Placement(rank=rank, size=size))
            assert torch.equal(share, numbers[name].narrow(dim, held.start, len(held))), name
        check_products(part, found.shards[0], False)
    assert found.file_type == "Q4_K_M" and found.tokenizer_path().name == "tokenizer.json"


def test_a_build_maps_the_file_and_leaves_it_as_it_is(made, capsys):
    """A build maps the file and does not change it.

    Writing to a weight changes a private copy, so the file may be read-only, as it is here.
    """
    file = made / "packed.safetensors"
    before = file.read_bytes()
    os.chmod(file, 0o444)
    os.chmod(made, 0o555)
    with Llama.build(str(made), None, 128, 1, device="cpu") as llama:
        model = llama.model
        assert all(lies_in(file, x) for x in model.parameters())
        with torch.no_grad():
            model.norm.weight.fill_(2)
        assert file.read_bytes() == before
    os.chmod(made, 0o755)


def test_verify_compares_the_bytes(made):
    assert "checksum matches" in verify(made)[0] and "parameters in 1 file(s)" in verify(made)[-1]
    file = made / "packed.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for check in (verify, lambda x: LoadCheck(find(x), warns=True)):
        with pytest.raises(ValueError, match=r"packed.safetensors.*MD5"):
            check(made)


def change_metadata(file: Path, **changes: str) -> None:
    """Replace the metadata within the space of the header."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= changes
    file.write_bytes(data[:8] + json.dumps(header).encode().ljust(size) + data[8 + size :])


def take_all_groups(made: Path) -> None:
    """Remove all groups of a matrix, which is then declared as int8 but has no scale."""
    file = made / "packed.safetensors"
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    tensors = load_file(file)
    name = next(x for x in tensors if x.endswith(".bf16.values")).removesuffix("bf16.values")
    values = tensors.pop(f"{name}bf16.values").to(torch.int8)
    tensors[f"{name}int8.values"] = values
    tensors[f"{name}int8.scales"] = torch.ones(len(values), 0, 1, 32)
    save_file(tensors, file, metadata)


def cut(made: Path) -> None:
    file = made / "packed.safetensors"
    os.truncate(file, file.stat().st_size - 64)


@pytest.mark.parametrize(
    ("change", "flags", "named"),
    [
        (lambda x: change_metadata(x / "packed.safetensors", format="llama-packed/0"), {},
         r"layout 'llama-packed/0'.* llama convert .*meta OUT --packed"),
        (lambda x: os.link(x / "packed.safetensors", x / "packed.two.safetensors"), {},
         r"in 2 file\(s\).*in one"),
        (lambda x: change_params(x, n_layers=1), {}, "'layers.1.attention.*bf16' is not as"),
        (lambda x: change_params(x, multiple_of=512), {}, "w13' is not as .*params.json describes"),
        (take_all_groups, {}, "is not as .*params.json describes"),
        (cut, {}, "cut short"),
        (lambda x: None, {"quantize": "int8"}, "holds bf16.*--packed --quantize int8"),
        (lambda x: None, {"dtype": "fp32"}, "dtype bf16: give the folder that they were made from"),
    ],
    ids=["version", "files", "layers", "sizes", "groups", "cut", "quantize", "dtype"],
)  # fmt: skip
def test_what_does_not_fit_is_named(change, flags, named, made):
    change(made)
    with pytest.raises(ValueError, match=named):
        Llama.build(str(made), device="cpu", **flags)


def test_packed_weights_are_not_converted(made):
    with pytest.raises(ValueError, match="give the folder that they were made from"):
        convert(made, made.parent / "again")
    for write in (pack, lambda x, out: reshard(x, out, 1)):
        with pytest.raises(ValueError, match="can only be run"):
            write(made, made.parent / "again")


def test_the_command_writes_all_or_nothing(made, tmp_path, capsys, monkeypatch):
    source, out = str(tmp_path / "meta"), tmp_path / "two"
    assert main(["convert", source, str(out), "--packed", "--quantize", "int8"]) == 0
    assert [x.name for x in find(out).shards] == ["packed.safetensors"]
    assert main(["verify", str(out)]) == 0
    monkeypatch.setattr(packed, "_pack_and_write", lambda *x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(source, tmp_path / "three")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["meta", "packed", "two"]


def test_a_slow_load_names_the_command(made, tmp_path, caplog, monkeypatch):
    """A slow load of plain weights suggests the packing command; one of packed weights does not."""
    monkeypatch.setattr(generation, "_SLOW_LOAD_S", 0.0)
    monkeypatch.setattr(loaded, "_LARGE", 0)
    source = tmp_path / "meta"
    Llama.build(str(source), None, 64, 1, device="cpu", quantize="int8").close()
    wanted = f"llama convert {source} OUT --packed --quantize int8"
    assert wanted in caplog.text
    caplog.clear()
    Llama.build(str(made), None, 64, 1, device="cpu").close()
    assert "convert" not in caplog.text
