"""The command `llama` with its shell arguments: flags, variables, errors, exit codes, results.

Most tests call `main` in this process; Llama itself, `verify` and `find` are the oracles.
"""

import contextlib
import gc
import io
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import DistNetworkError

import llama
from helpers.flags import read
from helpers.launch import DEMO, REPO, environment, run_program
from llama import Llama
from llama.checkpoint.verify import verify
from llama.cli import COMMANDS, main, model, ranks, run_script
from llama.cli.commands import _write
from llama.cli.flags import FLAGS, UsageError
from llama.cli.parser import REQUIRED, Command
from llama.ranks.errors import NotMetError
from llama.ranks.parallel import RankError

GREEDY = ["--temperature", "0", "--device", "cpu", "--dtype", "fp32"]
PLAIN = Command("", {"temperature": 0.6, "max_gen_len": 64, "prompt": None, "resume": False})
BATCH = COMMANDS["batch"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    """Remove the variables of the user who runs the tests."""
    for name in [*os.environ]:
        if name.startswith("LLAMA_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def demo() -> Llama:
    return Llama.build(str(DEMO), None, 512, 1, device="cpu", dtype="fp32")


def values(command: Command, *words: str, **environ: str) -> Namespace:
    return read("llama", command, words, environ)


# --- flags ---


def test_a_chat_with_a_model_of_a_short_context_has_that_context(
    make_checkpoint, monkeypatch, capsys
):
    """A chat with a model of a short context has that context.

    A past fault: the default of a chat was 4096, which such a model refused.
    """
    folder = make_checkpoint(context_length=2048)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("/stats\n"))
    assert main(["chat", str(folder), "--device", "cpu"]) == 0
    assert "context 0 of 2048 tokens" in capsys.readouterr().err


def test_windows_is_told_of_wsl(monkeypatch):
    """Windows is told to use WSL 2; a missing `termios` deep in the package would not say so."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"runs on Linux and macOS\. On Windows.* WSL 2"):
        runpy.run_path(str(llama.__file__))


def test_flags_are_read_with_their_types():
    given = values(PLAIN, "--temperature=1", "--max_gen_len", "8", "--prompt", "42", "--resume")
    assert vars(given) == {"temperature": 1.0, "max_gen_len": 8, "prompt": "42", "resume": True}
    assert type(given.temperature) is float and type(given.max_gen_len) is int
    assert vars(values(PLAIN)) == PLAIN.defaults


def test_a_prompt_in_utf_8_is_read_in_a_locale_without_it():
    """A prompt in UTF-8 is read in a locale without UTF-8, and the answer is written in it.

    Python keeps bytes that it cannot decode; other bytes than UTF-8 are an error.
    """
    code = """
import sys
from llama.cli import ranks
from llama.cli.parser import Command, read
command = Command("", {"prompt": None})
sys.exit(ranks.run(lambda: print(read("x", command, sys.argv[1:]).prompt)))
"""
    variables = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    for text, expected in ((b"caf\xc3\xa9", (0, b"caf\xc3\xa9\n")), (b"caf\xe9", (2, b""))):
        command = [sys.executable, "-c", code, "--prompt", os.fsdecode(text)]
        done = subprocess.run(command, env=variables, capture_output=True)
        assert (done.returncode, done.stdout) == expected, done.stderr
        assert done.returncode == 0 or done.stderr == (
            b"error: --prompt: the text is not UTF-8: give a text in UTF-8\n"
        )


def test_a_limit_of_the_address_space_is_named(monkeypatch, capsys):
    """What `ulimit -v` forbids is one line that names the limit."""
    monkeypatch.setattr(model, "address_space_limit", lambda: 700_000 << 10)
    assert main(["complete", "--prompt", "x"]) == 2
    expected = "error: `ulimit -v` limits the address space to 700,000 KiB, and PyTorch alone takes"
    assert capsys.readouterr().err.startswith(expected)
    mapped = "libtorch.so: failed to map segment from shared object"
    errors: list[Exception] = [
        ImportError(mapped),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ]

    def fail() -> None:
        raise error

    for error in errors:
        with pytest.raises(type(error)), monkeypatch.context() as patch:
            patch.setattr(ranks, "address_space_limit", lambda: None)
            ranks.run(fail)
        monkeypatch.setattr(ranks, "address_space_limit", lambda: 900_000 << 10)
        assert ranks.run(fail) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: the 900,000 KiB of address space that `ulimit -v` allows")
        assert said.count("\n") == 1


def test_dashes_stand_for_underscores_in_names_only():
    given = values(PLAIN, "--max-gen-len", "8", "--prompt=a-b --c-d")
    assert (given.max_gen_len, given.prompt) == (8, "a-b --c-d")
    assert values(PLAIN, "--prompt", "--c-d e").prompt == "--c-d e", "no flag has a space"


def test_none_is_a_value_of_numbers_that_may_be_left_out():
    assert values(PLAIN, "--max_gen_len", "None").max_gen_len is None
    assert values(PLAIN, "--prompt", "None").prompt == "None"
    with pytest.raises(UsageError, match="--temperature: 'none' is not a valid float"):
        values(PLAIN, "--temperature", "none")


def test_variables_stand_for_flags_and_the_command_line_wins():
    variables = {"LLAMA_TEMPERATURE": "0.25", "LLAMA_RESUME": "yes", "LLAMA_PROMPT": "3.1"}
    given = values(PLAIN, "--temperature", "0.5", **variables)
    assert (given.temperature, given.resume, given.prompt) == (0.5, True, "3.1")
    assert values(PLAIN, **variables).temperature == 0.25
    assert values(PLAIN, LLAMA_TEMPERATURE="", LLAMA_RESUME="0").temperature == 0.6


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("LLAMA_TEMPERATURE", "hot", "LLAMA_TEMPERATURE: 'hot' is not a valid float"),
        ("LLAMA_MAX_GEN_LEN", "1.5", "LLAMA_MAX_GEN_LEN: '1.5' is not a valid integer"),
        ("LLAMA_RESUME", "perhaps", "LLAMA_RESUME: 'perhaps' is not a valid boolean"),
    ],
)
def test_a_bad_variable_is_named(variable, text, told):
    with pytest.raises(UsageError, match=told):
        values(PLAIN, **{variable: text})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--temprature", "0.5"], "no such option '--temprature'. Did you mean '--temperature'?"),
        (
            ["--max-gen_length=9"],
            "no such option '--max_gen_length'. Did you mean '--max_gen_len'?",
        ),
        (["--verbose"], "no such option '--verbose'."),
        (["-t", "0.5"], "no such option '-t'."),
        (["--temperature", "hot"], "--temperature: 'hot' is not a valid float."),
        (["--temperature"], "option '--temperature' requires an argument."),
        (["word"], "got unexpected extra argument (word)"),
    ],
)
def test_a_bad_flag_is_one_line(words, told):
    with pytest.raises(UsageError) as error:
        values(PLAIN, *words)
    assert str(error.value) == told


def test_a_port_that_there_is_not_is_refused_before_a_server_listens():
    with pytest.raises(UsageError, match="--port: 65536 is not in the range 0<=x<=65535"):
        values(COMMANDS["serve"], "--port", "65536")


def test_words_are_placed_in_order_wherever_the_flags_are():
    for words in ("3.1 4.0 --resume", "--resume 3.1 4.0", "3.1 --resume 4.0"):
        given = values(BATCH, *words.split())
        assert (given.in_file, given.out_file, given.resume) == ("3.1", "4.0", True), words
    given = values(BATCH, "--", "--in", "--out")
    assert (given.in_file, given.out_file) == ("--in", "--out")


def test_a_word_is_given_once_and_not_forgotten():
    with pytest.raises(UsageError, match="DIR is given twice: 'a' and --ckpt_dir"):
        values(COMMANDS["chat"], "a", "--ckpt_dir", "b")
    with pytest.raises(UsageError, match="OUT is missing"):
        values(BATCH, "in")
    with pytest.raises(UsageError, match="--model_parallel_size is missing"):
        values(COMMANDS["reshard"], "a", "b")


def test_an_empty_name_is_not_the_demo_model():
    """An empty name is not the demo model.

    A past fault: llama batch IN OUT --ckpt_dir "$DIR" used the demo model where DIR was unset.
    """
    for words, told in (
        (["--ckpt_dir", ""], "--ckpt_dir"),
        (["--ckpt_dir="], "--ckpt_dir"),
        ([""], "DIR"),
    ):
        with pytest.raises(UsageError, match=f"^{told}: '' is empty"):
            values(COMMANDS["chat"], *words)
    assert values(COMMANDS["complete"], "--prompt", "").prompt == ""


# --- help ---


def test_help_lists_the_commands_and_the_exit_codes(capsys):
    assert main([]) == main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in COMMANDS)
    assert all(f"\n    {code} " in told for code in (0, 1, 2, 130))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_every_flag_with_its_default(name, capsys):
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    flags = {
        words[0]: " ".join(words)
        for words in map(str.split, re.split(r"\n  (?=-)|\n\n", told))
        if words
    }
    for flag, default in COMMANDS[name].defaults.items():
        line = flags[f"--{flag}"]
        meaning = COMMANDS[name].flags[flag].meaning
        shown = {None: COMMANDS[name].flags[flag].absent, REQUIRED: "required", False: ""}
        assert meaning in line
        assert (f"[env var: LLAMA_{flag.upper()}" in line) == COMMANDS[name].has_variable(flag)
        assert shown.get(default, str(default)) in line.partition(meaning)[2]
        both = default not in (None, REQUIRED) and COMMANDS[name].flags[flag].absent
        assert not both or f"none: {both}" in line
    lines = told.splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert examples and all(f"llama {name}" in example for example in examples)


def test_the_help_of_a_command_has_its_flags_in_groups(capsys):
    """No group of flags is longer than a screen, and those of the command come first."""
    assert main(["chat", "--help"]) == 0
    sections = re.split(r"\n\n(?=\w.*:\n)", capsys.readouterr().out)[1:]
    names = [section.partition(":")[0] for section in sections]
    assert names[0] == "Flags" and {"Model", "Sampling", "Ranks", "Server"} <= set(names)
    by_group = dict(zip(names, sections, strict=True))
    assert "--system TEXT" in by_group["Flags"] and "--top_p P" in by_group["Sampling"]
    assert all(section.count("\n  --") <= 15 for section in sections)


def test_a_variable_has_one_meaning():
    """LLAMA_GPU names a kind of device for `llama plan`; `doctor --gpu` is another flag."""
    assert values(COMMANDS["plan"], "8b", LLAMA_GPU="h100").gpu == "h100"
    assert values(COMMANDS["doctor"], LLAMA_GPU="h100").gpu is False
    for command in COMMANDS.values():
        for name in filter(command.has_variable, command.defaults):
            assert command.flags[name] is FLAGS[name]


def test_every_example_of_the_help_is_a_line_that_is_understood():
    for name, command in COMMANDS.items():
        for example in command.examples:
            words = shlex.split(example.partition(f"llama {name}")[2])
            values(command, *words)


def test_the_version_is_the_package_s(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"llama {llama.__version__}\n"
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert llama.__version__ in (project["version"], "0+unknown")


def test_flags_are_checked_before_torch_is_imported():
    code = """
import sys
from llama.cli import main
codes = [main(["chat", "--help"]), main(["chat", "--temprature", "0"]), main(["chit"]),
         main(["batch", "in", "out", "--top_p", "2"])]
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 2, 2, 2] False"
    flag, *others = done.stderr.splitlines()
    assert flag.startswith("error: no such option '--temprature'. ") and "'--temperature'" in flag
    assert others == [
        "error: no such command 'chit'. Did you mean 'chat'?",
        "error: top_p=2.0 must be a number from 0 to 1",
    ]


@pytest.mark.parametrize(
    ("word", "remedy"), [("run", "llama chat DIR"), ("pull", "llama download NAME")]
)
def test_commands_of_other_programs_say_what_to_do(word, remedy, capsys):
    assert main([word, "llama3.2"]) == 2
    assert f"error: there is no command {word}: " in (said := capsys.readouterr().err)
    assert remedy in said


def test_serve_looks_at_the_folder_before_it_listens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama.server.process.Server", lambda *_, **__: pytest.fail("it listens"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    assert main(["serve", str(tmp_path)]) == 1
    assert "model_type is 'qwen2'" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "it is the server's for ever"


@pytest.mark.parametrize("origin", ["localhost:3000", "http://a/path", "http://a, http://b", ""])
def test_an_origin_that_is_none(origin, capsys):
    assert main(["serve", "--allow_origin", origin]) == 2
    assert "--allow_origin" in capsys.readouterr().err


def test_the_command_that_pip_installs():
    """The installed command runs as [project.scripts] on the PATH, outside of the checkout."""
    entry = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["llama"]
    module, _, function = entry.partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", "--ckpt_dri", "nowhere"], cwd="/",
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no such option '--ckpt_dri'. Did you mean '--ckpt_dir'?\n"


# --- commands ---


def continuation(demo: Llama, prompt: str, most: int | None = None) -> str:
    (answer,) = demo.text_completion([prompt], 0.0, max_gen_len=most)
    return answer["generation"] + "\n"


def test_complete_takes_a_prompt_a_file_or_standard_input(demo, tmp_path, monkeypatch, capfd):
    (tmp_path / "prompt").write_text("The opposite of hot is\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The capital of France is\r\n")))
    for words, prompt in (
        (["--prompt", "42"], "42"),
        (["--prompt_file", str(tmp_path / "prompt")], "The opposite of hot is"),
        ([], "The capital of France is"),
    ):
        assert main(["complete", *words, *GREEDY, "--max_gen_len", "12"]) == 0
        out, err = capfd.readouterr()
        assert out == continuation(demo, prompt, 12)
        assert err.startswith("Loaded in ") and err.count("\n") == 1


def test_python_looks_for_no_garbage_among_what_a_command_imports(capfd):
    """Python does not collect garbage among the imports of a command.

    It searches them neither during the import nor later; other objects are collected as usual.
    """
    with model.quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    before = gc.get_freeze_count()
    kept: list[list[int]] = [[] for _ in range(10_000)]
    assert main(["complete", "--prompt", "42", *GREEDY, "--max_gen_len", "1"]) == 0
    assert gc.get_freeze_count() > before + len(kept) // 2 and gc.isenabled()


def test_folders_with_a_number_for_a_name(demo, tmp_path, monkeypatch, capfd):
    """Folders may have a number for a name: 3.10 is not 3.1, as a flag or in a variable."""
    monkeypatch.chdir(tmp_path)
    Path("3.10").symlink_to(DEMO)
    assert main(["convert", "3.10", "4.20"]) == 0
    out, err = capfd.readouterr()
    assert "model.safetensors" in out and not err
    assert main(["verify", "4.20"]) == 0
    assert capfd.readouterr().out.splitlines() == verify("4.20")
    monkeypatch.setenv("LLAMA_CKPT_DIR", "4.20")
    assert main(["complete", "--prompt", "The opposite of hot is", *GREEDY]) == 0
    assert capfd.readouterr().out == continuation(demo, "The opposite of hot is")
    assert main(["verify", "4.2"]) == 2
    assert capfd.readouterr().err.startswith("error: 4.2 does not exist")


def test_a_gguf_file_needs_nothing_beside_it(demo, tmp_path, capfd):
    path = str(tmp_path / "demo.gguf")
    assert main(["convert", str(DEMO), path]) == main(["verify", path]) == 0
    capfd.readouterr()
    assert main(["complete", path, "--prompt", "The opposite of hot is", *GREEDY]) == 0
    assert capfd.readouterr().out == continuation(demo, "The opposite of hot is")


def test_reshard_writes_what_verify_accepts(make_checkpoint, tmp_path, capfd):
    folder = make_checkpoint()[0]
    out = str(tmp_path / "out")
    assert main(["reshard", str(folder), out, "--model_parallel_size", "2"]) == 0
    assert "consolidated.01.pth" in capfd.readouterr().out
    assert any("in 2 file(s)" in line for line in verify(out))
    assert main(["reshard", str(folder), out, "--model_parallel_size", "2"]) == 1
    assert "holds something" in capfd.readouterr().err


def test_batch_writes_figures_to_stdout_and_counts_the_failed_lines(tmp_path, monkeypatch, capfd):
    (tmp_path / "in").write_text('{"prompt": "Once", "max_tokens": 4}\n{"prompt": 5}\n')
    files = [str(tmp_path / "in"), str(tmp_path / "out")]
    assert main(["batch", *files, *GREEDY]) == 0, "the line failed, and not the job"
    out, err = capfd.readouterr()
    assert out.startswith("load ") and out.endswith("| ranks 1 | float32\n")
    assert f"\n{files[1]}: 2 results added, 1 errors in the file\n" in "\n" + err
    assert err.endswith("see its error.line and error.message\n")
    assert main(["batch", *files, *GREEDY]) == 2, "files that cannot be used: 2, before any load"
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and "add --resume" in err and not out
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["batch", *files, *GREEDY]) == 0, "torchrun started it again: it resumes"
    assert f"{files[1]}: 0 results added, 1 errors in the file\n" in capfd.readouterr().err


def test_batch_tells_how_to_go_on_after_ctrl_c(tmp_path, monkeypatch, capfd):
    (tmp_path / "in").write_text("Once\n")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llama.cli.batch.job.run_batch", interrupted)
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), *GREEDY]) == 130
    assert capfd.readouterr().err.endswith("add --resume to answer the rest\n")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["complete", "--prompt", "a", "--prompt_file", "b"], 2, "give one of them"),
        (["complete", "--prompt", "a", "--max_gen_len", "-1"], 2, "max_gen_len=-1 must be"),
        (["chat", "--device", "abacus"], 2, "device='abacus' is not a device"),
        (["chat", "--seed", "-1"], 2, "--seed: -1 is not in the range 0<=x<="),
        (["chat", "--max_seq_len", "0"], 2, "--max_seq_len: 0 is not in the range 1<=x<="),
        (["chat", "--speculate_tokens", "65"], 2, "65 is not in the range 1<=x<=64"),
        (["chat", "--dtype", "fp7"], 2, "dtype='fp7': give one of bf16"),
        (["chat", "--quantize", "q4_0"], 2, "quantize='q4_0': give one of int8, fp8, int4"),
        (["chat", "--kv_cache_dtype", "int7"], 2, "kv_cache_dtype='int7': give int8"),
        (["chat", "--timeout_s", "-1"], 2, "timeout_s=-1.0 must be a number above 0"),
        (["chat", "--model_parallel_size", "3"], 2, "model_parallel_size=3 does not divide the 1"),
        (["chat", "--url", "ftp://x"], 2, "--url ftp://x must begin with http://"),
        (
            ["chat", "--url", "http://x", "--api_key", "\u00e9"],
            2,
            "the key must be printable ASCII",
        ),
        (["convert", str(DEMO), "/nowhere/x", "--quantize", "q4_0"], 2, "int4 for a folder OUT"),
        (["convert", str(DEMO), "/nowhere/x.gguf", "--quantize", "int8"], 2, "q4_0 for an OUT"),
        (["reshard", str(DEMO), "/nowhere/x", "--model_parallel_size", "0"], 2, "from 1 to 4096"),
        (["serve", "--host", "0.0.0.0"], 2, "so a key is needed: give --api_key"),
        (["serve", "--max_queue", "-1"], 2, "--max_queue: -1 is not in the range 0<=x"),
        (["serve", "--max_connections", "0"], 2, "--max_connections: 0 is not in the range 1<=x"),
        (["serve", "--drain_s", "-1"], 2, "--drain_s: -1.0 is not in the range x>=0"),
        (["serve", "--max_wait_s", "nan"], 2, "--max_wait_s: 'nan' is not a number"),
        (["download", "a/b/c"], 2, "'a/b/c' is not the name of a model: give ORG/NAME"),
        (["batch", "/nowhere", "out"], 2, "IN /nowhere: no such file or directory"),
        (["complete", "--prompt_file", "/nowhere"], 2, "--prompt_file /nowhere: no such file or"),
        (["complete", "--prompt_file", "/"], 2, "--prompt_file /: is a directory"),
        (["serve", "--api_key_file", "/nowhere"], 2, "--api_key_file /nowhere: no such file or"),
        (["serve", "--metrics_key_file", "/nowhere"], 2, "--metrics_key_file /nowhere: no such "),
        (["complete", "/nowhere", "--prompt", "a"], 2, "/nowhere does not exist: give the folder"),
        (["complete", "--prompt", "a", "--tokenizer_path", "/nowhere"], 2, "no tokenizer at /no"),
        (["complete", "--prompt", "a", "--device", "cuda"], 2, "device='cuda', but torch finds"),
        (["complete", "--prompt", "a", "--device", "mps"], 2, "device='mps', but torch finds no"),
        (["complete", "--prompt", "a", "--max_seq_len", "513"], 2, "max_seq_len=513 is beyond"),
        (
            ["complete", "--prompt", "a", "--activations", "int8", "--dtype", "fp32"],
            2,
            "activations=",
        ),
        (
            ["serve", "--host", "203.0.113.9", "--api_key", "k"],
            2,
            "--host 203.0.113.9 --port 8000: ",
        ),
        (
            ["serve", "--tensor-parallel-size", "2"],
            2,
            "'--tensor_parallel_size': it is --ranks here",
        ),
        (["serve", "--max-model-len", "2"], 2, "'--max_model_len': it is --max_seq_len here"),
        (["serve", "--ranks", "0"], 2, "--ranks: 0 is not in the range 1<=x<=1024"),
        (["chat", "--ranks", "2", "--url", "http://localhost:1"], 2, "leave out --ranks"),
        (["complete", "--prompt", "a"], 1, "WORLD_SIZE='x' must be a whole number from 1 to"),
        (["chat", "--ranks", "3"], 2, "torchrun has already started some (WORLD_SIZE=2)"),
    ],
)
def test_a_mistake_is_one_line(words, code, told, capfd, monkeypatch):
    if "WORLD_SIZE" in told:
        monkeypatch.setenv("WORLD_SIZE", "x" if "WORLD_SIZE='x'" in told else "2")
    assert main(words) == code
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: ") and told in err and err.count("\n") == 1


def test_an_error_is_one_write():
    """An error is one write, also if Python does not buffer: ranks share standard error.

    Each read of a pipe in packet mode returns what one write wrote.
    """
    read_end, write_end = os.pipe2(os.O_DIRECT)
    command = [sys.executable, "-m", "llama", "verify", "/no/such/folder"]
    env = environment(PYTHONUNBUFFERED="1")
    subprocess.run(command, stderr=write_end, env=env, timeout=60, check=False)
    os.close(write_end)
    line = os.read(read_end, 4096)
    os.close(read_end)
    assert line.startswith(b"error: ") and line.endswith(b"\n")


def test_a_port_in_use_is_named(capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    assert f"error: --port {port}: another program listens there" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LLAMA_TEMPRATURE", "LLAMA_TEMPERATURE"),
        ("LLAMA_CPU_KERNEL", "LLAMA_CPU_KERNELS"),
        ("LLAMA_MAX_SEQLEN", "LLAMA_MAX_SEQ_LEN"),
        ("LLAMA_CLOUD_API_KEY", None),  # LlamaIndex has this one
        ("LLAMA_ARG_CTX_SIZE", None),  # and llama.cpp this one
    ],
)
def test_a_misspelt_variable_is_named(name, meant, monkeypatch, capfd):
    monkeypatch.setenv(name, "1")
    assert main(["batch", "/nowhere", "out"]) == 2
    warned = f"warning: the variable {name} has no effect: did you mean {meant}?\n"
    assert capfd.readouterr().err.startswith(warned if meant else "error: ")


def test_help_offers_the_formats_of_gguf_only_where_gguf_is_written(capsys):
    for name in ("chat", "complete", "batch", "serve", "convert"):
        assert main([name, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "int8, fp8 or int4" in text
        assert ("q4_0" in text) == (name == "convert")


def test_a_bad_time_limit_is_a_mistake_in_the_command_line(monkeypatch, capfd):
    monkeypatch.setenv("LLAMA_DRAIN_S", "abc")
    assert main(["chat"]) == 2
    assert capfd.readouterr().err.startswith("error: LLAMA_DRAIN_S='abc' must be a number from 0")


def test_a_file_that_is_no_text(tmp_path, capfd):
    (tmp_path / "prompt").write_bytes("Once upon a time".encode("utf-16"))
    assert main(["complete", "--prompt_file", str(tmp_path / "prompt")]) == 1
    assert f"{tmp_path / 'prompt'} is not UTF-8 text" in capfd.readouterr().err


def test_the_demo_model_of_a_wheel_comes_first(tmp_path, monkeypatch):
    assert Path(model.demo_dir()) == DEMO
    wheel, checkout = tmp_path / "wheel", tmp_path / "checkout"
    monkeypatch.setattr(model, "DEMO_DIRS", (wheel, checkout))
    with pytest.raises(FileNotFoundError, match="has no demo model"):
        model.demo_dir()
    for folder in (checkout, wheel):
        folder.mkdir()
        (folder / "params.json").touch()
        assert model.demo_dir() == str(folder)


# --- doctor (test_doctor.py has its checks and its ranks) ---


@pytest.fixture
def no_problems(monkeypatch) -> None:
    """Hide the problems of the machine that runs the tests."""
    for name in ("environment_facts", "thread_facts"):
        monkeypatch.setattr(f"llama.cli.doctor.{name}", lambda *_, **__: ())


def test_doctor_reports_the_machine_and_a_checkpoint(no_problems, capfd):
    assert main(["doctor", str(DEMO), "--device", "cpu"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    assert facts["llama"].startswith(llama.__version__)
    assert facts["device"].startswith("cpu") and "GiB free" in facts["memory"]
    assert {"python", "torch", "cores", "cpu", "kernels", "g++"} <= facts.keys()
    assert facts["checkpoint"].startswith(f"{DEMO}: Meta's layout, 1 file(s)")
    assert "dim 256, 4 layers, 8 heads over 4" in facts["model"]


def test_doctor_sees_what_cannot_be_used(no_problems, tmp_path, monkeypatch, capfd):
    """doctor reports what cannot be used.

    The cases are a device, a folder of weights, and Meta's own package, which has files of the same
    names (tests/scripts/test_clone.py has a clone of Meta's repository).
    """
    monkeypatch.setattr(
        "llama.cli.doctor.metadata.packages_distributions",
        lambda: {"llama": ["llama-runtime", "llama3"]},
    )
    assert main(["doctor", str(tmp_path), "--device", "abacus"]) == 1
    lines = capfd.readouterr().out.splitlines()
    problems = {line.split()[0]: line for line in lines if " PROBLEM: " in line}
    assert problems.keys() == {"import", "device", "checkpoint"}
    assert "pip uninstall llama3" in problems["import"]


# --- the end of a command, alone and on ranks ---


def failing(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, ""),
        (UsageError("no"), 2, "error: no\n"),
        (ValueError("no"), 1, "error: no\n"),
        (RankError("rank 1 failed: no"), 1, "error: rank 1 failed: no\n"),
        (NotMetError("rank 1 did not arrive"), 1, "error: rank 1 did not arrive\n"),
        (
            DistNetworkError("recv failed\nframe #0: c10d"),
            1,
            "error: a connection between the ranks, which met at host-0:29500, is lost (recv "
            "failed): another rank, its machine, its torchrun or the network is gone; the first "
            "error message of the other machines says more\n",
        ),
    ],
)
def test_the_groups_are_left_whatever_happens(error, code, told, monkeypatch, capfd):
    """The groups are left whatever happens.

    A process that ends with its groups alive may abort, after all its work was done.
    """
    left: list[int] = []
    monkeypatch.setenv("MASTER_ADDR", "host-0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr("llama.ranks.groups.disconnect", lambda: left.append(1))
    assert ranks.run(failing(error)) == code
    assert capfd.readouterr() == ("", told)
    assert ranks.run(lambda: None) == 0 and len(left) == 2
    shown = ranks.run(lambda: print(warnings.formatwarning("slow", UserWarning, __file__, 1)))
    assert shown == 0 and capfd.readouterr().out == "warning: slow\n\n" and len(left) == 3
    with pytest.raises(RuntimeError, match="a bug"):
        ranks.run(failing(RuntimeError("a bug")))
    assert len(left) == 4


def test_rank_0_alone_speaks(monkeypatch, capfd):
    """Rank 0 alone prints.

    Another rank waits for torchrun to end it, as rank 0's end triggers that; if nothing ends it,
    the failure is its own, and it reports it.
    """
    waits: list[float] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    assert main(["--help"]) == main(["chat", "--help"]) == main(["--version"]) == 0
    assert main(["doctor"]) == 0 and "llama " in capfd.readouterr().out, "RANK alone means nothing"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--help"]) == main(["chat", "--help"]) == main(["--version"]) == 0
    assert main(["verify", str(DEMO)]) == main(["doctor"]) == 0
    assert capfd.readouterr() == ("", "") and not waits
    assert main(["chat", "--temprature", "0"]) == 2
    assert capfd.readouterr().err.startswith("rank 1: error: no such option") and len(waits) == 1


def test_a_reader_that_leaves_does_not_leave_the_other_ranks_alone(monkeypatch):
    """A reader that leaves does not leave the other ranks alone.

    In `llama complete | head -c 10`, rank 0 goes on with the steps that the others wait for. A
    single process stops (test_conversation tests that for a whole script).
    """
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr("sys.stdout", open(write, "w"))  # noqa: SIM115
    _write("a piece", watch=Mock())
    with pytest.raises(BrokenPipeError):
        _write("a piece")
    os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # discards the rest of the buffer


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
@pytest.mark.parametrize("words", [["--help"], ["chat", "--help"], ["--version"]])
def test_a_text_that_a_full_disk_does_not_take_is_one_line(words, monkeypatch, capfd):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(words) == 1
    assert capfd.readouterr().err == "error: no space left on device\n"


@pytest.mark.dist
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_an_answer_that_a_full_disk_does_not_take_is_one_line_of_all_ranks():
    """An answer that does not fit on a full disk gives one line of all ranks.

    Rank 0 alone writes: it reports the reason, and the other rank, which waits for it, prints
    nothing.
    """
    command = [sys.executable, "-m", "llama", "complete", *GREEDY, "--prompt", "a", "--ranks", "2"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
        _, told = process.communicate(timeout=120)
    loaded, error = told.splitlines()
    assert process.returncode == 1 and loaded.startswith("Loaded in")
    reason = "[Errno 28] No space left on device: 'standard output'"
    assert error.startswith("error: rank 0 on ") and error.endswith(reason)


@pytest.mark.slow
def test_complete_on_two_ranks(demo):
    """`complete` runs on two ranks.

    Rank 0 reads standard input for both, and prints once; the groups are left in order.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "llama", "complete", *GREEDY,
    ]  # fmt: skip
    done = run_program(command, input="The capital of France is\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == continuation(demo, "The capital of France is")
    assert done.stderr.count("Loaded in") == 1 and "Warning" not in done.stderr


INTERRUPTED = """
import importlib.abc, os, runpy, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "llama.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module("llama", run_name="__main__")
"""


def test_ctrl_c_during_the_imports_is_silent():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# --- scripts ---


def test_a_script_has_the_flags_of_its_signature(monkeypatch, capfd):
    def script(ckpt_dir: str, temperature: float = 0.6, max_gen_len: int | None = 64) -> None:
        """Run a script and return its result."""
        print([ckpt_dir, temperature, max_gen_len])

    def ended(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["folder/script.py", *words])
        with pytest.raises(SystemExit) as stop:
            run_script(script)
        return stop.value.code if isinstance(stop.value.code, int) else -1

    assert ended("--ckpt_dir", "3.1", "--max-gen-len", "none") == 0
    assert capfd.readouterr().out == "['3.1', 0.6, None]\n"
    assert ended("--temprature=1") == 2
    assert "Did you mean '--temperature'?" in capfd.readouterr().err
    assert ended() == 2
    assert capfd.readouterr().err == "error: --ckpt_dir is missing; --help lists the flags\n"
    assert ended("--help") == 0
    told = capfd.readouterr().out
    assert (
        told.startswith("Usage: script.py [OPTIONS]\n\n  Run a script and return its result.")
        and "LLAMA_CKPT_DIR" in told
    )


@pytest.mark.parametrize("value", ["x", "-1", "nan"])
def test_the_seconds_after_a_signal_are_checked(monkeypatch, value):
    monkeypatch.setenv("LLAMA_DRAIN_S", value)
    with pytest.raises(ValueError, match=r"^LLAMA_DRAIN_S='?[-.\w]+'? must be a number from 0"):
        ranks.finish_on_signal()


def test_closed_standard_files_are_not_reused(tmp_path):
    """Closed standard files are not reused.

    A file that the command opens must not get the number of standard output, nor lines of it;
    reading standard input gives the end of file.
    """
    code = (
        "import os, sys; from llama.cli import ranks\n"
        "def work():\n"
        "    number = os.open(os.environ['FILE'], os.O_WRONLY | os.O_CREAT)\n"
        "    ranks.say('x'); print('y')\n"
        "    return 0 if number > 2 and not sys.stdin.read() else 5\n"
        "raise SystemExit(ranks.run(work))"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    file = tmp_path / "file"
    done = subprocess.run(command, env=environment(FILE=str(file)), timeout=60)
    assert (done.returncode, file.read_bytes()) == (0, b"")


def test_a_line_that_nobody_reads_ends_nothing(monkeypatch):
    read_end, write_end = os.pipe()
    os.close(read_end)

    def work() -> int:
        ranks.say("ready")
        return 3

    with open(write_end, "w") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        assert ranks.run(work) == 3
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            broken.close()
