"""The changes of a step, as bytes, for a process that has the text of the requests.

In: the sequences that a step moved, each with a `Cursor` that says what the process knows of it.
Out: a report; and from a report, the same changes of that process's own `SequenceState` objects,
its mirrors. A report has a header and an array for each column. Values that few rows have follow as
JSON, in which floats keep their bits.
"""

import base64
import json
import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama.engine.sequence import FinishReason, SequenceState
from llama.requests.formats import RemoteConstraint

_HEAD = struct.Struct("<III")  # rows, tokens, bytes of JSON
_ENDS: list[FinishReason | None] = [None, "stop", "length", "abort", "error"]
_CODE_OF = {reason: code for code, reason in enumerate(_ENDS)}
_COUNTS = ("num_cached", "num_drafted", "num_accepted")
# Lists that grow with the tokens, with the list of the same length alongside each.
_SCORES = (("logprobs", "top_logprobs"), ("prompt_logprobs", "prompt_top_logprobs"))


@dataclass(slots=True, eq=False)
class Cursor:
    """How far a process knows a sequence.

    Attributes:
        number: The number of the sequence in that process.
        num_tokens: The tokens that it knows, with those of the prompt.
        has_scores: Whether any log-probabilities are wanted.
        num_scored: The entries of `logprobs` that it knows.
        num_prompt_scored: The entries of `prompt_logprobs` that it knows.
    """

    number: int
    num_tokens: int
    has_scores: bool
    num_scored: int = 0
    num_prompt_scored: int = 0

    @classmethod
    def of(cls, number: int, seq: SequenceState) -> "Cursor":
        """Return the cursor of a sequence at its beginning."""
        has_scores = seq.spec.logprobs is not None or seq.spec.prompt_logprobs is not None
        num_prompt_scored = len(seq.prompt_logprobs)  # a mirror has the entry of the first token
        return cls(number, len(seq.tokens), has_scores, 0, num_prompt_scored)


def pack_report(moved: Iterable[tuple[SequenceState, Cursor]]) -> bytes:
    """Return the report of sequences that got tokens or ended, and move their cursors."""
    numbers: list[int] = []
    sizes: list[int] = []
    ends: list[int] = []
    tokens: list[int] = []
    rare: dict[int, dict[str, Any]] = {}
    for seq, cursor in moved:
        known = seq.tokens
        is_first = cursor.num_tokens == seq.num_prompt
        numbers.append(cursor.number)
        sizes.append(len(known) - cursor.num_tokens)
        ends.append(_CODE_OF[seq.finish_reason])
        tokens += known[cursor.num_tokens :]
        cursor.num_tokens = len(known)
        if is_first or seq.finish_reason is not None or cursor.has_scores:
            values = _rare_values(seq, cursor)
            if values:
                rare[cursor.number] = values
    more = json.dumps(rare).encode() if rare else b""
    head = _HEAD.pack(len(numbers), len(tokens), len(more))
    columns = (array("I", numbers), array("I", sizes), array("i", tokens), array("B", ends))
    return b"".join((head, *columns, more))


def _rare_values(seq: SequenceState, cursor: Cursor) -> dict[str, Any]:
    """Return what a row has besides its tokens."""
    values: dict[str, Any] = {}
    for name in _COUNTS:
        count = getattr(seq, name)
        if count:
            values[name] = count
    if cursor.has_scores:
        values["logprobs"] = seq.logprobs[cursor.num_scored :]
        values["top_logprobs"] = seq.top_logprobs[cursor.num_scored :]
        cursor.num_scored = len(seq.logprobs)
        first = cursor.num_prompt_scored
        values["prompt_logprobs"] = seq.prompt_logprobs[first:]
        values["prompt_top_logprobs"] = seq.prompt_top_logprobs[first:]
        cursor.num_prompt_scored = len(seq.prompt_logprobs)
    if seq.finish_reason is not None:
        if seq.stop_id is not None:
            values["stop_id"] = seq.stop_id
        if seq.finish_reason == "error" and seq.constraint is not None:
            values["failure"] = seq.constraint.failure
        if seq.pooled is not None:
            values["pooled"] = base64.b64encode(seq.pooled.astype(np.float32).tobytes()).decode()
    return values


def apply_report(data: bytes, mirrors: Mapping[int, SequenceState]) -> list[SequenceState]:
    """Give the tokens of a report to the sequences of this process.

    A number that is not known belongs to a sequence that was removed: nothing of it is read.

    Args:
        data: The report.
        mirrors: The live sequences by number.

    Returns:
        The sequences that got tokens or ended.
    """
    num_rows, num_tokens, num_more = _HEAD.unpack_from(data)
    sizes_at = _HEAD.size + 4 * num_rows
    tokens_at = sizes_at + 4 * num_rows
    ends_at = tokens_at + 4 * num_tokens
    more_at = ends_at + num_rows
    numbers = array("I", data[_HEAD.size : sizes_at])
    sizes = array("I", data[sizes_at:tokens_at])
    tokens = array("i", data[tokens_at:ends_at]).tolist()
    ends = data[ends_at:more_at]
    rare = json.loads(data[more_at : more_at + num_more]) if num_more else {}
    moved = []
    start = 0
    for number, size, end in zip(numbers, sizes, ends, strict=True):
        first = start
        start += size
        seq = mirrors.get(number)
        if seq is None:
            continue
        seq.tokens += tokens[first:start]
        if rare:
            _set_rare(seq, rare.get(str(number), {}))
        seq.finish_reason = _ENDS[end]
        moved.append(seq)
    return moved


def _set_rare(seq: SequenceState, values: dict[str, Any]) -> None:
    """Give a mirror what its row has besides its tokens."""
    for scores, tops in _SCORES:
        getattr(seq, scores).extend(values.get(scores, ()))
        entries = values.get(tops, ())
        getattr(seq, tops).extend([(token, value) for token, value in top] for top in entries)
    for name in (*_COUNTS, "stop_id"):
        if name in values:
            setattr(seq, name, values[name])
    if "failure" in values and isinstance(seq.constraint, RemoteConstraint):
        seq.constraint.failure = values["failure"]
    if "pooled" in values:
        seq.pooled = np.frombuffer(base64.b64decode(values["pooled"]), np.float32)
