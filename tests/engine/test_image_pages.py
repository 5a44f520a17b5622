"""The pages of images without a model: the books balance, and each row sees its own images."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scheduling import (
    VOCAB,
    FakeEngine,
    FakeRunner,
    FakeStep,
    RandomDrafts,
    engine,
    next_token,
)
from helpers.sequences import state_of
from llama.engine.request import ImageSpan
from llama.engine.rows import Scheduled
from llama.engine.sequence import SequenceState
from llama.engine.step import Step
from llama.model.args import ModelArgs, VisionArgs
from llama.options.images import ImageStore
from llama.options.speculation.hook import speculate
from llama.ranks.parallel import Parallel

IMAGE_ID = VOCAB
_SIZES = VisionArgs(2, chunk_size=28, width=32, n_heads=4, ffn_dim=32, n_layers=2, features=(1,))
_RATIO = 2
PARAMS = ModelArgs(dim=128, n_layers=4, n_heads=4, vocab_size=VOCAB, vision=_SIZES)


class ImageRunner(FakeRunner):
    """A runner that stores images in their pages, and checks what each row sees of them.

    An image has the token IMAGE_ID plus its number, by which the artificial model knows it.
    """

    store: ImageStore
    encoded: list[list[Any]]

    def start(self, step: Step) -> FakeStep:
        due = [
            group
            for item in step.items
            for group in self.store._groups.get(item.sequence, ())
            if group.step is step
        ]
        self.encoded.append(due)
        for group in due:
            self._put(group)
        running = super().start(step)  # writes and checks the pages of text
        for item in step.items:
            self._check(item)
        return running

    def _put(self, group: Any) -> None:
        for page, content in zip(group.pages, group.contents, strict=True):
            for offset in range(self.page_size):
                self.slots[page * self.page_size + offset] = hash(content)

    def _check(self, item: Scheduled) -> None:
        seq = item.sequence
        seen: dict[int, tuple[Any, int]] = {}
        for part in self.store._seen(seq, item.start, item.count, item.start):
            rows = range(part.first_row, part.first_row + part.num_rows)
            seen |= dict.fromkeys(rows, (part.group, part.num_tokens))
        per_tile = _SIZES.tokens_per_tile
        for row in range(item.start, item.start + item.count):
            begun = [span for span in seq.spec.images if span.position <= row]
            if not begun:
                assert row not in seen
                continue
            positions = [begun[-1].position]  # those of the images that touch the last one
            for span in reversed(begun[:-1]):
                if span.position == positions[-1] - 1:
                    positions.append(span.position)
            spans = [span for span in begun if span.position in positions]
            group, num_tokens = seen[row]
            assert num_tokens == sum(per_tile * span.rows * span.columns for span in spans)
            assert group.spans[: len(spans)] == spans
            num_slots = self.page_size * len(group.pages)
            assert num_slots * _RATIO >= num_tokens and group.table
            for page, content in zip(group.pages, group.contents, strict=True):
                slots = range(page * self.page_size, (page + 1) * self.page_size)
                assert {self.slots[slot] for slot in slots} == {hash(content)}, "foreign page"

    def known(self, item: Scheduled) -> list[int]:
        return with_numbers(item.sequence, super().known(item))


def with_numbers(seq: SequenceState, tokens: list[int]) -> list[int]:
    """Return tokens in which each image has the number that is its digest."""
    numbered = list(tokens)
    for image in seq.spec.images:
        numbered[image.position] += int.from_bytes(image.digest, "little")
    return numbered


def image_engine(num_pages: int, batch: int, budget: int, **options: Any) -> FakeEngine:
    tried = engine(num_pages, 4, batch, budget, **options)
    tried.runner.__class__ = ImageRunner
    model: Any = SimpleNamespace(
        params=PARAMS, parallel=Parallel(), plan=SimpleNamespace(image_ratio=_RATIO)
    )
    store = ImageStore(model, tried.scheduler, num_pages)
    tried.hooks.append(store)
    tried.runner.store = store
    tried.runner.encoded = []
    return tried


def image_sequence(prompt: list[int], count: int, call: int = 0) -> SequenceState:
    """Return a sequence; a negative number of its prompt is an image, of one to four tiles."""
    tokens = [token if token >= 0 else IMAGE_ID for token in prompt]
    images = tuple(
        ImageSpan(position, (-token).to_bytes(2, "little"), 1, -token % 4 + 1)
        for position, token in enumerate(prompt)
        if token < 0
    )
    return state_of(tokens, len(prompt) + count, 1, call=call, images=images)


def expected(seq: SequenceState) -> list[int]:
    """Return the answer that a sequence has alone, by definition."""
    tokens = with_numbers(seq, seq.tokens[: seq.num_prompt])
    while len(tokens) < seq.spec.max_len:
        tokens.append(next_token(tokens))
    return tokens[seq.num_prompt :]


def check_budget(tried: FakeEngine, step: Step) -> None:
    """Check that a step is within its budget, or encodes one group alongside answers alone.

    Drafts are added later, to what a step would compute anyway.
    """
    due = tried.runner.encoded[-1]
    counts = [item.count - len(item.drafts) for item in step.items]
    work = sum(counts) + sum(group.cost for group in due)
    if work > tried.scheduler.token_budget and due:
        assert len(due) == 1
        assert set(counts) == {1}


prompts = st.lists(st.integers(-6, VOCAB - 1), min_size=1, max_size=14)
requests = st.tuples(prompts, st.integers(0, 12), st.integers(0, 10), st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.integers(7, 40),
    st.integers(1, 6),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
    st.floats(0, 0.3),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_the_pages_of_images_balance(
    arrivals, num_pages, batch, budget, ahead, drafts, rate, rng: random.Random, stages
):
    """Arrivals, images, budgets, page counts and cancellations are random, with preemption.

    Equal images are shared, also by a sequence that is cancelled while another waits for the same
    one, and pages of images are evicted one by one. Each row sees what it should, each answer is
    that of the sequence alone, and the pool ends as it began.
    """
    ahead = ahead and not drafts and stages == 1
    tried = image_engine(
        num_pages, batch, max(budget, batch), async_scheduling=ahead, stages=stages
    )
    speculate(tried, RandomDrafts(rng) if drafts else None)
    run = tried.runner.start

    def checked(step: Step) -> FakeStep:
        running: FakeStep = run(step)
        check_budget(tried, step)
        return running

    tried.runner.start = checked
    sequences = [image_sequence(prompt, count, call) for prompt, count, _, call in arrivals]
    pending = sorted(
        ((when, seq) for (_, _, when, _), seq in zip(arrivals, sequences, strict=True)
         if tried.scheduler.max_pages(seq) <= num_pages),
        key=lambda pair: pair[0],
    )  # fmt: skip
    everyone = [seq for _, seq in pending]
    for number in range(10_000):
        while pending and pending[0][0] <= number:
            tried.add(pending.pop(0)[1])
        if not pending and not tried.has_unfinished():
            break
        live = [*tried.scheduler.live()]
        if live and rng.random() < rate:
            tried.finish(rng.choice(live), "abort")
            tried.scheduler.check()
        tried.step()
        tried.scheduler.check()
    for seq in everyone:
        assert seq.finish_reason in ("abort", "length")
        assert seq.output == expected(seq)[: seq.num_output]
    assert tried.scheduler.pool.num_free == num_pages
    assert not tried.runner.store._groups and not tried.runner.store._due


def run_all(tried: FakeEngine, *sequences: SequenceState) -> None:
    for seq in sequences:
        tried.add(seq)
    while tried.has_unfinished():
        tried.step()
        tried.scheduler.check()


def test_an_image_of_which_a_page_was_evicted_is_encoded_again():
    """Two of its three pages are found, which are not enough."""
    tried = image_engine(6, 2, 64)
    run_all(tried, image_sequence([-3, 1, 2], 1))
    assert [len(due) for due in tried.runner.encoded if due] == [1]
    pool = tried.scheduler.pool
    (group,) = tried.runner.store._needed(image_sequence([-3], 1), 0)
    while len(pool.match_prefix(group.contents)) == 3:
        pool.release([pool.allocate()])
    run_all(tried, image_sequence([-3, 2, 2], 2))
    assert [len(due) for due in tried.runner.encoded if due] == [1, 1]


def test_a_cancelled_sequence_leaves_an_image_to_the_other_that_waits_for_it():
    tried = image_engine(12, 4, 64)
    first, second = image_sequence([1, -3, 1], 6), image_sequence([2, -3, 2], 6)
    tried.add(first)
    tried.add(second)
    tried.step()
    tried.finish(first, "abort")
    tried.scheduler.check()
    run_all(tried)
    assert second.output == expected(second)
    assert sum(map(len, tried.runner.encoded)) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_an_image_beyond_the_budget_is_encoded_beside_answers(ahead):
    """It is not put off for as long as others are answered, and each of its steps has one token."""
    tried = image_engine(40, 4, 4, async_scheduling=ahead)
    others = [image_sequence([1, 2], 60, call) for call in (1, 2)]
    for seq in others:
        tried.add(seq)
    for _ in range(4):
        tried.step()
    late = image_sequence([1, -3, 1], 1, 3)
    tried.add(late)
    for _ in range(8):
        tried.step()
    assert late.finished and not any(seq.finished for seq in others)
    assert late.output == expected(late)
