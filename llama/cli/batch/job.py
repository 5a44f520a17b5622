"""A batch job on the engine: a file of requests in, a file of results out, and no result lost.

Under torchrun, replicas take lines from one counter and write to one file. However a job ends, the
file holds what was finished; a resumed job does the rest. files.py knows the bytes of the files,
loop.py the order of the work; a job on a server is in server_job.py.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from llama.cli.batch.files import Line, Results, check_files
from llama.cli.batch.lines import answer_record, read_request
from llama.cli.batch.loop import BatchReport, Loop, Take, own_counters
from llama.generation import Llama
from llama.ranks.collectives import ModelParallel
from llama.requests.request import Request, RequestOutput, derived_seed
from llama.sampling_params import SamplingParams
from llama.server.openai.request import OpenAIRequest


def run_batch(
    llama: Llama,
    in_path: str,
    out_path: str,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_gen_len: int | None = None,
    *,
    resume: bool = False,
    model: str = "llama",
    progress: bool = False,
) -> BatchReport:
    """Answer every line of a file. Another file gets one JSON record per line, in order of finish.
    llama/cli/README.md has the forms of lines and records. temperature, top_p, max_gen_len, model:
    for lines that do not give their own. resume: add the missing records to an output of the same
    input and arguments, or ValueError. Every rank makes the same call, and gets the report.
    ValueError if the input is cut, OSError if another program changes the output."""
    defaults = SamplingParams(max_tokens=max_gen_len, temperature=temperature, top_p=top_p)
    parallel = llama.llm_engine.parallel
    with _open_files(llama, in_path, out_path, resume) as (file, results):
        num_done = results.num_done

        def work() -> BatchReport:
            take, replicas = _counters(parallel), parallel.data_size
            shows = progress and parallel.global_rank == 0
            with closing(EngineAnswers(llama, defaults, model)) as answers:
                loop = Loop(answers, file, results, defaults, llama.seed, take, replicas, shows)
                return loop.run()

        counts = struct.pack("qq", *(llama.lead(work) or (0, 0)))
        report = BatchReport(*struct.unpack("qq", parallel.broadcast_bytes(counts)))
        with parallel.agree("the results", world=True):
            if parallel.global_rank == 0:
                results.check_written(num_done + report.written)
    return report


def _counters(parallel: ModelParallel) -> Take:
    """Those of this job, in the store of all ranks."""
    store = parallel.store
    if store is None:
        return own_counters()
    # All replicas make their n-th job together, so it gets the same number on each.
    job = (store.add("batch", 1) - 1) // parallel.data_size

    def take(name: str, amount: int) -> int:
        return store.add(f"batch-{job}/{name}", amount) - amount

    return take


@contextmanager
def _open_files(
    llama: Llama, in_path: str, out_path: str, resume: bool
) -> Iterator[tuple[BinaryIO, Results]]:
    """The first rank makes or locks the output. Then all ranks read it, before any adds to it."""
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
        pass  # no rank has the output open any more: the next job can lock it


def prepare_line(llama: Llama, line: Line, body: OpenAIRequest) -> Request:
    """What a line asks of the engine. Without a seed it has that of its number, as if all lines
    were one call: neither resuming nor another process changes an answer."""
    name, engine = f"line-{line.number}", llama.llm_engine
    if body.chat:
        prompt = body.chat_ids(llama.tokenizer, llama.tool_format)
        request = engine.prepare(name, prompt, body.chat_params(llama.tool_format))
    else:
        request = engine.prepare(name, body.prompts[0], body.params)
    if request.seed is None:
        request.set_seed(derived_seed(llama.seed, line.number - 1))
    return request


@dataclass
class EngineAnswers:
    """Lines answered by the engine of this process, as many at once as its batch has room for."""

    llama: Llama
    defaults: SamplingParams
    model: str
    running: dict[str, tuple[Line, str, OpenAIRequest, Request]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.llama.engine.stats.generated_tokens

    @property
    def has_room(self) -> bool:
        num_answers = sum(len(request.answers) for *_, request in self.running.values())
        return num_answers < self.llama.model.params.max_batch_size

    @property
    def is_idle(self) -> bool:
        return not self.running

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        body = read_request(fields, self.defaults)
        request = prepare_line(self.llama, line, body)
        self.llama.llm_engine.submit([request])
        self.running[request.request_id] = line, custom_id, body, request

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """One step of the engine. Its records are written before the next one."""
        return [self._record(output) for output in self.llama.llm_engine.step() if output.finished]

    def close(self) -> None:
        """Drop what is not finished."""
        for request_id in self.running:
            self.llama.llm_engine.abort_request(request_id)

    def _record(self, output: RequestOutput) -> tuple[Line, dict[str, Any]]:
        line, custom_id, body, _ = self.running.pop(output.request_id)
        tokenizer = self.llama.tokenizer
        return line, answer_record(custom_id, line.number, body, output, tokenizer, self.model)
