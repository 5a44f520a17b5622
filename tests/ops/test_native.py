"""Kernels are compiled once and stored whole and safely; without a compiler PyTorch is used."""

import ctypes
import errno
import logging
import mmap
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.kernels import HAS_KERNELS, KERNELS_RUN, SUPPORTED
from helpers.waiting import wait_until
from llama.common import allocation
from llama.kernels.cpu import build, constants, native
from llama.ranks.processes import has_ended
from llama.weights.blocks import BlockedWeight
from llama.weights.choice import packed
from llama.weights.plain import PlainWeight

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
needs_running_kernels = pytest.mark.skipif(
    not KERNELS_RUN, reason=f"needs AVX2, g++, and {native.VARIABLE} other than none"
)
AVX2 = next(x for x in build.INSTRUCTION_SETS if x.name == "avx2")
STUB = 'extern "C" void nothing() {}\n'


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    """Provide a cache folder and a source that compiles quickly."""
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")
    (build.FOLDER / "stub.cpp").write_text(STUB)
    monkeypatch.setattr(native, "checked", lambda library: library)  # this library has no constants
    return tmp_path / "cache"


@pytest.fixture
def fresh(monkeypatch) -> Iterator[None]:
    """Reset `kernels`, as in a new process without settings."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


def libraries_in(folder: Path) -> list[Path]:
    """Return the contents of the cache; a build must leave no temporary folder or other file."""
    return sorted(path for path in folder.iterdir() if path.name != "lock")


@needs_kernels
def test_no_compiler_is_one_warning_and_torch_does_the_work(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match=r"install g\+\+") as warned:
        assert type(packed(torch.ones(64, 8).bfloat16())) is PlainWeight
        x, weight = torch.ones(3, 8).bfloat16(), torch.ones(64, 8).bfloat16()
        assert (BlockedWeight.pack(weight).linear(x) == 8).all()
    assert len(warned) == 1


@needs_kernels
def test_a_source_that_does_not_compile_says_why(stub, fresh, monkeypatch):
    (build.FOLDER / "stub.cpp").write_text("this is no program")
    monkeypatch.setattr(native, "cache_folder", lambda: stub)
    with pytest.warns(UserWarning, match="stub.cpp"):
        assert native.kernels() is None
    assert libraries_in(stub) == []


@needs_kernels
def test_a_compiler_that_does_not_know_the_cpu_compiles_for_an_older_one(stub, fresh, monkeypatch):
    unknown = build.InstructionSet("newer", ("-march=cpu-of-the-future",), frozenset())
    monkeypatch.setattr(native, "INSTRUCTION_SETS", (unknown, AVX2))
    monkeypatch.setattr(native, "cache_folder", lambda: stub)
    assert native.kernels() is not None
    (path,) = libraries_in(stub)
    assert path.name.startswith("avx2-")


@needs_kernels
def test_a_library_of_the_package_is_used_without_a_compiler(stub, fresh, monkeypatch):
    path = build.FOLDER / build.library_name(SUPPORTED[-1])
    compiler = build.find_compiler()
    assert compiler is not None
    build.build(compiler, SUPPORTED[-1], path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native, "cache_folder", lambda: stub)
    library = native.kernels()
    assert library is not None and library._name == str(path)
    assert not stub.exists()


@needs_kernels
def test_libraries_share_objects_of_sources_that_do_not_use_what_a_set_adds(tmp_path, monkeypatch):
    """A source is compiled for the base, unless the set names it, and once for equal flags."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    for name in ("shared", "own"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return WHICH; }}\n')
    base = build.InstructionSet("base", ("-DWHICH=1",), frozenset())
    larger = build.InstructionSet("larger", ("-DWHICH=2",), frozenset(), frozenset(), base)
    objects, compiler = tmp_path / "objects", build.find_compiler()
    assert compiler is not None
    objects.mkdir()
    values = []
    for body in (base, larger._replace(sources=frozenset({"own"})), larger):
        path = tmp_path / f"{build.fingerprint(compiler, body)}.so"
        assert not path.exists()  # the sources that a set names are part of the name
        build.build(compiler, body, path, objects)
        library = ctypes.CDLL(str(path))
        values.append((library.shared(), library.own()))
    assert values == [(1, 1), (1, 2), (1, 1)]
    assert sorted(x.name.split("-")[0] for x in objects.iterdir()) == ["own", "own", "shared"]
    (tmp_path / "own.cpp").write_text('extern "C" int own() { return 3; }\n')
    build.build(compiler, base, tmp_path / "changed.so", objects)
    library = ctypes.CDLL(str(tmp_path / "changed.so"))
    assert (library.shared(), library.own()) == (1, 3)
    assert len(list(objects.iterdir())) == 4


@needs_kernels
def test_the_variable_names_one_body_or_none(fresh, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, AVX2.name)
    library = native.kernels()
    assert library is not None and Path(library._name).name.startswith("avx2-")
    monkeypatch.setenv(native.VARIABLE, "none")
    native.kernels.cache_clear()
    assert native.kernels() is None
    monkeypatch.setenv(native.VARIABLE, "avx9")
    with pytest.raises(ValueError, match=r"LLAMA_CPU_KERNELS='avx9': .* one of none, .*avx2"):
        native.allowed_instruction_sets()


def test_the_fastest_body_comes_first(monkeypatch):
    """The fastest variant comes first, on a CPU with all of its flags.

    bf16 pairs are not used on Intel CPUs that hide their tiles.
    """
    monkeypatch.delenv(native.VARIABLE, raising=False)
    pairs = next(x for x in build.INSTRUCTION_SETS if x.name == "avx512_bf16")
    for flags, first in [
        (build.INSTRUCTION_SETS[0].needs | pairs.slow_on, "amx"), (pairs.needs, "avx512_bf16"),
        (pairs.needs | pairs.slow_on, "avx512_vnni"),
        (pairs.needs | {"avx512_fp16"}, "avx512_bf16"),
        (pairs.needs - {"avx512_bf16", "avx512_vnni"}, "avx512"),
        (AVX2.needs | {"avx_vnni"}, "avx_vnni"), (AVX2.needs, "avx2"),
    ]:  # fmt: skip
        monkeypatch.setattr(native, "cpu_flags", lambda flags=flags: flags)
        assert native.allowed_instruction_sets()[0].name == first
        assert {x.name for x in native.allowed_instruction_sets()} >= {first, "avx2"}


@needs_kernels
def test_built_once_and_again_only_when_something_changed(stub, caplog):
    native.load(stub, AVX2)
    assert "compiling the CPU kernels (avx2)" in caplog.text
    (first,) = libraries_in(stub)
    made = first.stat().st_mtime_ns
    caplog.clear()
    native.load(stub, AVX2)
    assert not caplog.records
    assert first.stat().st_mtime_ns == made
    assert stub.stat().st_mode & 0o777 == 0o700
    (build.FOLDER / "stub.h").write_text("// changed\n")
    native.load(stub, AVX2)
    native.load(stub, AVX2._replace(flags=("-march=haswell", "-DCHANGED")))
    assert len(libraries_in(stub)) == 3


@needs_kernels
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_built_again(stub, damage):
    """A damaged library is built again.

    Half a library loads without an error until its missing half is used, which is a SIGBUS.
    """
    native.load(stub, AVX2)
    (path,) = libraries_in(stub)
    whole = path.read_bytes()
    path.unlink()  # the loaded library keeps its contents
    broken = {"cut": whole[:-500], "changed": whole[:900] + b"?" + whole[901:], "empty": b""}
    path.write_bytes(broken[damage])
    assert not build.is_whole(path)
    native.load(stub, AVX2)
    assert build.is_whole(path)


@needs_kernels
def test_processes_that_need_a_library_at_once_build_it_once(stub, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr(logging.getLogger("llama"), "handlers", [logging.FileHandler(log)])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=native.load, args=(stub, AVX2)) for _ in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4
    assert log.read_text().count("compiling") == 1
    (path,) = libraries_in(stub)
    assert build.is_whole(path)


@needs_kernels
def test_a_killed_build_leaves_no_compiler_and_the_next_removes_its_files(
    stub, tmp_path, monkeypatch
):
    """A killed build leaves no compiler, and its files are removed by the next.

    The compiler, a shell with a child of its own, kills the process that builds, as the system does
    when memory runs out.
    """
    bin_folder, compiler = tmp_path / "bin", build.find_compiler()
    bin_folder.mkdir()
    wrapper, pid_file = bin_folder / "g++", tmp_path / "pid"
    wrapper.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && exec {compiler} "$@"
mkdir {tmp_path}/first || exit 1
read -r _ _ _ builder _ < /proc/$PPID/stat
sleep 600 & echo $! > {pid_file}
kill -9 $builder
wait
"""
    )
    wrapper.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(bin_folder), prepend=os.pathsep)
        killed = multiprocessing.get_context("fork").Process(target=native.load, args=(stub, AVX2))
        killed.start()
        killed.join()
    assert killed.exitcode == -signal.SIGKILL
    wait_until(lambda: has_ended(int(pid_file.read_text())))
    assert [path.name for path in libraries_in(stub) if path.name.startswith("build-")]
    native.load(stub, AVX2)
    (path,) = libraries_in(stub)
    assert build.is_whole(path)


@needs_kernels
def test_a_folder_that_others_can_write_is_not_trusted(stub):
    stub.mkdir()
    stub.chmod(0o777)
    with pytest.warns(UserWarning, match=f"other users can write to {stub}.*XDG_CACHE_HOME"):
        assert native.load(stub, AVX2) is not None
    assert list(stub.iterdir()) == []


@needs_kernels
@pytest.mark.parametrize("planted", ["group", "owner", "link", "pipe"])
def test_a_planted_library_is_not_run(stub, monkeypatch, planted):
    """A library that another user may have written is not run, but compiled again.

    What is checked is the open file: its owner, its mode and its kind, and not its name.
    """
    native.load(stub, AVX2)
    (path,) = libraries_in(stub)
    content = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600, "also with a umask of 002"
    if planted == "group":
        path.chmod(0o620)
    if planted == "owner":
        if os.getuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, 12345, -1)
    if planted == "link":
        path.rename(stub.parent / "elsewhere.so")
        path.symlink_to(stub.parent / "elsewhere.so")
    if planted == "pipe":
        path.unlink()
        os.mkfifo(path)
    loaded: list[str] = []
    dlopen = ctypes.CDLL

    def load(name: str) -> ctypes.CDLL:
        loaded.append(name)
        return dlopen(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.warns(UserWarning, match="stored CPU kernels are not used, but compiled again: "):
        native.load(stub, AVX2)
    assert loaded == [str(path)], "the new one"
    assert path.is_file() and not path.is_symlink() and path.read_bytes() == content
    assert path.stat().st_uid == os.getuid()
    native.load(stub, AVX2)
    (checked,) = loaded[1:]
    assert checked.startswith("/proc/self/fd/"), "the file that was checked, whatever its name"


@needs_kernels
def test_a_folder_that_cannot_be_made_is_done_without(stub):
    stub.write_text("a file in the way")
    for folder in (stub, Path("no/home")):
        with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
            assert native.load(folder, AVX2) is not None


@needs_kernels
@pytest.mark.parametrize(
    "swapped, name",
    [
        (("NIBBLES", "SIX_BITS"), "ElementFormat::NIBBLES"),
        (("FLOAT32", "FLOAT16"), "ScaleFormat::FLOAT32"),
        (("PENDING", "MISMATCH"), "ChannelState::PENDING"),
        (("MAX_RANK = 256", "MAX_RANK = 128"), "MAX_RANK"),
    ],
    ids=str,
)
def test_a_library_with_other_constants_is_refused(tmp_path, swapped, name):
    """A library with other constants is refused.

    A format with another number in C++ would be read as garbage, without an error.
    """
    header = (build.FOLDER / "constants.h").read_text()
    first, second = swapped
    assert first in header
    changed = header.replace(first, "?").replace(second, first).replace("?", second)
    (tmp_path / "constants.h").write_text(changed)
    (tmp_path / "constants.cpp").write_text((build.FOLDER / "constants.cpp").read_text())
    library = tmp_path / "constants.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", tmp_path / "constants.cpp", "-o", library]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(RuntimeError, match=f"compiled with {name}=.* and this package has"):
        native.checked(ctypes.CDLL(str(library)))


@needs_running_kernels
def test_every_constant_of_the_sources_is_compared():
    """Every constant of the sources is compared.

    The library has every constant that Python lists, and each enumerator is listed.
    """
    header = (build.FOLDER / "constants.h").read_text()
    names = set(re.findall(r"^constexpr \w+ (\w+) =", header, re.M))
    for enum, members in re.findall(r"^enum class (\w+) : int64_t {(.*)};", header, re.M):
        names |= {f"{enum}::{member.strip()}" for member in members.split(",")}
    assert names == constants.ALL.keys()
    assert native.call("constant_value", "nowhere") == -1
    for name, value in constants.ALL.items():
        assert native.call("constant_value", name) == value


@needs_running_kernels
def test_types_of_gguf_are_known_by_name():
    assert native.call("gguf_type", "Q4_K") >= 0
    assert native.call("gguf_type", "Q9_9") == -1


@needs_running_kernels
def test_threads_come_from_torchs_own_runtime():
    assert native.kernels() is not None
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "gomp" in line or "iomp" in line}
    assert len(runtimes) == 1, runtimes


@needs_kernels
def test_torchs_runtime_is_shared_before_the_kernels_are_loaded(fresh, monkeypatch):
    """Torch for ARM loads it for its own libraries alone; then the kernels would not load."""
    loaded: list[tuple] = []
    dlopen = ctypes.CDLL

    def load(*args: Any) -> ctypes.CDLL:
        loaded.append(args)
        return dlopen(*args)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert native.kernels() is not None
    (runtime, mode), (kernels,) = loaded
    assert mode == ctypes.RTLD_GLOBAL and "omp" in Path(runtime).name
    assert "kernels" in kernels or kernels.startswith("/proc/self/fd/")


@needs_running_kernels
@pytest.mark.parametrize(
    "change",
    [
        {3: 2.0},  # a float where an integer is expected
        {3: True},
        {5: 1},  # an integer where a float is expected
        {0: torch.ones(2, 32)},  # float32 is not accepted
        {0: torch.ones(32, 2).bfloat16().T},
        {0: torch.ones(2, 32, device="meta").bfloat16()},
        {0: 0},
    ],
)
def test_arguments_of_another_kind_are_refused(change):
    x = torch.ones(2, 32).bfloat16()
    arguments: list = [x, x[0], torch.empty_like(x), 2, 32, 1e-5]
    native.call("rms_norm_bf16", *arguments)
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(TypeError, match="rms_norm_bf16 takes"):
        native.call("rms_norm_bf16", *arguments)


@needs_kernels
def test_a_missing_argument_is_refused():
    x = torch.ones(2, 32).bfloat16()
    with pytest.raises(TypeError, match="rms_norm_bf16 takes"):
        native.call("rms_norm_bf16", x, x[0], torch.empty_like(x), 2, 32)


def test_every_function_of_the_sources_has_its_signature():
    """Every function of the sources has its signature.

    The C++ arguments match the table in number, and pointers and integers are in the same
    positions.
    """
    letters = {"long": int, "float": float, "bool": bool}
    found = {}
    for source in build.FOLDER.glob("*.cpp"):
        # integer_product.cpp exports none.
        exported = source.read_text().partition('extern "C" {')[2]
        for returns, name, listed in re.findall(r"^(\w+) (\w+)\(([^)]*)\) \{", exported, re.M):
            kinds = [None if "*" in x else letters[x.split()[-2]] for x in listed.split(",")
                     if not x.strip().startswith("int threads")]  # fmt: skip
            found[name] = (letters.get(returns), kinds)
    table = {
        name: (returns, [kind if kind in letters.values() else None for kind in kinds])
        for name, (returns, kinds) in native.SIGNATURES.items()
    }
    assert found == table


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells of its pages")
def test_huge_pages_are_asked_for():
    """Huge pages are requested.

    The kernel marks the memory "hg" (madvise), in whole pages of 2 MiB inside the tensor.
    """
    memory = mmap.mmap(-1, 9 << 20)  # a separate mapping
    tensor = torch.frombuffer(memory, dtype=torch.int8)
    allocation.use_huge_pages(tensor)
    marked = 0
    for begin, end, flags in mappings():
        if "hg" in flags:
            inside = min(end, tensor.data_ptr() + tensor.nbytes) - max(begin, tensor.data_ptr())
            marked += max(0, inside)
    assert marked >= 6 << 20
    tensor.fill_(1)
    assert int(tensor.sum(dtype=torch.int64)) == 9 << 20


def mappings() -> Iterator[tuple[int, int, list[str]]]:
    """Return this process's mappings: start, end, and the kernel's flags."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(x, 16) for x in span.groups())
        elif line.startswith("VmFlags:"):
            yield begin, end, line.split()[1:]


@pytest.mark.parametrize("size", [0, 5, 3 << 20])
def test_memory_too_small_for_huge_pages_is_left_alone(size):
    tensor = torch.ones(size, dtype=torch.int8)
    allocation.use_huge_pages(tensor)
    assert (tensor == 1).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_zeros_take_memory_only_when_they_are_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    pages = allocation.zeros((64, 1 << 20), torch.bfloat16, torch.device("cpu"))
    assert pages.shape == (64, 1 << 20) and pages.dtype is torch.bfloat16
    assert pages.is_contiguous() and pages.data_ptr() % 64 == 0
    assert resident() - before < 16 << 20
    pages[7] = 1
    assert float(pages[6:9].float().sum()) == 1 << 20
    assert resident() - before < 32 << 20
    assert not pages[:7].any() and not pages[8:].any()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EROFS], ids=["no locks", "read-only"])
def test_where_there_is_no_lock_nobody_waits_for_it(tmp_path, monkeypatch, number):
    """Without file locks nobody waits for one.

    Locks may fail on a network's file system, or no file can be made: kernels are optional.
    """

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    name = "fcntl.flock" if number == errno.ENOLCK else "builtins.open"
    entered = []
    with monkeypatch.context() as patch:
        patch.setattr(name, fails)
        patch.setattr(time, "sleep", None)
        with native.locked(tmp_path / "lock", 60):
            entered.append(1)
    assert entered
