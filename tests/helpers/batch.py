"""Batch jobs for tests: build the input file from lines, and return the resulting records."""

import json
from pathlib import Path
from typing import Any

from llama import Llama
from llama.cli.batch.job import run_batch
from llama.cli.model import sampling_params


def written(lines: list[Any]) -> bytes:
    """Return the bytes of a file: bytes unchanged, strings as text, all else as JSON lines."""
    parts = [
        x if isinstance(x, bytes) else (x if isinstance(x, str) else json.dumps(x)).encode()
        for x in lines
    ]
    return b"".join(part + b"\n" for part in parts)


def answers(
    llama: Llama, folder: Path, lines: list[Any], *, model: str = "llama", **flags: Any
) -> list[dict[str, Any]]:
    """Return the records for these lines, in the order of the lines.

    `flags` are those of sampling.
    """
    (folder / "in").write_bytes(written(lines))
    (folder / "out").unlink(missing_ok=True)
    paths = str(folder / "in"), str(folder / "out")
    run_batch(llama, *paths, sampling_params(**flags), model=model)
    records = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return sorted(records, key=lambda record: record["id"])
