"""The program that tests of the reference run on every rank: it reads jobs, and writes results.

A job is {"folder": ..., "build": {...}, "prompts": [...], "generate": {...}}; its result is what
`generate` of the reference returns, or the text of the error that it raised.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama.reference import Llama


def run(job: dict[str, Any]) -> Any:
    folder = job["folder"]
    try:
        llama = Llama.build(folder, f"{folder}/tokenizer.model", 128, 8, **job.get("build", {}))
        return llama.generate(job["prompts"], **job["generate"])
    except (OSError, ValueError) as e:
        return f"{type(e).__name__}: {e}"


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = [run(job) for job in jobs]
    out = Path(sys.argv[2]) / f"rank{dist.get_rank()}.json"
    out.write_text(json.dumps(results))
