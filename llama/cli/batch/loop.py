"""The work of one replica on a batch job: take lines, have them answered, write their records.

The engine of this process answers them, or a server. Lines are read when there is room for them, so
a job of any length starts at once, and its memory does not grow.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol

from tqdm import tqdm

from llama.cli.batch.files import Line, Results, read_lines
from llama.cli.batch.lines import custom_id_of, error_record, parse_line
from llama.ranks.signals import stop_requested
from llama.sampling_params import SamplingParams

_COUNTS = ("written", "failed", "tokens", "finished")
_POST_S = 0.5  # between two exchanges of the counts with the other replicas
_TIMEOUT_S = 3600.0  # for replicas that make no progress: one step can be slow, but not so slow

# Adds to the counter of a name, which all replicas share, and returns what it was before.
Take = Callable[[str, int], int]


class BatchReport(NamedTuple):
    written: int  # records that this job added, on all replicas
    failed: int  # records with an error in the whole output, those of earlier jobs included


class Answers(Protocol):
    """Who answers the lines. num_tokens: generated so far. has_room: another line may be started.
    is_idle: nothing that was started will finish any more."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        """Begin to answer a line. TypeError or ValueError if it asks for what cannot be."""

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Go on for a while; the records of the lines that are answered by now."""


def own_counters() -> Take:
    """The counters of a job that is the only replica."""
    values = Counter[str]()

    def take(name: str, amount: int) -> int:
        values[name] += amount
        return values[name] - amount

    return take


@dataclass
class Loop:
    """The part of one replica: the first rank of its group reads, leads and writes."""

    answers: Answers
    file: BinaryIO
    results: Results
    defaults: SamplingParams
    seed: int  # of the job; a resumed job must have the same one, and the same defaults
    take: Take = field(default_factory=own_counters)  # the counters of all replicas
    num_replicas: int = 1
    shows: bool = False
    own: Counter[str] = field(default_factory=Counter)  # counted since the last exchange
    sums: Counter[str] = field(default_factory=Counter)  # what all replicas have counted
    jsonl: bool = False  # known once the first line is read
    num_read: int = 0
    bar: tqdm | None = None  # made only where it is shown: its lock outlives a fork

    def __post_init__(self) -> None:
        self.missing = enumerate(self._missing())
        self.num_done = self.results.num_done
        self.tokens_before = self.answers.num_tokens
        self.began = self.posted = time.monotonic()
        if self.shows:
            self.bar = tqdm(initial=self.num_done, unit=" requests", dynamic_ncols=True)

    def run(self) -> BatchReport:
        """Until no line is left to take, or a signal asked to stop and what runs is finished."""
        reading = True
        with contextlib.nullcontext() if self.bar is None else self.bar:
            while True:
                while reading and self.answers.has_room:
                    # The next line that no replica has taken; none, once a signal asked to stop.
                    ours = -1 if stop_requested() else self.take("line", 1)
                    line = next((x for index, x in self.missing if index == ours), None)
                    reading = line is not None
                    if line is not None:
                        self._start(line)
                if self.answers.is_idle:
                    break
                for line, record in self.answers.finished():
                    self._write(line, record)
                self._post_in_time()
            self._post(finished=1)
            self._wait_for_replicas()
        return BatchReport(self.sums["written"], self.sums["failed"] + self.results.failed)

    def _missing(self) -> Iterator[Line]:
        """The lines without a record, in order: the same on every replica."""
        number, defaults = 0, self.defaults
        salt = repr((defaults.temperature, defaults.top_p, defaults.max_tokens, self.seed))
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

    def _start(self, line: Line) -> None:
        custom_id = f"line-{line.number}"
        try:
            fields = parse_line(line.data, jsonl=self.jsonl)
            custom_id = custom_id_of(fields, custom_id)
            self.answers.start(line, custom_id, fields)
        except (TypeError, ValueError) as e:
            self._write(line, error_record(custom_id, line.number, "invalid_request", str(e)))
            self._post_in_time()

    def _write(self, line: Line, record: dict[str, Any]) -> None:
        self.results.append(line, record)
        self.own.update(written=1, failed=record["error"] is not None)

    def _post_in_time(self) -> None:
        if time.monotonic() - self.posted > _POST_S:
            self._post()

    def _post(self, **counts: int) -> None:
        """Exchange the counts with the other replicas, and show the sums."""
        self.posted, tokens = time.monotonic(), self.answers.num_tokens
        self.own.update(tokens=tokens - self.tokens_before, **counts)
        self.tokens_before = tokens
        for name in _COUNTS:
            own = self.own.pop(name, 0)
            self.sums[name] = self.take(name, own) + own
        if self.bar is not None:
            self._show(self.bar)

    def _show(self, bar: tqdm) -> None:
        """Requests done, tokens per second, and time left, by an estimate of the lines to come."""
        size = os.fstat(self.file.fileno()).st_size  # 0 of a pipe
        if size and self.num_read:
            bar.total = math.ceil(self.num_read * size / self.file.tell())  # exact at its end
        rate = self.sums["tokens"] / (self.posted - self.began)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        bar.update(self.num_done + self.sums["written"] - bar.n)

    def _wait_for_replicas(self) -> None:
        """Return when all replicas have finished: torchrun ends all ranks when one exits with an
        error code. This polls, as a long answer takes longer than a collective may."""
        before, since = dict(self.sums), time.monotonic()
        while self.sums["finished"] < self.num_replicas:
            time.sleep(0.1)
            self._post()
            if self.sums != before:
                before, since = dict(self.sums), time.monotonic()
            elif time.monotonic() - since > _TIMEOUT_S:
                raise TimeoutError(f"the other replicas made no progress for {_TIMEOUT_S:.0f} s")
        self._post()  # sums are read one by one: a replica may have added to one already read
