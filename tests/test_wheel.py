"""A built wheel, installed apart from the tree: its kernels run without a compiler or a home."""

import ctypes
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from helpers.dockerfile import copied
from helpers.kernels import HAS_KERNELS, can_run, library, objects_folder, path_of
from llama.kernels.cpu import build

REPO = Path(__file__).resolve().parent.parent
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
import llama
from llama.kernels.cpu import native
library = native.kernels()
engine = llama.Llama.build(sys.argv[1], device="cpu", dtype="bf16", max_seq_len=128)
prompts = [engine.tokenizer.encode("Once upon a time", bos=True, eos=False)] * 2
ids, logprobs = engine.generate(prompts, 24, temperature=0.8, logprobs=True, seed=7)
bits = [[x.hex() for x in row] for row in logprobs]
print(json.dumps([llama.__file__, library and library._name, ids, bits]))
"""


def generated(program: Path, folder: Path, checkpoint: Path, **environment: str) -> list:
    """Return the paths of package and kernels, and ids and log probabilities of two answers."""
    done = subprocess.run(
        [sys.executable, str(program), str(checkpoint)],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        cwd=checkpoint, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the files that the Dockerfile copies.

    The libraries that can run here come from the cache, where they are compiled with the same
    flags. The others are compiled without optimization, which takes a fifth of the time.
    """
    compiler = build.find_compiler()
    assert compiler is not None
    folder = tmp_path_factory.mktemp("wheel")
    kept = tmp_path_factory.mktemp("kernels")
    for body in build.INSTRUCTION_SETS:
        built = path_of(body)
        if can_run(body):
            library(body.name)
            (kept / built.name).symlink_to(built)
        elif build.accepts(compiler, body):
            fast = body._replace(flags=(*body.flags, "-O0"))
            build.build(compiler, fast, kept / built.name, objects_folder())
    for name, path in copied("wheel").items():
        source, target = REPO / name, folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.startswith("/"):  # constraints.txt is for installing the wheel
            shutil.copyfile(source, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    env = os.environ | {"LLAMA_BUILT_KERNELS": str(kept)}
    subprocess.run([*pip, *options, folder / "source"], check=True, timeout=400, env=env)
    (path,) = folder.glob("llama_runtime-*.whl")
    return path


def smallest_set(own: ModuleType) -> build.InstructionSet:
    """Return the set of this machine that each of its CPUs has."""
    sets = [x for x in own.INSTRUCTION_SETS if x.machine == platform.machine()]
    found: build.InstructionSet = sets[-1]
    return found


@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_a_library_that_was_not_kept_is_compiled(tmp_path, monkeypatch):
    """A library that was not included is compiled.

    The same holds where the folder of included libraries has half a file of that name.
    """
    with monkeypatch.context() as patch:  # setuptools has a module of that name, too
        patch.setattr(sys, "path", [x for x in sys.path if x != str(REPO / "scripts")])
        program = runpy.run_path(str(REPO / "scripts" / "wheel.py"))
    own, put_library = program["BUILD"], program["put_library"]
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(own, "FOLDER", tmp_path)
    avx2, made = smallest_set(own), tmp_path / "made.so"
    kept = tmp_path / f"{own.fingerprint(own.find_compiler(), avx2)}.so"
    for folder in ("", str(tmp_path)):
        kept.write_bytes(b"half")
        monkeypatch.setenv("LLAMA_BUILT_KERNELS", folder)
        put_library(avx2, made, tmp_path)
        assert ctypes.CDLL(str(made)).one() == 1 and own.is_whole(made)
    kept.write_bytes(made.read_bytes())
    monkeypatch.setattr(own, "build", None)
    put_library(avx2, tmp_path / "copied.so", tmp_path)
    assert (tmp_path / "copied.so").read_bytes() == made.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)  # may compile the kernels
@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_a_wheel_gives_the_bits_of_a_checkout_without_a_compiler(wheel, tmp_path):
    """A wheel gives the bits of a checkout without a compiler.

    Both run the same variant of the kernels, and torch with one thread, on one CPU.
    """
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"llama/kernels/cpu/{build.library_name(smallest_set(build))}",
            "llama/data/demo/params.json",
            "llama/prompts/chat_template.jinja", "llama/server/page/index.html",
            "llama/server/page/style.css", "llama/server/page/main.js"} < set(names)  # fmt: skip
    site, home = tmp_path / "site", tmp_path / "home"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does, and faster
    home.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    own = {"PATH": str(home), "HOME": str(home), "XDG_CACHE_HOME": ""}
    package, library, *answers = generated(program, site, site / "llama" / "data" / "demo", **own)
    assert package == str(site / "llama" / "__init__.py")
    assert library is not None and library.startswith(str(site))
    assert list(home.iterdir()) == []
    _, compiled, *expected = generated(program, REPO, REPO / "checkpoints" / "demo")
    assert not compiled.startswith(str(REPO))
    assert answers == expected


@pytest.mark.slow
@pytest.mark.timeout(900)  # may compile the kernels
@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_a_wheel_works_in_an_empty_environment(wheel):
    """scripts/try_wheel passes, with the dependencies of the environment that runs the tests."""
    command = [str(REPO / "scripts" / "try_wheel"), str(wheel), sysconfig.get_path("purelib")]
    variables = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/site-packages/llama/kernels/cpu/kernels." in done.stdout  # doctor names the library
    assert "g++          not found" in done.stdout


def test_a_source_distribution_has_what_a_wheel_is_built_of(tmp_path):
    """A source distribution has the files that the Dockerfile builds a wheel of."""
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__", "tests", "bench")
    for name in ("llama", "scripts", "checkpoints"):
        shutil.copytree(REPO / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copyfile(REPO / name, source / name)
    program = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = tmp_path.glob("llama_runtime-*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for name in copied("wheel").keys() - {"constraints.txt"}:
        files = [path for path in (REPO / name).rglob("*") if path.suffix not in (".md", ".pyc")]
        files = [path for path in files if path.is_file()] or [REPO / name]
        assert {str(path.relative_to(REPO)) for path in files} <= packed


def test_type_checkers_see_an_editable_install(tmp_path):
    """An editable install is a line with the checkout's path, which mypy and editors read.

    setuptools' default is an import hook in Python code, which they do not run.
    """
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("llama", "scripts"):
        shutil.copytree(REPO / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPO / name, source / name)
    program = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = tmp_path.glob("llama_runtime-*.whl")
    with zipfile.ZipFile(path) as wheel:
        files = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert [Path(name).suffix for name in files] == [".pth"]
        assert wheel.read(files[0]).decode().strip() == str(source)
