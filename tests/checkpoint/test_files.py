"""One file of tensors: mapped, read, and refused if it is something else."""

import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_meta
from helpers.weights import PARAMS, STATE, loaded
from llama.checkpoint.files import FileReader, open_tensors
from llama.checkpoint.find import find
from llama.checkpoint.write import convert


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")
@pytest.mark.parametrize("layout", ["meta", "hf"])
def test_mapped_tensors_are_found_in_their_file(tmp_path, layout):
    write_meta(tmp_path / "meta", PARAMS, STATE)
    convert.convert(tmp_path / "meta", tmp_path / "hf")
    for file in find(tmp_path / layout).shards:
        content = file.read_bytes()
        for mapped in open_tensors(file).values():
            assert mapped.offset is not None
            data = mapped.data.numpy().tobytes()
            assert content[mapped.offset :][: len(data)] == data
            read = torch.empty_like(mapped.data)
            FileReader(torch.device("cpu")).read(read, file, mapped.offset)
            assert torch.equal(read, mapped.data)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_file_cut_while_it_is_read_is_named(tmp_path, device):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"weights\.pth \(8 bytes\) became shorter"):
        FileReader(torch.device(device)).read(torch.zeros(3), file, 0)


def test_a_pth_with_two_entries_of_one_name_is_refused(meta):
    """A .pth with two entries of one name is refused.

    torch takes one of them, and a program that scans the file may see the other.
    """
    path = meta / "consolidated.01.pth"
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        record = archive.infolist()[-1].filename
        archive.writestr(record, b"other")
    with pytest.raises(ValueError, match=rf"01\.pth .* two entries of the name '{record}': save"):
        loaded(find(meta))


class Evil:
    """A pickle payload that creates a file, in place of an attacker's code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: {**STATE, "norm.weight": e}])
def test_a_malicious_pickle_is_refused_and_not_run(meta, tmp_path, wrap):
    torch.save(wrap(Evil(tmp_path / "owned")), meta / "consolidated.01.pth")
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth .*was not run.*trust"):
        loaded(find(meta))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(b""), r"\(0 bytes\) is empty; download it again"),
        (
            lambda p: p.write_text("\n<!DOCTYPE html><html>403</html>"),
            r"\(32 bytes\) is a web page",
        ),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
        (lambda p: p.write_bytes(bytes(range(1, 256))), r"is not a file of torch\.save"),
        (lambda p: os.truncate(p, p.stat().st_size // 2), "is cut short or damaged.*download"),
        (lambda p: torch.save([torch.ones(2)], p), "must hold a dict of tensors, not list"),
        (lambda p: torch.save(STATE, p, _use_new_zipfile_serialization=False), "before 1.6"),
    ],
)
def test_a_file_that_is_no_shard(meta, spoil, message):
    path = meta / "consolidated.00.pth"
    spoil(path)
    with pytest.raises(ValueError, match=rf"consolidated\.00\.pth .*{message}"):
        open_tensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"norm.weight": torch.ones(64, device="meta")},
        {"norm.weight": torch.ones(64).to_sparse()},
        {"norm.weight": 7},
        {7: torch.ones(2)},
        {"n" * 10_000_000: 7},
    ],
    ids=["meta", "sparse", "number", "no name", "long name"],
)
def test_an_entry_that_is_no_weight(tmp_path, entry):
    """A zip entry that is not a weight is refused with a short error.

    Past faults: a meta tensor raised NotImplementedError at the first copy, and a long name was
    quoted in full.
    """
    torch.save(entry, tmp_path / "a.pth")
    with pytest.raises(
        ValueError, match=r"a\.pth: the entry .* is not a tensor .*save the state dict"
    ) as error:
        open_tensors(tmp_path / "a.pth")
    assert len(str(error.value)) < 500


DTENSORS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
    tensor = distribute_tensor(torch.ones(8, 4), mesh, [placement])
    torch.save({"model": {"norm.weight": tensor}}, f"{sys.argv[1]}/{name}.pth")
"""


@pytest.mark.parametrize("imports", ["", "import torch.distributed.tensor;"])
def test_a_part_of_a_sharded_tensor_is_named_with_what_saves_a_whole_one(tmp_path, imports):
    """Whether a program has imported DTensors or not; torch reads them only then."""
    run = [sys.executable, "-c"]
    made = subprocess.run([*run, DTENSORS, str(tmp_path)], capture_output=True, timeout=120)
    assert made.returncode == 0, made.stderr
    read = f"{imports}from pathlib import Path\nfrom llama.checkpoint.files import open_tensors\n"
    for name in ("sharded", "replicated"):
        code = read + f"open_tensors(Path({str(tmp_path / name)!r} + '.pth'))"
        done = subprocess.run([*run, code], capture_output=True, text=True, timeout=120)
        error = done.stderr.splitlines()[-1]
        assert error.startswith(f"ValueError: {tmp_path / name}.pth holds DTensors, of which")
        assert "StateDictOptions(full_state_dict=True)" in error


def safetensors_of(spans: dict[str, tuple[int, int]], num_bytes: int) -> bytes:
    """Return a .safetensors built from its documentation: length, JSON header, then the tensors'
    bytes.
    """
    entries = {
        name: {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for name, (start, end) in spans.items()
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


@pytest.mark.parametrize(
    ("spans", "num_bytes"),
    [
        ({"a": (0, 8), "b": (4, 12)}, 12),  # overlapping ranges
        ({"a": (0, 8), "b": (12, 16)}, 16),  # a gap between ranges
        ({"a": (0, 8), "b": (8, 16)}, 12),  # a range past the end
        ({"a": (0, 8)}, 12),  # bytes that no tensor uses
    ],
)
def test_a_safetensors_header_must_describe_the_file_exactly(tmp_path, spans, num_bytes):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_of({"a": (0, 8), "b": (8, 16)}, 16))
    assert {name: len(t.data) for name, t in open_tensors(path).items()} == {"a": 2, "b": 2}
    path.write_bytes(safetensors_of(spans, num_bytes))
    with pytest.raises(ValueError, match=r"a\.safetensors .* is cut short or damaged"):
        open_tensors(path)
