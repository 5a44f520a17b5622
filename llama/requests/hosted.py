"""The sequences that another process asks of the engine of this process.

In: messages of one such process. Out: sequences in the port, and for each step that moves any of
them one report. Sequences have the numbers that the other process gave them; nothing here knows a
text, nor how a message travels.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from llama.engine.request import ImageSpan
from llama.engine.sequence import SequenceState
from llama.requests.formats import AnswerFormat, ConstraintMaker
from llama.requests.local_port import LocalPort
from llama.requests.messages import Add, Message, Reason, Refuse
from llama.requests.port import Group, set_seeds
from llama.requests.reports import Cursor, pack_report
from llama.requests.seeds import derived_seed


@dataclass(eq=False)
class HostedCall:
    """The sequences of one call of another process.

    Attributes:
        owner: The sequences of its process.
        sender: Whoever sent it.
        groups: The sequences of each request.
        formats: The format of the answers of each request; None for no format.
        numbers: The numbers of the sequences that have not ended.
    """

    owner: "HostedSequences"
    sender: bytes
    groups: list[Group]
    formats: list[AnswerFormat | None]
    numbers: dict[SequenceState, int]

    @property
    def num_unfinished(self) -> int:
        """The number of its sequences that run or wait."""
        return len(self.numbers)

    @property
    def has_waiting(self) -> bool:
        """Whether any of its sequences has no token yet."""
        return any(seq.num_output == 0 for seq in self.numbers)

    def compile(self, constraints: ConstraintMaker) -> None:
        """Make the constraints of its sequences, which may take seconds.

        Raises:
            FieldError: A format cannot be compiled.
        """
        for group, answer_format in zip(self.groups, self.formats, strict=True):
            if answer_format is not None:
                for seq in group.sequences:
                    root = seq.spec.prefix_root
                    seq.constraint = constraints.constraint(answer_format, root)


class HostedSequences:
    """The sequences of one process, which owns them in the port."""

    def __init__(
        self,
        port: LocalPort,
        send_report: Callable[[bytes], None],
        send: Callable[[Message], None],
    ) -> None:
        """Begin without sequences.

        Args:
            port: The port.
            send_report: Sends a report without waiting, from any thread.
            send: Sends a message without waiting, from any thread.
        """
        self._port = port
        self._send_report = send_report
        self._send = send
        self._calls: dict[SequenceState, HostedCall] = {}  # the calls of live sequences
        self._sequences: dict[int, SequenceState] = {}
        self._cursors: dict[SequenceState, Cursor] = {}
        self._pixels: dict[bytes, bytes] = {}  # pixels of the next call, by their digests

    def keep_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Keep the pixels of an image of the next call, (r, T, T, 3) uint8."""
        self._pixels[digest] = pixels

    def open(self, message: Add) -> HostedCall:
        """Return the sequences of a message, which `start` gives to the port."""
        call = HostedCall(self, b"", [], [], {})
        kept, self._pixels = self._pixels, {}
        with self._port.lock:
            for added in message.groups:
                spec = added.spec
                call.sender = spec.sender
                sequences = []
                pixels = {span.digest: _tiles(kept[span.digest], span) for span in spec.images}
                for number in added.numbers:
                    seq = SequenceState(spec, pixels=pixels)
                    spec = replace(spec, prompt_logprobs=None)  # the first one scores the prompt
                    self._calls[seq] = call
                    self._sequences[number] = seq
                    self._cursors[seq] = Cursor.of(number, seq)
                    call.numbers[seq] = number
                    sequences.append(seq)
                call.groups.append(Group(sequences, added.seed))
                text = added.answer_format
                call.formats.append(AnswerFormat.from_json(text) if text else None)
        return call

    def start(self, call: HostedCall) -> None:
        """Add the sequences of a call to the port, except those removed since.

        Raises:
            FieldError: An adapter has been dropped.
        """
        with self._port.lock:
            groups = []
            call_seed = None
            for index, group in enumerate(call.groups):
                seed = group.seed
                if seed is None:
                    call_seed = self._port.next_seed() if call_seed is None else call_seed
                    seed = derived_seed(call_seed, index)
                set_seeds(group.sequences, seed)
                wanted = [seq for seq in group.sequences if seq in call.numbers]
                if wanted:
                    groups.append(Group(wanted, seed))
            if groups:
                self._port.add(groups, self)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove sequences that the other process does not want any more."""
        with self._port.lock:
            found = [self._sequences[x] for x in numbers if x in self._sequences]
            self._port.remove(found)
            for seq in found:
                self._forget(seq)

    def refuse(self, call: HostedCall, reason: Reason, field: str = "", text: str = "") -> None:
        """End what is left of a call, and tell the other process why."""
        with self._port.lock:
            numbers = list(call.numbers.values())
            self.remove(numbers)
        self._send(Refuse(numbers, reason, field, text))

    def close(self) -> None:
        """Remove all sequences: the other process is gone."""
        self.remove(list(self._sequences))

    def moved(self, sequences: list[SequenceState]) -> None:
        """Report what a step gave the sequences; see `Owner.moved`."""
        self._send_report(pack_report((seq, self._cursors[seq]) for seq in sequences))
        for seq in sequences:
            if seq.finish_reason is not None:
                self._forget(seq)

    def failed(self, error: Exception, sequences: list[SequenceState]) -> None:
        """Tell the other process that a step failed; see `Owner.failed`."""
        self._send(Refuse([self._forget(seq) for seq in sequences], "failed", text=str(error)))

    def _forget(self, seq: SequenceState) -> int:
        """Forget a sequence, and return its number."""
        del self._calls[seq].numbers[seq]
        del self._calls[seq]
        number = self._cursors.pop(seq).number
        del self._sequences[number]
        return number


def _tiles(pixels: bytes, span: ImageSpan) -> np.ndarray:
    """Return the pixels of an image as its tiles, (r, T, T, 3)."""
    num_tiles = span.rows * span.columns
    side = math.isqrt(len(pixels) // (3 * num_tiles))
    return np.frombuffer(bytearray(pixels), np.uint8).reshape(num_tiles, side, side, 3)
