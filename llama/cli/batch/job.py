"""A batch job on the engine: a file of requests becomes a file of results, and no result is lost.

Under torchrun, replicas take lines from one counter and write to one file. However a job ends, the
file holds all answers that were finished; a resumed job answers the rest. files.py reads and writes
the files, loop.py decides the order of the work, and server_job.py runs a job on a server.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llama.api import Llama, ModelParallel, Parallel, Request, RequestOutput
from llama.cli.batch.files import Line, Results, check_files
from llama.cli.batch.loop import BatchReport, Loop, Take, local_counters
from llama.cli.batch.work import LineWork, prepare_line
from llama.sampling_params import SamplingParams

_REPORT = struct.Struct("qq")  # the counts of a BatchReport


def run_batch(
    llama: Llama,
    in_path: str,
    out_path: str,
    defaults: SamplingParams,
    *,
    images: Path | None = None,
    resume: bool = False,
    model: str = "llama",
    progress: bool = False,
) -> BatchReport:
    """Answer every line of a file; every rank makes the same call and gets the report.

    docs/guides/batch.md has the format of lines and records.

    Args:
        llama: The model.
        in_path: A file with one request per line.
        out_path: A file that gets one JSON record per line, in the order in which answers finish.
        defaults: Parameters of lines that do not give their own.
        images: The folder of the images that lines name.
        resume: Whether to add the missing records to an output of the same input and arguments.
        model: The name of the model in the records.
        progress: Whether rank 0 shows a progress bar.

    Raises:
        ValueError: The input cannot be used, or it does not belong to the output.
        OSError: A file cannot be used, or another program changes the output.
    """
    parallel = llama.llm_engine.parallel
    with _open_files(llama, in_path, out_path, resume) as (file, results):
        num_done = results.num_done

        def work() -> BatchReport:
            with closing(EngineAnswers(llama, defaults, model)) as answers:
                loop = Loop(
                    answers,
                    file,
                    results,
                    defaults,
                    llama.seed,
                    images,
                    take=_counters(parallel),
                    num_replicas=parallel.data_size,
                    shows_progress=progress and parallel.global_rank == 0,
                )
                return loop.run()

        counts = llama.lead(work) or BatchReport(0, 0)
        report = BatchReport(*_REPORT.unpack(parallel.broadcast_bytes(_REPORT.pack(*counts))))
        with parallel.agree("the results", world=True):
            if parallel.global_rank == 0:
                results.check_written(num_done + report.written)
    return report


def _counters(parallel: Parallel) -> Take:
    """Return the counters of this job, which are in the store of all ranks."""
    if not isinstance(parallel, ModelParallel) or parallel.store is None:
        return local_counters()
    store = parallel.store
    # All replicas run their n-th job together, so it gets the same number on each of them.
    job = (store.add("batch", 1) - 1) // parallel.data_size

    def take(name: str, amount: int) -> int:
        total: int = store.add(f"batch-{job}/{name}", amount)
        return total - amount

    return take


@contextmanager
def _open_files(
    llama: Llama, in_path: str, out_path: str, resume: bool
) -> Iterator[tuple[BinaryIO, Results]]:
    """Open both files on every rank.

    The first rank creates or locks the output. Then all ranks read it before any rank adds to it.
    """
    parallel = llama.llm_engine.parallel
    with ExitStack() as stack:
        with parallel.agree("the batch files", world=True) as must_match:
            check_files(in_path, out_path, resume=resume)
            file = stack.enter_context(open(in_path, "rb"))
            size = os.fstat(file.fileno()).st_size
            if parallel.global_rank == 0:
                results = stack.enter_context(closing(Results(out_path, max_lines=size)))
            must_match.append(size)
        with parallel.agree("the results so far", world=True) as must_match:
            if parallel.global_rank:
                others = Results(out_path, first=False, max_lines=size)
                results = stack.enter_context(closing(others))
            must_match.append(zlib.crc32(results.done))
        yield file, results
    with parallel.agree("the end", world=True):
        pass  # No rank has the output open any more, so that the next job can lock it.


class _Running(NamedTuple):
    """A line that the engine is answering.

    Attributes:
        line: The line.
        work: What it asks of the engine.
        outputs: The last outputs of its requests, as they come.
    """

    line: Line
    work: LineWork
    outputs: list[RequestOutput]


@dataclass
class EngineAnswers:
    """Answers from the engine of this process, as many at once as its batch can hold.

    Attributes:
        llama: The model.
        defaults: Parameters of lines that do not give their own.
        model: The name of the model in the records.
        running: The unfinished requests by their ids, each with its line.
    """

    llama: Llama
    defaults: SamplingParams
    model: str
    running: dict[str, tuple[Request, _Running]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the engine has generated."""
        return self.llama.engine.stats.generated_tokens

    @property
    def has_capacity(self) -> bool:
        """Whether another line fits into the batch."""
        num_answers = sum(len(request.answers) for request, _ in self.running.values())
        return num_answers < self.llama.model.params.max_batch_size

    @property
    def is_idle(self) -> bool:
        """Whether no line is being answered."""
        return not self.running

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        """Begin to answer a line; see `Answers.start`."""
        work = prepare_line(self.llama, line.number, custom_id, fields, self.defaults, self.model)
        self.llama.llm_engine.submit(work.requests)
        entry = _Running(line, work, [])
        self.running |= {request.request_id: (request, entry) for request in work.requests}

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Run one step of the engine and return the records that it completed.

        The loop writes them before the next step.
        """
        records = []
        for output in self.llama.llm_engine.step():
            if not output.finished:
                continue
            _, entry = self.running.pop(output.request_id)
            entry.outputs.append(output)
            if len(entry.outputs) == len(entry.work.requests):
                records.append((entry.line, entry.work.record(entry.outputs)))
        return records

    def close(self) -> None:
        """Abort the requests that are not finished."""
        for request_id in self.running:
            self.llama.llm_engine.abort_request(request_id)
