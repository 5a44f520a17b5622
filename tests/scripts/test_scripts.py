"""The scripts as a user runs them, in this process: flags, mistakes, prompts, folder names."""

import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.launch import DEMO, REPO
from llama import Llama

SCRIPTS = ["text_completion", "chat_completion", "chat", "batch_completion"]
GREEDY = ["--temperature", "0", "--device", "cpu", "--dtype", "fp32"]
RULE = "=" * 34


@pytest.fixture
def script(monkeypatch) -> Callable[..., int]:
    """A function script("chat", "--seed", "1"), which returns the exit code of scripts/chat.py."""
    for name in [*os.environ]:
        if name.startswith("LLAMA_"):
            monkeypatch.delenv(name)

    def run(name: str, *words: str) -> int:
        path = str(REPO / "scripts" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *words])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(path, run_name="__main__")
        assert isinstance(stop.value.code, int)
        return stop.value.code

    return run


@pytest.fixture
def no_build(monkeypatch) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Llama, "build", build)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--temprature", "0"], r"no such option '--temprature'\. .*'--temperature'.*"),
        (["--temperature", "-1"], r"temperature=-1\.0 must be a number from 0 to 100"),
        (["--top_p", "2"], r"top_p=2\.0 must be a number from 0 to 1"),
    ],
)
def test_a_wrong_flag_stops_every_script_before_the_load(
    name, words, told, script, no_build, capfd
):
    files = ["in", "out"] if name == "batch_completion" else []
    assert script(name, *files, *words) == 2
    out, err = capfd.readouterr()
    assert not out and re.fullmatch(f"error: {told}\n", err)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--prompt", "a", "--prompt_file", "b"], 2, "give one of them"),
        (["--prompt_file", "/nowhere"], 1, "/nowhere: no such file or directory"),
        (["--ckpt_dir", "/nowhere"], 2, "/nowhere does not exist"),
        (["--prompt", "word " * 300], 1, "max_seq_len is 256: shorten the prompt"),
    ],
)
def test_a_mistake_is_one_line(words, code, told, script, capfd):
    assert script("text_completion", *words) == code
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and told in err and err.count("\n") == 1
    assert not [line for line in out.splitlines() if not line.startswith("Loaded in ")]


def test_text_completion_streams_a_prompt(demo, script, tmp_path, monkeypatch, capfd):
    """text_completion streams a prompt.

    It comes from a flag, a file or standard input; the output is the prompt, then the pieces as
    they come.
    """
    (tmp_path / "prompt").write_text("The opposite of hot is\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"One and two make\n")))
    for words, prompt in (
        (["--prompt", "Once upon a time"], "Once upon a time"),
        (["--prompt_file", str(tmp_path / "prompt")], "The opposite of hot is"),
        (["--prompt_file", "-"], "One and two make"),
    ):
        pieces: list[str] = []
        monkeypatch.setattr("llama.cli.commands._write", lambda x, alone, to=pieces: to.append(x))
        assert script("text_completion", *words, *GREEDY, "--max_gen_len", "12") == 0
        (wanted,) = demo.text_completion([prompt], 0.0, max_gen_len=12)
        assert "".join(pieces) == f"{prompt}\n> {wanted['generation']}\n"
        assert len(pieces) > wanted["generation"].count(" ") > 0
        first, last = capfd.readouterr().out.splitlines()
        assert first.startswith("Loaded in ") and last.startswith("load ")


def test_without_a_prompt_the_flags_and_prompts_are_metas(
    demo, script, tmp_path, monkeypatch, capfd
):
    """Without a prompt the flags and prompts are Meta's.

    --ckpt_dir is a folder whose name is a number, on the command line or in a variable.
    """
    monkeypatch.chdir(tmp_path)
    Path("123").symlink_to(DEMO)
    variables = runpy.run_path(str(REPO / "scripts" / "text_completion.py"))
    prompts = variables["PROMPTS"]
    assert prompts[0] == "I believe the meaning of life is" and len(prompts) == 4
    assert script("text_completion", "--ckpt_dir", "123", *GREEDY) == 0
    loaded, *lines = capfd.readouterr().out.splitlines()
    assert "max_seq_len=128, max_batch_size=4," in loaded
    wanted = demo.text_completion(prompts, 0.0, max_gen_len=64)
    shown = "".join(
        f"{p}\n> {r['generation']}\n\n{RULE}\n\n" for p, r in zip(prompts, wanted, strict=True)
    )
    assert lines[:-1] == shown.splitlines() and lines[-1].startswith("load ")
    monkeypatch.setenv("LLAMA_CKPT_DIR", "123")
    assert script("chat_completion", *GREEDY, "--max_gen_len", "4") == 0
    assert "User: what is the recipe of mayonnaise?" in capfd.readouterr().out


def test_meta_s_own_scripts_may_name_a_folder_123(tmp_path, monkeypatch):
    """Meta's own scripts may name a folder 123, which fire turns into an int."""
    monkeypatch.chdir(tmp_path)
    Path("123").symlink_to(DEMO)
    folder: object = 123
    llama = Llama.build(folder, None, 64, 1, device="cpu", dtype="fp32")  # type: ignore[arg-type]
    assert llama.model.params.dim == 256


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text_completion", "The capital of France is\n>  Paris."),
        ("chat_completion", "> Assistant: The capital of France is Paris."),
    ],
)
def test_scripts_end_with_a_line_of_figures(name, said, script, capfd):
    assert script(name, "--temperature", "0", "--device", "cpu") == 0
    out, err = capfd.readouterr()
    assert said in out and not err
    last = out.splitlines()[-1]
    assert last.startswith("load ") and last.endswith("| ranks 1 | bfloat16")
    assert last.count("tokens/s") == 2


def test_the_demo_model_has_defaults_of_its_own_which_flags_replace(script, capfd):
    """The demo model has defaults of its own, which flags replace.

    A past fault: the defaults were used whatever the flags said.
    """
    assert script("text_completion", *GREEDY) == 0
    out = capfd.readouterr().out
    assert "max_seq_len=256" in out and f".\n\n{RULE}\n" in out, "a story ends by itself"
    assert script("text_completion", *GREEDY, "--max_seq_len", "32", "--max_gen_len", "2") == 0
    out = capfd.readouterr().out
    assert "max_seq_len=32," in out and "Once upon a time\n> , there\n" in out
    assert "| generated 6 tokens" in out


def test_no_script_reads_its_flags_by_fire():
    """No script reads its flags by fire.

    fire reports an unknown flag after the work is done, makes numbers of names, and takes the `-`
    of `--prompt_file -` for a separator. docs/guides/from-meta.md has all reasons.
    """
    files = [*(REPO / "scripts").rglob("*.py"), *(REPO / "llama").rglob("*.py")]
    assert len(files) > 50
    assert not [path for path in files if re.search(r"\b(import|from) fire\b", path.read_text())]
