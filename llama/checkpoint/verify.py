"""Is a checkpoint whole? A folder in, a line for each file out, or an error that names the bad one.

It reads every byte of what checklist.chk lists, and of other files no more than names and shapes.
"""

import hashlib
import os
import re
from collections import Counter
from pathlib import Path

from llama.checkpoint.find import find, is_plain
from llama.checkpoint.tensor_files import broken
from llama.checkpoint.weights import Weights


def verify(ckpt_dir: str | os.PathLike[str]) -> list[str]:
    """Check a checkpoint: checksums (checklist.chk, where there is one), names, shapes, shards.

    Returns a line for each file. ValueError or FileNotFoundError names the first bad one.
    """
    found = find(ckpt_dir)
    sums = _read_checklist(found.folder / "checklist.chk")
    matched = {name: _check_sum(found.folder / name, md5) for name, md5 in sums.items()}
    weights = Weights(found)
    counts = Counter(stored.file.name for shard in weights.shards for stored in shard.values())
    lines = [
        f"{file.name}: {counts[file.name]} tensors, {file.stat().st_size:,} bytes, "
        + matched.pop(file.name, "no checksum to compare with")
        for file in found.shards
    ]
    lines += [f"{name}: {line}" for name, line in matched.items()]
    numel = sum(shape.numel() for shape in weights.shapes.values())
    return lines + [
        f"{found.folder}: complete, {numel:,} parameters in {len(found.shards)} file(s)"
    ]


def _read_checklist(path: Path) -> dict[str, str]:
    """Lines "md5  name", as md5sum writes them -> name: md5; empty where there is no such file."""
    sums: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        parts = re.fullmatch(r"([0-9a-fA-F]{32})\s+\*?(.+?)\s*", line)
        if parts and is_plain(parts[2]):
            sums[parts[2]] = parts[1].lower()
        elif line.strip():
            raise ValueError(f"{path}: {line[:80]!r} is no md5 and file name: download it again")
    return sums


def _check_sum(path: Path, md5: str) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which checklist.chk lists: download it")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest != md5:
        raise broken(path, f"has md5 {digest}, where checklist.chk says {md5}")
    return "checksum matches"
