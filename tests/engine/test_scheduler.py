"""The page pool and the scheduler, without a model: no token is lost or repeated, no page leaks."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

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
    sequence,
    watch_releases,
)
from llama.engine.hooks import StepHook
from llama.engine.pages import PagePool, page_hash
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.engine.waiting import WaitingQueue
from llama.options.speculation.hook import speculate


def alone(prompt: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:
    """Return what a sequence must produce, computed by definition."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        token = next_token(tokens)
        if token in stop_ids:
            break
        tokens.append(token)
    return tokens


def popped(queue: WaitingQueue, count: int) -> list[SequenceState]:
    """Return the next sequences of a queue, which they leave."""
    found = []
    for _ in range(count):
        seq = queue.peek()
        assert seq is not None
        queue.pop(seq)
        found.append(seq)
    return found


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)
# For each sequence: the prompt, the number of tokens, the step of arrival, and the call.
requests = st.tuples(prompts, st.integers(0, 12), st.integers(0, 10), st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.integers(7, 30),
    st.integers(1, 6),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, VOCAB - 1), max_size=1),
    st.one_of(st.none(), st.randoms(use_true_random=False)),
    st.integers(1, 3),
)
def test_no_token_is_lost_or_repeated(
    arrivals, num_pages, batch, budget, reuse, ahead, stops, rng, stages
):
    """No token is lost or repeated.

    Arrivals, lengths, budgets and page counts are random, with preemption: each sequence produces
    exactly what it would alone, and the pool ends as it began. The same holds with async
    scheduling, where a step is scheduled before the tokens of the last one are known, in a
    pipeline, and with random drafts.
    """
    ahead = ahead and rng is None and stages == 1
    tried = engine(num_pages, 4, batch, max(budget, batch), reuse, ahead, stages)
    speculate(tried, rng and RandomDrafts(rng))
    stop_ids = frozenset(stops)
    pending = sorted(
        ((when, sequence(prompt, count, stop_ids, n)) for prompt, count, when, n in arrivals),
        key=lambda pair: pair[0],
    )
    everyone = [seq for _, seq in pending]
    for step in range(10_000):
        while pending and pending[0][0] <= step:
            tried.add(pending.pop(0)[1])
        if not pending and not tried.has_unfinished():
            break
        tried.step()
        tried.scheduler.check()
        assert len(tried.scheduler.running) <= batch
    for seq in everyone:
        assert seq.finished
        assert seq.tokens == alone(
            seq.tokens[: seq.num_prompt], seq.spec.max_len - seq.num_prompt, stop_ids
        )
        wanted = "length" if len(seq.tokens) == seq.spec.max_len else "stop"
        assert seq.finish_reason == wanted
    assert tried.scheduler.pool.num_free == num_pages
    assert max(tried.runner.budgets, default=0) <= tried.scheduler.token_budget


@settings(max_examples=100, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_aborts_leave_the_pool_as_it_was(arrivals, ahead: bool, rng: random.Random, stages: int):
    """Sequences aborted at random moments, waiting or running, return every page."""
    tried = engine(num_pages=9, async_scheduling=ahead and stages == 1, stages=stages)
    sequences = [sequence(prompt, count) for prompt, count, *_ in arrivals]
    for seq in sequences:
        tried.add(seq)
    while tried.has_unfinished():
        if rng.random() < 0.4:
            tried.finish(rng.choice(sequences), "abort")
            tried.scheduler.check()
        tried.step()
        tried.scheduler.check()
    for seq in sequences:
        assert seq.finish_reason in ("abort", "length")
        assert seq.tokens == alone(seq.tokens[: seq.num_prompt], seq.num_output, frozenset())
    assert tried.scheduler.pool.num_free == 9


def test_steps_of_a_pipeline_are_equally_full():
    """Steps of a pipeline are equally full, and chunks of a prompt follow one another at once.

    Eight sequences generate while a prompt of four chunks arrives: each of the three steps in
    flight has three, three and two of them, alongside a chunk.
    """
    tried = engine(num_pages=99, max_batch_size=9, budget=9, stages=3)
    sequences = [sequence([i], 12) for i in range(8)]
    for seq in sequences:
        tried.add(seq)
    steps: list[Step] = []
    for _ in range(3):
        tried.step(inform=steps.append)
    long = sequence([i % VOCAB for i in range(26)], 2)
    tried.step([long], inform=steps.append)
    while tried.has_unfinished():
        tried.step(inform=steps.append)
    with_chunks = [i for i, step in enumerate(steps) if any(x.count > 1 for x in step.items)]
    first = with_chunks[0]
    assert with_chunks == [*range(first, first + len(with_chunks))] and len(with_chunks) >= 4
    decodes = [sum(x.count == 1 for x in step.items) for step in steps[first : first + 6]]
    assert all(sum(decodes[i : i + 3]) == 8 and max(decodes) == 3 for i in range(4)), decodes
    assert [s.tokens for s in sequences] == [alone([i], 12, frozenset()) for i in range(8)]
    assert long.tokens == alone(long.tokens[:26], 2, frozenset())


@pytest.mark.parametrize(
    ("lengths", "stages", "counts"),
    [
        ([8] * 16, 2, [32, 32, 32, 32]),
        ([640], 2, [80] * 8),
        ([30], 3, [30]),
        ([8] * 16, 1, [128]),
    ],
)
def test_prompts_are_divided_among_steps_of_a_pipeline(lengths, stages, counts):
    """Prompts that wait together are in several steps, so that no stage waits for all of them."""
    tried = engine(num_pages=200, max_batch_size=16, budget=2048, stages=stages)
    steps: list[Step] = []
    for i, length in enumerate(lengths):
        tried.add(sequence([i, *range(length - 1)], 1))
    while tried.has_unfinished():
        tried.step(inform=steps.append)
    prompt_tokens = [sum(x.count for x in step.items) for step in steps if step.items]
    assert prompt_tokens == counts


def test_whole_prompts_of_a_pipeline_are_divided_among_steps_as_they_are():
    scheduler = Scheduler(
        PagePool(200, 4), max_batch_size=9, token_budget=999, num_stages=2, has_whole_prompts=True
    )
    for i in range(8):
        scheduler.waiting.add(sequence([i] * 50, 0))
    counts = [[x.count for x in scheduler.schedule().items] for _ in range(3)]
    assert counts == [[50], [50], [50]]


def test_a_sequence_whose_results_are_in_flight_is_not_admitted_again():
    """A preempted sequence waits for its results in flight, also where pages are free."""
    scheduler = engine(stages=3).scheduler
    seq = sequence([1, 2], 3)
    scheduler.waiting.add(seq)
    seq.awaits_results = True
    assert not scheduler.schedule().items and not scheduler.running
    seq.awaits_results = False
    assert [item.sequence for item in scheduler.schedule().items] == [seq]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_call_that_has_no_place_gets_one_of_the_call_that_has_most(ahead):
    """A waiting call takes a slot of the call that has the most.

    Three sequences of one call and one of another run when two more calls arrive. Both run in the
    next step, in place of the newest of the first call, which are the first in line to resume.
    """
    tried = engine(num_pages=99, max_batch_size=4, async_scheduling=ahead)
    sequences = [sequence([i], 20, call=n) for i, n in enumerate([1, 2, 1, 1, 3, 3, 4, 2])]
    for seq in sequences[:4]:
        tried.add(seq)
    for _ in range(3):
        tried.step()
    tried.step(sequences[4:])
    running, waiting = tried.scheduler.running, tried.scheduler.waiting
    assert {sequences.index(seq) for seq in running} == {0, 1, 4, 6}
    assert [sequences.index(seq) for seq in waiting] == [2, 3, 5, 7]
    tried.step()
    assert tried.scheduler.num_preemptions == 2, "a call that has one place keeps it"
    while tried.has_unfinished():
        tried.step()
    assert [s.tokens for s in sequences] == [alone([i], 20, frozenset()) for i in range(8)]


def test_calls_take_turns_in_the_order_of_their_arrival():
    """Waiting calls give one sequence each, in the order of their arrival."""
    queue = WaitingQueue()
    counts = {1: 3, 2: 1, 3: 4}
    calls = [[sequence([n], 1, call=n) for _ in range(count)] for n, count in counts.items()]
    everyone = [seq for call in calls for seq in call]
    for seq in everyone:
        queue.add(seq)
    assert len(queue) == 8 and list(queue) == everyone
    assert popped(queue, 4) == [calls[0][0], calls[1][0], calls[2][0], calls[0][1]]
    for seq in calls[2]:
        queue.remove(seq)
    assert not queue.firsts(b"", {1}, 9), "the others have none that wait"
    assert not queue.firsts(b"", set(), 0)
    assert queue.firsts(b"", {2}, 9) == [queue.peek()] == [calls[0][2]]
    assert popped(queue, 1) == [calls[0][2]]
    assert not queue and len(queue) == 0


def test_the_front_of_the_queue_comes_before_all_turns():
    """Preempted sequences, and calls with nothing running, come before the turns of calls."""
    queue = WaitingQueue()
    first, second, third, fourth = (sequence([1], 1, call=n) for n in (1, 2, 3, 3))
    for seq in (first, second, third, fourth):
        queue.add(seq)
    queue.front.append(preempted := sequence([1], 1, call=1))
    assert queue.firsts(b"", {1}, 9) == [second, third]
    queue.move_to_front([second, third])
    assert list(queue) == [second, third, preempted, first, fourth]
    queue.remove(third)
    queue.remove(third)
    assert popped(queue, 4) == [second, preempted, first, fourth] and not queue


def test_senders_take_turns_before_their_calls_do():
    """One sender of many calls waits for a turn as long as one of a single call does."""
    queue = WaitingQueue()
    many = [sequence([n], 1, call=n, sender=b"a") for n in range(5)]
    few = [sequence([n], 1, call=7, sender=b"b") for n in range(2)]
    one = sequence([1], 1, call=8, sender=b"c")
    for seq in [*many, *few, one]:
        queue.add(seq)
    assert queue.senders() == [b"a", b"b", b"c"]
    assert queue.peek(frozenset(many)) is few[0]
    assert queue.peek(frozenset([*many, *few, one])) is None
    wanted = [many[0], few[0], one, many[1], few[1], many[2]]
    assert popped(queue, 6) == wanted and list(queue) == many[3:]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("counts", [[1] * 30, [9, 9], [1, 1, 40]])
def test_a_sender_of_many_calls_gives_way_to_others(ahead, counts):
    """Whoever fills the batch with its calls gives way to other senders at once, in equal shares.

    Of eight places, one sender keeps four when a second one comes, and three or two of them when
    two more have come. Its own calls, whatever their sizes, change nothing.
    """
    tried = engine(num_pages=99, budget=16, max_batch_size=8, async_scheduling=ahead)
    large = [
        sequence([i % VOCAB], 30, call=call, sender=b"a")
        for call, count in enumerate(counts)
        for i in range(count)
    ]
    tried.step(large)
    tried.step()

    def num_running() -> list[int]:
        senders = [seq.spec.sender for seq in tried.scheduler.running]
        assert len(senders) == 8
        return [senders.count(sender) for sender in (b"a", b"b", b"c", b"d")]

    assert num_running() == [8, 0, 0, 0]
    others = [[sequence([n], 20, call=100 + 10 * k + n, sender=s) for n in range(6)]
              for k, s in enumerate((b"b", b"c", b"d"))]  # fmt: skip
    tried.step(others[0])
    assert num_running() == [4, 4, 0, 0]
    tried.step([*others[1], *others[2]])
    assert num_running() == [2, 2, 2, 2]
    while tried.has_unfinished():
        tried.step()
        tried.scheduler.check()
    for seq in [*large, *itertools.chain(*others)]:
        count = seq.spec.max_len - seq.num_prompt
        assert seq.tokens == alone(seq.tokens[: seq.num_prompt], count, frozenset())


def test_nobody_gives_way_to_a_sender_that_would_have_more():
    """A sender with one call of eight keeps half when another one comes with many calls."""
    tried = engine(num_pages=99, budget=16, max_batch_size=8)
    tried.step([sequence([i % VOCAB], 30, call=1, sender=b"a") for i in range(8)])
    tried.step([sequence([i % VOCAB], 30, call=2 + i, sender=b"b") for i in range(20)])
    before = tried.scheduler.num_preemptions
    for _ in range(9):
        tried.step()
    assert sum(seq.spec.sender == b"a" for seq in tried.scheduler.running) == 4
    assert tried.scheduler.num_preemptions == before == 4


def _prompt_tokens(step: Step) -> dict[bytes, int]:
    """Return the tokens of prompts in a step, by their sender."""
    counts: Counter[bytes] = Counter()
    for item in step.items:
        if item.start < item.sequence.num_prompt:
            counts[item.sequence.spec.sender] += item.count
    return dict(counts)


@pytest.mark.parametrize(
    ("lengths", "shares"),
    [
        ({b"a": [90], b"b": [3], b"c": [90]}, {b"a": 6, b"b": 3, b"c": 7}),
        ({b"a": [90], b"b": [2, 2], b"c": [1]}, {b"a": 11, b"b": 4, b"c": 1}),
        ({b"a": [5, 90], b"b": [5, 90]}, {b"a": 8, b"b": 8}),
        ({b"a": [40, 40, 40]}, {b"a": 16}),
        ({b"a": [20], b"b": [5]}, {b"a": 4, b"b": 5}),
    ],
)
def test_senders_share_the_prompt_tokens_of_a_step(lengths, shares):
    """Senders have equal shares, also next to one that came first, and what others do not want."""
    tried = engine(num_pages=200, max_batch_size=9, budget=16)
    steps: list[Step] = []
    numbers = itertools.count()

    def numbered(length: int, sender: bytes) -> SequenceState:
        number = next(numbers)
        return sequence([number] * length, 1, call=number, sender=sender)

    arrivals = [[numbered(n, sender) for n in counts] for sender, counts in lengths.items()]
    tried.step(arrivals[0])
    tried.step(itertools.chain(*arrivals[1:]), inform=steps.append)
    assert _prompt_tokens(steps[0]) == shares


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_long_prompt_delays_nobody_else(ahead, stages):
    """During long prompts of one sender, another one has a token in each step, from its first on.

    In a pipeline that is each round of its stages.
    """
    if ahead and stages > 1:
        return
    tried = engine(900, 4, 6, 8, async_scheduling=ahead, stages=stages)
    large = [sequence([i % VOCAB] * 400, 2, call=i, sender=b"a") for i in range(5)]
    tried.step(large)
    tried.step()
    small = sequence([5, 5, 5], 6, call=9, sender=b"b")
    tried.step([small])
    num_steps = 1
    while not small.finished:
        tried.step()
        num_steps += 1
    assert num_steps <= (6 + ahead) * stages + stages
    assert not any(seq.num_output for seq in large)
    while tried.has_unfinished():
        tried.step()
        tried.scheduler.check()
    assert small.tokens == alone([5, 5, 5], 6, frozenset())
    for i, seq in enumerate(large):
        assert seq.tokens == alone([i % VOCAB] * 400, 2, frozenset())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_sequences_that_rest_have_no_token_and_keep_their_places(ahead, stages):
    """Sequences that rest, running or waiting, have no token in a step, and lose none.

    A step in which all rest runs them as if none did, as nothing else could go on.
    """
    if ahead and stages > 1:
        return
    tried = engine(99, 4, 4, 8, async_scheduling=ahead, stages=stages)
    everyone = [sequence([i % VOCAB] * 2, 9, call=i // 3) for i in range(9)]
    tried.step(everyone)
    rng = random.Random(5)
    num_rested = 0
    for _ in range(400):
        if not tried.has_unfinished():
            break
        live = list(tried.scheduler.live())
        resting = rng.sample(live, rng.randrange(len(live) + 1))
        running = list(tried.scheduler.running)
        steps: list[Step] = []
        tried.step(resting=resting, inform=steps.append)
        (step,) = steps
        if not set(running) <= set(resting):
            num_rested += len(resting)
            assert stages > 1 or {item.sequence for item in step.items}.isdisjoint(resting)
        kept = [seq for seq in running if seq in resting and not seq.finished]
        assert all(seq in tried.scheduler.running for seq in kept)
        tried.scheduler.check()
    assert not tried.has_unfinished() and num_rested > 50
    for i, seq in enumerate(everyone):
        assert seq.tokens == alone([i % VOCAB] * 2, 9, frozenset())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_call_gets_pages_of_the_call_that_has_most(ahead):
    """A call takes pages of the call that has the most.

    The pages are used up: of eight sequences of one call two run, and six wait to resume. A small
    call runs in the next step and until its end, which comes before that of any of the others.
    """
    tried = engine(num_pages=20, budget=16, max_batch_size=8, async_scheduling=ahead)
    large = [sequence([i], 40, call=1) for i in range(8)]
    for seq in large:
        tried.add(seq)
    while len(tried.scheduler.running) > 2:
        tried.step()
    small = sequence([5, 5], 9, call=2)
    tried.step([small])
    while not small.finished:
        assert small in tried.scheduler.running and len(tried.scheduler.running) > 1
        tried.step()
    assert not any(seq.finished for seq in large)
    while tried.has_unfinished():
        tried.step()
    assert [s.tokens for s in large] == [alone([i], 40, frozenset()) for i in range(8)]


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_happens_and_is_invisible(monkeypatch, ahead):
    """Preemption happens and is invisible in the results.

    Six sequences each grow to 7 of 9 pages: some must release their pages and resume later.
    """
    tried = engine(num_pages=9, max_batch_size=6, async_scheduling=ahead)
    given_up = watch_releases(tried.scheduler, monkeypatch)
    sequences = [sequence([i], 27) for i in range(6)]
    for seq in sequences:
        tried.add(seq)
    while tried.has_unfinished():
        tried.step()
    assert given_up.count(False) > 0, "nobody was preempted: the test tests nothing"
    assert [s.tokens for s in sequences] == [alone([i], 27, frozenset()) for i in range(6)]


def test_who_gave_up_its_pages_comes_before_who_never_had_any(monkeypatch):
    """A preempted sequence comes before one that never had pages.

    Three sequences cannot all run to their end together, and a fourth waits after them.
    """
    tried = engine(num_pages=8, max_batch_size=3)
    sequences = [sequence([i], 15) for i in range(4)]
    for seq in sequences:
        tried.add(seq)
    given_up = watch_releases(tried.scheduler, monkeypatch)
    while tried.has_unfinished():
        tried.step()
        order = [sequences.index(seq) for seq in tried.scheduler.live()]
        assert order == sorted(order), "a later one went ahead"
    assert given_up.count(False) > 0, "nobody was preempted: the test tests nothing"


def test_more_prompts_than_the_batch_holds_queue_in_order():
    tried = engine(num_pages=40, max_batch_size=2)
    sequences = [sequence([i % VOCAB], 5) for i in range(7)]
    for seq in sequences:
        tried.add(seq)
    ended = []
    while tried.has_unfinished():
        ended += [seq for seq in tried.step() if seq.finished]
    assert [sequences.index(seq) for seq in ended] == list(range(7))


def test_long_prompts_are_taken_in_chunks_beside_running_ones():
    """Long prompts are prefilled in chunks alongside running sequences.

    With 8 tokens a step, a prompt of 21 takes three steps; the running sequence advances in each.
    """
    tried = engine(num_pages=40)
    first, second = sequence([1], 10), sequence([2] * 21, 1)
    tried.add(first)
    tried.step()
    tried.add(second)
    lengths = []
    while not second.finished:
        tried.step()
        lengths.append(first.num_output)
    assert lengths == [2, 3, 4]
    assert tried.runner.budgets == [1, 8, 8, 8]


def test_a_shared_prefix_is_computed_once():
    tried = engine(num_pages=40)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # two full pages and two tokens
    for count in (3, 3):
        seq = sequence(prompt, count)
        tried.add(seq)
        while tried.has_unfinished():
            tried.step()
    assert seq.num_cached == 8
    assert tried.runner.computed == (10 + 2) + (2 + 2)
    other = sequence([6] + prompt[1:], 1)  # the same second page after another first one
    tried.add(other)
    while tried.has_unfinished():
        tried.step()
    assert other.num_cached == 0


def test_the_last_prompt_token_is_always_computed():
    """The last prompt token is always computed.

    A prompt of exactly two cached pages still needs logits: its second page is computed again.
    """
    tried = engine(num_pages=40)
    for _ in range(2):
        seq = sequence([1, 2, 3, 4, 5, 6, 0, 1], 2)
        tried.add(seq)
        while tried.has_unfinished():
            tried.step()
    assert seq.num_cached == 4
    assert seq.tokens == alone([1, 2, 3, 4, 5, 6, 0, 1], 2, frozenset())


def test_least_recently_freed_pages_are_evicted_first():
    pool = PagePool(3, 2)
    names = [page_hash(b"", [i, i]) for i in range(3)]
    pages = [pool.allocate() for _ in range(3)]
    for page, name in zip(pages, names, strict=True):
        pool.cache(page, name)
    pool.release([pages[1]])
    pool.release([pages[2], pages[0]])  # the last page of a run is reused first: 0, then 2
    pool.check()
    assert pool.allocate() == pages[1]
    assert pool.match_prefix([names[1]]) == []
    assert pool.match_prefix([names[2]]) == [pages[2]]
    assert pool.allocate() == pages[0]
    pool.incref(pool.match_prefix([names[2]]))
    assert pool.num_free == 0


def test_a_page_freed_twice_is_caught():
    pool = PagePool(2, 2)
    page = pool.allocate()
    pool.release([page])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([page])


@pytest.mark.parametrize("moment", ["start", "read", "read, ahead"])
def test_a_failing_runner_leaves_an_engine_that_goes_on(monkeypatch, moment):
    """A failing runner leaves an engine that goes on.

    The error reaches the caller, every sequence in the step ends, and others are served.
    """
    tried = engine(async_scheduling="ahead" in moment)

    def fail() -> NoReturn:
        raise MemoryError("no room")

    def start(step: Step) -> FakeStep:
        return fail() if moment == "start" else FakeStep(fail)

    monkeypatch.setattr(tried.runner, "start", start)
    victims = [sequence([1, 2], 3) for _ in range(6)]
    for seq in victims:
        tried.add(seq)
    if tried.runner.async_scheduling:
        assert tried.step() == [], "nothing is read of the first step"
    with pytest.raises(MemoryError):
        tried.step()
    assert not tried.has_step_in_flight
    assert [seq.finish_reason for seq in victims] == ["error"] * 4 + [None] * 2
    assert tried.scheduler.pool.num_free == 8
    assert list(tried.scheduler.live()) == victims[4:], "those that never ran go on waiting"
    monkeypatch.undo()
    seq = sequence([1, 2], 3)
    tried.add(seq)
    while tried.has_unfinished():
        tried.step()
    for served in (*victims[4:], seq):
        assert served.tokens == alone([1, 2], 3, frozenset())
        assert served.finish_reason == "length"
    tried.add(seq := sequence([1, 2], 3))
    tried.clear("abort")
    assert seq.finish_reason == "abort" and not tried.has_unfinished()


def test_what_can_never_run_is_refused():
    tried = engine(num_pages=2, page_size=4)
    with pytest.raises(ValueError, match="up to 9 tokens does not fit the KV cache of 8 tokens"):
        tried.add(sequence([1], 8))
    with pytest.raises(ValueError, match="the prompt has 0 tokens: give 1 to 3"):
        tried.add(sequence([], 3))
    with pytest.raises(AssertionError, match="a token of each sequence"):
        engine(budget=3, max_batch_size=4)


def test_a_step_is_started_before_the_last_one_is_read():
    """Async scheduling starts a step before the last one is read.

    The runner has two steps in flight, whatever the sequences ask for: it is the runner that waits
    where a row's sampling needs the previous token.
    """
    tried = engine(num_pages=20, async_scheduling=True)
    started: list[int] = []
    read: list[int] = []
    start = tried.runner.start

    def watched(step: Step) -> FakeStep:
        number, running = len(started), start(step)
        started.append(len(read))

        def wait() -> StepResults:
            read.append(number)
            return running.read()

        return FakeStep(wait)

    tried.runner.start = watched
    plain, penalized = sequence([1, 2], 9), sequence([2, 1], 3)
    words = ((9, 8),)
    penalized.spec = replace(penalized.spec, presence_penalty=0.5, bad_words=words)
    tried.add(plain)
    for _ in range(3):
        tried.step()
    assert started == [0, 0, 1], "each step but the first began with one unread"
    tried.add(penalized)
    while tried.has_unfinished():
        tried.step()
    assert started == [0, *range(len(started) - 1)], started
    assert plain.tokens == alone([1, 2], 9, frozenset())
    assert penalized.tokens == alone([2, 1], 3, frozenset())


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_that_sampled_tokens_fill_are_found(ahead):
    """Pages that sampled tokens fill are found in the prefix cache.

    A page gets a hash once all its tokens are known: one step later with async scheduling.
    """
    tried = engine(num_pages=20, async_scheduling=ahead)
    first = sequence([1, 2], 13)
    tried.add(first)
    while tried.has_unfinished():
        tried.step()
    second = sequence(first.tokens, 2)
    tried.add(second)
    while tried.has_unfinished():
        tried.step()
    assert second.num_cached == 12
    assert second.tokens == alone(first.tokens, 2, frozenset())


class Store(StepHook):
    """A second tier that keeps the slots of full pages by their hash, as files on a disk would."""

    counts: list[int] | None = None
    told: deque[int] | None = None

    def __init__(self) -> None:
        self.kept: dict[bytes, list[int]] = {}
        self.loaded: list[int] = []
        self.runner: FakeRunner
        self.scheduler: Scheduler

    def attach(self, tried: FakeEngine) -> None:
        self.runner = tried.runner
        self.scheduler = tried.scheduler
        tried.hooks.append(self)
        tried.scheduler.pool.tier = self

    def after_rows(self, step: Step, results: StepResults) -> None:
        size = self.runner.page_size
        for seq, filled in self.scheduler.filled(step):
            for i in filled:
                slots = range(seq.pages[i] * size, (seq.pages[i] + 1) * size)
                kept = [self.runner.slots[slot] for slot in slots]
                self.kept.setdefault(seq.page_hashes[i], kept)

    def load(self, pages: Sequence[int], contents: Sequence[bytes]) -> int:
        known = [*itertools.takewhile(self.kept.__contains__, contents)]
        for page, content in zip(pages, known, strict=False):
            for offset, value in enumerate(self.kept[content]):
                self.runner.slots[page * self.runner.page_size + offset] = value
        self.loaded.append(len(known))
        return len(known)


@pytest.mark.parametrize("how", ["plain", "ahead", "drafts", "stages"])
@pytest.mark.parametrize("seed", range(5))
def test_a_second_tier_fills_the_pages_of_prompts(seed, how):
    """Prompts whose pages a second tier has are not computed again, and the answers are equal.

    The runner checks the content of every slot that a step reads. Prompts are longer than the
    budget of a step, share their beginnings, and are preempted. The tier has the last full page of
    an answer, too, unless the token that fills it was pending.
    """
    stages = 2 if how == "stages" else 1
    rng = random.Random(seed)
    start = [rng.randrange(VOCAB) for _ in range(20)]
    prompts = [start[: rng.randrange(21)] + rng.choices(range(VOCAB), k=30) for _ in range(6)]
    store = Store()
    answers, computed, cached = [], [], []
    for _ in range(2):  # the second engine begins with what the first one has stored
        tried = engine(
            num_pages=36, page_size=4, max_batch_size=3, budget=10, stages=stages,
            async_scheduling=how == "ahead",
        )  # fmt: skip
        speculate(tried, RandomDrafts(rng) if how == "drafts" else None)
        store.attach(tried)
        sequences = [sequence(prompt, 8) for prompt in prompts]
        for seq in sequences:
            tried.add(seq)
        while tried.has_unfinished():
            tried.step()
            tried.scheduler.check()
        for seq in sequences:
            num_known = len(seq.tokens) - 1 - (how == "ahead")
            tried.scheduler._hashes(seq, num_known // 4)
            assert {*seq.page_hashes[: num_known // 4]} <= store.kept.keys()
        answers.append([seq.tokens for seq in sequences])
        computed.append(tried.runner.computed)
        cached.append([seq.num_cached for seq in sequences])
    assert answers[0] == answers[1] == [alone(prompt, 8, frozenset()) for prompt in prompts]
    assert computed[1] < 0.6 * computed[0] and max(store.loaded) >= 2
    full_pages = [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    assert all(0 < ours <= most for ours, most in zip(cached[1], full_pages, strict=True))
