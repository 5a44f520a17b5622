"""Rank 0 leads: it alone takes requests, and tells the other ranks before each step.

In: sequences added to rank 0's core, from any thread. Out: the same core on every rank, one step
after the other. A message is a row of int64 in a fixed layout, `Message.pack`; no pickle crosses
ranks. It has the number of the step, what came, what went, and a checksum of what the step will
compute: a rank that would compute something else is an error before the model runs.

While rank 0 has nothing to do, it sends an idle message now and then: each wait of the other ranks
has a limit. It knows ids only; `llama.requests.llm_engine` decides who leads and when.
"""

import contextlib
import signal
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any

from llama.engine.core import EngineCore
from llama.engine.scheduler import Scheduled
from llama.engine.sequence import Sequence, TokenParams
from llama.ranks import ModelParallel, RankError

KEEP_ALIVE_S = 20.0

_STEP, _IDLE, _END, _INTERRUPT = 1, 2, 3, 4
_NONE, _INT, _FLOAT, _TUPLE = 0, 1, 2, 3  # tags before the values of parameters
_PARAMS = [f.name for f in fields(TokenParams)]


@dataclass
class Message:
    """What rank 0 tells before a step: [kind, step, checksum, came, gone], then their entries.

    An entry of `came` is [serial, max_len, seed, is_constrained, tokens, stop ids, parameters],
    each list with its length before it and each parameter with a tag; one of `gone` is a serial. A
    constraint stays on rank 0, whose ids the others take.
    """

    kind: int
    step: int = 0
    checksum: int = 0
    came: list[tuple[int, Sequence]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        head = (self.kind, self.step, self.checksum, len(self.came), len(self.gone))
        row = array("q", head)
        for serial, seq in self.came:
            row.extend((serial, seq.max_len, seq.seed, seq.is_constrained))
            row.extend((len(seq.tokens), len(seq.stop_ids)))
            row.extend(seq.tokens)
            row.extend(sorted(seq.stop_ids))
            for name in _PARAMS:
                _write(row, getattr(seq.params, name))
        row.extend(self.gone)
        return row.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "Message":
        numbers = array("q", data)
        rest = iter(numbers)
        kind, step, checksum, num_came, num_gone = _next(rest, 5)
        came = [_read_sequence(rest) for _ in range(num_came)]
        return cls(kind, step, checksum, came, _next(rest, num_gone))


class LeadingCore(EngineCore):
    """Rank 0's core while it leads. What is added or ended takes effect with the next step.

    One thread at a time may use it, as any core; an interrupt (Ctrl-C) is held back while a step
    runs, since the other ranks run it too.
    """

    def __init__(self, core: EngineCore, parallel: ModelParallel) -> None:
        super().__init__(core.runner, core.scheduler)
        self.stats = core.stats
        self._parallel = parallel
        self._serials: dict[Sequence, int] = {}  # of what every rank has
        self._num_came = 0
        self._came: list[Sequence] = []  # since the last step
        self._gone: list[Sequence] = []
        self._message = Message(_IDLE)
        self._num_steps = 0
        self._failure: BaseException | None = None
        self._sending = threading.Lock()
        self._last_sent = time.monotonic()
        self._has_ended = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="llama-lead", daemon=True)
        self._beat.start()

    def add(self, seq: Sequence) -> None:
        self.check(seq)
        self._came.append(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        assert reason == "abort", reason
        if not seq.finished:
            self._gone.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self._came) or super().has_unfinished()

    def step(self) -> list[Sequence]:
        if self._failure is not None:
            raise RankError(f"the ranks of this model have stopped: {self._failure}")
        with _interrupt_held_back(), self._sending:
            self._take_in()
            try:
                return self._forget_finished(super().step())
            except BaseException as error:  # ranks that broke off in a step cannot meet again
                self._failure = error
                raise

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """After an interrupt, which never breaks off a step: only what came and went is redone."""
        wanted = dict.fromkeys(sequences)
        known = [*self._serials, *self._came]
        for seq in known:
            if seq not in wanted and seq not in self._gone:
                self.finish(seq, "abort")
        for seq in wanted:
            if seq not in known and not seq.finished:
                self.add(seq)

    @property
    def has_failed(self) -> bool:
        """A step broke off: the ranks cannot meet again, and none of them is told anything."""
        return self._failure is not None

    def close(self, last_word: int, *, interrupted: bool = False) -> None:
        """The other ranks stop following, and hear a number. Their cores and this one are empty.

        interrupted: each of them gets a KeyboardInterrupt, as this rank has.
        """
        self._has_ended.set()
        self._beat.join()
        with self._sending:
            if self._failure is None:
                self._send(Message(_INTERRUPT if interrupted else _END, last_word))
        super().clear("abort")

    def _take_in(self) -> None:
        """Queue what came and end what went, here; `before_run` tells the other ranks."""
        came, self._came = self._came, []
        gone, self._gone = dict.fromkeys(self._gone), []
        self._message = message = Message(_STEP)
        for seq in came:
            if seq not in gone:
                self._serials[seq] = self._num_came
                message.came.append((self._num_came, seq))
                self._num_came += 1
                super().add(seq)
            else:
                seq.finish_reason = "abort"
        for seq in gone:
            if seq in self._serials and not seq.finished:
                message.gone.append(self._serials.pop(seq))
                super().finish(seq, "abort")

    def _forget_finished(self, moved: list[Sequence]) -> list[Sequence]:
        for seq in moved:
            if seq.finished:
                del self._serials[seq]
        return moved

    def before_run(self, scheduled: list[Scheduled]) -> None:
        message = self._message
        if not (scheduled or message.came or message.gone or self.is_ahead):
            return
        message.step, message.checksum = self._num_steps, checksum(scheduled)
        self._num_steps += 1
        self._send(message)

    def _send(self, message: Message) -> None:
        self._parallel.broadcast_bytes(message.pack())
        self._last_sent = time.monotonic()

    def _keep_alive(self) -> None:
        every = min(KEEP_ALIVE_S, self._parallel.timeout_s / 4)
        while not self._has_ended.wait(every / 4):
            with self._sending:
                if self._failure is None and time.monotonic() - self._last_sent > every:
                    self._send(Message(_IDLE))


class FollowingCore(EngineCore):
    """The core of another rank: `follow` runs the steps that rank 0 tells of, until it ends."""

    def __init__(self, core: EngineCore, parallel: ModelParallel) -> None:
        super().__init__(core.runner, core.scheduler)
        self.stats = core.stats
        self._parallel = parallel
        self._sequences: dict[int, Sequence] = {}
        self._message = Message(_IDLE)
        self._num_steps = 0

    def follow(self) -> int:
        """Run every step of rank 0, until it closes: its last word. RankError if this rank strays,
        which the whole group must end with."""
        with _interrupt_ignored():
            while True:
                data = self._parallel.broadcast_bytes(b"", is_idle=True)
                self._message = message = Message.unpack(data)
                if message.kind in (_END, _INTERRUPT):
                    self.clear("abort")
                    if message.kind == _INTERRUPT:
                        raise KeyboardInterrupt
                    return message.step
                if message.kind == _STEP:
                    self._run(message)

    def _run(self, message: Message) -> None:
        for serial, seq in message.came:
            self._sequences[serial] = seq
            self.add(seq)
        for serial in message.gone:
            self.finish(self._sequences.pop(serial), "abort")
        with self._parallel.step():
            self.step()
        for serial, seq in list(self._sequences.items()):
            if seq.finished:
                del self._sequences[serial]

    def before_run(self, scheduled: list[Scheduled]) -> None:
        told = self._message
        if (told.step, told.checksum) != (self._num_steps, checksum(scheduled)):
            raise RankError(
                f"rank {self._parallel.global_rank} strays from rank 0 at step {told.step}: it has "
                f"made {self._num_steps} steps, and would compute {len(scheduled)} sequences in "
                "another way. Are the ranks' programs and packages the same?"
            )
        self._num_steps += 1


def checksum(scheduled: list[Scheduled]) -> int:
    """Of what a step will compute: for each sequence its lengths, its pages and its last token."""
    row = array("q")
    for item in scheduled:
        seq = item.sequence
        row.extend((item.count, len(seq.tokens), item.start, len(seq.pages)))
        row.extend((seq.tokens[-1], seq.pages[-1] if seq.pages else -1))
    return zlib.crc32(row.tobytes())


def _write(row: "array[int]", value: Any) -> None:
    """A tag, then the value: an int, a float as its bits, or a tuple with its length."""
    if value is None:
        row.append(_NONE)
    elif isinstance(value, tuple):
        row.extend((_TUPLE, len(value)))
        for part in value:
            _write(row, part)
    elif isinstance(value, float):
        row.extend((_FLOAT, *struct.unpack("q", struct.pack("d", value))))
    else:
        row.extend((_INT, int(value)))


def _read(rest: Iterator[int]) -> Any:
    tag = next(rest)
    if tag == _NONE:
        return None
    number = next(rest)
    if tag == _TUPLE:
        return tuple(_read(rest) for _ in range(number))
    if tag == _FLOAT:
        return struct.unpack("d", struct.pack("q", number))[0]
    return number


def _read_sequence(rest: Iterator[int]) -> tuple[int, Sequence]:
    serial, max_len, seed, is_constrained, num_tokens, num_stops = _next(rest, 6)
    tokens, stop_ids = _next(rest, num_tokens), frozenset(_next(rest, num_stops))
    params = TokenParams(**{name: _read(rest) for name in _PARAMS})
    return serial, Sequence(
        tokens, params, max_len, seed, stop_ids, is_constrained=bool(is_constrained)
    )


def _next(rest: Iterator[int], count: int) -> list[int]:
    return [next(rest) for _ in range(count)]


@contextlib.contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Ctrl-C takes effect after the block. Only the main thread runs Python's handlers."""
    held: list[tuple[int, FrameType | None]] = []
    handler = _replace_handler(lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[0])


@contextlib.contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Ctrl-C in a terminal reaches every rank: rank 0 decides what it means."""
    handler = _replace_handler(lambda number, frame: None)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def _replace_handler(new: Any) -> Any:
    """The present handler of SIGINT, replaced; None, and nothing done, where it is not Python's."""
    old = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(old):
        return None
    signal.signal(signal.SIGINT, new)
    return old
