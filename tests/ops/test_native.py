"""Kernels are compiled once, kept whole and safe; without a compiler torch does the work."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from helpers.kernels import HAS_KERNELS
from llama import device
from llama.ops.cpu import native
from llama.ops.linear import linear, pack, pack_if_supported

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
STUB = 'extern "C" void nothing() {}\n'


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    """A cache folder, for a source that compiles in no time."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    (tmp_path / "stub.cpp").write_text(STUB)
    return tmp_path / "cache"


@needs_kernels
def test_no_compiler_is_one_warning_and_torch_does_the_work(monkeypatch):
    monkeypatch.setenv("PATH", "")
    native.kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"install g\+\+") as warned:
            assert pack_if_supported(torch.ones(64, 8).bfloat16()).dim() == 2
            x, weight = torch.ones(3, 8).bfloat16(), torch.ones(64, 8).bfloat16()
            assert (linear(x, pack(weight)) == 8).all()
        assert len(warned) == 1
    finally:
        native.kernels.cache_clear()


@needs_kernels
def test_a_source_that_does_not_compile_says_why(stub, monkeypatch):
    (native.FOLDER / "stub.cpp").write_text("this is no program")
    monkeypatch.setattr(native, "cache_folder", lambda: stub)
    native.kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="stub.cpp"):
            assert native.kernels() is None
    finally:
        native.kernels.cache_clear()
    assert list(stub.iterdir()) == []


@needs_kernels
def test_built_once_and_again_only_when_something_changed(stub, monkeypatch):
    native.load(stub)
    (first,) = stub.iterdir()
    made = first.stat().st_mtime_ns
    native.load(stub)
    assert first.stat().st_mtime_ns == made
    assert stub.stat().st_mode & 0o777 == 0o700
    (native.FOLDER / "stub.h").write_text("// changed\n")
    native.load(stub)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"another CPU"}))
    native.load(stub)
    assert len(list(stub.iterdir())) == 3


@needs_kernels
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_built_again(stub, damage):
    """Half a library passes for one until its missing half is touched: SIGBUS, not an error."""
    native.load(stub)
    (path,) = stub.iterdir()
    whole = path.read_bytes()
    path.unlink()  # the loaded one stays as it was
    broken = {"cut": whole[:-500], "changed": whole[:900] + b"?" + whole[901:], "empty": b""}
    path.write_bytes(broken[damage])
    assert not native._is_whole(path)
    native.load(stub)
    assert native._is_whole(path)


@needs_kernels
def test_processes_that_build_at_once_do_not_meet(stub):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=native.load, args=(stub,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    (path,) = stub.iterdir()
    assert native._is_whole(path)


@needs_kernels
def test_a_folder_that_others_can_write_is_not_trusted(stub):
    stub.mkdir()
    stub.chmod(0o777)
    assert native.load(stub) is not None
    assert list(stub.iterdir()) == []


@needs_kernels
def test_a_folder_that_cannot_be_made_is_done_without(stub):
    stub.write_text("a file in the way")
    assert native.load(stub) is not None
    assert native.load(Path("no/home")) is not None


@needs_kernels
def test_threads_come_from_torchs_own_runtime(libraries):
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "gomp" in line or "iomp" in line}
    assert len(runtimes) == 1, runtimes


def test_huge_pages_are_only_asked_for():
    for size in (0, 5, 3 << 20):
        tensor = torch.ones(size, dtype=torch.int8)
        device.use_huge_pages(tensor)
        assert (tensor == 1).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_zeros_take_memory_only_when_they_are_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    pages = device.zeros((64, 1 << 20), torch.bfloat16, torch.device("cpu"))
    assert pages.shape == (64, 1 << 20) and pages.dtype is torch.bfloat16
    assert pages.is_contiguous() and pages.data_ptr() % 64 == 0
    assert resident() - before < 16 << 20
    pages[7] = 1
    assert float(pages[6:9].float().sum()) == 1 << 20
    assert resident() - before < 32 << 20
    assert not pages[:7].any() and not pages[8:].any()
