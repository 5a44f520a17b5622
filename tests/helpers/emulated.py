"""The CPU kernels of ARM, compiled by a cross compiler, and run on this machine by QEMU.

`library` returns an object that stands for a loaded library: a call sends the tensors that it reads
or writes to emulated.cpp, and stores what comes back in them. Weights pass addresses in tables of
integers, too: each comes from `Tensor.data_ptr`, which notes the memory that has it.
"""

import bisect
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

from helpers.kernels import objects_folder
from llama.kernels.cpu import build, native
from llama.kernels.cpu.build import INSTRUCTION_SETS

COMPILER = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
CAN_EMULATE = COMPILER is not None and QEMU is not None
ARM = {x.name: x for x in INSTRUCTION_SETS if x.machine == "aarch64"}
# The oldest CPU that has the instructions, as QEMU names it: it has none that the kernels may not
# use. "max" has all that QEMU knows.
CPUS = {"neon": "cortex-a72", "neon_dotprod": "neoverse-n1", "neon_bf16": "max"}
_PROGRAM = Path(__file__).resolve().parent / "emulated.cpp"
_LIBRARIES = Path("/usr/aarch64-linux-gnu")  # Debian's and Ubuntu's


class Storages:
    """The memory of tensors whose addresses were asked for; none of it is freed meanwhile."""

    def __init__(self) -> None:
        self.with_integers: set[int] = set()  # where those begin that may hold addresses
        self._storages: dict[int, UntypedStorage] = {}  # by where they begin
        self._begins: list[int] = []  # sorted

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if tensor.dtype is torch.int64:
            self.with_integers.add(begin)
        if begin and begin not in self._storages:
            bisect.insort(self._begins, begin)
            self._storages[begin] = storage

    def find(self, address: int) -> tuple[int, UntypedStorage] | None:
        """Return the beginning of the memory that has an address, and the memory."""
        index = bisect.bisect(self._begins, address)
        if not index:
            return None
        begin = self._begins[index - 1]
        storage = self._storages[begin]
        return (begin, storage) if address < begin + storage.nbytes() else None


class EmulatedLibrary:
    """A library whose functions QEMU runs.

    Args:
        path: The library.
        cpu: QEMU's name of the CPU.
        program: emulated.cpp, compiled.
    """

    def __init__(self, path: Path, cpu: str, program: Path) -> None:
        assert QEMU is not None
        self.storages = Storages()
        self._name = str(path)
        command = [QEMU, "-cpu", cpu, "-L", str(_LIBRARIES), str(program), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> "_Function":
        function = _Function(functools.partial(self._call, name))
        setattr(self, name, function)
        return function

    def _call(self, name: str, *values: Any) -> int:
        kinds = [*native.SIGNATURES[name][1], *[int] * (len(values))][: len(values)]
        memory = _Memory(self.storages)
        integers: list[tuple[int, int]] = []
        floats: list[float] = []
        for value, kind in zip(values, kinds, strict=True):
            if kind is float:
                floats.append(value)
            elif kind is str:
                integers.append(memory.text(value))
            elif kind is int or kind is bool:
                integers.append((-1, int(value)))
            else:
                integers.append(memory.find(value) or (-1, value))
        memory.relocate()
        contents = [x.content() for x in memory.buffers]
        encoded = name.encode()
        counts = [len(encoded), len(contents), len(memory.relocations), len(integers), len(floats)]
        numbers = [*counts, *map(len, contents)]
        tail = [number for row in (*memory.relocations, *integers) for number in row]
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None and answers is not None
        pipe.write(struct.pack(f"<{len(numbers)}q", *numbers) + encoded + b"".join(contents))
        pipe.write(struct.pack(f"<{len(tail)}q{len(floats)}d", *tail, *floats))
        pipe.flush()
        (result,) = struct.unpack("<q", _read(answers, 8))
        for buffer, content in zip(memory.buffers, contents, strict=True):
            buffer.store(_read(answers, len(content)))
        return result


class _Function:
    """A function of a library, with the attributes that `native.call` sets."""

    def __init__(self, run: Callable[..., int]) -> None:
        self._run = run
        self.argtypes: list[type] | None = None
        self.restype: type | None = None

    def __call__(self, *values: Any) -> int:
        return self._run(*values)


class _Buffer:
    """The memory of one or more tensors."""

    def __init__(self, storage: UntypedStorage, may_hold_addresses: bool = False) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.may_hold_addresses = may_hold_addresses

    def content(self) -> bytes:
        return self.bytes.numpy().tobytes()

    def store(self, content: bytes) -> None:
        """Store what the kernel left, unless it is what was there."""
        if content != self.content():  # memory that may not be written is not
            self.bytes.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


class _Memory:
    """The buffers of a call, found by the addresses of what they hold."""

    def __init__(self, storages: Storages) -> None:
        self.buffers: list[_Buffer] = []
        self.relocations: list[tuple[int, int, int, int]] = []
        self._storages = storages
        self._index: dict[int, int] = {}  # the buffer of a storage, by where it begins

    def text(self, text: str) -> tuple[int, int]:
        content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        self.buffers.append(_Buffer(content.untyped_storage()))
        return len(self.buffers) - 1, 0

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the buffer and the offset of an address; None where no tensor has it."""
        found = self._storages.find(address)
        if found is None:
            return None
        begin, storage = found
        if begin not in self._index:
            self._index[begin] = len(self.buffers)
            self.buffers.append(_Buffer(storage, begin in self._storages.with_integers))
        return self._index[begin], address - begin

    def relocate(self) -> None:
        """Find the addresses that buffers of integers hold, and those in the buffers found so."""
        for index, buffer in enumerate(self.buffers):  # grows meanwhile
            if not buffer.may_hold_addresses:
                continue
            for i, number in enumerate(buffer.bytes.view(torch.int64).tolist()):
                if number > 2**32 and (found := self.find(number)):
                    self.relocations.append((index, 8 * i, *found))


def _read(pipe: Any, count: int) -> bytes:
    content = pipe.read(count)
    assert len(content) == count, "QEMU ended: its message is above"
    return content


@functools.cache
def library(name: str) -> EmulatedLibrary:
    """Return the library of an instruction set of ARM; its process lives as long as this one."""
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "emulated"
        flags = ["-std=c++17", "-O1", "-fopenmp", "-Wl,--no-as-needed", "-lgomp", "-ldl"]
        command = [COMPILER, str(_PROGRAM), *flags, "-o", str(program)]
        subprocess.run(command, check=True, timeout=100)
        emulated = EmulatedLibrary(compiled(name), CPUS[name], program)
        assert emulated.constant_value("MAX_RANK") > 0  # the program has been loaded
    return emulated


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let QEMU run the kernels, with an instruction set of ARM, until the patches are undone."""
    body = library(name)
    body.storages = Storages()
    monkeypatch.setattr(native, "kernels", lambda: body)
    data_ptr = Tensor.data_ptr

    def noted(tensor: Tensor) -> int:
        body.storages.note(tensor)
        return data_ptr(tensor)

    monkeypatch.setattr(Tensor, "data_ptr", noted)


def compiled(name: str) -> Path:
    """Return the path of a library, which is compiled once, as those for this CPU are."""
    assert COMPILER is not None
    folder = objects_folder().parent
    path = folder / f"{build.fingerprint(COMPILER, ARM[name])}.so"
    with native.locked(folder / "lock", 600):
        if not build.is_whole(path):
            build.build(COMPILER, ARM[name], path, objects_folder())
    return path
