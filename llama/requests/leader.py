"""Led ranks: rank 0 alone takes requests, and informs the other ranks before each step.

In: the sequences that are added to rank 0's core and removed from it. Out: the same core on every
rank, step by step. A message is JSON, in which floats keep their bits, and has a checksum of the
step: a rank that would compute something else raises an error before the model runs. While rank 0
has nothing to do, it sends idle messages, since each wait of the other ranks has a limit.
`llama.requests` decides who leads and when.
"""

import contextlib
import functools
import threading
import time
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from llama.checkpoint.lora.unmerged import LoadedAdapter
from llama.engine.core import EngineCore
from llama.engine.request import SequenceSpec
from llama.engine.sequence import SequenceState
from llama.engine.step import Step
from llama.options.adapters import AdapterStore
from llama.ranks.parallel import Parallel, RankError
from llama.requests.interrupts import interrupt_ignored

KEEP_ALIVE_S = 20.0

_STEP = 1
_IDLE = 2
_END = 3
_INTERRUPT = 4
_LOAD = 5
_DROP = 6
_ADAPTER = "the adapter"  # what the ranks agree on when they load one


@dataclass
class Message:
    """A message of rank 0 before a step, which is sent as JSON.

    Attributes:
        kind: One of the kinds above.
        number: The number of the step; at the end, rank 0's call counter.
        checksum: The checksum of the step.
        added: New sequences, each with a serial number.
        removed: The serial numbers of sequences that are not wanted any more.
        resting: The serial numbers of sequences that sit out this step.
        adapter: The path of an adapter to load, or the hash of one to drop.
        loaded: The numbers of pages that the step loads from the second tier, in order.
    """

    kind: int
    number: int = 0
    checksum: int = 0
    added: list[tuple[int, SequenceSpec]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    resting: list[int] = field(default_factory=list)
    adapter: str = ""
    loaded: list[int] = field(default_factory=list)


MESSAGE = TypeAdapter(Message)


class Leader:
    """Rank 0 while it leads the other ranks, for one thread at a time."""

    def __init__(self, core: EngineCore, adapters: AdapterStore, parallel: Parallel) -> None:
        self._core = core
        self._adapters = adapters
        self._parallel = parallel
        self._serials: dict[SequenceState, int] = {}  # serial numbers of live sequences
        self._num_added = 0
        self._num_steps = 0
        self._failure: BaseException | None = None
        self._sending = threading.Lock()
        self._last_sent = time.monotonic()
        self._has_ended = threading.Event()
        self._tier = core.scheduler.pool.tier
        self._beat = threading.Thread(target=self._keep_alive, name="llama-lead", daemon=True)
        self._beat.start()

    @property
    def has_failed(self) -> bool:
        """Whether a step broke off: the ranks cannot meet again, and get no message."""
        return self._failure is not None

    def step(
        self,
        added: list[SequenceState],
        removed: list[SequenceState],
        resting: list[SequenceState] | None = None,
    ) -> list[SequenceState]:
        """Run `EngineCore.step` on every rank.

        Raises:
            RankError: An earlier step broke off.
        """
        self._check_alive()
        removed = [seq for seq in removed if not seq.finished]
        message = Message(_STEP)
        for seq in added:
            self._serials[seq] = self._num_added
            message.added.append((self._num_added, seq.spec))
            self._num_added += 1
        message.removed += [self._serials.pop(seq) for seq in removed]
        resting = [seq for seq in resting or [] if seq in self._serials]
        message.resting += [self._serials[seq] for seq in resting]
        inform = functools.partial(self._inform, message)
        if self._tier is not None:
            self._tier.counts = message.loaded
        with self._sending:
            try:
                moved = self._core.step(added, removed, inform, resting)
            except BaseException as error:
                # Ranks that broke off in a step cannot meet again.
                self._failure = error
                raise
        for seq in moved:
            if seq.finished:
                del self._serials[seq]
        return moved

    def load_adapter(self, path: str) -> LoadedAdapter:
        """Load an adapter on every rank; no step runs meanwhile.

        Raises:
            OSError: A file is missing or cannot be read, on this rank. Nothing has been loaded.
            ValueError: The adapter cannot be used, or the ranks' files differ. Nothing has been
                loaded.
            RankError: Another rank cannot load it, or an earlier step broke off.
        """
        with self._sending:
            self._check_alive()
            self._send(Message(_LOAD, adapter=path))
            return load_adapter(self._adapters, self._parallel, path)

    def drop_adapter(self, digest: bytes) -> None:
        """Forget an adapter on every rank."""
        with self._sending:
            self._check_alive()
            self._send(Message(_DROP, adapter=digest.hex()))
            self._adapters.drop(digest)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RankError(f"the ranks of this model have stopped: {self._failure}")

    def close(self, num_calls: int, *, interrupted: bool = False) -> None:
        """End the lead: the other ranks take over rank 0's call counter, and all cores are empty.

        Args:
            num_calls: Rank 0's call counter.
            interrupted: Whether the other ranks raise KeyboardInterrupt, as this rank did.
        """
        self._has_ended.set()
        self._beat.join()
        if self._tier is not None:
            self._tier.counts = None
        with self._sending:
            if self._failure is None:
                self._send(Message(_INTERRUPT if interrupted else _END, num_calls))
                with self._parallel.step():
                    self._core.drain()
        self._core.clear("abort")

    def _inform(self, message: Message, step: Step) -> None:
        if step.items or message.added or message.removed or self._core.has_step_in_flight:
            message.number = self._num_steps
            message.checksum = checksum(step)
            self._num_steps += 1
            self._send(message)

    def _send(self, message: Message) -> None:
        self._parallel.broadcast_bytes(MESSAGE.dump_json(message))
        self._last_sent = time.monotonic()

    def _keep_alive(self) -> None:
        every = min(KEEP_ALIVE_S, self._parallel.timeout_s / 4)
        while not self._has_ended.wait(every / 4):
            with self._sending:
                if self._failure is None and time.monotonic() - self._last_sent > every:
                    self._send(Message(_IDLE))


class Follower:
    """A rank that follows rank 0: `follow` runs rank 0's steps until the lead ends."""

    def __init__(self, core: EngineCore, adapters: AdapterStore, parallel: Parallel) -> None:
        self._core = core
        self._adapters = adapters
        self._parallel = parallel
        self._sequences: dict[int, SequenceState] = {}  # keys: rank 0's serial numbers
        self._serials: dict[SequenceState, int] = {}
        self._num_steps = 0
        self._tier = core.scheduler.pool.tier

    def follow(self) -> int:
        """Run rank 0's steps until it closes, and return its call counter.

        Raises:
            RankError: This rank would compute something else than rank 0.
            KeyboardInterrupt: Rank 0 was interrupted.
        """
        with interrupt_ignored():
            while True:
                data = self._parallel.broadcast_bytes(b"", is_idle=True)
                message = MESSAGE.validate_json(data)
                if message.kind == _STEP:
                    self._step(message)
                elif message.kind == _LOAD:
                    # The ranks have agreed on the error, which rank 0 reports: nothing is loaded.
                    with contextlib.suppress(Exception):
                        load_adapter(self._adapters, self._parallel, message.adapter)
                elif message.kind == _DROP:
                    self._adapters.drop(bytes.fromhex(message.adapter))
                elif message.kind != _IDLE:
                    with self._parallel.step():
                        self._core.drain()
                    self._core.clear("abort")
                    if self._tier is not None:
                        self._tier.told = None
                    if message.kind == _INTERRUPT:
                        raise KeyboardInterrupt
                    return message.number

    def _step(self, message: Message) -> None:
        """Run the step of a message."""
        added = []
        for serial, spec in message.added:
            seq = SequenceState(spec)
            self._sequences[serial] = seq
            self._serials[seq] = serial
            added.append(seq)
        removed = [self._forget(serial) for serial in message.removed]
        resting = [self._sequences[serial] for serial in message.resting]
        compare = functools.partial(self._compare, message)
        if self._tier is not None:
            self._tier.told = deque(message.loaded)
        with self._parallel.step():
            moved = self._core.step(added, removed, compare, resting)
        for seq in moved:
            if seq.finished:
                self._forget(self._serials[seq])

    def _forget(self, serial: int) -> SequenceState:
        """Remove a sequence from those that rank 0 can name, and return it."""
        seq = self._sequences.pop(serial)
        del self._serials[seq]
        return seq

    def _compare(self, message: Message, step: Step) -> None:
        if (message.number, message.checksum) != (self._num_steps, checksum(step)):
            raise RankError(
                f"rank {self._parallel.global_rank} diverged from rank 0 at step {message.number}: "
                f"it has made {self._num_steps} steps, and would compute {len(step.items)} "
                "sequences in another way. Are the ranks' programs and packages the same?"
            )
        self._num_steps += 1


def load_adapter(adapters: AdapterStore, parallel: Parallel, path: str) -> LoadedAdapter:
    """Load an adapter on this rank and, at the same time, on every other.

    Raises:
        OSError: A file is missing or cannot be read, on this rank.
        ValueError: The adapter cannot be used, or the ranks' files differ.
        RankError: Another rank cannot load it.
    """
    with parallel.agree(_ADAPTER) as must_match:
        adapter = adapters.read(path)
        must_match.append(adapter.digest)
    adapters.add(adapter)
    return adapter


def checksum(step: Step) -> int:
    """Return a checksum of a step: the lengths, last page and last token of each sequence."""
    row = array("q")
    for item in step.items:
        seq = item.sequence
        row.extend((item.count, len(seq.tokens), item.start, len(seq.pages)))
        row.extend((seq.tokens[-1], seq.pages[-1] if seq.pages else -1))
    return zlib.crc32(row.tobytes())
