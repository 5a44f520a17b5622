"""The program that batch/test_job.py runs on every rank: batch jobs, tokens per rank, figures.

Arguments: a folder of weights, the model-parallel size, a folder with `in`, of 90 lines. Replica 0
makes no step before the others have written 80 results.
"""

import json
import sys
import time
from pathlib import Path

import torch

from llama import Llama
from llama.cli.batch.job import run_batch
from llama.cli.model import figures, sampling_params
from llama.ranks.groups import disconnect


def main(weights: str, size: str, folder: str) -> None:
    torch.set_num_threads(1)
    llama = Llama.build(weights, None, 128, 4, int(size), dtype="fp32", device="cpu")
    parallel = llama.model.parallel
    start = llama.engine.runner.start

    def start_late(scheduled):
        while parallel.data_rank == 0 and out.read_bytes().count(b"\n") < 80:
            time.sleep(0.01)
        return start(scheduled)

    llama.engine.runner.start = start_late  # type: ignore[method-assign]
    params = sampling_params(temperature=1.0)
    reports = []
    for name, resume in (("out", False), ("out", True), ("again", False)):
        out = Path(folder, name)
        before = llama.engine.stats.generated_tokens
        report = run_batch(llama, f"{folder}/in", str(out), params, resume=resume)
        tokens = llama.engine.stats.generated_tokens - before
        reports.append([report.written, report.failed, tokens])
    Path(folder, f"rank{parallel.global_rank}.json").write_text(json.dumps(reports))
    Path(folder, f"rank{parallel.global_rank}.figures").write_text(figures(llama))
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
