"""Writing folders of weights: permissions, a full disk, and a process that is killed."""

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from llama.checkpoint.write import atomic as writing
from llama.checkpoint.write.convert import convert, pack, reshard


@pytest.fixture(params=[0o022, 0o077])
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the size of files: EFBIG is raised in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_permissions_are_those_of_new_files(umask, tmp_path):
    """Permissions are those of new files.

    safetensors makes its files readable by their owner alone, whatever the umask.
    """
    convert(DEMO, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta")
    reshard(DEMO, tmp_path / "two", 2)
    for path in tmp_path.rglob("*"):
        plain = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == plain & ~umask, path
    names = {str(path.relative_to(tmp_path / "hf")) for path in (tmp_path / "hf").rglob("*")}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "original",
        "original/tokenizer.model", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("write", "limit", "file"),
    [
        (lambda out: convert(DEMO, out), 8_002_000, "model.safetensors"),
        (lambda out: reshard(DEMO, out, 1), 8_002_000, "consolidated.00.pth"),
        (lambda out: convert(DEMO, out), 500_000, "scratch"),
        (lambda out: convert(DEMO, out.with_suffix(".gguf")), 8_000_000, "out.gguf"),
        (lambda out: convert(DEMO, out.with_suffix(".gguf")), 20_000, "out.gguf"),  # in its header
        pytest.param(
            lambda out: pack(DEMO, out),
            2_555_914,
            "packed.safetensors",  # fails in a norm of 512 bytes
            marks=pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++"),
        ),
    ],
)
def test_a_disk_that_fills_up_is_one_line(tmp_path, limit_files, write, limit, file):
    limit_files(limit)  # 8 MB of tensors fit, but not their file with its header
    with pytest.raises(OSError, match=rf"{file} could not be written \(.*[Ff]ile too large") as e:
        write(tmp_path / "out")
    assert "\n" not in str(e.value) and "free some space" in str(e.value)
    assert not list(tmp_path.iterdir())


def test_torch_s_own_error_for_a_full_disk_is_not_shown(tmp_path, limit_files):
    """torch's own error for a full disk is not shown.

    A large write fails, then torch.save closes the file and reports "unexpected pos 640 vs 598".
    """
    limit_files(2_000_000)
    tensors = {"a": torch.zeros(1_000_000)}
    with pytest.raises(OSError, match=r"a\.pth could not be written \(File too large\)"):
        writing.save(tmp_path / "a.pth", tensors, print)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/out cannot be made \(Not a directory\): give another"):
        convert(DEMO, tmp_path / "file" / "out")


@pytest.mark.parametrize("write", [convert, lambda a, b: reshard(a, b, 2)])
def test_the_folder_appears_when_its_last_file_is_there(tmp_path, monkeypatch, write):
    """The folder appears only when its last file is complete.

    A process that is killed thus leaves no folder that looks complete.
    """
    steps: list[list[str]] = []

    def watch(real: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            real(*args)
            steps.append([path.name for path in tmp_path.iterdir()])

        return watched

    for name in ("save", "write_json", "copy_file"):
        monkeypatch.setattr(writing, name, watch(getattr(writing, name)))
    write(DEMO, tmp_path / "out")
    assert len(steps) > 3 and all(step == ["out.partial"] for step in steps)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_was_cut_off_is_named(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(FileExistsError, match=r"out\.partial was left by a run that was cut off"):
        convert(DEMO, tmp_path / "out")


@pytest.mark.parametrize("write", [convert, lambda a, b, **k: reshard(a, b, 2, **k)])
def test_progress_counts_files_and_bytes_on_stderr(tmp_path, capsys, write):
    write(DEMO, tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    write(DEMO, tmp_path / "out", progress=True)
    out, err = capsys.readouterr()
    files = len([*(tmp_path / "out").glob("*.pth"), *(tmp_path / "out").glob("*.safetensors")])
    last = err.strip().split("\r")[-1]
    assert not out and "100%" in last and "8.0" in last and f"file {files} of {files}" in last
