"""Embeddings and hidden states against transformers, alone and alongside other requests."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.fine_tunes import make_model
from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from helpers.prompts import prompts_of
from llama import Llama, SamplingParams
from llama.engine.request import Capture, Pooling
from llama.requests.pooling import NO_ANSWER
from llama.requests.request import RequestOutput

PROMPTS = prompts_of([7, 1, 40, 23], seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat") / "model", "meta")


@pytest.fixture(scope="module")
def states(folder) -> list[list[torch.Tensor]]:
    """transformers' hidden states of each prompt, (T, E) each: L + 1 of them, the last normed."""
    model = transformers.LlamaModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        found: list[Any] = [
            model(torch.tensor([prompt]), output_hidden_states=True) for prompt in PROMPTS
        ]
    return [[state[0] for state in output.hidden_states] for output in found]


@pytest.fixture(scope="module")
def llama(folder) -> Llama:
    return Llama.build(str(folder), None, 128, 4, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def native() -> Iterator[Llama]:
    """The demo model in bf16, by the CPU's kernels where there are some."""
    with Llama.build(str(DEMO), None, 512, 8, device="cpu", dtype="bf16") as built:
        yield built


def close(found: np.ndarray, wanted: torch.Tensor) -> bool:
    return bool(np.allclose(found, wanted.numpy(), atol=2e-5, rtol=1e-5))


def test_vectors_are_those_of_transformers(llama, states):
    for kind in ("last", "mean"):
        raw = llama.embed(PROMPTS, pooling=kind, normalize=False)
        cut = llama.embed(PROMPTS, pooling=kind, dimensions=24)
        for found, short, state in zip(raw, cut, states, strict=True):
            wanted = state[-1][-1] if kind == "last" else state[-1].mean(0)
            assert found.dtype == np.float32 and close(found, wanted)
            assert close(short, torch.nn.functional.normalize(wanted[:24], dim=0))


def test_hidden_states_are_those_of_transformers(llama, states):
    layers = [0, 1, -1, 2, "norm"]
    for found, state in zip(llama.hidden_states(PROMPTS, layers), states, strict=True):
        assert list(found) == layers and torch.equal(found[-1], found[2])
        assert torch.equal(found[0], state[0])
        assert torch.allclose(found[1], state[1], atol=2e-5)
        assert torch.allclose(found["norm"], state[2], atol=2e-5)
        normed = llama.model.norm(found[-1])
        assert torch.allclose(normed, state[2], atol=2e-5), "-1 is not what the norm reads"
    (last,) = llama.hidden_states(PROMPTS[2:3], ["norm"], "last")
    assert last["norm"].shape == (1, 64) and torch.allclose(last["norm"], state_of(states), 0, 2e-5)


def state_of(states: list[list[torch.Tensor]]) -> torch.Tensor:
    return states[2][-1][-1:]


def test_a_text_gets_its_special_tokens_and_its_prompt(llama):
    text = "the cat"
    ids = llama.tokenizer.encode(text, bos=True, eos=False)
    prefixed = llama.tokenizer.encode("query: the cat", bos=True, eos=False)
    count = len(llama.tokenizer.encode("query: ", bos=True, eos=False))
    assert np.array_equal(*llama.embed([text, ids], pooling="mean"))
    options: dict[str, Any] = {"pooling": "mean", "normalize": False, "prompt": "query: "}
    assert np.array_equal(
        llama.embed([text], **options)[0],
        llama.embed([prefixed], pooling="mean", normalize=False)[0],
    )
    (rest,) = llama.embed([text], **options, include_prompt=False)
    (state,) = llama.hidden_states([prefixed], ["norm"])
    assert close(rest, state["norm"][count:].mean(0))


def test_wrong_values_are_named_before_any_work(llama):
    steps = llama.engine.stats.steps
    for message, call in {
        "pooling is not given": lambda: llama.embed(["a"]),
        "pooling='cls'": lambda: llama.embed(["a"], pooling="cls"),
        "pooling='first'": lambda: llama.embed(["a"], pooling="first"),
        "dimensions=65": lambda: llama.embed(["a"], pooling="mean", dimensions=65),
        "dimensions=True": lambda: llama.embed(["a"], pooling="mean", dimensions=True),
        "prompt_name='x'": lambda: llama.embed(["a"], pooling="mean", prompt_name="x"),
        "both given": lambda: llama.embed(["a"], pooling="mean", prompt_name="x", prompt="y"),
        "inputs must be a list": lambda: llama.embed("a", pooling="mean"),
        r"inputs\[1\]": lambda: llama.embed([[1], 2], pooling="mean"),
        "has 0 tokens": lambda: llama.embed([[]], pooling="mean"),
        "max_seq_len is 128": lambda: llama.embed([[1] * 129], pooling="mean"),
        "token ids are 0 to": lambda: llama.embed([[10**6]], pooling="mean"),
        "nothing is left": lambda: llama.embed(
            [""], pooling="mean", prompt="a b", include_prompt=False
        ),
        "layers has 3": lambda: llama.hidden_states([[1]], [3]),
        "layers has -4": lambda: llama.hidden_states([[1]], [-4]),
        "layers has 'first'": lambda: llama.hidden_states([[1]], ["first"]),
        "layers is empty": lambda: llama.hidden_states([[1]], []),
        "tokens='first'": lambda: llama.hidden_states([[1]], [0], "first"),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert llama.engine.stats.steps == steps
    cut = llama.embed([[1] * 129], pooling="mean", truncate=100)
    assert np.array_equal(cut[0], llama.embed([[1] * 100], pooling="mean")[0])


def test_a_state_that_is_not_finite_is_an_error_of_its_request(llama, monkeypatch):
    run = llama.model.hidden_states

    def broken(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden: torch.Tensor = run(tokens, *rest)
        hidden[-1] = torch.nan
        return hidden

    monkeypatch.setattr(llama.model, "hidden_states", broken)
    with pytest.raises(ValueError, match=r"prompt 1: .*NaN or infinity"):
        llama.embed([[1, 2, 3], [1, 2]], pooling="last")


def test_preemption_and_chunks_change_no_vector(folder, llama):
    """A mean of several steps, of which some are repeated for want of pages, is that of one."""
    page_bytes = 16 * 2 * 2 * 2 * 16 * 4
    small = Llama.build(
        str(folder), None, 128, 4, device="cpu", dtype="fp32", kv_cache_memory_bytes=8 * page_bytes
    )
    scheduler = small.engine.scheduler
    scheduler.token_budget = 9
    prompts = prompts_of([50, 70, 33, 61], seed=9)
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
    prepare = small.llm_engine.prepare
    made = [prepare("", prompt[:20], SamplingParams(**asked)) for prompt in prompts[:2]]
    made += [
        prepare("", x, NO_ANSWER, index=i, reads=Pooling("mean", 3)) for i, x in enumerate(prompts)
    ]
    made += [prepare("", x, NO_ANSWER, reads=Capture((1,))) for x in prompts]
    outputs = small.llm_engine.run(made)
    assert scheduler.num_preemptions > 0
    wanted = llama.hidden_states(prompts, [1, "norm"])
    for i, state in enumerate(wanted):
        pooled = outputs[2 + i].pooled
        assert pooled is not None and close(pooled, state["norm"][3:].mean(0))
        found = torch.cat(outputs[6 + i].captured[1])
        assert torch.allclose(found, state[1], atol=2e-5)
    scheduler.check()


@pytest.mark.skipif(not KERNELS_RUN, reason="only the CPU's kernels are batch-invariant")
def test_requests_of_all_kinds_share_steps_and_keep_their_bits(native):
    """Tokens, log-probabilities, vectors and states have the same bits alone as in a batch."""
    rng = random.Random(3)
    vocab = native.tokenizer.n_words - 256
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in (5, 60, 1, 33, 18, 80, 2, 41)]
    kinds: list[tuple[SamplingParams, Any]] = [
        (SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, ignore_eos=True), None),
        (NO_ANSWER, Pooling("mean")),
        (SamplingParams(max_tokens=9, seed=4, prompt_logprobs=1, logprobs=0), None),
        (NO_ANSWER, Pooling("last")),
        (NO_ANSWER, Capture((0, 2, native.model.n_layers + 1))),
        (NO_ANSWER, Pooling("mean", 2)),
    ]
    engine = native.llm_engine

    def run(chosen: list[int]) -> list[RequestOutput]:
        made = []
        for i in chosen:
            params, reads = kinds[i % len(kinds)]
            made.append(engine.prepare("", prompts[i], params, index=i, reads=reads))
        return engine.run(made)

    def bits(output: RequestOutput) -> list[Any]:
        answer = output.outputs[0]
        pooled = b"" if output.pooled is None else output.pooled.tobytes()
        captured = [torch.cat(x).float().numpy().tobytes() for x in output.captured.values()]
        return [answer.token_ids, answer.logprobs, output.prompt_logprobs, pooled, captured]

    every = [*range(len(prompts))]
    alone = [bits(run([i])[0]) for i in every]
    assert [bits(x) for x in run(every)] == alone
    native.engine.scheduler.token_budget = 16  # chunks, in other batches
    assert [bits(x) for x in run(every[::-1])] == alone[::-1]
    native.engine.scheduler.token_budget = 2048
    assert native.engine.scheduler.pool.num_free == native.engine.scheduler.pool.num_pages


@pytest.mark.skipif(not KERNELS_RUN, reason="the native layers are compared")
def test_captures_have_the_bits_of_every_executor(native):
    """The states of the native layers, split where states are taken, are those of the modules."""
    layers = [0, 1, 2, -1, "norm"]
    prompts = prompts_of([33, 4], seed=2)
    (found, other) = native.hidden_states(prompts, layers)
    whole = native.hidden_states(prompts, ["norm"])
    native.model.use_modules()
    modules = native.hidden_states(prompts, layers)
    native.model.use_modules(False)
    assert torch.equal(found["norm"], whole[0]["norm"])
    for ours, theirs in zip((found, other), modules, strict=True):
        assert all(torch.equal(ours[layer], theirs[layer]) for layer in layers)


def test_a_prefix_is_reused_for_the_last_token_alone(native):
    """A second call computes one page at most of a known prompt; a mean computes all of it."""
    prompt = prompts_of([96], seed=12)[0]
    first = native.embed([prompt], pooling="last")
    before = native.engine.stats.prompt_tokens
    assert np.array_equal(first, native.embed([prompt], pooling="last"))
    assert native.engine.stats.prompt_tokens - before <= 16
    native.embed([prompt], pooling="mean")
    assert native.engine.stats.prompt_tokens - before >= 96
