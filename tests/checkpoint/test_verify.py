"""Verification of a checkpoint: each file's checksum, and the error for a damaged file."""

import hashlib
import os
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch.serialization import set_crc32_options

from helpers.checkpoints import write_meta
from helpers.weights import (
    PARAMS,
    STATE,
    change_safetensors,
    change_shard,
    flip_a_bit,
    loaded,
)
from llama import Llama
from llama.checkpoint import verify as verifying
from llama.checkpoint.find import find
from llama.checkpoint.loader import load
from llama.checkpoint.verify import verify
from llama.model import Transformer
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement


def write_checklist(folder: Path) -> None:
    lines = [
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
    ]
    (folder / "checklist.chk").write_text("\n".join(lines) + "\n")


def test_verify_reports_each_file(meta):
    assert "CRC-32 of its 27 records matches" in verify(meta)[0]
    write_checklist(meta)
    shard0, shard1, params, whole = verify(meta)
    assert shard0.startswith("consolidated.00.pth: 21 tensors, ")
    assert shard1.startswith("consolidated.01.pth: ") and shard1.endswith("checksum matches")
    assert params == "params.json: checksum matches"
    assert whole.endswith(f"{sum(t.numel() for t in STATE.values()):,} parameters in 2 file(s)")


def test_verify_names_the_file_whose_checksum_differs(meta):
    """`verify` names the file whose checksum differs; one flipped bit in a weight shows nowhere
    else.
    """
    write_checklist(meta)
    rows = torch.load(meta / "consolidated.01.pth", weights_only=True)["output.weight"]
    rows[3, 5] += 1e-3
    change_shard(meta / "consolidated.01.pth", output__weight=rows)
    loaded(find(meta))
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth .*has MD5 .*checklist\.chk says"):
        verify(meta)
    (meta / "checklist.chk").write_text("0" * 32 + "  tokenizer.model\n")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model is missing"):
        verify(meta)
    (meta / "checklist.chk").write_text("0" * 32 + "  ../../secret\n")
    with pytest.raises(ValueError, match="is not an MD5 and a file name"):
        verify(meta)


def test_verify_checks_hugging_face_s_layout_too(hugging):
    assert verify(hugging)[0].startswith("model.safetensors: 21 tensors")
    change_safetensors(hugging, "model.norm.weight", torch.ones(65))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(65,\)"):
        verify(hugging)


def test_a_pth_with_half_its_bytes_zero_is_not_complete(meta):
    """A .pth with half of its bytes zero is reported as incomplete.

    An interrupted download that was resumed leaves such a file: sizes, names and shapes are right.
    """
    path = meta / "consolidated.01.pth"
    content = bytearray(path.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = bytes(2 * quarter)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"differ in layers\.0\.attention_norm\.weight"):
        loaded(find(meta))
    with pytest.raises(
        ValueError, match=r"01\.pth .* is damaged \(BadZipFile: .*\); download it again"
    ):
        verify(meta)


def test_one_flipped_bit_is_found(meta):
    flip_a_bit(meta / "consolidated.00.pth", "norm.weight")
    with pytest.raises(ValueError, match=r"00\.pth .* is damaged \(BadZipFile: Bad CRC-32"):
        verify(meta)


def test_a_pth_written_without_checksums_is_said_to_have_none(meta):
    path = meta / "consolidated.00.pth"
    shard = torch.load(path, weights_only=True)
    set_crc32_options(False)
    try:
        torch.save(shard, path)
    finally:
        set_crc32_options(True)
    lines = verify(meta)
    assert lines[0].endswith("no checksum to compare with")
    assert lines[1].endswith("records matches")


@pytest.mark.timeout(60)  # opening a pipe waits for a writer
def test_a_pipe_in_the_checklist_is_not_waited_for(meta):
    os.mkfifo(meta / "tokenizer.model")
    (meta / "checklist.chk").write_text("0" * 32 + "  tokenizer.model\n")
    with pytest.raises(OSError, match=r"tokenizer\.model is a pipe"):
        verify(meta)


def test_progress_counts_every_byte_on_stderr(meta, capsys):
    write_checklist(meta)
    (meta / "checklist.chk").write_text(
        "".join(line + "\n" for line in (meta / "checklist.chk").read_text().splitlines()
                if "01.pth" not in line)
    )  # fmt: skip
    verify(meta)
    assert capsys.readouterr() == ("", "")
    verify(meta, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "Verifying" in err


@pytest.mark.parametrize("name", list(STATE))
def test_a_damaged_weight_is_not_loaded_by_who_verifies(checkpoint_dir, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_dir[0], folder)

    def build(**settings) -> None:
        Llama.build(str(folder), None, 64, 1, device="cpu", dtype="fp32", **settings)

    if name == "norm.weight":  # once for all parameters
        with warnings.catch_warnings(action="error"):
            build(verify=True)
    flip_a_bit(folder / "consolidated.00.pth", name)
    with pytest.raises(ValueError, match=r"00\.pth .* is damaged \(BadZipFile: .*; download it"):
        build(verify=True)
    build()


def test_each_byte_is_checked_once_and_before_it_is_copied(meta, monkeypatch):
    """Each byte is checked once, before it is copied.

    The ranks of a machine share the work, whatever parts of a file each of them copies.
    """
    done: list[tuple[str, str]] = []

    def note(path, archive, record):
        done.append((path.name, record.filename))
        yield 0

    monkeypatch.setattr(verifying, "_check_crc32", note)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = find(meta)
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        before = len(done)
        check = verifying.LoadCheck(found, warns=False).check
        load(
            found,
            Transformer(found.params, parallel=Parallel(Placement(rank=rank, size=2))),
            check=check,
        )
        assert len(STATE) * 2 // 3 < len(done) - before < len(STATE) * 4 // 3
    weights = [(path.name, name) for path in found.shards
               for name in zipfile.ZipFile(path).namelist() if "/data/" in name]  # fmt: skip
    assert set(weights) <= set(done) and len(set(done)) == len(done)


def test_files_without_checksums_are_named(hugging):
    with pytest.warns(UserWarning, match=r"model\.safetensors cannot be verified: no checksum"):
        verifying.LoadCheck(find(hugging), warns=True)


def test_a_record_shorter_than_its_tensor_is_refused(meta):
    """A record of a .pth that is shorter than its tensor is refused, at load and by verify.

    Its CRC-32 is right, and torch maps the bytes that follow it for the rest of the tensor.
    """
    path = meta / "consolidated.00.pth"
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    name = max(records, key=lambda x: len(records[x]))
    size = len(records[name])
    records[name] = records[name][:-64]
    with zipfile.ZipFile(path, "w") as archive:  # stored, as torch does
        for entry, data in records.items():
            archive.writestr(entry, data)
    message = rf"00\.pth .* is damaged: it holds {size - 64:,} bytes for '.*', which has {size:,}"
    for read in (verify, find):
        with pytest.raises(ValueError, match=message):
            read(meta)


def copy_anew(source: Path, target: Path) -> None:
    """Save the tensors of a file anew: the names in the archive differ."""
    torch.save(torch.load(source, weights_only=True), target)


def from_another_step(folder: Path, name: str, number: int, count: int) -> None:
    """Replace a shard by that of a model in which one more tensor was changed."""
    state = {key: tensor * 1.01 for key, tensor in STATE.items() if key == name}
    other = write_meta(folder.with_name("later"), PARAMS, STATE | state, count)
    copy_anew(other / f"consolidated.{number:02d}.pth", folder / f"consolidated.{number:02d}.pth")


@pytest.mark.parametrize("count", [2, 4, 8])
def test_shards_that_do_not_belong_together_are_named(tmp_path, count):
    """Copies of a shard, and shards of two steps of a training; key-value heads may be alike."""
    folder = write_meta(tmp_path / "good", PARAMS, STATE, count)
    assert "nothing tells whether two of them changed places" in verify(folder)[-1]
    last = count - 1
    for source, target in ((0, last), (last, 0), (0, 1)):
        copied = write_meta(tmp_path / f"copied{source}{target}", PARAMS, STATE, count)
        names = [f"consolidated.{i:02d}.pth" for i in (source, target)]
        copy_anew(copied / names[0], copied / names[1])
        with pytest.raises(ValueError, match=r"holds the same part of the model as .* a copy"):
            loaded(find(copied))
    for i, name in enumerate(("norm.weight", "layers.1.ffn_norm.weight")):
        mixed = write_meta(tmp_path / f"mixed{i}" / "model", PARAMS, STATE, count)
        from_another_step(mixed, name, last, count)
        with pytest.raises(ValueError, match=rf"{last:02d}\.pth and .* differ in {name}, which"):
            verify(mixed)


def test_shards_of_zeros_are_no_copies(tmp_path):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    loaded(find(write_meta(tmp_path, PARAMS, zeros, 2)))
