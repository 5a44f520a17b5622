"""A server keeps KV pages on a disk that becomes full, and then cannot be written at all.

`python tests/programs/kv_disks.py` mounts a file system in memory, which needs the right to do so.
The exit code is 1 if an answer or its log-probabilities differ from those of a server without
pages on disk, if a request fails, or if the server does not say why it writes nothing.
"""

import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from helpers.server import run_server
from llama.build_args import MIN_DISK_BYTES
from programs.kv_soak import FLAGS, KEYS, PROGRAM, answers_without_pages, ask

DISK_MIB = 128  # a segment is begun only where a whole one, of 64 MiB, fits


def fill(disk: Path) -> None:
    """Leave no room on a disk, as another program may."""
    with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def check(root: Path, wanted: list[Any], reason: str) -> int:
    """Ask a server everything, and return the number of tokens that it did not compute.

    Half-way another file fills the disk, unless that cannot be written.
    """
    flags = ("--kv_cache_dir", str(root), "--kv_cache_disk_bytes", str(MIN_DISK_BYTES))
    num_cached = 0
    with run_server(*FLAGS, *flags, program=PROGRAM) as server:
        for number, choices in enumerate(wanted):
            if number == len(wanted) // 2:
                fill(root.parent)
            found, count = ask(server.url, KEYS[0], number)
            assert found == choices, (number, found, choices)
            num_cached += count
        assert server.stop() == 0
        said = [line for line in server.ended()[1].splitlines() if "KV pages are not" in line]
    assert len(said) == 1 and reason in said[0], said
    num_bytes = sum(path.stat().st_size for path in root.glob("*/*.kv"))
    print(f"{reason}: {len(wanted)} answers right, {num_cached:,} cached, {num_bytes:,} bytes")
    return num_cached


def run(folder: Path) -> None:
    wanted = answers_without_pages(folder)
    disk = folder / "disk"
    disk.mkdir()
    size = f"size={DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
    try:
        first = check(disk / "kv", wanted, "No space left on device")
        (disk / "other").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert check(disk / "kv", wanted, "Read-only file system") > first
    finally:
        subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        run(Path(place))
