"""Is a checkpoint whole? A folder in, a line for each file out, or an error that names the bad one.

Names and shapes are compared with params.json. The bytes are compared with the MD5 in checklist.chk
(Meta's downloads have one), else with the CRC-32 that a .pth carries per tensor. A .safetensors
carries no checksum: there the header must describe the file exactly, without gaps or overlaps.
"""

import bisect
import hashlib
import os
import re
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from llama.checkpoint import packed
from llama.checkpoint.downloads import broken, check_download, read_small
from llama.checkpoint.files import MappedTensor, first_line
from llama.checkpoint.find import Checkpoint, find, is_plain
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import whole_shapes
from llama.checks import brief, torchrun_number
from llama.model.transformer import Transformer

_BLOCK_BYTES = 4 << 20  # read at a time by one thread
# A part of a file is read; each block's size is told, and at the end ValueError where it is bad.
Check = Iterator[int]


def verify(ckpt_dir: str | os.PathLike[str], *, progress: bool = False) -> list[str]:
    """Check a checkpoint: names, shapes, that no shard is missing, and every byte's checksum.

    Returns a line for each file and one for all. ValueError or OSError names the first bad file.
    `progress` draws a bar on stderr. Each file is read once, by as many threads as torch uses.
    """
    checkpoint = find(ckpt_dir)
    if checkpoint.packed is None:
        shards = CheckpointReader(checkpoint).shards
    else:
        shards = [packed.attach(checkpoint, Transformer(checkpoint.params, device="meta"))]
    checks = _checks(checkpoint)
    total = sum(path.stat().st_size for path, (_, parts) in checks.items() if parts)
    _run([part for _, parts in checks.values() for part in parts], total, progress)
    counts = Counter(tensor.file for shard in shards for tensor in shard.values())
    lines = []
    for path, (result, _) in checks.items():
        size = f"{counts[path]} tensors, {path.stat().st_size:,} bytes, " if counts[path] else ""
        lines.append(f"{path.name}: {size}{result}")
    numel = sum(shape.numel() for shape in whole_shapes(checkpoint.params).values())
    count = len(checkpoint.shards)
    return [*lines, f"{checkpoint.weights_path}: complete, {numel:,} parameters in {count} file(s)"]


class LoadCheck:
    """Compares each tensor's bytes in a .pth with their CRC-32 just before they are copied, and
    other files as a whole at first. The ranks of a machine share the records. One that `tells`
    warns of files without checksums."""

    def __init__(self, checkpoint: Checkpoint, *, tells: bool) -> None:
        self._share = torchrun_number("LOCAL_RANK")
        self._num_shares = torchrun_number("LOCAL_WORLD_SIZE")
        self._archives = {p: zipfile.ZipFile(p) for p in checkpoint.shards if p.suffix == ".pth"}
        self._records = {path: _summed(archive) for path, archive in self._archives.items()}
        self._checked: set[tuple[Path, int]] = set()
        others = {x: y for x, (_, y) in _checks(checkpoint).items() if not self._records.get(x)}
        if self._share == 0:
            _run([part for parts in others.values() for part in parts], 0, progress=False)
        bare = [path.name for path in checkpoint.shards if others.get(path) == []]
        if bare and tells:
            more = f" and {len(bare) - 1} more" if bare[1:] else ""
            warnings.warn(
                f"{checkpoint.folder}: {bare[0]}{more} cannot be verified: no checksum is in it",
                stacklevel=2,
            )

    def check(self, tensors: Iterable[MappedTensor]) -> None:
        """ValueError that names the file whose bytes are not those that were written."""
        found = {(tensor.file, i) for tensor in tensors for i in self._places(tensor)}
        wanted = sorted(found - self._checked)
        self._checked |= found
        checks = [
            _check_crc32(path, self._archives[path], self._records[path][i])
            for path, i in wanted
            if i % self._num_shares == self._share
        ]
        _run(checks, 0, progress=False)

    def _places(self, tensor: MappedTensor) -> range:
        """Of the record that holds a tensor, in its file's list; of all, where nothing tells it."""
        records = self._records.get(tensor.file, [])
        if tensor.offset is None:
            return range(len(records))
        end = bisect.bisect_right(records, tensor.offset, key=lambda x: x.header_offset)
        return range(max(end - 1, 0), end)


def _checks(checkpoint: Checkpoint) -> dict[Path, tuple[str, list[Check]]]:
    """The shards and the files that are listed -> what is said of a good one, and its checks."""
    listed = _read_checklist(checkpoint.folder / "checklist.chk")
    checks: dict[Path, tuple[str, list[Check]]] = {}
    scales = sorted(checkpoint.folder.glob("fp8_scales_*.pt"))
    for path in [*checkpoint.shards, *scales, *(checkpoint.folder / name for name in listed)]:
        if path.name in listed:
            check_download(path)
            checks[path] = "checksum matches", [_check_md5(path, listed[path.name])]
        elif path.suffix in (".pth", ".pt") and (records := _summed(file := zipfile.ZipFile(path))):
            parts = [_check_crc32(path, file, record) for record in records]
            checks[path] = f"CRC-32 of its {len(parts)} records matches", parts
        else:
            checks[path] = "no checksum to compare with", []
    return checks


def _run(checks: Iterable[Check], total: int, progress: bool) -> None:
    """Run the checks in threads; the error of the first that fails, in their order, is raised."""
    lock = threading.Lock()
    bar = tqdm(total=total, desc="Verifying", unit="B", unit_scale=True, disable=not progress)

    def run(check: Check) -> None:
        for count in check:
            with lock:
                bar.update(count)

    with bar, ThreadPoolExecutor(min(torch.get_num_threads(), 8)) as pool:
        for _ in pool.map(run, checks):  # after an error, what has not begun is cancelled
            pass


def _read_checklist(path: Path) -> dict[str, str]:
    """Lines "md5  name", as md5sum writes them -> name: md5; empty where there is no such file."""
    if not path.exists():
        return {}
    sums: dict[str, str] = {}
    for line in read_small(path).decode(errors="replace").splitlines():
        parts = re.fullmatch(r"([0-9a-fA-F]{32})\s+\*?(.+?)\s*", line)
        if parts and is_plain(parts[2]):
            sums[parts[2]] = parts[1].lower()
        elif line.strip():
            raise ValueError(
                f"{path}: {brief(line)} is not an MD5 and a file name: download it again"
            )
    return sums


def _check_md5(path: Path, md5: str) -> Check:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            yield len(block)
    if digest.hexdigest() != md5:
        raise broken(path, f"has MD5 {digest.hexdigest()}, but checklist.chk says {md5}")


def _summed(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The records with a CRC-32, in their order in the file: one a tensor, of which torch.save
    writes it unless `set_crc32_options(False)` was called. Threads may read them at once."""
    return sorted((x for x in archive.infolist() if x.CRC), key=lambda x: x.header_offset)


def _check_crc32(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Check:
    try:
        with archive.open(record) as content:  # it compares the CRC-32 when it reaches the end
            while block := content.read(_BLOCK_BYTES):
                yield len(block)
    except (zipfile.BadZipFile, EOFError) as e:
        raise broken(path, f"is damaged ({first_line(e)})") from e
