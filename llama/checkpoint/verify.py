"""Is a checkpoint whole? A folder in, a line for each file out, or an error that names the bad one.

Names and shapes are compared with params.json. The bytes are compared with the MD5 in checklist.chk
(Meta's downloads have one), else with the CRC-32 that a .pth carries per tensor. A .safetensors
carries no checksum: there the header must describe the file exactly, without gaps or overlaps.
"""

import functools
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from llama.checkpoint.downloads import broken, check_download
from llama.checkpoint.files import Report, checksum_jobs
from llama.checkpoint.find import Checkpoint, find, is_plain
from llama.checkpoint.reader import CheckpointReader
from llama.checks import brief

_BLOCK_BYTES = 4 << 20  # read at a time by one thread


def verify(ckpt_dir: str | os.PathLike[str], *, progress: bool = False) -> list[str]:
    """Check a checkpoint: names, shapes, that no shard is missing, and every byte's checksum.

    Returns a line for each file and one for all. ValueError or OSError names the first bad file.
    `progress` draws a bar on stderr. Each file is read once, by as many threads as torch uses.
    """
    checkpoint = find(ckpt_dir)
    weights = CheckpointReader(checkpoint)
    results = _compare_checksums(checkpoint, progress)
    counts = Counter(tensor.file.name for shard in weights.shards for tensor in shard.values())
    lines = [
        f"{file.name}: {counts[file.name]} tensors, {file.stat().st_size:,} bytes, "
        + results.pop(file.name)
        for file in checkpoint.shards
    ]
    lines += [f"{name}: {result}" for name, result in results.items()]
    numel = sum(shape.numel() for shape in weights.shapes.values())
    count = len(checkpoint.shards)
    return [*lines, f"{checkpoint.folder}: complete, {numel:,} parameters in {count} file(s)"]


def _compare_checksums(checkpoint: Checkpoint, progress: bool) -> dict[str, str]:
    """Names of listed files and shards -> what was compared; ValueError for the first bad one."""
    listed = _read_checklist(checkpoint.folder / "checklist.chk")
    jobs: list[Callable[[Report], None]] = []
    results, total = {}, 0
    for name, md5 in listed.items():
        path = checkpoint.folder / name
        check_download(path)
        jobs.append(functools.partial(_check_md5, path, md5))
        results[name] = "checksum matches"
        total += path.stat().st_size
    for path in checkpoint.shards:
        if path.name in listed:
            continue
        records = checksum_jobs(path) if path.suffix == ".pth" else []
        jobs += records
        results[path.name] = (
            f"CRC-32 of its {len(records)} records matches"
            if records
            else "no checksum to compare with"
        )
        total += path.stat().st_size if records else 0
    _run(jobs, total, progress)
    return results


def _run(jobs: list[Callable[[Report], None]], total: int, progress: bool) -> None:
    """Run the jobs in threads; the error of the first that fails, in their order, is raised."""
    lock = threading.Lock()
    bar = tqdm(total=total, desc="Verifying", unit="B", unit_scale=True, disable=not progress)

    def report(count: int) -> None:
        with lock:
            bar.update(count)

    with bar, ThreadPoolExecutor(min(torch.get_num_threads(), 8)) as pool:
        futures = [pool.submit(job, report) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read_checklist(path: Path) -> dict[str, str]:
    """Lines "md5  name", as md5sum writes them -> name: md5; empty where there is no such file."""
    if not path.exists():
        return {}
    check_download(path)
    sums: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        parts = re.fullmatch(r"([0-9a-fA-F]{32})\s+\*?(.+?)\s*", line)
        if parts and is_plain(parts[2]):
            sums[parts[2]] = parts[1].lower()
        elif line.strip():
            raise ValueError(
                f"{path}: {brief(line)} is not an MD5 and a file name: download it again"
            )
    return sums


def _check_md5(path: Path, md5: str, report: Report) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            report(len(block))
    if digest.hexdigest() != md5:
        raise broken(path, f"has MD5 {digest.hexdigest()}, but checklist.chk says {md5}")
