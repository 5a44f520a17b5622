"""A batch file on a Ray cluster: one actor per replica, wherever Ray places it.

    pip install -c constraints.txt -e '.[ray]'    # in the checkout, on each machine
    ray start --head                              # machine 0; on the others: --address HOST:6379
    python scripts/ray_batch.py IN OUT --ckpt_dir DIR --replicas 4 --gpus 1
    python scripts/ray_batch.py IN OUT --ckpt_dir DIR --replicas 4 --gpus 1 --resume

Ray places the actors, starts one again where its process or machine has died, and gives it the
lines that it had. This script alone reads IN and writes OUT, in the form of `llama batch`, whose
--resume goes on with the same file; only the weights must be on every machine. A replica is one
process: a model that needs several GPUs is for torchrun.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama.cli import ranks
from llama.cli.batch.files import Line, Results, check_files, read_lines
from llama.cli.batch.lines import LineFormat, custom_id_of, error_record, parse_line
from llama.cli.batch.loop import salt_of
from llama.cli.batch.work import prepare_line
from llama.cli.flags import BUILD_FLAGS, FLAGS, SAMPLING_FLAGS, Flag
from llama.cli.model import check_sampling, demo_dir, load, sampling_params
from llama.cli.parser import REQUIRED, Command, read
from llama.sampling_params import SamplingParams

CHUNK = 32  # lines of one task: what a killed actor does again at most twice over
_AT_ONCE = 2  # tasks of one actor, which share its engine's steps: no pause between two tasks

COMMAND = Command(
    "Answer each line of a file into another file, on the replicas of a Ray cluster.",
    {
        "in_file": REQUIRED, "out_file": REQUIRED, "resume": False, "replicas": 1, "cpus": 1.0,
        "gpus": 0.0, "address": None, **BUILD_FLAGS, **SAMPLING_FLAGS,
    },
    ["in_file", "out_file"],
    flags=FLAGS | {
        "replicas": Flag(int, "N", "Actors, each with the whole model"),
        "cpus": Flag(float, "N", "Cores that Ray keeps for one actor"),
        "gpus": Flag(float, "N", "GPUs that Ray keeps for one actor: 0 or 1"),
        "address": Flag(str, "HOST:PORT", "Address of the cluster", "the one here, or a new one"),
    },
)  # fmt: skip


class Replica:
    """An actor that turns lines of the input into records; it opens no file but the weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._llama = load(options)
        self._name = Path(options.ckpt_dir or demo_dir()).name
        self._defaults = _defaults(options)

    def answer(
        self, lines: list[Line], line_format: LineFormat
    ) -> list[tuple[Line, dict[str, Any]]]:
        """Yield each line and its record, in order; a bad line's record has its error."""
        records: list[dict[str, Any]] = [{}] * len(lines)
        good = []
        for i, line in enumerate(lines):
            custom_id = f"line-{line.number}"
            try:
                fields = parse_line(line.data, line_format)
                custom_id = custom_id_of(fields, custom_id)
                more = (custom_id, fields, self._defaults, self._name)
                good.append((i, prepare_line(self._llama, line.number, *more)))
            except (TypeError, ValueError) as e:
                records[i] = error_record(custom_id, line.number, "invalid_request", str(e))
        requests = [request for _, work in good for request in work.requests]
        outputs = iter(self._llama.llm_engine.run(requests))
        for i, work in good:
            records[i] = work.record(list(itertools.islice(outputs, len(work.requests))))
        return list(zip(lines, records, strict=True))


def _defaults(options: argparse.Namespace) -> SamplingParams:
    """Return the parameters of lines that do not give their own."""
    return sampling_params(**{name: getattr(options, name) for name in SAMPLING_FLAGS})


def run(options: argparse.Namespace) -> int:
    """Answer a file and return 1 where a line has an error; OUT keeps the finished records."""
    check_sampling(options)
    check_files(options.in_file, options.out_file, resume=options.resume)
    import ray
    from ray.util import ActorPool

    ray.init(address=options.address, log_to_driver=False)
    actor = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus)(Replica)
    # An actor that died is made again, elsewhere if need be, and its tasks run again.
    retries = {"max_restarts": -1, "max_task_retries": -1}
    actor = actor.options(max_concurrency=_AT_ONCE, scheduling_strategy="SPREAD", **retries)
    actors = [actor.remote(options) for _ in range(options.replicas)]
    pool = ActorPool(actors * _AT_ONCE)
    size = os.path.getsize(options.in_file)
    results = Results(options.out_file, max_lines=size)
    failed = written = 0

    def write_next() -> None:
        nonlocal failed, written
        for line, record in pool.get_next_unordered():
            results.append(line, record)
            failed += record["error"] is not None
            written += 1

    try:
        for lines, line_format in _chunks(options, results):
            if not pool.has_free():
                write_next()
            pool.submit(lambda actor, chunk: actor.answer.remote(*chunk), (lines, line_format))
        while pool.has_next():
            write_next()
    finally:
        results.close()
        ray.shutdown()
    failed += results.failed
    ranks.say(f"{options.out_file}: {written} results added, {failed} errors in the file")
    return 0


def _chunks(
    options: argparse.Namespace, results: Results
) -> Iterator[tuple[list[Line], LineFormat]]:
    """Yield the lines without a record, in chunks of CHUNK, with the format of the file."""
    with open(options.in_file, "rb") as file:
        lines = read_lines(file, salt_of(_defaults(options), options.seed))
        first = next(lines, None)
        if first is None:
            return
        line_format = LineFormat.of(options.in_file, first.data)
        requests = lines if line_format.columns else itertools.chain([first], lines)
        missing = (line for line in requests if not results.has(line))
        while chunk := list(itertools.islice(missing, CHUNK)):
            yield chunk, line_format


def main() -> int:
    return ranks.run(lambda: run(read("ray_batch.py", COMMAND, sys.argv[1:])), error_code=2)


if __name__ == "__main__":
    sys.exit(main())
