"""Speculation changes no bit: runs with drafts are compared with runs without, on the CPU."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import reference
from helpers.checkpoints import random_state, write_meta
from helpers.drafts import (
    PROMPTS,
    Drafts,
    answers,
    cached,
    drafter_of,
    key,
    requests_of,
    without_drafts,
)
from helpers.flags import read
from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from helpers.sequences import state_of
from llama import Llama, ModelArgs, SamplingParams, Transformer
from llama.checkpoint.packing import pack_model
from llama.cli import COMMANDS
from llama.cli.chat.conversation import TurnStats
from llama.cli.model import figures, load
from llama.engine.core import PAGE_SIZE, EngineCore
from llama.engine.rows import Reader
from llama.engine.runner import ModelRunner
from llama.engine.sequence import SequenceState
from llama.kernels.host import host_kernels
from llama.loading.files import Files
from llama.ops.batch import Batch
from llama.ops.kernels import Kernels
from llama.ops.kv_cache import AS_COMPUTED, FORMATS
from llama.options.engine_options import EngineOptions
from llama.options.speculation.draft_model import ModelDrafter, SequenceDraft
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.speculation.hook import DRAFTERS, DrafterKind, speculate
from llama.options.speculation.lookup import Speculator
from llama.options.speculation.texts import Lookup, Text
from llama.ranks.parallel import Parallel
from llama.server.engine_metrics import EngineMetrics
from llama.server.metrics import ActiveRequest, Metrics
from llama.weights.blocks import BlockedWeight

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")


@pytest.mark.parametrize(
    ("quantize", "num_kv_heads"),
    [
        *itertools.product([None, "KV cache"], [8, 2, 1]),
        # attention does not depend on the format of the weights
        *((name, 2) for name in ("int8", "fp8", "int4")),
    ],
)
@pytest.mark.parametrize("vocab_size", [128, 130])
def test_a_row_of_a_chunk_has_the_bits_of_a_single_step(
    num_kv_heads, quantize, vocab_size, kernels
):
    """A row of a chunk has the bits of a single decode step.

    The contexts lie around the edge of a chunk of 256 keys, and drafts have every length. A
    vocabulary that does not fill its blocks concerns lm_head, whose rows depend on no context.
    """
    sizes = {"dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": num_kv_heads}
    args = ModelArgs(**sizes, vocab_size=vocab_size, multiple_of=32, max_seq_len=320)
    in_8_bits = quantize == "KV cache"
    kv_format = FORMATS["int8"] if in_8_bits else AS_COMPUTED
    model = Transformer(args, dtype=torch.bfloat16, kv_format=kv_format)
    state = random_state(vars(args))
    for name, share in model.named_shards().items():
        share.copy_(state[name])
    pack_model(model, quantize=None if in_8_bits else quantize)
    tokens = torch.randint(128, (272,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.new_kv_cache(20, 16)

    def logits(start: int, count: int) -> torch.Tensor:
        """Return logits (count, V) of tokens after `start` others whose keys and values are
        cached.
        """
        new = tokens[start : start + count]
        ids, batch = Batch.pack(
            new, [start], [count], [range(20)], 16, range(count), torch.device("cpu")
        )
        with torch.inference_mode():
            return model.logits(model.hidden_states(ids, batch, cache))

    logits(0, 255)
    alone = torch.cat([logits(i, 1) for i in range(255, 272)])
    for context in range(255, 259 if vocab_size == 128 else 256):
        for drafts in range(1, 14):
            first = context - 255
            found = logits(context, 1 + drafts)
            assert found.equal(alone[first : first + 1 + drafts]), (context, drafts)


class RandomLengths(ModelDrafter):
    """A drafter of 0 to `max_drafts` tokens, independent of measured times."""

    def _draft(self, states: list[SequenceDraft], seconds: float) -> list[list[int]]:
        self.rng = random.Random(sum(len(x.seq.tokens) for x in states))
        return super()._draft(states, seconds)

    def choose(self, rates: list[list[float]], seconds: float, min_drafts: int = 0) -> list[int]:
        return [self.rng.randint(0, len(each)) for each in rates]


def lookup_drafter(max_drafts: int = 7, *, is_shared: bool = False) -> Speculator:
    return Speculator(max_drafts, Parallel(), is_shared)


def runner_of(model: Transformer, num_pages: int) -> ModelRunner:
    return ModelRunner(model, model.new_kv_cache(num_pages, PAGE_SIZE), num_pages)


Plain = tuple[Llama, list[tuple], dict[tuple, list[int]]]


@pytest.fixture(scope="module")
def plain(make_checkpoint) -> Plain:
    return built(make_checkpoint)


@pytest.fixture(scope="module")
def in_8_bits(make_checkpoint) -> Plain:
    return built(make_checkpoint, kv_cache_dtype="int8")


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
def test_drafts_change_no_bit_where_the_vocabulary_does_not_fill_its_blocks(tied, make_checkpoint):
    """The kernels multiply such an lm_head, and no answer has any of its padding.

    Logits are those of a float64 model with the same weights, within the error of bf16.
    """
    folder, state, params = make_checkpoint(seed=24, num_tokens=2050, dim=128, vocab_size=2050)
    if tied:
        params = params | {"tied_output": True}
        state = {name: x for name, x in state.items() if name != "output.weight"}
        write_meta(folder, params, state)
        state["output.weight"] = state["tok_embeddings.weight"]
    llama = Llama.build(str(folder), None, 128, 8, device="cpu", dtype="bf16")
    assert type(llama.model.output.weight) is BlockedWeight
    found, _ = without_drafts(llama)
    requests = list(requests_of(llama))
    speculating = Llama(llama.model, llama.tokenizer, options=EngineOptions(num_pages=300))
    speculate(speculating.engine, lookup_drafter())
    assert answers(speculating, requests) == found
    assert speculating.engine.stats.draft_tokens > 20
    together = [x for x in found if len(x) == 4]
    alone = []
    for request in requests_of(llama):
        alone += [x for x in answers(llama, [request]) if len(x) == 4]
    assert alone == together
    rounded = {name: x.bfloat16().double() for name, x in state.items()}
    for tokens in PROMPTS[:3]:
        logits = llama.model.forward(torch.tensor([tokens]), 0)[0]
        expected = reference.logits(rounded, params, tokens)
        assert logits.shape == (len(tokens), 2050)
        assert (logits - expected).abs().max() < 0.02 * expected.abs().max()


def built(make_checkpoint, **options) -> Plain:
    """A bf16 model, its answers without drafts, and the tokens of each sequence."""
    folder, _, _ = make_checkpoint(seed=24, dim=128)  # heads of 32, which the kernels support
    llama = Llama.build(str(folder), None, 128, 8, device="cpu", dtype="bf16", **options)
    return llama, *without_drafts(llama)


@needs_kernels
@pytest.mark.parametrize("num_pages", [300, 9])
@pytest.mark.parametrize(
    "kind", ["oracle", "wrong", "some", "stop_ids", "too_long", "lookup", "shared", "model"]
)
def test_drafts_change_no_answer(kind, num_pages, plain, monkeypatch):
    """Drafts change no answer: text, ids, bits of log probabilities, finish reasons and usage.

    The pages suffice for the whole batch, or they do not, and sequences are preempted.
    """
    model, found, truth = plain
    llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=num_pages))
    core = llama.engine
    drafter: Drafter = Drafts(kind, truth)
    if kind in ("lookup", "shared"):
        drafter = lookup_drafter(is_shared=kind == "shared")
    if kind == "model":
        drafter = RandomLengths(4, runner_of(model.model, num_pages), core.scheduler)
    speculate(core, drafter)
    requests = list(requests_of(llama))
    assert answers(llama, requests) == found
    assert core.stats.draft_tokens > (20 if kind in ("lookup", "shared") else 100)
    assert bool(core.scheduler.num_preemptions) == (num_pages < 99)
    if kind == "model":
        sequences = [answer.sequence for request in requests for answer in request.answers]
        free = [seq for seq in sequences if not seq.spec.is_constrained]
        assert sum(seq.num_drafted for seq in free) > 100
        # the draft model is the model itself
        assert all(seq.num_accepted == seq.num_drafted for seq in free)
    if kind in ("oracle", "wrong") and num_pages > 99:
        assert core.stats.steps < 40 if kind == "oracle" else core.stats.accepted_tokens == 0
    assert core.scheduler.pool.num_free == num_pages


@needs_kernels
def test_an_abort_among_drafts_frees_its_pages(plain):
    """Aborting sequences among drafts frees their pages.

    Every third sequence is aborted after some steps; its tokens so far are right, and the others go
    on.
    """
    model, _, truth = plain
    llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=300))
    core = llama.engine
    speculate(core, Drafts("some", truth))
    added = [answer.sequence for request in requests_of(llama) for answer in request.answers]
    core.step(added=added)
    while core.stats.accepted_tokens < 20:
        core.step()
    live = [seq for seq in added if not seq.finished]
    core.step(removed=live[::3])
    while core.has_unfinished():
        core.scheduler.check()
        core.step()
    for seq in added:
        # in the reference run, stop strings ended some sequences
        pairs = zip(seq.tokens, truth[key(seq)], strict=False)
        assert all(token == wanted for token, wanted in pairs)
        assert (seq.finish_reason == "abort") == (seq in live[::3])
    assert core.scheduler.pool.num_free == 300 and len(live) > 6


@needs_kernels
def test_beam_search_is_not_drafted_for(plain):
    """Beam search is not drafted for.

    Each round asks each beam for one token, so drafts could save nothing, and none are looked up.
    """
    model = plain[0]
    found = []
    for max_drafts in (0, 7):
        llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=100))
        if max_drafts:
            speculate(llama.engine, lookup_drafter(max_drafts))
        # one beam needs a new page, and one token is left
        found.append(llama.beam_search(["abab" * 9], 3, 20))
    assert found[0] == found[1]
    drafter = drafter_of(llama.engine)
    assert isinstance(drafter, Speculator) and drafter._states
    assert not any(state.lookup for state in drafter._states.values())
    assert llama.engine.stats.draft_tokens == 0


@needs_kernels
def test_a_draft_model_computes_what_it_has_not_had(plain, monkeypatch):
    """A draft model computes the keys and values that it lacks.

    The pages of a prompt are found by their hashes. The draft model has computed them only if it
    drafted for that text before; otherwise it computes them now. Its drafts are right in both
    cases.
    """
    model = plain[0]
    llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=40))
    core = llama.engine
    drafter = RandomLengths(4, runner_of(model.model, 40), core.scheduler)
    num_computed, start = [0], drafter._start

    def counted(drafts: list[SequenceDraft]) -> Reader[list[int]]:
        before = sum(draft.num_computed for draft in drafts)
        found = start(drafts)
        num_computed[-1] += sum(draft.num_computed for draft in drafts) - before
        return found

    monkeypatch.setattr(drafter, "_start", counted)
    cached = []
    for each in (None, drafter, drafter):
        speculate(core, each)
        seq = state_of(PROMPTS[9] * 2, 90, 7, temperature=0.7)
        core.add(seq)
        while core.has_unfinished():
            core.step()
        assert seq.num_accepted == seq.num_drafted
        cached.append(seq.num_cached)
        num_computed.append(0)
    assert cached == [0, 48, 48] and seq.num_drafted > 9
    assert num_computed[0] == 0 and num_computed[1] > num_computed[2] + 40


@needs_kernels
@pytest.mark.parametrize(("kind", "num_pages"), [("some", 300), ("some", 9), ("model", 9)])
def test_drafts_change_no_answer_with_a_cache_in_8_bits(
    kind, num_pages, in_8_bits, plain, monkeypatch
):
    """Drafts change no answer with an int8 cache, a warm prefix cache or preemption.

    The answers are compared with those of the same kind of cache.
    """
    test_drafts_change_no_answer(kind, num_pages, in_8_bits, monkeypatch)
    assert in_8_bits[1] != plain[1]


@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "in_8_bits"])
def test_drafts_leave_the_cache_as_it_would_be(kind, request):
    """Drafts leave the cache as it would be without them.

    The bytes of all valid keys and values, and the pages that a later prompt finds, are equal.
    """
    model, truth = request.getfixturevalue(kind)[0], dict[tuple, list[int]]()
    found = [cached(model, kind, truth) for kind in (None, "some", "oracle")]
    (slots, tokens, hashes, steps), *with_drafts = found
    assert len(hashes) == 6
    for other in with_drafts:
        assert other[0].equal(slots) and other[1:3] == (tokens, hashes) and other[3] < steps / 2


@needs_kernels
def test_a_model_is_built_with_a_draft_model(plain, make_checkpoint, monkeypatch):
    """A model is built with a draft model.

    The answers are those without it; its drafts, keys and values are those of a model that reads
    each text anew; and its memory is counted. A pair that does not match is an error before weights
    load.
    """
    folder, _, _ = make_checkpoint(seed=24, dim=128)
    small, _, _ = make_checkpoint(seed=25, dim=128, n_layers=1)
    common: dict[str, Any] = {"device": "cpu", "dtype": "bf16", "max_seq_len": 128}
    # keyed by n_layers
    own = {n: Kernels(host_kernels().functions) for n in (1, 2)}

    def choose(files: Files, *_: Any) -> Files:
        return replace(files, kernels=own[files.checkpoint.params.n_layers])

    monkeypatch.setattr("llama.loading.choose_kernels", choose)
    asked = list[Transformer]()
    monkeypatch.setattr("llama.generation.recorder_for", asked.append)
    monkeypatch.setattr("llama.assembly.ModelDrafter", RandomLengths)
    llama = Llama.build(
        str(folder), max_batch_size=8, speculate=str(small), speculate_tokens=4, **common
    )
    core = llama.engine
    drafter = drafter_of(core)
    assert isinstance(drafter, ModelDrafter)
    assert asked == [drafter._runner.model, llama.model]  # graphs of each model
    assert [model.kernels for model in asked] == [own[1], own[2]]
    compared, num_pages = [0], core.scheduler.pool.num_pages

    def draft(sequences: list[SequenceState], seconds: float) -> list[list[int]]:
        found = original(sequences, seconds)
        anew = RandomLengths(4, runner_of(drafter._runner.model, num_pages), core.scheduler)
        assert anew.draft(sequences, seconds) == found
        for seq in sequences:
            states = [each._states[seq] for each in (drafter, anew)]
            known = min(len(seq.tokens), *(state.num_computed for state in states))
            caches = [each._runner.kv_cache[:, :, list(seq.pages)] for each in (drafter, anew)]
            own, fresh = (cache.flatten(2, 3)[:, :, :known] for cache in caches)
            assert own.equal(fresh)
        compared[0] += sum(map(len, found))
        return found

    original = drafter.draft
    monkeypatch.setattr(drafter, "draft", draft)
    assert answers(llama, list(requests_of(llama))) == plain[1]
    assert compared[0] > 100 and 0 < core.stats.accepted_tokens < core.stats.draft_tokens / 2
    per_token = 2 * 2 * 64 * 3  # bytes of keys and values of 2 heads of 64, in 2 + 1 layers
    bounded = Llama.build(
        str(folder), speculate=str(small), kv_cache_memory_bytes=per_token * 16 * 9, **common
    )
    assert bounded.engine.scheduler.pool.num_pages == 9
    for bad, words in [(str(DEMO), "has another vocabulary"), ("nowhere", "nor a draft model: ")]:
        with pytest.raises(ValueError, match=words):
            Llama.build(str(folder), speculate=bad, **common)


@needs_kernels
@pytest.mark.parametrize("is_shared", [False, True])
def test_texts_of_others_are_looked_up_where_that_is_asked_for(is_shared, plain, monkeypatch):
    """Texts of other requests are searched for drafts where that is enabled.

    A request, another one, and the first one again have the same bits, in far fewer steps where
    texts are shared. The amount of text that is kept is bounded.
    """
    model, drafted, found = plain[0], list[int](), list[list[int]]()
    llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=40))
    speculator = lookup_drafter(is_shared=is_shared)
    speculate(llama.engine, speculator)
    monkeypatch.setattr(speculator, "choose", lambda rates, _: [len(x) for x in rates])
    for prompt in (1, 2, 1):
        before = llama.engine.stats.accepted_tokens
        asked = SamplingParams(temperature=1, max_tokens=60, seed=3, ignore_eos=True)
        request = llama.llm_engine.prepare("", PROMPTS[prompt], asked)
        found.append(llama.llm_engine.run([request])[0].outputs[0].token_ids)
        drafted.append(llama.engine.stats.accepted_tokens - before)
    assert found[0] == found[2] != found[1]
    assert (drafted[2] > 45) == is_shared and drafted[0] < 9, drafted
    texts = [[i] * 40_000 for i in range(8)]
    for seq in [state_of(text, 50_000) for text in texts]:
        speculator.draft([seq], 0.0)
        seq.finish_reason = "stop"
    ended = Text(4)
    for token in [*range(9), -1, 7]:
        ended.append(token)
    lookup = Lookup(range(4), others=[ended])
    assert lookup.draft(9) == [4, 5, 6, 7, 8]
    assert (speculator._ended_texts is not None) == is_shared
    if speculator._ended_texts is not None:
        kept = [text.ids for text in speculator._ended_texts.of(b"")]
        assert sum(map(len, kept)) < 200_000
        assert [ids[-2] for ids in kept] == [6, 5]


@needs_kernels
def test_a_prediction_is_where_drafts_come_from(plain):
    """Drafts come from a prediction that the request brings.

    The prompt contains nothing of the answer; the prediction contains all of it but two tokens.
    """
    model, found = plain[0], list[tuple[list[int], int]]()
    for kind in ("without", "wrong", "right"):
        llama = Llama(model.model, model.tokenizer, options=EngineOptions(num_pages=40))
        speculate(llama.engine, lookup_drafter())
        text = "" if kind == "without" else "no word of it, and none"
        asked = SamplingParams(temperature=1, max_tokens=60, seed=3, prediction=text)
        request = llama.llm_engine.prepare("", PROMPTS[1], asked)
        if kind == "right":
            ids = found[0][0]
            seq = request.answers[0].sequence
            seq.spec = replace(seq.spec, prediction=(*ids[:9], 1, 2, *ids[11:]))
        (output,) = llama.llm_engine.run([request])
        found.append((output.outputs[0].token_ids, llama.engine.stats.steps))
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[2][1] < 25 < 45 < found[1][1], found
    # two tokens are wrong, and one ends the search
    assert output.num_predicted() == (57, 3)


@needs_kernels
def test_a_model_is_built_to_speculate(plain, make_checkpoint, caplog):
    """A model is built with speculation.

    Its answers equal those of a model without it, in fewer steps; the log, /metrics and the figures
    report how many tokens were drafted and how many were accepted.
    """
    folder, _, _ = make_checkpoint(seed=24, dim=128)
    options = read("llama", COMMANDS["chat"], [str(folder), "--max_seq_len", "128"], {
        "LLAMA_SPECULATE": "lookup", "LLAMA_DEVICE": "cpu", "LLAMA_DTYPE": "bf16",
        "LLAMA_SPECULATE_SHARED": "1",
    })  # fmt: skip
    fast = load(options)
    speculator = drafter_of(fast.engine)
    assert isinstance(speculator, Speculator)
    assert speculator._ended_texts is not None
    prompt = (PROMPTS[3] * 4)[:60]
    bias = dict.fromkeys(PROMPTS[3], 12.0)
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias=bias, ignore_eos=True)
    outputs = []
    for llama in (fast, plain[0]):
        before = llama.engine.stats.steps
        request = llama.llm_engine.prepare("", prompt, params)
        (output,) = llama.llm_engine.run([request])
        outputs.append((output.outputs[0].token_ids, llama.engine.stats.steps - before))
        if llama is fast:
            assert 0 < output.usage.accepted_tokens <= output.usage.draft_tokens
            usage, stats = output.usage, llama.engine.stats
            assert usage.accepted_tokens == stats.accepted_tokens
            with caplog.at_level("INFO", "llama.server"):
                ActiveRequest("id", [request]).log()
    assert outputs[0][0] == outputs[1][0] and outputs[0][1] < outputs[1][1] * 0.8
    right, drafted = usage.accepted_tokens, usage.draft_tokens
    assert f"60 generated ({drafted} drafted, {right} accepted), ended" in caplog.text
    assert f"| {right} of {drafted} drafted tokens accepted |" in figures(fast)
    assert (
        TurnStats(1.0, 2.0, usage)
        .describe(None)
        .endswith(f" | {right} of {drafted} drafted tokens accepted")
    )
    metrics = Metrics()
    metrics.registry.register(EngineMetrics(fast, lambda: 0))
    counted = {"drafts": stats.drafts, "draft_tokens": drafted, "accepted_tokens": right}
    for name, value in counted.items():
        line = f"llama:spec_decode_num_{name}_total {float(value)}"
        assert line in metrics.text().decode().splitlines()
    places = {f'"{i}"': n for i, n in stats.accepted_at.items()}
    for place, count in places.items():
        line = f"llama:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}} {count}.0"
        assert line in metrics.text().decode().splitlines()
    assert sum(places.values()) == right and places['"0"'] == max(places.values())
    with pytest.raises(ValueError, match="speculate='model', neither 'lookup' nor a draft model: "):
        Llama.build(str(folder), speculate="model")
    with pytest.raises(TypeError, match="speculate=3: give 'lookup', a draft model, or None"):
        Llama.build(str(folder), speculate=3)  # type: ignore[arg-type]
    for other in (None, str(folder)):
        with pytest.raises(ValueError, match="give speculate='lookup', or leave out speculate_sh"):
            Llama.build(str(folder), speculate=other, speculate_shared=True)


class Bigrams(Drafter):
    """A drafter with weights: the token that follows each token."""

    def __init__(self, options: EngineOptions, core: EngineCore) -> None:
        super().__init__(options.speculate_tokens, core.runner.model.parallel, [])
        folder = str(options.speculate)
        self.following = torch.load(Path(folder, "bigrams.pt"), weights_only=True).tolist()

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        return [[self.following[state.seq.tokens[-1]]] for state in states]


def test_a_drafter_with_weights_finds_its_own_folder(tmp_path, monkeypatch):
    """A folder that a drafter of the table reads is no draft model, and answers stay the same."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    kind = DrafterKind(Bigrams, reads=lambda folder: Path(folder, "bigrams.pt").is_file())
    monkeypatch.setitem(DRAFTERS, "bigrams", kind)
    with pytest.raises(ValueError, match="nor a draft model"):
        Llama.build(str(DEMO), device="cpu", speculate=str(tmp_path), max_seq_len=128)
    found = []
    for speculate_with in (None, str(tmp_path)):
        llama = Llama.build(
            str(DEMO), device="cpu", max_seq_len=128, speculate=speculate_with, verbose=False
        )
        request = llama.llm_engine.prepare("", PROMPTS[0], params)
        (output,) = llama.llm_engine.run([request])
        ids = output.outputs[0].token_ids
        found.append(ids)
        following = torch.zeros(llama.model.vocab_size, dtype=torch.int64)
        following[ids[:-1]] = torch.tensor(ids[1:])
        torch.save(following, tmp_path / "bigrams.pt")
    assert found[0] == found[1] and llama.engine.stats.accepted_tokens > 5
    with pytest.raises(ValueError, match="give speculate='lookup', or leave out speculate_shared"):
        Llama.build(str(DEMO), device="cpu", speculate=str(tmp_path), speculate_shared=True)
