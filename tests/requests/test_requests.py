"""LLMEngine, streaming, beam search and the async engine, on a random model.

The oracles are the same requests alone, transformers' beam search and generate on the same weights,
and the answers without streaming.
"""

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helpers.launch import DEMO
from helpers.prompts import prompts_of
from helpers.scheduling import never_found
from llama import Dialog, Llama, Message
from llama.checkpoint.write.convert import convert
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.beam_search import Beam, BeamParams, _Search
from llama.requests.llm_engine import LLMEngine
from llama.requests.prepare import ContextLengthError
from llama.requests.request import RequestOutput
from llama.requests.seeds import derived_seed
from llama.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def llama(checkpoint_dir) -> Llama:
    return Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def demo() -> Llama:
    return Llama.build(str(DEMO), None, 384, 8, device="cpu", dtype="fp32")


# No byte occurs twice in the UTF-8 of this text, so each byte has one successor.
BABBLE = "é😀漢字한ひ⛄. "


@pytest.fixture(scope="module")
def babbler(make_checkpoint) -> Llama:
    """A model that repeats BABBLE byte by byte, with one byte in fifty astray.

    Its layers add nothing, its hidden states are one-hot, and each row of lm_head points at the
    preceding bytes.
    """
    folder, state, _ = make_checkpoint(n_layers=1, dim=512, ffn_dim_multiplier=0.02, seed=7)
    data = BABBLE.encode()
    assert len(set(data)) == len(data)
    state["tok_embeddings.weight"] = torch.eye(512) * 512**0.5
    state["layers.0.attention.wo.weight"].zero_()
    state["layers.0.feed_forward.w2.weight"].zero_()
    state["norm.weight"].fill_(1.0)
    state["output.weight"].zero_()
    follows = dict(zip(data, data[1:] + data[:1], strict=True))
    for byte in range(512):
        after = follows.get(byte, data[byte % len(data)])
        state["output.weight"][after, byte] = 10 / 512**0.5
    torch.save(state, folder / "consolidated.00.pth")
    return Llama.build(str(folder), None, 128, 50, device="cpu", dtype="fp32")


@pytest.fixture
def engine(llama) -> Iterator[LLMEngine]:
    """The module's engine; every test must leave it empty."""
    yield llama.llm_engine
    assert not llama.llm_engine.has_unfinished_requests()
    pool = llama.engine.scheduler.pool
    assert pool.num_free == pool.num_pages
    llama.engine.scheduler.check()


@pytest.fixture(scope="module")
def theirs(checkpoint_dir, tmp_path_factory):
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("beams") / "hf"
    convert(checkpoint_dir[0], folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run(engine: LLMEngine, requests: dict[str, tuple]) -> dict[str, RequestOutput]:
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 6},
    {"temperature": 1.3, "top_k": 12, "seed": 7},
    {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {65: 50.0}},
    {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2, "seed": 9},
    {"temperature": 1.0, "stop": ["a", "e", "i"], "seed": 10},
    {"temperature": 1.0, "stop_token_ids": list(range(60)), "seed": 11, "min_tokens": 4},
    {"temperature": 1.0, "ignore_eos": True, "seed": 12},
    {"temperature": 1.0, "n": 3, "seed": 13},
    {"temperature": 1.0, "n": 2, "best_of": 4, "seed": 14},
]


def answers(output: RequestOutput) -> list[tuple]:
    return [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs]


def test_a_mixed_batch_equals_each_request_alone(engine):
    """A mixed batch equals each request alone.

    All settings run at once, then each by itself, then all in another order with late arrivals.
    """
    prompts = prompts_of([5 + 3 * i for i in range(len(SETTINGS))], seed=30)
    requests = {
        f"r{i}": (prompt, SamplingParams(max_tokens=20, **settings))
        for i, (prompt, settings) in enumerate(zip(prompts, SETTINGS, strict=True))
    }
    together = run(engine, requests)
    for request_id, request in requests.items():
        alone = run(engine, {request_id: request})[request_id]
        assert answers(alone) == answers(together[request_id])
    order = random.Random(0).sample(sorted(requests), len(requests))
    last: dict[str, RequestOutput] = {}
    for request_id in itertools.chain(order, itertools.repeat("")):
        if request_id:
            engine.add_request(request_id, *requests[request_id])
        if not engine.has_unfinished_requests():
            break
        last |= {output.request_id: output for output in engine.step()}
    assert {r: answers(last[r]) for r in requests} == {r: answers(together[r]) for r in requests}


def test_outputs_grow_and_count(engine):
    """Outputs grow and count.

    Each output has the whole text so far and what is new; usage adds up; ids come in the order of
    steps.
    """
    (prompt,) = prompts_of([40], seed=31)
    engine.add_request("a", prompt, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert [len(o.outputs[0].token_ids) for o in seen] == list(range(1, 11))
    assert "".join(o.outputs[0].new_text for o in seen) == seen[-1].outputs[0].text
    assert [o.finished for o in seen] == [False] * 9 + [True]
    assert seen[-1].outputs[0].finish_reason == "length"
    usage = seen[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 10, 50)
    again = run(engine, {"b": (prompt, SamplingParams(max_tokens=1, temperature=0))})["b"]
    assert again.usage.cached_tokens == 32


def test_logprobs_hold_the_token_and_the_likeliest(engine, llama):
    (prompt,) = prompts_of([12], seed=32)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=4, prompt_logprobs=2)
    out = run(engine, {"a": (prompt, params)})["a"]
    answer = out.outputs[0]
    tokens = prompt + answer.token_ids
    scores = llama.model(torch.tensor([tokens]), 0)[0].log_softmax(-1)
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == 12 and answer.logprobs is not None
    for i, found in enumerate((*out.prompt_logprobs[1:], *answer.logprobs)):
        k = 2 if i < 11 else 4
        top = scores[i].topk(k)
        wanted = {tokens[i + 1]: float(scores[i, tokens[i + 1]])}
        wanted |= dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        assert found == pytest.approx(wanted, abs=1e-4)
    total = sum(found[t] for found, t in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_n_are_the_seeds_own_answers_and_best_of_the_likeliest(engine, llama):
    """n answers are those of the seeds, and best_of returns the most likely.

    The n answers are those of n requests with the derived seeds; best_of returns the n with the
    highest sum of log probabilities, which another test compares with transformers.
    """
    (prompt,) = prompts_of([9], seed=33)
    common: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    found = run(engine, {"n": (prompt, SamplingParams(n=5, seed=4, **common))})["n"].outputs
    single = {
        f"s{i}": (prompt, SamplingParams(seed=derived_seed(4, i), **common)) for i in range(5)
    }
    by_id = run(engine, single)
    alone = [by_id[f"s{i}"].outputs[0] for i in range(5)]
    assert [a.token_ids for a in found] == [a.token_ids for a in alone]
    assert len({tuple(a.token_ids) for a in found}) > 1
    best = run(engine, {"b": (prompt, SamplingParams(n=2, best_of=5, seed=4, **common))})["b"]
    ranked = sorted(alone, key=lambda a: -(a.cumulative_logprob or 0.0))
    assert [a.token_ids for a in best.outputs] == [a.token_ids for a in ranked[:2]]
    assert [a.index for a in best.outputs] == [0, 1]
    assert best.usage.completion_tokens == sum(len(a.token_ids) for a in alone)


def test_best_of_is_chosen_by_the_scores_that_transformers_gives(engine, theirs):
    """best_of is chosen by the scores that transformers gives.

    The sum of log probabilities of each answer agrees with transformers within 1e-3; the n returned
    are in its order, and none that was left out scores higher.
    """
    (prompt,) = prompts_of([9], seed=37)
    common: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 1.0,
        "logprobs": 0,
        "seed": 4,
        "ignore_eos": True,
    }
    every = run(engine, {"n": (prompt, SamplingParams(n=6, **common))})["n"].outputs

    def score(tokens: list[int]) -> float:
        logits = theirs(torch.tensor([prompt + tokens])).logits[0].detach().log_softmax(-1)
        return sum(float(logits[8 + i, token]) for i, token in enumerate(tokens))

    for answer in every:
        assert answer.cumulative_logprob == pytest.approx(score(answer.token_ids), abs=1e-3)
    best = run(engine, {"b": (prompt, SamplingParams(n=2, best_of=6, **common))})["b"].outputs
    found = [score(answer.token_ids) for answer in best]
    assert found == pytest.approx(sorted(map(score, (a.token_ids for a in every)))[:-3:-1])


def test_stops_are_named_and_left_out(babbler):
    prompt, engine = "x", babbler.llm_engine
    free = run(engine, {"a": (prompt, SamplingParams(max_tokens=30, temperature=0))})["a"]
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[3:6]
    at = text.index(stop)
    params: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    cut = run(engine, {"a": (prompt, SamplingParams(stop=stop, **params))})["a"].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:at], "stop", stop)
    kept = SamplingParams(stop=[stop], include_stop_str_in_output=True, **params)
    assert run(engine, {"a": (prompt, kept)})["a"].outputs[0].text == text[: at + 3]
    stop_id = SamplingParams(stop_token_ids=[ids[7]], **params)
    ended = run(engine, {"a": (prompt, stop_id)})["a"].outputs[0]
    assert ended.token_ids == ids[: ids.index(ids[7])]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", ids[7])
    late = SamplingParams(stop_token_ids=[ids[0]], min_tokens=5, **params)
    assert len(run(engine, {"a": (prompt, late)})["a"].outputs[0].token_ids) >= 5


def test_bad_words_are_never_said(babbler):
    params: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    request = {"a": ("x", SamplingParams(**params))}
    assert "漢" in run(babbler.llm_engine, request)["a"].outputs[0].text
    request = {"a": ("x", SamplingParams(bad_words=["漢"], **params))}
    text = run(babbler.llm_engine, request)["a"].outputs[0].text
    assert "漢" not in text and "😀" in text


def test_a_thousand_aborts_leave_the_pool_as_it_was(engine, llama):
    """A thousand aborts leave the pool as it was.

    Requests of every kind run, and 1,000 are aborted at random moments; those that finish are
    right.
    """
    rng = random.Random(1)
    prompts = prompts_of([rng.randrange(1, 60) for _ in range(20)], seed=36)
    params = [SamplingParams(max_tokens=12, **settings) for settings in SETTINGS]
    wanted: dict[tuple[int, int], list] = {}
    live: dict[str, tuple[int, int]] = {}
    aborted = 0
    for serial in itertools.count():
        if aborted >= 1000:
            break
        kind = rng.randrange(20), rng.randrange(len(params))
        engine.add_request(f"r{serial}", prompts[kind[0]], params[kind[1]])
        live[f"r{serial}"] = kind
        while rng.random() < 0.55 and live:
            gone = rng.choice(sorted(live))
            output = engine.abort_request(gone)
            assert output is not None and output.finished
            assert {a.finish_reason for a in output.outputs} <= {"abort", "stop", "length"}
            del live[gone]
            aborted += 1
        if rng.random() < 0.3:
            for output in engine.step():
                if output.finished:
                    kind = live.pop(output.request_id)
                    assert answers(output) == wanted.setdefault(kind, answers(output))
    llama.engine.scheduler.check()
    for request_id in live:
        engine.abort_request(request_id)
    assert engine.abort_request("nobody") is None
    assert wanted, "nothing ever finished"


def test_a_ten_turn_chat_computes_only_what_is_new(demo):
    """A chat of ten turns computes only new tokens.

    Counted with prefix reuse, each turn prefills its new tokens and at most a page of old ones; the
    answers are those of an engine without reuse.
    """
    plain = Llama.build(str(DEMO), None, 384, 1, device="cpu", dtype="fp32")
    never_found(plain.engine.scheduler.pool)
    dialog: list[Message] = []
    stats = demo.engine.stats
    known: list[int] = []
    for turn in range(10):
        dialog.append({"role": "user", "content": f"What is {turn} plus one?"})
        prompt = demo.formatter.encode_dialog_prompt(dialog)
        before = stats.prompt_tokens
        (answer,) = demo.chat_completion([dialog], 0.0, max_gen_len=20)
        computed = stats.prompt_tokens - before
        shared = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b),
                      min(len(known), len(prompt)))  # fmt: skip
        assert computed <= len(prompt) - shared + 16
        assert plain.chat_completion([dialog], 0.0, max_gen_len=20) == [answer]
        dialog.append(answer["generation"])
        known = prompt + demo.tokenizer.encode(
            answer["generation"]["content"], bos=False, eos=False
        )
    assert plain.engine.stats.prompt_tokens > 3 * stats.prompt_tokens


BAD_REQUESTS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    (("", [256], SamplingParams()), ValueError, "request_id is empty"),
    (("a", [], SamplingParams()), ValueError, "the prompt has 0 tokens"),
    (("a", [1] * 129, SamplingParams()), ValueError, "129 tokens, but max_seq_len is 128"),
    (("a", [600], SamplingParams()), ValueError, "holds 600: token ids are 0 to 511"),
    (
        ("a", None, SamplingParams()),
        TypeError,
        "the prompt must be a list of token ids, got NoneType",
    ),
    (("a", [256], {"n": 1}), TypeError, "params must be SamplingParams, got dict"),
    (("a", [256], SamplingParams(stop_token_ids=[512])), ValueError, "stop_token_ids"),
    (("a", [256], SamplingParams(logit_bias={999: 1})), ValueError, "logit_bias"),
]


@pytest.mark.parametrize(("args", "kind", "message"), BAD_REQUESTS)
def test_bad_requests_are_refused_before_anything_is_queued(args, kind, message, engine):
    with pytest.raises(kind, match=message):
        engine.add_request(*args)
    assert not engine.has_unfinished_requests()


def test_one_rule_says_what_is_too_long(engine):
    """One rule decides what is too long.

    The answer ends with the context; where callers must know, that is an error.
    """
    (prompt,) = prompts_of([100], seed=38)
    asked = SamplingParams(max_tokens=29, temperature=0, ignore_eos=True)
    answer = run(engine, {"a": (prompt, asked)})["a"].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (28, "length")
    with pytest.raises(ContextLengthError, match=r"and max_tokens=29 .* 128"):
        engine.prepare("a", prompt, asked, must_fit=True)
    for max_tokens in (None, 28):
        asked = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = engine.prepare("a", prompt, asked, must_fit=True)
        assert len(engine.run([request])[0].outputs[0].token_ids) == 28
    with pytest.raises(ContextLengthError, match="129 tokens, but max_seq_len is 128"):
        engine.prepare("a", [1] * 129, asked)


def test_an_aborted_request_is_not_heard_of_again(engine, llama):
    """An aborted request gives no more output.

    It advanced in another caller's call, and was aborted before its output was read.
    """
    engine.add_request("a", [256, 65], SamplingParams(max_tokens=9, temperature=0))
    llama.generate(prompts_of([5]), 1, 0)
    assert engine.abort_request("a") is not None
    last = run(engine, {"b": ([256, 66], SamplingParams(max_tokens=2, temperature=0))})
    assert list(last) == ["b"]


def test_an_id_in_use_is_refused(engine):
    engine.add_request("a", [256], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        engine.add_request("a", [256], SamplingParams())
    engine.abort_request("a")
    engine.add_request("a", [256], SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()


def joined(increments) -> dict[int, str]:
    text: dict[int, str] = {}
    for increment in increments:
        text[increment.index] = text.get(increment.index, "") + increment.text
    return text


PIECES = "aé😀漢字👩‍👩‍👧한ひ ñ\n𝔘z"


def some_prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 12))) for _ in range(count)]


def test_streamed_equals_not_streamed_on_80_prompts(babbler):
    """Streaming equals no streaming on 80 prompts.

    Prompts and answers have emoji and CJK, characters cut by the length limit, and stray bytes.
    """
    prompts = some_prompts(80, seed=2)  # 50 run at once
    for temperature in (0.0, 1.1):
        whole = babbler.text_completion(prompts, temperature, 1.0, 31, seed=3)
        increments = list(babbler.stream_text(prompts, temperature, 1.0, 31, seed=3))
        text = joined(increments)
        assert [text[i] for i in range(80)] == [r["generation"] for r in whole]
        ends = [inc.index for inc in increments if inc.finish_reason is not None]
        assert sorted(ends) == list(range(80))
        said = "".join(text.values())
        assert all(c in said for c in BABBLE)
        # An increment never has half a character: an invalid one is invalid in the whole answer
        # too.
        assert "".join(inc.text for inc in increments).count("\ufffd") == said.count("\ufffd")


def test_stop_strings_never_leak_wherever_tokens_end(babbler):
    """Stop strings never leak, wherever tokens end.

    The stop strings are cut out of the answers themselves, across the borders of one-byte tokens.
    """
    rng = random.Random(3)
    prompts = some_prompts(60, seed=4)
    whole = [r["generation"] for r in babbler.text_completion(prompts, 1.0, 1.0, 60, seed=1)]
    streams = []  # started one after the other, so that they share the steps
    for place, (prompt, text) in enumerate(zip(prompts, whole, strict=True)):
        at = rng.randrange(1, len(text) - 4)
        stops = [text[at : at + rng.randrange(1, 4)], "never there"]
        seed = derived_seed(1, place)
        stream = babbler.stream_text([prompt], 1.0, 1.0, 60, stop=stops, seed=seed)
        streams.append((next(stream), stream, text[: text.index(stops[0])]))
    for first, rest, wanted in streams:
        increments = [first, *rest]
        assert "".join(inc.text for inc in increments) == wanted
        assert increments[-1].finish_reason == "stop"


def test_streamed_chat_equals_not_streamed(demo):
    dialogs: list[Dialog] = [
        [{"role": "user", "content": text}] for text in ("Hello", "Tell me a story.")
    ]
    whole = demo.chat_completion(dialogs, 0.0, max_gen_len=60)
    text = joined(demo.stream_chat(dialogs, 0.0, max_gen_len=60))
    assert [text[i] for i in range(2)] == [r["generation"]["content"] for r in whole]


def test_leaving_a_stream_aborts_what_is_left(engine, llama):
    stream = llama.stream_text(["abc", "def"], 0.0, max_gen_len=50)
    next(stream)
    assert engine.has_unfinished_requests()
    stream.close()


def test_two_streams_and_a_call_between_share_the_engine(engine, llama):
    """Two streams and a call between them share the engine.

    A call to generate or beam_search in the middle of a stream advances it, here to its end, and
    loses nothing of it.
    """
    wanted = [llama.text_completion([p], 0.0, max_gen_len=20)[0]["generation"] for p in "ab"]
    first = llama.stream_text(["a"], 0.0, max_gen_len=20)
    second = llama.stream_text(["b"], 0.0, max_gen_len=20)
    said = [next(first).text, next(second).text]
    llama.generate(prompts_of([9]), 10, 0)
    llama.beam_search(["x"], 2, 15)
    said[1] += "".join(inc.text for inc in second)
    said[0] += "".join(inc.text for inc in first)
    assert said == wanted


@pytest.mark.parametrize("change", [{"stop": [""]}, {"temperature": -1}, {"max_gen_len": -1}])
def test_bad_streams_are_refused_at_the_call(change, llama):
    with pytest.raises(ValueError):
        llama.stream_text(["a"], **change)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beam_search_equals_transformers(penalty, early_stopping, llama, theirs):
    """Beam search equals transformers'.

    The same beams are in the same order, with scores within 1e-4, or 1e-6 relative above 100: a
    penalty below 0 multiplies them, and float32 has no more digits (both are that far from
    float64). A token that ends many beams is made likely by stopping on a common one.
    """
    llama.tokenizer.stop_tokens = {257, 264, 265, *range(0, 256, 9)}
    try:
        for prompt in ("Once", "x", "The end"):
            found = llama.beam_search(
                [prompt], 3, 12, length_penalty=penalty, early_stopping=early_stopping
            )[0]
            ids = torch.tensor([llama.tokenizer.encode(prompt, bos=True, eos=False)])
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=3,
                max_new_tokens=12, do_sample=False, length_penalty=penalty,
                early_stopping=early_stopping, eos_token_id=sorted(llama.tokenizer.stop_tokens),
                pad_token_id=511, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            stops = llama.tokenizer.stop_tokens | {511}
            wanted = [
                llama.tokenizer.decode([t for t in row.tolist() if t not in stops])
                for row in out.sequences[:, ids.shape[1] :]
            ]
            assert [beam["generation"] for beam in found] == wanted
            scores = [beam["score"] for beam in found]
            assert scores == pytest.approx(out.sequences_scores.tolist(), rel=1e-6, abs=1e-4)
    finally:
        llama.tokenizer.stop_tokens = {257, 265}


@pytest.mark.parametrize(("early", "goes_on"), [(False, True), (True, False), (np.True_, False)])
def test_early_stopping_may_be_a_bool_of_numpy(early, goes_on):
    search = _Search([256], 9, frozenset({1}), BeamParams(1, early_stopping=early))
    search.running, search.length = [Beam([5], -1.0)], 1
    search.finished = [Beam([6], -9.0, -9.0, "stop")]
    assert search.may_improve() is goes_on


def test_beams_go_on_though_every_stop_token_is_likelier():
    search = _Search([256], 9, frozenset({1, 2, 3}), BeamParams(beam_width=1))
    search.advance([[(1, -0.1), (2, -0.2), (3, -0.3), (4, -0.4)]])
    assert [beam.tokens for beam in search.running] == [[4]]
    assert [beam.tokens for beam in search.finished] == [[]]


def test_many_prompts_of_beams_are_those_of_each(llama):
    prompts = ["a", "Once upon", "xyz"]
    together = llama.beam_search(prompts, 4, 10)
    for prompt, beams in zip(prompts, together, strict=True):
        (alone,) = llama.beam_search([prompt], 4, 10)
        assert [b["generation"] for b in beams] == [b["generation"] for b in alone]
        assert [b["score"] for b in beams] == pytest.approx(
            [b["score"] for b in alone], rel=1e-5, abs=1e-4
        )
    pool = llama.engine.scheduler.pool
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize(
    "change", [{"beam_width": 0}, {"beam_width": 17}, {"length_penalty": float("nan")},
               {"early_stopping": "soon"}],
)  # fmt: skip
def test_bad_beams_are_refused(change, llama):
    with pytest.raises(ValueError, match=next(iter(change))):
        llama.beam_search(["a"], **change)


def test_many_async_requests_at_once(engine, llama):
    """Many async requests run at once: of twenty tasks, each gets what its request gets alone."""
    prompts = prompts_of([3 + i for i in range(20)], seed=40)
    params = [SamplingParams(max_tokens=15, **SETTINGS[i % len(SETTINGS)]) for i in range(20)]
    wanted = [
        answers(run(engine, {"x": (p, s)})["x"]) for p, s in zip(prompts, params, strict=True)
    ]

    async def one(served: AsyncLLMEngine, i: int) -> list:
        outputs = [o async for o in served.generate(prompts[i], params[i], f"r{i}")]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        return answers(outputs[-1])

    async def main() -> list:
        served = AsyncLLMEngine(llama)
        try:
            return await asyncio.gather(*(one(served, i) for i in range(20)))
        finally:
            served.close()

    assert asyncio.run(main()) == wanted


def test_leaving_or_cancelling_an_async_request_frees_its_pages(engine, llama):
    """Leaving or cancelling an async request frees its pages.

    Hundreds of tasks leave the loop, are cancelled, or are aborted by name at random moments.
    """
    rng = random.Random(4)
    prompts = prompts_of([rng.randrange(1, 50) for _ in range(300)], seed=41)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    async def one(served: AsyncLLMEngine, i: int, leave_after: int) -> str:
        count = 0
        async for output in served.generate(prompts[i], params, f"r{i}"):
            count += 1
            if output.finished:
                return str(output.outputs[0].finish_reason)
            if count == leave_after:
                break
        return "left"

    async def main() -> list:
        served = AsyncLLMEngine(llama)
        tasks = [asyncio.create_task(one(served, i, rng.choice([1, 2, 5, 99]))) for i in range(300)]
        for i in rng.sample(range(300), 150):
            await asyncio.sleep(rng.random() * 0.01)
            if i % 2:
                tasks[i].cancel()
            else:
                await served.abort(f"r{i}")
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        served.close()
        return ends

    ends = [str(e) if isinstance(e, str) else type(e).__name__ for e in asyncio.run(main())]
    assert {"left", "length", "abort", "CancelledError"} <= set(ends), set(ends)


def test_a_bad_async_request_disturbs_nobody(engine, llama, monkeypatch):
    may_step = threading.Event()  # The first request cannot end, and free its id, before this.
    real_step = engine.core.step

    def step_when_allowed(*args: Any) -> Any:
        assert may_step.wait(60)
        return real_step(*args)

    async def main() -> None:
        served = AsyncLLMEngine(llama)
        good = served.generate([256, 65], SamplingParams(max_tokens=6, temperature=0), "good")
        first = asyncio.ensure_future(anext(good))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="in use"):
            await anext(served.generate([256], SamplingParams(), "good"))
        with pytest.raises(ValueError, match="600"):
            await anext(served.generate([600], SamplingParams(), "bad"))
        may_step.set()
        await first
        assert [o async for o in good][-1].finished
        served.close()

    monkeypatch.setattr(engine.core, "step", step_when_allowed)
    asyncio.run(main())


def test_an_error_in_a_step_reaches_every_waiter(engine, llama, monkeypatch):
    def fail(scheduled):
        raise MemoryError("no room")

    async def main() -> None:
        served = AsyncLLMEngine(llama)
        with monkeypatch.context() as patch:
            patch.setattr(llama.engine.runner, "start", fail)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    await anext(served.generate([256, 65], SamplingParams(), "a"))
        outputs = [o async for o in served.generate([256, 65], SamplingParams(max_tokens=2), "a")]
        assert outputs[-1].finished
        served.close()

    asyncio.run(main())
