"""A batch job: a file of requests in, a file of results out, and no result lost.

Lines are read when the engine has room for them, so a job of any length starts at once, and its
memory does not grow. Under torchrun, replicas take lines from one counter and write to one file.
However a job ends, the file holds what was finished; a resumed job does the rest. This file knows
neither the bytes of the files nor what a line asks for: that is in files.py and lines.py.
"""

import math
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from tqdm import tqdm

from llama.batch.files import Line, Results, check_files, read_lines
from llama.batch.lines import answer_record, custom_id_of, error_record, parse_line, read_request
from llama.generation import Llama
from llama.parallel import ModelParallel, SharedCounter, stop_requested
from llama.requests.request import Request, RequestOutput, derived_seed
from llama.sampling_params import SamplingParams
from llama.serving.openai.chat_prompt import chat_params, chat_prompt
from llama.serving.openai.requests import OpenAIRequest
from llama.serving.tools import tool_format_of

_TICKS_PER_POST = 16  # engine steps or bad lines between two exchanges with the other replicas
_TIMEOUT_S = 3600.0  # for replicas that make no progress: one step can be slow, but not so slow


@dataclass(frozen=True)
class BatchReport:
    """written: records that this job added, on all replicas. failed: records with an error in the
    whole output, those of earlier jobs included."""

    written: int
    failed: int


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

    A file whose first line begins with { is JSONL: OpenAI batch requests, or objects with a prompt
    or messages, and sampling fields. Any other file is text with one prompt per line. Blank lines
    are skipped.

    temperature, top_p, max_gen_len: for lines that do not give their own.
    resume: add the missing records to an output of the same input and arguments. ValueError if the
        output is that of another input.
    model: the label in the record of a line that names no model.
    progress: show a progress bar on stderr.

    A line that cannot be answered gets a record with an error, and counts as done. Every rank makes
    the same call, and gets the report at the end. ValueError if the input is cut while it is read;
    OSError if another program changes the output.
    """
    defaults = SamplingParams(max_tokens=max_gen_len, temperature=temperature, top_p=top_p)
    parallel = llama.llm_engine.parallel
    shows = progress and parallel.global_rank == 0
    with _open_files(llama, in_path, out_path, resume) as (file, results):
        num_done = results.num_done

        def work() -> tuple[int, int]:
            with closing(_Job(llama, file, results, defaults, model, shows)) as job:
                job.run()
            return job.tally.sums["written"], job.tally.sums["failed"]

        counts = struct.pack("qq", *(llama.lead(work) or (0, 0)))
        written, failed = struct.unpack("qq", parallel.broadcast_bytes(counts))
        with parallel.agree("the results", world=True):
            if parallel.global_rank == 0:
                results.check_written(num_done + written)
    return BatchReport(written, failed + results.failed)


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


class _Tally:
    """Counters over all replicas. Each adds its own every 16 ticks, and reads the sums then."""

    NAMES = ("ticks", "written", "failed", "tokens", "finished")

    def __init__(self, parallel: ModelParallel, job: int) -> None:
        self._shared = {name: SharedCounter(parallel, f"batch-{job}/{name}") for name in self.NAMES}
        self._own = Counter[str]()  # not yet added to the shared ones
        self.sums = dict.fromkeys(self.NAMES, 0)

    def add(self, **counts: int) -> None:
        self._own.update(counts)

    def post(self) -> None:
        for name, shared in self._shared.items():
            own = self._own[name]
            self.sums[name] = shared.take(own) + own
        self._own.clear()


@dataclass(frozen=True)
class _Running:
    line: Line
    custom_id: str
    body: OpenAIRequest
    request: Request


class _Job:
    """The part of one replica: the first rank of its group reads, leads and writes."""

    def __init__(
        self,
        llama: Llama,
        file: BinaryIO,
        results: Results,
        defaults: SamplingParams,
        model: str,
        shows: bool,
    ) -> None:
        self.llama = llama
        self.engine = llama.llm_engine
        self.tool_format = tool_format_of(llama)
        self.parallel = llama.llm_engine.parallel
        self.file = file
        self.results = results
        self.defaults = defaults
        self.model = model
        # All replicas make their n-th job together, so it gets the same number on each.
        job = SharedCounter(self.parallel, "batch").take(1) // self.parallel.data_size
        self.queue = SharedCounter(self.parallel, f"batch-{job}/line")
        self.tally = _Tally(self.parallel, job)
        self.missing = enumerate(self._missing())
        self.jsonl = False  # known once the first line is read
        self.running: dict[str, _Running] = {}
        self.num_read = 0
        self.tokens_before = llama.engine.stats.generated_tokens
        self.ticks = 0
        self.bar = _Bar(file, results.num_done) if shows else None

    def run(self) -> None:
        room = self.llama.model.params.max_batch_size
        reading = True
        while True:
            while reading and sum(len(r.request.answers) for r in self.running.values()) < room:
                line = self._next_line()
                reading = line is not None
                if line is not None:
                    self._start(line)
            if not self.running:
                break
            for output in self.engine.step():
                if output.finished:
                    self._write_answer(output)
            self._tick()
        self._post(finished=1)
        self._wait_for_replicas()

    def close(self) -> None:
        for request_id in self.running:
            self.engine.abort_request(request_id)
        if self.bar is not None:
            self.bar.close()

    def _missing(self) -> Iterator[Line]:
        """The lines without a record, in order: the same on every replica."""
        number = 0
        flags = self.defaults
        salt = repr((flags.temperature, flags.top_p, flags.max_tokens, self.llama.seed))
        for line in read_lines(self.file, salt):
            if not self.num_read:
                self.jsonl = line.data.lstrip().startswith(b"{")
            number = line.number
            self.num_read += 1
            if not self.results.has(line):
                yield line
        if number < len(self.results.done) - 1:
            raise ValueError(
                f"{self.results.path} has a result of line {len(self.results.done) - 1}, but the "
                f"input ends at line {number}: resume with the same input"
            )

    def _next_line(self) -> Line | None:
        """The next line that no replica has taken; none, once a signal asked to stop."""
        if stop_requested():
            return None
        ours = self.queue.take(1)
        return next((line for index, line in self.missing if index == ours), None)

    def _start(self, line: Line) -> None:
        name = custom_id = f"line-{line.number}"
        try:
            fields = parse_line(line.data, jsonl=self.jsonl)
            custom_id = custom_id_of(fields, name)
            body = read_request(fields, self.defaults)
            prompt: str | list[int]
            if body.chat:
                prompt = chat_prompt(body, self.llama.tokenizer, self.tool_format)
                params = chat_params(body, self.tool_format)
            else:
                prompt, params = body.prompts[0], body.params
            request = self.engine.prepare(name, prompt, params)
        except (TypeError, ValueError) as e:
            self._write(line, error_record(custom_id, line.number, "invalid_request", str(e)))
            self._tick()
            return
        if request.seed is None:  # as if all lines were one call: resuming changes no answer
            request.set_seed(derived_seed(self.llama.seed, line.number - 1))
        self.engine.submit([request])
        self.running[name] = _Running(line, custom_id, body, request)

    def _write_answer(self, output: RequestOutput) -> None:
        running = self.running[output.request_id]
        line, tokenizer = running.line, self.llama.tokenizer
        record = answer_record(
            running.custom_id, line.number, running.body, output, tokenizer, self.model
        )
        self._write(line, record)
        del self.running[output.request_id]

    def _write(self, line: Line, record: dict[str, object]) -> None:
        self.results.append(line, record)
        self.tally.add(written=1, failed=record["error"] is not None)

    def _tick(self) -> None:
        self.ticks += 1
        if self.ticks % _TICKS_PER_POST == 0:
            self._post(ticks=_TICKS_PER_POST)

    def _post(self, **counts: int) -> None:
        """Exchange the counts with the other replicas, and show the sums."""
        tokens = self.llama.engine.stats.generated_tokens
        self.tally.add(tokens=tokens - self.tokens_before, **counts)
        self.tokens_before = tokens
        self.tally.post()
        if self.bar is not None:
            self.bar.show(self.tally.sums, self.num_read)

    def _wait_for_replicas(self) -> None:
        """Return when all replicas have finished: torchrun ends all ranks when one exits with an
        error code, which failed lines cause.

        This polls, because a collective has a timeout of minutes, and a long answer takes longer.
        """
        before, since = dict(self.tally.sums), time.monotonic()
        while self.tally.sums["finished"] < self.parallel.data_size:
            time.sleep(0.1)
            self._post()
            if self.tally.sums != before:
                before, since = dict(self.tally.sums), time.monotonic()
            elif time.monotonic() - since > _TIMEOUT_S:
                raise TimeoutError(f"the other replicas made no progress for {_TIMEOUT_S:.0f} s")
        self._post()  # sums are read one by one: a replica may have added to one already read


class _Bar:
    """Requests done, tokens per second, and time left, by an estimate of the lines to come."""

    def __init__(self, file: BinaryIO, num_done: int) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._num_done = num_done
        self._began = time.monotonic()
        self._bar = tqdm(initial=num_done, unit=" requests", dynamic_ncols=True)

    def show(self, sums: dict[str, int], num_read: int) -> None:
        if self._size and num_read:
            lines = num_read * self._size / self._file.tell()  # exact at the end of the file
            self._bar.total = math.ceil(lines)
        rate = sums["tokens"] / (time.monotonic() - self._began)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update(self._num_done + sums["written"] - self._bar.n)

    def close(self) -> None:
        self._bar.close()
