"""Inside a clone of Meta's repository, whose `llama/` Python finds before the installed one.

The clone here is artificial: as in Meta's, `build` joins torch's groups before anything else.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.launch import DEMO, REPO, environment
from llama.cli import main
from llama.ranks.world import started_processes

TORCH_SAYS = "environment variable RANK expected, but not set"
REMEDY = "PYTHONSAFEPATH=1"
GENERATION = """
class Llama:
    @staticmethod
    def build(ckpt_dir: str, tokenizer_path: str, max_seq_len: int, max_batch_size: int):
        import torch
        torch.distributed.init_process_group("gloo")
"""
EXAMPLE = f"""
from llama import Llama
folder = {str(DEMO)!r}
generator = Llama.build(folder, folder + "/tokenizer.model", 128, 4)
print(generator.text_completion(["The capital of France is"], temperature=0)[0]["generation"])
"""


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "__init__.py").write_text("from .generation import Llama\n")
    (tmp_path / "llama" / "generation.py").write_text(GENERATION)
    (tmp_path / "example_text_completion.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ran(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment(**variables), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_script_fails_in_the_clone_and_the_remedy_mends_it(clone):
    """A script fails in the clone, and the documented remedy fixes it.

    torch's error is the one that the guide quotes, so that a search finds the remedy.
    """
    failed = ran("example_text_completion.py")
    assert failed.returncode == 1 and failed.stderr.rstrip().endswith(TORCH_SAYS)
    mended = ran("example_text_completion.py", PYTHONSAFEPATH="1")
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.endswith(" Paris.\n")
    page = (REPO / "docs" / "guides" / "from-meta.md").read_text()
    assert TORCH_SAYS in page and REMEDY in page


def test_doctor_names_the_remedy(clone, capfd):
    assert main(["doctor", "--device", "cpu"]) == 1
    (line,) = [x for x in capfd.readouterr().out.splitlines() if " PROBLEM: " in x]
    assert f"{clone / 'llama'} hides this package" in line
    assert TORCH_SAYS in line and f"{REMEDY} torchrun" in line


def test_doctor_in_another_checkout_says_which_one_runs(clone, capfd):
    (clone / "llama" / "cli").mkdir()
    (clone / "llama" / "cli" / "doctor.py").touch()
    assert main(["doctor", "--device", "cpu"]) == 1
    (line,) = [x for x in capfd.readouterr().out.splitlines() if " PROBLEM: " in x]
    assert "another checkout" in line and f"the command llama runs {REPO / 'llama'}," in line


def test_the_command_runs_in_the_clone_and_the_module_is_told(clone, tmp_path):
    """The command runs in the clone, and running the module gives an error.

    The command's own folder comes first on its path. With -m the clone's package is run; an install
    from a checkout adds the modules that the clone's package lacks.
    """
    entry = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["llama"]
    module, _, function = entry.partition(":")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "llama"
    command.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    assert ran(str(command), "--version").stdout.startswith("llama ")
    with (clone / "llama" / "__init__.py").open("a") as file:
        file.write(f"__path__.append({str(REPO / 'llama')!r})\n")
    for words in (["doctor"], ["chat", "--temprature", "1"]):
        done = ran("-m", "llama", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"error: {clone / 'llama'} is another package" in done.stderr
        assert REMEDY in done.stderr
    assert ran("-m", "llama", "--version", PYTHONSAFEPATH="1").returncode == 0


def test_left_over_variables_of_torchrun_are_named(monkeypatch, capfd):
    """Left-over variables of torchrun are named.

    With WORLD_SIZE alone, torch would report that RANK is not set, but no remedy.
    """
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    told = "WORLD_SIZE=2 also needs RANK, MASTER_ADDR: launch with torchrun, or unset"
    assert main(["complete", "--prompt", "a", "--device", "cpu"]) == 1
    assert capfd.readouterr().err.startswith(f"error: {told}")
    assert main(["doctor", "--device", "cpu"]) == 1
    assert f"PROBLEM: {told}" in capfd.readouterr().out
    launched = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value, words in (
        ("WORLD_SIZE", "x", "'x' must be a whole number from 1 to 1048575"),
        ("WORLD_SIZE", "0", "0 must be a whole number from 1 to 1048575"),
        ("RANK", "", "'' must be a whole number from 0 to 1"),
        ("RANK", "2", "2 must be a whole number from 0 to 1"),
        ("MASTER_PORT", "http", "'http' must be a whole number from 0 to 65535"),
        ("MASTER_PORT", "65536", "65536 must be a whole number from 0 to 65535"),
        ("LOCAL_RANK", "-1", "'-1' must be a whole number from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "3", "3 must be a whole number from 1 to 2"),
        ("LOCAL_WORLD_SIZE", "1.5", "'1.5' must be a whole number from 1 to 2"),
    ):
        with monkeypatch.context() as patched, pytest.raises(ValueError) as error:
            for each, text in {**launched, name: value}.items():
                patched.setenv(each, text)
            started_processes()
        assert str(error.value) == f"{name}={words}"
