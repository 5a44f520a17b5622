"""Whether a checkpoint is complete and undamaged.

In: what `find` understands. Out: a line for each file, or an error that names the first bad one;
or a check of the tensors that a rank is about to load. Names and shapes are compared with
params.json. Bytes are compared with the MD5 in checklist.chk, which Meta's downloads have, else
with the SHA-256 by which Hugging Face's cache names a file, else with the CRC-32 of each tensor in
a .pth. A .safetensors has no checksum: its header must describe
the file exactly, without gaps or overlaps.
"""

import bisect
import contextlib
import os
import re
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from llama.checkpoint import packed
from llama.checkpoint.files import MappedTensor, first_line
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import whole_shapes
from llama.checkpoint.weight_files import is_plain
from llama.common.checks import brief, torchrun_number
from llama.model.transformer import Transformer
from llama.storage.downloads import (
    Digest,
    broken,
    cached_digest,
    check_digest,
    check_download,
    read_small,
)
from llama.vision.parts import with_image_parts

_CHECKLIST = "checklist.chk"  # Meta's list of MD5 sums
_BLOCK_BYTES = 4 << 20  # bytes that a thread reads at a time
_MAX_THREADS = 8
# Reads a part of a file and yields the size of each block; raises ValueError where it is damaged.
Check = Iterator[int]


class _FileChecks(NamedTuple):
    """The checks of one file.

    Attributes:
        result: What is reported of the file if no check fails.
        checks: The checks, which may run in any order.
    """

    result: str
    checks: list[Check]


def verify(ckpt_dir: str | os.PathLike[str], *, progress: bool = False) -> list[str]:
    """Check a checkpoint: names, shapes, that no shard is missing, and every byte's checksum.

    Each file is read once, by several threads.

    Args:
        ckpt_dir: The checkpoint.
        progress: Whether a bar is drawn on stderr.

    Returns:
        A line for each file and one for all.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: A file is bad; the first one is named.
    """
    checkpoint = find(ckpt_dir).with_images()
    if checkpoint.packed is None:
        reader = CheckpointReader(checkpoint, compares=False)
        shards = reader.shards
    else:
        model = with_image_parts(Transformer(checkpoint.params, device="meta"))
        shards = [packed.attach(checkpoint, model)]
    listed = (checkpoint.folder / _CHECKLIST).exists()
    files = _file_checks(checkpoint)
    total = sum(path.stat().st_size for path, file in files.items() if file.checks)
    _run([check for file in files.values() for check in file.checks], total, progress)
    if checkpoint.packed is None:
        reader.check_alike()
    counts = Counter(tensor.file for shard in shards for tensor in shard.values())
    lines = []
    for path, file in files.items():
        size = ""
        if counts[path]:
            size = f"{counts[path]} tensors, {path.stat().st_size:,} bytes, "
        lines.append(f"{path.name}: {size}{file.result}")
    num_params = sum(shape.numel() for shape in whole_shapes(checkpoint.params).values())
    count = len(checkpoint.shards)
    unknown = ""
    if checkpoint.layout == "meta" and count > 1 and not listed:
        unknown = f"; without {_CHECKLIST} nothing tells whether two of them changed places"
    whole = f"{num_params:,} parameters in {count} file(s){unknown}"
    lines.append(f"{checkpoint.weights_path}: complete, {whole}")
    if checkpoint.choice:
        lines.append(checkpoint.choice)
    if checkpoint.vision is not None:
        lines.append(f"{checkpoint.weights_path}: this is {checkpoint.vision.describe()}")
    return lines


class LoadCheck:
    """Compares what a rank loads with the checksums, before it is copied.

    A .pth has the CRC-32 of each tensor, which is compared just before the tensor is copied; the
    ranks of a machine divide the tensors among them. Other files are checked as a whole when this
    is created, by the first rank of each machine.
    """

    def __init__(self, checkpoint: Checkpoint, *, warns: bool, divides: bool = True) -> None:
        """Check the files that have no checksum for each tensor.

        Args:
            checkpoint: The checkpoint that is loaded.
            warns: Whether a warning names files without checksums.
            divides: Whether all ranks of this machine load parts of the same tensors, and divide
                their checks. The stages of a pipeline load different ones.
        """
        local_rank = torchrun_number("LOCAL_RANK")
        self._rank = local_rank if divides else 0
        self._num_ranks = torchrun_number("LOCAL_WORLD_SIZE") if divides else 1
        self._archives = {
            path: zipfile.ZipFile(path)
            for path in checkpoint.shards
            if path.suffix in (".pth", ".bin")
        }
        self._records = {path: _summed(archive) for path, archive in self._archives.items()}
        self._checked: set[tuple[Path, int]] = set()
        whole_files = {
            path: file.checks
            for path, file in _file_checks(checkpoint).items()
            if not self._records.get(path)
        }
        if local_rank == 0:
            checks = [check for checks in whole_files.values() for check in checks]
            _run(checks, 0, progress=False)
        unverified = [path.name for path in checkpoint.shards if whole_files.get(path) == []]
        if unverified and warns:
            more = f" and {len(unverified) - 1} more" if unverified[1:] else ""
            warnings.warn(
                f"{checkpoint.folder}: {unverified[0]}{more} cannot be verified: no "
                "checksum is stored with it",
                stacklevel=2,
            )

    def check(self, tensors: Iterable[MappedTensor]) -> None:
        """Check the bytes of tensors, those that were not checked before.

        Every rank must be given the same tensors, because each checks a part of them.

        Raises:
            ValueError: The bytes are not those that were written; the file is named.
        """
        records = {(tensor.file, i) for tensor in tensors for i in self._record_indices(tensor)}
        unchecked = sorted(records - self._checked)
        self._checked |= records
        checks = [
            _check_crc32(path, self._archives[path], self._records[path][i])
            for path, i in unchecked
            if i % self._num_ranks == self._rank
        ]
        _run(checks, 0, progress=False)

    def _record_indices(self, tensor: MappedTensor) -> range:
        """Return the index of the record that holds a tensor; of all, where it is not known."""
        records = self._records.get(tensor.file, [])
        if tensor.offset is None:
            return range(len(records))
        end = bisect.bisect_right(records, tensor.offset, key=lambda x: x.header_offset)
        return range(max(end - 1, 0), end)


def _file_checks(checkpoint: Checkpoint) -> dict[Path, _FileChecks]:
    """Return the checks of each shard, of each file in the checklist, and of a cached tokenizer."""
    listed = _read_checklist(checkpoint.folder / _CHECKLIST)
    scales = sorted(checkpoint.folder.glob("fp8_scales_*.pt"))
    paths = [*checkpoint.shards, *scales]
    paths += [checkpoint.folder / name for name in listed]
    with contextlib.suppress(FileNotFoundError):  # a checkpoint may have no tokenizer
        tokenizer = checkpoint.tokenizer_path()
        if cached_digest(tokenizer) is not None:
            paths.append(tokenizer)
    checks = {}
    for path in paths:
        if path not in checks:
            checks[path] = _checks_of(path, listed.get(path.name))
    return checks


def _checks_of(path: Path, md5: str | None) -> _FileChecks:
    """Return the checks of a file, by its MD5 if that is known, else by its own checksums."""
    if md5 is not None:
        check_download(path)
        digest = Digest("md5", md5, _CHECKLIST)
        return _FileChecks("checksum matches", [check_digest(path, digest)])
    cached = cached_digest(path)
    if cached is not None:
        return _FileChecks("SHA-256 matches", [check_digest(path, cached)])
    if path.suffix in (".pth", ".pt", ".bin"):
        archive = zipfile.ZipFile(path)
        records = _summed(archive)
        if records:
            checks = [_check_crc32(path, archive, record) for record in records]
            return _FileChecks(f"CRC-32 of its {len(records)} records matches", checks)
    return _FileChecks("no checksum to compare with", [])


def _run(checks: Iterable[Check], total: int, progress: bool) -> None:
    """Run checks in threads, and raise the error of the first that fails, in their order.

    Args:
        checks: The checks.
        total: The bytes that they read, for the bar.
        progress: Whether a bar is drawn on stderr.
    """
    lock = threading.Lock()
    bar = tqdm(
        total=total,
        desc="Verifying",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )

    def run(check: Check) -> None:
        for count in check:
            with lock:
                bar.update(count)

    num_threads = min(torch.get_num_threads(), _MAX_THREADS)
    with bar, ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(run, checks):
            pass  # an error is raised here, and cancels the checks that have not begun


def _read_checklist(path: Path) -> dict[str, str]:
    """Read lines "md5  name", as md5sum writes them: the MD5 by file name, empty without a file."""
    if not path.exists():
        return {}
    sums: dict[str, str] = {}
    for line in read_small(path).decode(errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{32})\s+\*?(.+?)\s*", line)
        if match and is_plain(match[2]):
            sums[match[2]] = match[1].lower()
        elif line.strip():
            raise ValueError(
                f"{path}: {brief(line)} is not an MD5 and a file name: correct the line"
            )
    return sums


def _summed(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the records of a .pth that have a CRC-32, in their order in the file.

    There is one for each tensor. torch.save writes a CRC-32 unless `set_crc32_options(False)` was
    called. Several threads may read the records at once.
    """
    records = [record for record in archive.infolist() if record.CRC]
    return sorted(records, key=lambda record: record.header_offset)


def _check_crc32(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Check:
    try:
        # The archive compares the CRC-32 when its end is reached.
        with archive.open(record) as content:
            while block := content.read(_BLOCK_BYTES):
                yield len(block)
    except (zipfile.BadZipFile, EOFError) as e:
        raise broken(path, f"is damaged ({first_line(e)})") from e
