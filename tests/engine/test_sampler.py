"""Sampling against a naive float64 computation of one row.

The file has over 400 lines because each step of the pipeline has its own oracle here.
"""

import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.absent_device import absent_gpu
from helpers.race import finishes
from helpers.sampling import INF, LOGITS, assert_close, assert_same, sequence
from helpers.sequences import state_of
from llama.engine import processors
from llama.engine.processors import LogitsProcessors
from llama.engine.sampler import (
    needs_top_only,
    sample,
    sample_top_p,
    score,
    top_of_all,
    top_of_share,
)
from llama.engine.sequence import SequenceState
from llama.ops import sample as op
from llama.ops.fixed_point import uniform


def many(count: int, **params) -> list[SequenceState]:
    """Return sequences that differ in their seeds alone."""
    return [state_of([1], 10, i, **params) for i in range(count)]


def naive(logits: Tensor, seq: SequenceState) -> np.ndarray:
    """Return the probabilities (V) of one row, computed step by step in float64 by definition."""
    p, x = seq.spec, logits.double().numpy().copy()
    for token, bias in dict(p.logit_bias or ()).items():
        x[token] += bias
    for word in p.bad_words:
        if seq.tokens[len(seq.tokens) - len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -INF
    if seq.num_output < p.min_tokens:
        x[list(seq.spec.stop_ids)] = -INF
    for token in set(seq.tokens):
        x[token] *= 1 / p.repetition_penalty if x[token] > 0 else p.repetition_penalty
    for token in set(seq.output):
        x[token] -= p.presence_penalty + p.frequency_penalty * seq.output.count(token)
    probs = np.exp((x - x.max()) / p.temperature)
    probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    if p.top_k > 0:
        probs[probs < np.sort(probs)[::-1][: p.top_k][-1]] = 0
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order] / probs.sum()
    probs[order[ordered.cumsum() - ordered > p.top_p]] = 0
    return probs / probs.sum()


def naive_ids(logits: Tensor, sequences: list[SequenceState]) -> list[int]:
    seeds = torch.tensor([seq.spec.seed for seq in sequences])
    positions = torch.tensor([len(seq.tokens) for seq in sequences])
    uniforms = uniform(seeds, positions).tolist()
    found = []
    for row, seq, number in zip(logits, sequences, uniforms, strict=True):
        if seq.spec.greedy:
            found.append(int(row.argmax()))
            continue
        probs = naive(row, seq)
        (ids,) = probs.nonzero()
        times = finishes(number, ids, probs[ids])
        found.append(int(ids[times.argmin()]))
    return found


def random_sequence(rng: random.Random, vocab: int) -> SequenceState:
    """Return a sequence with a random mixture of settings, each of them on in about half of the
    cases.
    """

    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    return sequence(
        [rng.randrange(vocab) for _ in range(rng.randint(1, 9))],
        [rng.randrange(vocab) for _ in range(rng.randint(0, 9))],
        seed=rng.getrandbits(63),
        stop_ids=(0, 1),
        temperature=rng.uniform(0.2, 3),
        top_p=maybe(rng.random(), 1.0),
        top_k=maybe(rng.randint(1, vocab + 5), 0),
        min_p=maybe(rng.random() ** 3, 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(3)}, {}),
        bad_words=maybe([[rng.randrange(vocab)]], ()),
        min_tokens=maybe(5, 0),
        logprobs=maybe(rng.randint(0, 5), None),
    )


# --- each step, against its formula ----------------------------------------------------------


def test_a_bad_word_may_begin_in_the_prompt(distribution) -> None:
    seq = sequence([1, 2], [], bad_words=((2, 7), (1, 2, 3), (0, 1, 2, 6), (1, 4)))
    banned = torch.tensor([3, 7])
    expected = LOGITS.index_fill(0, banned, -INF).softmax(-1)
    assert_same(distribution(LOGITS, seq), expected)


def test_processors_do_not_wait_for_a_gpu():
    """No processor waits for a GPU, on which the step before may still run.

    A past fault: the ban of a bad word of several tokens was copied from memory that is not pinned.
    """
    asked: list[dict[str, Any]] = [
        {"bad_words": ((3, 4, 4, 7), (9,))},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    ]
    sequences = [sequence(**params) for params in asked]
    logits = LOGITS.repeat(len(asked), 1)
    with absent_gpu((9, 0)) as gpu:
        on_gpu = LogitsProcessors().apply(gpu.put(logits.clone()), sequences)
        assert gpu.waits == []
        assert torch.equal(on_gpu.cpu(), LogitsProcessors().apply(logits, sequences))
    assert on_gpu[0, 7] == on_gpu[0, 9] == -INF


def test_presence_and_frequency_count_the_output_only(distribution) -> None:
    """Presence and frequency penalties count the output only.

    Token 3 occurs once and 4 twice in the output; 1 and 2 occur in the prompt alone.
    """
    seq = sequence(presence_penalty=0.5, frequency_penalty=0.75)
    expected = LOGITS.clone()
    expected[3] -= 0.5 + 0.75
    expected[4] -= 0.5 + 0.75 * 2
    assert_same(distribution(LOGITS, seq), expected.softmax(-1))


def test_repetition_comes_before_presence_and_after_bias(distribution) -> None:
    seq = sequence(logit_bias={4: -2.0}, repetition_penalty=2.0, presence_penalty=0.5)
    expected = LOGITS.clone()
    for token in (1, 2, 3, 4):
        biased = LOGITS[token] + (-2.0 if token == 4 else 0)
        expected[token] = biased / 2 if biased > 0 else biased * 2
    expected[[3, 4]] -= 0.5
    assert_same(distribution(LOGITS, seq), expected.softmax(-1))


def test_min_p_comes_before_top_p(distribution) -> None:
    """min_p is applied before top_p.

    0.5 and 0.25 pass min_p; the first has 0.667 of their mass, so top_p = 0.65 ends there.
    """
    probs = torch.tensor([0.05] * 5 + [0.5, 0.25])
    seq = sequence([1], [], min_p=0.3, top_p=0.65)
    assert_same(distribution(probs.log(), seq), torch.tensor([0.0] * 5 + [1.0, 0.0]))


def test_top_p_counts_the_mass_after_top_k(distribution) -> None:
    """top_p counts the mass after top_k.

    Of 3 of 8 equal tokens, raised by a bias, 0.5 keeps 2; of the whole mass it would keep 3.
    """
    seq = sequence([1], [], logit_bias=dict.fromkeys((2, 4, 6), 1.0), top_k=3, top_p=0.5)
    assert_same(distribution(torch.zeros(8), seq), torch.tensor([0, 0, 0.5, 0, 0.5, 0, 0, 0]))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (0.1, 1), (0.25, 3), (0.3, 3), (0.5, 5), (0.99, 8), (1.0, 8)]
)
def test_metas_rule_keeps_while_the_mass_before_is_at_most_p(distribution, top_p, kept) -> None:
    """Meta's rule keeps a token while the mass before it is at most p.

    Of eight equal tokens, the third has 0.25 before it, and stays with p = 0.25.
    """
    expected = torch.zeros(8)
    expected[:kept] = 1 / kept
    assert_same(distribution(torch.zeros(8), sequence([1], [], top_p=top_p)), expected)


def test_top_k_keeps_what_equals_the_kth(distribution) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    expected = torch.tensor([1.0, 2.0, 1.0, -INF, 1.0]).softmax(-1)
    assert_same(distribution(logits, sequence([1], [], top_k=2)), expected)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([5, 40, 700]))
def test_a_mixed_batch_draws_what_the_definition_does(seed, vocab) -> None:
    rng = random.Random(seed)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * rng.uniform(
        1, 6
    )
    sequences = [random_sequence(rng, vocab) for _ in range(6)]
    expected = naive_ids(logits, sequences)
    assert sample(logits, sequences).ids.tolist() == expected


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0])
def test_a_nucleus_of_any_size_is_exact(spread) -> None:
    """A nucleus of any size is exact, from one token to nine tenths of 20,000.

    The logits have the ties that 16 bits bring.
    """
    torch.manual_seed(0)
    logits = (torch.randn(16, 20_000) * spread).bfloat16().float()
    params: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.6},
        {"top_p": 0.9, "top_k": 3000},
    ]
    sequences = [sequence([1], [], seed=i, **params[i % 3]) for i in range(16)]
    expected = naive_ids(logits, sequences)
    assert sample(logits, sequences).ids.tolist() == expected


# --- chance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_its_authors_known_answers(counter, key, words) -> None:
    """Philox gives the known answers of its authors.

    They are from Random123's table for philox2x32-10. The lowest bit of a word is not used.
    """
    seed = torch.tensor([counter[1] << 32 | key], dtype=torch.uint64).view(torch.int64)
    found = uniform(seed, torch.tensor([counter[0]]))
    assert found.tolist() == [(words[0] >> 1 << 31) + (words[1] >> 1)]


def test_numbers_differ_by_seed_by_position_and_by_both_words_of_the_seed() -> None:
    seeds = torch.tensor([0, 1, 2, 2**32, 2**62, 2**63 - 1]).repeat_interleave(2000)
    positions = torch.arange(2000).repeat(6)
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 2**62
    high, low = numbers >> 31, numbers & 2**31 - 1
    assert len(high.unique()) > 12_000 - 5  # chance alone makes 0.03 pairs
    assert all(abs(word.double().mean() / 2**31 - 0.5) < 0.01 for word in (high, low))
    again = uniform(seeds[77:78], positions[77:78])
    assert torch.equal(again, numbers[77:78])


def test_a_draw_depends_on_its_row_its_seed_and_its_position_alone() -> None:
    """A draw depends on its row, its seed and its position alone.

    It does not depend on neighbours, row order, batch size, or how earlier tokens were divided into
    steps. The ids are exact, as a row's weights are integers; log probabilities are torch's.
    """
    torch.manual_seed(2)
    vocab, rng = 3000, random.Random(2)
    logits = (torch.randn(32, vocab) * 3).bfloat16().float()
    sequences = [random_sequence(rng, vocab) for _ in range(31)] + [sequence(temperature=0.0)]
    together = sample(logits, sequences)
    assert together.logprobs is not None
    order = torch.randperm(32)
    shuffled = sample(logits[order], [sequences[i] for i in order])
    assert torch.equal(shuffled.ids, together.ids[order])
    for row, seq in enumerate(sequences):
        alone = sample(logits[row : row + 1], [seq])
        assert alone.ids[0] == together.ids[row]
        if alone.logprobs is not None:
            assert_close(alone.logprobs[0], together.logprobs[row])


def test_a_seed_repeats_itself_and_another_differs() -> None:
    logits = torch.zeros(64, 1000)
    first = sample(logits, many(64)).ids
    assert torch.equal(sample(logits, many(64)).ids, first)
    assert len(first.unique()) > 50
    by_position = [state_of([0] * n, 99, 0) for n in range(1, 65)]
    assert len(sample(logits, by_position).ids.unique()) > 50


@pytest.mark.parametrize("params", [{}, {"top_p": 0.99}, {"top_k": 3}, {"temperature": 1e-4}])
@pytest.mark.parametrize("number", [0, 2**62 - 1])
def test_the_least_and_the_greatest_number_stay_inside(monkeypatch, params, number) -> None:
    """The smallest and the largest random number give a token with a probability.

    The ends of the vocabulary have none, and rounding must not give them any.
    """
    monkeypatch.setattr(op, "uniform", lambda seeds, _: torch.full((len(seeds),), number))
    logits = torch.cat((torch.full((9,), -INF), torch.zeros(700), torch.full((9,), -INF)))
    assert naive(logits, sequence(**params))[sample(logits[None], [sequence(**params)]).ids] > 0


# --- greedy, and rows without an answer ------------------------------------------------------


def test_greedy_takes_the_first_of_the_top_ones_whatever_the_filters() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.1}, {"top_k": 2, "min_p": 0.5}, {"seed": 5}]
    for params in filters:
        greedy, drawn = sequence([0], [], temperature=0, **params), sequence([0], [])
        assert sample(logits, [greedy]).ids.tolist() == [1]
        assert sample(logits.expand(2, -1), [drawn, greedy]).ids[1] == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_tops_of_shares_are_what_the_whole_row_gives(num_ranks) -> None:
    """Merging the top values of vocabulary shares gives the result of the whole row.

    The cases are ties within a share and between shares, and rows with NaN or infinities, some or
    only.
    """
    rng = random.Random(num_ranks)
    draw = torch.Generator().manual_seed(num_ranks)
    for _ in range(200):
        vocab = num_ranks * rng.choice([1, 3, 40, 256])
        logits = torch.randint(-3, 2, (4, vocab), generator=draw) * 0.5
        for odd in rng.sample([torch.nan, INF, -INF, -0.0], 2):
            logits[rng.randrange(4), rng.randrange(vocab)] = odd
        logits[rng.randrange(4)] = rng.choice([torch.nan, INF, -INF, 1.0])
        shares = logits.chunk(num_ranks, dim=1)
        pairs = [top_of_share(x, i * x.shape[1]) for i, x in enumerate(shares)]
        wanted = sample(logits, [sequence(temperature=0)] * 4).ids
        assert torch.equal(top_of_all(torch.cat(pairs, dim=1)), wanted)


def test_only_rows_that_take_the_top_token_as_it_is_need_no_more() -> None:
    more: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {5: 0.1}},
        {"bad_words": ((3,),)},
        {"bad_words": ((9, 3),)},
        {"min_tokens": 4, "stop_ids": (3,)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ]
    less: list[dict[str, Any]] = [
        {"top_p": 0.5, "top_k": 3, "min_p": 0.9},
        {"min_tokens": 3, "stop_ids": (3,)},
        {"prompt_logprobs": 3},
    ]
    rows = [sequence(**({"temperature": 0.0} | params)) for params in less]
    assert needs_top_only(rows)
    for params in more:
        assert not needs_top_only([*rows, sequence(**({"temperature": 0.0} | params))]), params


def test_greedy_heeds_bias_bans_and_penalties() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"logit_bias": {5: 100.0}}, 5),
        ({"bad_words": ((3,), (7,))}, 1),
        ({"min_tokens": 4, "stop_ids": (3, 7, 1)}, 10),
        ({"repetition_penalty": 5.0}, 7),
        ({"presence_penalty": 2.0}, 7),
        ({"frequency_penalty": 2.0}, 7),
    ]
    sequences = [sequence(temperature=0, **params) for params, _ in cases]
    ids = sample(LOGITS.expand(len(cases), -1), sequences).ids
    assert LOGITS.argmax() == 3
    assert ids.tolist() == [token for _, token in cases]


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"logprobs": 2}]
)
@pytest.mark.parametrize("fault", ["nan", "inf", "all -inf", "all banned"])
def test_a_row_without_an_answer_is_marked_and_harms_no_other(params, fault) -> None:
    good, bad = sequence(**params), sequence(**params)
    logits = LOGITS.repeat(3, 1)
    if fault == "nan":
        logits[1, 6] = torch.nan
    elif fault == "inf":
        logits[1, 6] = INF
    elif fault == "all -inf":
        logits[1] = -INF
    else:
        bad = sequence(bad_words=tuple((i,) for i in range(12)), **params)
    sampled = sample(logits, [good, bad, good])
    (expected,) = naive_ids(LOGITS[None], [good])
    assert sampled.ids.tolist() == [expected, -1, expected]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e30])
def test_no_temperature_makes_numbers_overflow(temperature, size) -> None:
    ids = sample(LOGITS[None] * size, [sequence(temperature=temperature, top_p=0.9)]).ids
    assert 0 <= ids[0] < 12
    if temperature < 1 <= size:
        assert ids[0] == 3


def test_logits_are_left_as_they_are() -> None:
    rng, logits = random.Random(4), LOGITS.repeat(16, 1)
    sample(logits, [random_sequence(rng, 12) for _ in range(16)])
    assert torch.equal(logits, LOGITS.repeat(16, 1))


# --- log-probabilities -----------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    """Reported log probabilities are the model's own.

    Bias, penalty, temperature and filters change only the row that was drawn from.
    """
    changed = sequence(
        logprobs=2, temperature=0.3, top_k=2, logit_bias={5: 9.0}, repetition_penalty=2.0
    )
    sequences = [changed, sequence(logprobs=0), sequence(temperature=0)]
    sampled = sample(LOGITS.expand(3, -1), sequences)
    expected = LOGITS.log_softmax(-1)
    assert sampled.ids[0] == 5
    assert sampled.logprobs is not None and sampled.top_logprobs is not None
    assert_close(sampled.logprobs, expected[sampled.ids])
    assert sampled.top_ids is not None and sampled.top_ids.tolist() == [[3, 7]] * 3
    assert_close(sampled.top_logprobs, expected[[3, 7]].expand(3, -1))


def test_logprobs_cost_nothing_unless_asked_for() -> None:
    sampled = sample(LOGITS[None], [sequence()])
    assert sampled.logprobs is sampled.top_ids is sampled.top_logprobs is None
    sampled = sample(LOGITS[None], [sequence(logprobs=0)])
    assert sampled.logprobs is not None and sampled.top_ids is sampled.top_logprobs is None


def test_score_gives_each_targets_logprob_and_the_likeliest() -> None:
    torch.manual_seed(5)
    logits, targets = torch.randn(7, 30) * 50, torch.arange(7) * 4
    expected = logits.log_softmax(-1)
    logprobs, top_ids, top_logprobs = score(logits, targets, 3)
    assert top_ids is not None and top_logprobs is not None
    assert_close(logprobs, expected[torch.arange(7), targets])
    assert torch.equal(top_ids, expected.sort(descending=True).indices[:, :3])
    assert_close(top_logprobs, expected.sort(descending=True).values[:, :3])
    assert score(logits, targets, 0)[1:] == (None, None)
    whole = score(logits, targets, 99)[1]
    assert whole is not None and whole.shape == (7, 30)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_score_of_a_row_has_the_bits_of_any_batch(num_threads: int) -> None:
    """PyTorch alone would divide the sum of a single row of more than 32,768 among threads."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 49_412, generator=draw) - 11
    logits[:, 0] = 0  # sums of about 2: each of their bits is seen in their logarithm
    targets = torch.arange(40)
    torch.set_num_threads(num_threads)  # fixtures restore the number
    together, _, top = score(logits, targets, 1)
    alone = [score(logits[i : i + 1], targets[i : i + 1], 1) for i in range(40)]
    assert torch.equal(torch.cat([x[0] for x in alone]), together)
    assert top is not None and torch.equal(torch.cat([cast(Tensor, x[2]) for x in alone]), top)


# --- Meta's public function ------------------------------------------------------------------


def test_sample_top_p_follows_metas_rule() -> None:
    """sample_top_p follows Meta's rule.

    The reference's steps, written out: drop tokens where the mass before exceeds p, then
    renormalise.
    """
    torch.manual_seed(6)
    probs = (torch.randn(64, 200) * 3).softmax(-1)
    for p in (0.0, 0.3, 0.9, 1.0):
        ordered, order = torch.sort(probs, dim=-1, descending=True)
        ordered[torch.cumsum(ordered, -1) - ordered > p] = 0.0
        torch.manual_seed(7)
        drawn = torch.multinomial(ordered / ordered.sum(-1, keepdim=True), num_samples=1)
        torch.manual_seed(7)
        found = sample_top_p(probs, p)
        assert found.shape == (64, 1)
        assert torch.equal(found, order.gather(-1, drawn))
    assert torch.equal(sample_top_p(probs, 0.0), probs.argmax(-1, keepdim=True))


def test_what_is_counted_on_the_device_is_what_the_sequences_have() -> None:
    """Token counts on the device equal those of the sequences.

    Rows come, go, move, pause and take drafts; the ids are those of sequences counted anew.
    """
    rng, kept = random.Random(4), LogitsProcessors()
    draw = torch.Generator().manual_seed(4)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4}, {"presence_penalty": 0.7, "frequency_penalty": -0.4}, {},
        {"repetition_penalty": 0.6, "frequency_penalty": 0.9, "logit_bias": {3: 2.0, 4: -1.0}},
        {"min_tokens": 6, "stop_ids": (1, 2, 3)}, {"bad_words": ((3,), (1, 2), (2, 2))},
    ]  # fmt: skip
    live: list[SequenceState] = []
    for _ in range(120):
        live = [seq for seq in live if rng.random() < 0.9]
        while len(live) < rng.randrange(1, 6):
            output = [rng.randrange(12) for _ in range(rng.randrange(3))]
            params = rng.choice(settings) | {"temperature": rng.choice((0.0, 1.0))}
            live.append(sequence([rng.randrange(12) for _ in range(4)], output, **params))
        rng.shuffle(live)
        now = [seq for seq in live if rng.random() < 0.9]
        if not now:
            continue
        logits = torch.randn(len(now), 12, generator=draw)
        found = sample(logits, now, processors=kept).ids
        assert found.equal(sample(logits, now).ids)
        for seq, token in zip(now, found.tolist(), strict=True):
            seq.tokens.append(token)
            if rng.random() < 0.1:  # the drafts after it were accepted
                seq.tokens += [rng.randrange(12) for _ in range(2)]


def test_no_token_is_looked_at_twice(monkeypatch) -> None:
    """No token is read twice: the host's cost of a step does not grow with the sequences."""
    params: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "logit_bias": ((3, 1.0),),
    }
    rows = [state_of([i, 5, 6], 99, i, **params) for i in range(3)]
    kept, logits = LogitsProcessors(), torch.zeros(3, 12)
    sent: list[int] = []
    to_device = processors.on_device_of

    def noted(tensor: Tensor, values: Any) -> Tensor:
        sent.append(len(values))
        return to_device(tensor, values)

    monkeypatch.setattr(processors, "on_device_of", noted)
    for step in range(5):
        sent.clear()
        for seq, token in zip(
            rows, sample(logits, rows, processors=kept).ids.tolist(), strict=True
        ):
            seq.tokens.append(token)
        assert bool(sent) == (step == 0), sent
