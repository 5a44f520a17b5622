"""`llama verify`, `reshard` and `convert` from the command line: their output and exit codes."""

import shlex

import pytest

from helpers.launch import DEMO
from llama.checkpoint.verify import verify
from llama.checkpoint.write import atomic as writing
from llama.cli import main

RESHARD = ["--model_parallel_size", "2"]


@pytest.mark.parametrize(("command", "more"), [("convert", []), ("reshard", RESHARD)])
def test_what_was_written_where_and_what_comes_next(tmp_path, capfd, command, more):
    out = str(tmp_path / "a folder")
    assert main([command, str(DEMO), out, *more]) == 0
    *files, total, following = capfd.readouterr().out.splitlines()
    sizes = {p.relative_to(out): p.stat().st_size for p in (tmp_path / "a folder").rglob("*.*")}
    assert files == [f"{name}: {size:,} bytes" for name, size in sorted(sizes.items())]
    assert total == f"{out}: {len(sizes)} files, {sum(sizes.values()):,} bytes written"
    program, *words = shlex.split(following.removeprefix("next: "))
    assert (program, words) == ("llama", ["verify", out])
    assert main(words) == 0
    assert capfd.readouterr().out.splitlines() == verify(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "123"], "error: 123 does not exist: give the folder that holds the weights"),
        (["verify", "file"], "error: file is a file: give the folder that holds the weights"),
        (["convert", "empty", "out"], "error: empty holds no weights"),
        (["convert", str(DEMO), "full"], "holds something: give a new folder"),
        (["convert", str(DEMO), "file/out"], "cannot be made (Not a directory)"),
        (["convert", str(DEMO), "out.GGUF", "--packed"], "out.GGUF: packed weights are a folder"),
        (["convert", str(DEMO), "cut"], "cut.partial was left by a run that was cut off"),
        (["reshard", str(DEMO), "out", "--model_parallel_size", "3"], "does not divide n_heads=8"),
        (["reshard", str(DEMO), "out"], "--model_parallel_size is missing"),
        (["convert", str(DEMO), "large"], "could not be written (No space left on device)"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capfd, words, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "full/of", "cut.partial"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    if "large" in words:
        monkeypatch.setattr(writing.os, "posix_fallocate", no_space)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(words) in (1, 2)
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_under_torchrun_only_rank_0_works(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for words in (
        ["verify", "123"],
        ["convert", "123", "out"],
        ["reshard", "123", "out", *RESHARD],
    ):
        assert main(words) == 0
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
