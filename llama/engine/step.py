"""One pass of the model: the tokens that it computes, and their rows that have results.

In: the tokens that the scheduler has chosen. Out: a `Step`, which the runner computes, and whose
results the scheduler gives to the sequences. `rows.py` has the kinds of rows. This file knows
neither the model nor torch.
"""

from dataclasses import dataclass
from typing import Any

from llama.engine.rows import HIDDEN, PROMPT_KINDS, SAMPLE, VERIFY, RowKind, Rows, Scheduled
from llama.engine.sequence import SequenceState

StepResults = dict[RowKind[Any], Any]  # what each kind of a step computed


@dataclass(slots=True)
class Step:
    """The tokens that the model computes in one pass, and the rows that have results.

    Attributes:
        items: The tokens, sequence after sequence. Items with a single token come first, as
            `Batch` wants them.
        rows: The rows that have results, by their kind.
    """

    items: list[Scheduled]
    rows: dict[RowKind[Any], Rows]

    @classmethod
    def of(cls, items: list[Scheduled]) -> "Step":
        """Return the step of these items, with the rows that their sequences ask for."""
        rows_of_kinds: dict[RowKind[Any], Rows] = {}
        sampled = SAMPLE.rows(items)
        if sampled.items:
            rows_of_kinds[SAMPLE] = sampled
        # Few sequences want anything else: the others are looked at once for all kinds.
        reading = [item for item in items if item.sequence.spec.reads_prompt]
        for kind in PROMPT_KINDS if reading else ():
            rows = kind.rows(reading)
            if rows.items:
                rows_of_kinds[kind] = rows
        return cls(items, rows_of_kinds)

    def verify_drafts(self) -> None:
        """Turn a decode step whose items have drafts by now into one that verifies them.

        Those with the fewest come first, as kernels compute them together.
        """
        self.items.sort(key=lambda item: item.count)
        self.rows = {VERIFY: VERIFY.rows(self.items)}

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token and samples the next, and nothing else."""
        if self.rows.keys() != {SAMPLE}:
            return False
        sampled = self.rows[SAMPLE].items
        has_single_tokens = self.items[-1].count == 1
        return has_single_tokens and len(sampled) == len(self.items)

    @property
    def is_read_at_once(self) -> bool:
        """Whether the next step is scheduled only once this one is read."""
        return any(kind.is_read_at_once for kind in self.rows)

    def mark_pending(self) -> None:
        """Note that this step has been started, so that the sampled tokens are pending."""
        if SAMPLE in self.rows:
            for item in self.rows[SAMPLE].items:
                item.sequence.num_pending += 1

    def mark_awaited(self) -> None:
        """Note that a pipeline has started this step, whose sequences wait for its results."""
        for rows in self.rows.values():
            for item in rows.items:
                item.sequence.awaits_results = True

    def sampled(self) -> list[Scheduled]:
        """Return an item per row after which a token is sampled, in the order of the rows."""
        sampled: list[Scheduled] = []
        for kind, rows in self.rows.items():
            sampled += kind.sampled(rows)
        return sampled

    def result_rows(self) -> list[int]:
        """Return which of the tokens have results: the rows kind after kind, counted from 0."""
        first_of = dict[SequenceState, int]()
        first = 0
        for item in self.items:
            first_of[item.sequence] = first
            first += item.count
        found = list[int]()
        for rows in self.rows.values():
            for item, offsets in rows.pairs():
                first = first_of[item.sequence]
                for offset in offsets:
                    found.append(first + offset)
        return found

    def captured_layers(self) -> frozenset[int]:
        """Return the numbers of the hidden states that any sequence of the step wants."""
        if HIDDEN not in self.rows:
            return frozenset()
        specs = [item.sequence.spec for item in self.rows[HIDDEN].items]
        return frozenset(x for spec in specs if spec.capture for x in spec.capture.layers)

    def sampling_items(self) -> list[Scheduled]:
        """Return the items whose sequences get a token, or several, of this step."""
        found = []
        for kind in (SAMPLE, VERIFY):
            if kind in self.rows:
                found += self.rows[kind].items
        return found
