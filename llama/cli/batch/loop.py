"""The work of one replica on a batch job: take lines, have them answered, write their records.

In: the two files, and somebody who answers lines: the engine of this process, or a server. Lines
are read when there is room for them, so a job of any length starts at once, and its memory does
not grow. This file knows neither the bytes of the files nor how a line is answered, and no torch.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from tqdm import tqdm

from llama.cli.batch.files import Line, Results, read_lines
from llama.cli.batch.lines import custom_id_of, error_record, parse_line
from llama.ranks.signals import stop_requested
from llama.sampling_params import SamplingParams

_TICKS_PER_POST = 16  # steps, waits or bad lines between two exchanges with the other replicas
_TIMEOUT_S = 3600.0  # for replicas that make no progress: one step can be slow, but not so slow


@dataclass(frozen=True)
class BatchReport:
    """written: records that this job added, on all replicas. failed: records with an error in the
    whole output, those of earlier jobs included."""

    written: int
    failed: int


class Answers(Protocol):
    """Who answers the lines."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, for the progress bar."""

    @property
    def has_room(self) -> bool:
        """Whether another line may be started."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was started will finish any more."""

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        """Begin to answer a line. TypeError or ValueError if it asks for what cannot be."""

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Go on for a while; the records of the lines that are answered by now."""

    def close(self) -> None:
        """Drop what is not finished."""


class SharedCount(Protocol):
    """A counter of all replicas; `take` adds to it, and returns what it was before."""

    def take(self, amount: int) -> int: ...


class OwnCount:
    """The counter of a job that is the only one."""

    def __init__(self, name: str) -> None:
        self._value = 0

    def take(self, amount: int) -> int:
        self._value += amount
        return self._value - amount


class Tally:
    """Counters over all replicas. Each adds its own every 16 ticks, and reads the sums then."""

    NAMES = ("ticks", "written", "failed", "tokens", "finished")

    def __init__(self, count: Callable[[str], SharedCount]) -> None:
        self._shared = {name: count(name) for name in self.NAMES}
        self._own = Counter[str]()  # not yet added to the shared ones
        self.sums = dict.fromkeys(self.NAMES, 0)

    def add(self, **counts: int) -> None:
        self._own.update(counts)

    def post(self) -> None:
        for name, shared in self._shared.items():
            own = self._own[name]
            self.sums[name] = shared.take(own) + own
        self._own.clear()


class Loop:
    """The part of one replica: the first rank of its group reads, leads and writes.

    seed: of the job; a resumed job must have the same one, and the same defaults. count: makes
    the shared counter of a name. num_replicas: how many loops share the lines.
    """

    def __init__(
        self,
        answers: Answers,
        file: BinaryIO,
        results: Results,
        defaults: SamplingParams,
        *,
        seed: int,
        shows: bool = False,
        count: Callable[[str], SharedCount] = OwnCount,
        num_replicas: int = 1,
    ) -> None:
        self.answers = answers
        self.file = file
        self.results = results
        self.salt = repr((defaults.temperature, defaults.top_p, defaults.max_tokens, seed))
        self.num_replicas = num_replicas
        self.queue = count("line")
        self.tally = Tally(count)
        self.missing = enumerate(self._missing())
        self.jsonl = False  # known once the first line is read
        self.num_read = 0
        self.tokens_before = answers.num_tokens
        self.ticks = 0
        self.bar = _Bar(file, results.num_done) if shows else None

    def run(self) -> None:
        """Until no line is left to take, or a signal asked to stop and what runs is finished."""
        reading = True
        while True:
            while reading and self.answers.has_room:
                line = self._next_line()
                reading = line is not None
                if line is not None:
                    self._start(line)
            if self.answers.is_idle:
                break
            for line, record in self.answers.finished():
                self._write(line, record)
            self._tick()
        self._post(finished=1)
        self._wait_for_replicas()

    def close(self) -> None:
        self.answers.close()
        if self.bar is not None:
            self.bar.close()

    def _missing(self) -> Iterator[Line]:
        """The lines without a record, in order: the same on every replica."""
        number = 0
        for line in read_lines(self.file, self.salt):
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
        custom_id = f"line-{line.number}"
        try:
            fields = parse_line(line.data, jsonl=self.jsonl)
            custom_id = custom_id_of(fields, custom_id)
            self.answers.start(line, custom_id, fields)
        except (TypeError, ValueError) as e:
            self._write(line, error_record(custom_id, line.number, "invalid_request", str(e)))
            self._tick()

    def _write(self, line: Line, record: dict[str, Any]) -> None:
        self.results.append(line, record)
        self.tally.add(written=1, failed=record["error"] is not None)

    def _tick(self) -> None:
        self.ticks += 1
        if self.ticks % _TICKS_PER_POST == 0:
            self._post(ticks=_TICKS_PER_POST)

    def _post(self, **counts: int) -> None:
        """Exchange the counts with the other replicas, and show the sums."""
        tokens = self.answers.num_tokens
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
        while self.tally.sums["finished"] < self.num_replicas:
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
