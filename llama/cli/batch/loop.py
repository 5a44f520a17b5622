"""The work of one replica in a batch job: take lines, have them answered, write their records.

The engine of this process answers the lines, or a server does. A line is read only when it can be
started, so a job of any length starts at once and its memory does not grow.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from tqdm import tqdm

from llama.api import stop_requested
from llama.cli.batch.files import Line, Results, read_lines
from llama.cli.batch.lines import LineFormat, custom_id_of, error_record, parse_line
from llama.cli.image_files import with_files
from llama.sampling_params import SamplingParams

_COUNTS = ("written", "failed", "tokens", "finished")
_POST_S = 0.5  # interval at which replicas exchange their counts
_TIMEOUT_S = 3600.0  # limit of the wait for replicas without progress; one step can be slow

# Adds to the counter of a name, which all replicas share, and returns its previous value.
Take = Callable[[str, int], int]


class BatchReport(NamedTuple):
    """The numbers of records that a job has written."""

    written: int  # records that this job added, on all replicas
    failed: int  # records with an error in the whole output, including those of earlier jobs


class Answers(Protocol):
    """A source of answers to lines: the engine or a server."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""

    @property
    def has_capacity(self) -> bool:
        """Whether another line may be started."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was started is going to finish any more."""

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        """Begin to answer a line.

        Raises:
            TypeError, ValueError: The line asks for something that cannot be done.
        """

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Continue for a while, and return the records of the lines that are answered by now."""


def local_counters() -> Take:
    """Return the counters of a job that has one replica."""
    values = Counter[str]()

    def take(name: str, amount: int) -> int:
        values[name] += amount
        return values[name] - amount

    return take


def salt_of(defaults: SamplingParams, seed: int) -> str:
    """Return the salt of `read_lines`: it identifies what answers depend on besides their lines.

    It is the same as in earlier versions for what these had, so that their jobs can be resumed:
    further parameters are a part of it only where they are not at their defaults.
    """
    parts: list[Any] = [defaults.temperature, defaults.top_p, defaults.max_tokens, seed]
    further = replace(defaults, temperature=1.0, top_p=1.0, max_tokens=None)
    if further != SamplingParams(max_tokens=None):
        parts.append(further)
    return repr(tuple(parts))


@dataclass
class Loop:
    """The loop of one replica. The first rank of the replica's group reads, leads and writes.

    Attributes:
        answers: Answers the lines.
        file: The input, at its start.
        results: The output.
        defaults: Parameters of lines that do not give their own.
        seed: The seed of the job. A resumed job must have the same seed and the same defaults.
        images: The folder of the images that lines name; None if they name none.
        take: The counters of all replicas.
        num_replicas: Number of replicas of the job.
        shows_progress: Whether to show a progress bar.
        unposted: Counts since the last exchange with the other replicas.
        sums: Counts of all replicas at the last exchange.
        line_format: The format of the lines, which the first one shows.
        num_read: Number of lines read.
        bar: The progress bar. Only a bar that is shown is made, because tqdm's lock survives a
            fork.
    """

    answers: Answers
    file: BinaryIO
    results: Results
    defaults: SamplingParams
    seed: int
    images: Path | None = None
    take: Take = field(default_factory=local_counters)
    num_replicas: int = 1
    shows_progress: bool = False
    unposted: Counter[str] = field(init=False, default_factory=Counter)
    sums: Counter[str] = field(init=False, default_factory=Counter)
    line_format: LineFormat = field(init=False, default_factory=LineFormat)
    num_read: int = field(init=False, default=0)
    bar: tqdm | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.missing = enumerate(self._missing())
        self.num_done = self.results.num_done
        self.tokens_before = self.answers.num_tokens
        self.began = time.monotonic()
        self.posted = self.began
        if self.shows_progress:
            self.bar = tqdm(initial=self.num_done, unit=" requests", dynamic_ncols=True)

    def run(self) -> BatchReport:
        """Answer lines until none is left, or until a signal asks to stop.

        Lines that have been started are finished in either case.
        """
        with contextlib.nullcontext() if self.bar is None else self.bar:
            self._answer_lines()
            self._post(finished=1)
            self._wait_for_replicas()
        return BatchReport(self.sums["written"], self.sums["failed"] + self.results.failed)

    def _answer_lines(self) -> None:
        is_reading = True
        while True:
            while is_reading and self.answers.has_capacity:
                is_reading = self._start_next()
            if self.answers.is_idle:
                return
            for line, record in self.answers.finished():
                self._write(line, record)
            self._post_in_time()

    def _start_next(self) -> bool:
        """Start the next line that no replica has taken.

        Returns:
            False if there is no further line or a signal asked to stop.
        """
        if stop_requested():
            return False
        index = self.take("line", 1)
        for i, line in self.missing:
            if i == index:
                self._start(line)
                return True
        return False

    def _missing(self) -> Iterator[Line]:
        """Yield the lines without a record, in the same order on every replica."""
        number = 0
        is_first = True
        for line in read_lines(self.file, salt_of(self.defaults, self.seed)):
            if is_first:
                is_first = False
                self.line_format = LineFormat.of(self.file.name, line.data)
                if self.line_format.columns:
                    continue  # the names of the columns
            number = line.number
            self.num_read += 1
            if not self.results.has(line):
                yield line
        last_done = len(self.results.done) - 1
        if number < last_done:
            raise ValueError(
                f"{self.results.path} has a result of line {last_done}, but the input ends at line "
                f"{number}: resume with the same input"
            )

    def _start(self, line: Line) -> None:
        custom_id = f"line-{line.number}"
        try:
            fields = parse_line(line.data, self.line_format)
            custom_id = custom_id_of(fields, custom_id)
            if self.images is not None:
                fields = with_files(fields, self.images)
            self.answers.start(line, custom_id, fields)
        except (TypeError, ValueError) as e:
            self._write(line, error_record(custom_id, line.number, "invalid_request", str(e)))
            self._post_in_time()

    def _write(self, line: Line, record: dict[str, Any]) -> None:
        self.results.append(line, record)
        self.unposted.update(written=1, failed=record["error"] is not None)

    def _post_in_time(self) -> None:
        if time.monotonic() - self.posted > _POST_S:
            self._post()

    def _post(self, **counts: int) -> None:
        """Exchange the counts with the other replicas, and show the sums."""
        self.posted = time.monotonic()
        tokens = self.answers.num_tokens
        self.unposted.update(tokens=tokens - self.tokens_before, **counts)
        self.tokens_before = tokens
        for name in _COUNTS:
            count = self.unposted.pop(name, 0)
            self.sums[name] = self.take(name, count) + count
        if self.bar is not None:
            self._show(self.bar)

    def _show(self, bar: tqdm) -> None:
        """Show finished requests, tokens per second, and an estimate of the time left."""
        size = os.fstat(self.file.fileno()).st_size  # 0 for a pipe
        num_finished = self.num_done + self.sums["written"]
        if size and self.num_read:
            # The number of lines is estimated from the bytes read; it is exact at the end. Other
            # replicas and earlier jobs may have finished more lines than the estimate.
            estimate = math.ceil(self.num_read * size / self.file.tell())
            bar.total = max(estimate, num_finished)
        rate = self.sums["tokens"] / (self.posted - self.began)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        bar.update(num_finished - bar.n)

    def _wait_for_replicas(self) -> None:
        """Return when all replicas have finished.

        torchrun ends all ranks when one of them exits with an error code. This polls the counters,
        because a long answer takes longer than the time-out of a collective.
        """
        before = dict(self.sums)
        since = time.monotonic()
        while self.sums["finished"] < self.num_replicas:
            time.sleep(0.1)
            self._post()
            if self.sums != before:
                before = dict(self.sums)
                since = time.monotonic()
            elif time.monotonic() - since > _TIMEOUT_S:
                raise TimeoutError(f"the other replicas made no progress for {_TIMEOUT_S:.0f} s")
        # The sums are read one by one, so a replica may have added to one that was read already.
        self._post()
