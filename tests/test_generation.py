"""The API against Meta's own model, transformers and a naive reference, in float32 on the CPU.

Each fault of the reference that is corrected on purpose has a test here with it in the docstring.
"""

import copy
import io
import logging
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from helpers import meta as oracle
from helpers import reference
from helpers.checkpoints import change_params
from helpers.flags import read
from helpers.kernels import KERNELS_RUN
from helpers.launch import REPO
from helpers.prompts import prompts_of
from llama import Llama, ModelArgs, Tokenizer, Transformer, generation
from llama.checkpoint.find import find
from llama.checkpoint.packing import pack_model
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.write.convert import convert
from llama.cli import COMMANDS
from llama.cli.model import load
from llama.common.device import free_bytes, pick_dtype
from llama.loading import Loaded
from llama.model.layers import Linear
from llama.ops.kv_cache import pick_kv_format
from llama.requests.seeds import derived_seed
from llama.sampling_params import SamplingParams
from llama.weights.bytes import BytesWeight
from llama.weights.choice import check_quantize

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"n_kv_heads": None},
    "mqa": {"n_kv_heads": 1},
    "scaled rope": {"use_scaled_rope": True},
    "odd ffn": {"multiple_of": 7, "ffn_dim_multiplier": 1.1},
    "three heads a kv head": {"dim": 96, "n_heads": 6, "n_kv_heads": 2, "n_layers": 3},
}


PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # slots, keys and values, layers, kv heads, head dim, fp32


def build(folder, max_seq_len=128, max_batch_size=4, **kwargs) -> Llama:
    kwargs = {"device": "cpu", "dtype": "fp32"} | kwargs
    return Llama.build(str(folder), None, max_seq_len, max_batch_size, **kwargs)


@pytest.fixture(scope="module")
def meta():
    oracle.join_a_world_of_one()
    yield oracle
    oracle.leave_the_world()


@pytest.mark.parametrize("written", oracle.MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_greedy_and_logprobs_equal_metas_model(shape, written, make_checkpoint, meta):
    """Greedy ids and logprobs equal Meta's model, and the reference.

    Prompts of mixed lengths in one batch give the ids that Meta's model gives each prompt alone,
    and its log probabilities of prompt and answer within 1e-4.
    """
    changes = SHAPES[shape]
    folder, state, params = make_checkpoint(seed=3, **changes)
    llama = build(folder)
    theirs = meta.MODELS[written](state, params)
    stops = llama.tokenizer.stop_tokens
    prompts = prompts_of([3, 17, 1, 40, 9, 16])
    tokens, _ = llama.generate(prompts, 24, temperature=0)
    assert tokens == [meta.greedy(theirs, prompt, 24, stops) for prompt in prompts]
    assert len({tuple(t) for t in tokens}) > 3, "the model says the same to everything"
    echoed, scores = llama.generate(prompts, 24, temperature=0, logprobs=True, echo=True)
    assert scores is not None
    for prompt, out, answer, found in zip(prompts, tokens, echoed, scores, strict=True):
        assert answer == prompt + out
        assert found == pytest.approx(meta.logprobs(theirs, answer), abs=1e-4)
        assert found == pytest.approx(reference.logprobs(state, params, answer), abs=1e-4)
    for prompt, out in zip(prompts, tokens, strict=True):
        assert llama.generate([prompt], 24, temperature=0)[0] == [out], "alone is not as in a batch"


def test_greedy_equals_transformers(make_checkpoint, tmp_path):
    """Greedy decoding equals Hugging Face's own generate with the same weights, converted."""
    from transformers import LlamaForCausalLM

    folder, _, _ = make_checkpoint(seed=5, use_scaled_rope=True)
    convert(folder, tmp_path / "hf")
    theirs: Any = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    llama = build(folder)
    for prompt in prompts_of([2, 11, 33], seed=1):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
            eos_token_id=sorted(llama.tokenizer.stop_tokens), pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        kept = [t for t in out if t not in llama.tokenizer.stop_tokens]
        assert llama.generate([prompt], 20, temperature=0)[0] == [kept]


@pytest.mark.parametrize("tokenizer_file", ["tokenizer.model", "tokenizer.json"])
def test_a_hugging_face_folder_loads_as_it_is(tokenizer_file, make_checkpoint, tmp_path):
    """A Hugging Face folder loads unchanged.

    *.safetensors, config.json and either tokenizer file give the answers of Meta's layout.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder, _, _ = make_checkpoint(seed=6, use_scaled_rope=True)
    wanted = build(folder).text_completion(["Once", "né 漢"], 0.0, max_gen_len=12)
    convert(folder, tmp_path / "hf")
    original, ours = tmp_path / "hf/original/tokenizer.model", tmp_path / "hf/tokenizer.json"
    if tokenizer_file == "tokenizer.json":
        names = list(Tokenizer(str(folder / "tokenizer.model")).special_tokens)
        converter = TikTokenConverter(
            str(original), pattern=Tokenizer.pat_str, extra_special_tokens=names
        )
        converter.converted().save(str(ours))
        original.unlink()
    else:
        original.rename(tmp_path / "hf" / "tokenizer.model")
        ours.unlink()
    assert build(tmp_path / "hf").text_completion(["Once", "né 漢"], 0.0, max_gen_len=12) == wanted


def test_more_prompts_than_max_batch_size_queue(shared_llama):
    """Prompts beyond max_batch_size wait in a queue.

    The reference fails with AssertionError: (6, 4).
    """
    prompts = prompts_of([5, 9, 2, 7, 30, 4, 12, 3, 8, 6, 11])
    together = shared_llama.generate(prompts, 12, temperature=0)[0]
    assert together == [shared_llama.generate([p], 12, temperature=0)[0][0] for p in prompts]


def test_prompts_of_mixed_lengths_are_prefilled_whole(checkpoint_dir):
    """Prompts of mixed lengths are prefilled completely.

    The reference prefills the shortest prompt, then feeds the others one token a step: 60 steps
    here. A ragged batch takes one.
    """
    llama = build(checkpoint_dir[0])
    llama.generate(prompts_of([2, 30, 61]), 1, temperature=0)
    assert llama.engine.stats.steps == 1


def test_a_rank_holds_at_least_one_head(checkpoint_dir):
    """There are at most as many ranks as heads; shards, which are equal, must divide them."""
    params = find(checkpoint_dir[0]).params
    for size in (1, 2, 3, 4):  # 4 ranks hold each of 2 kv heads twice
        params.check_ranks(size)
    with pytest.raises(ValueError, match=r"size=5 is more than n_heads=4, .* most 4"):
        params.check_ranks(5)
    with pytest.raises(ValueError, match="model_parallel_size=3 does not divide n_heads=4"):
        params.check_shards(3)


def test_long_contexts_are_allowed_where_the_model_has_them(make_checkpoint):
    """Long contexts are allowed where the model supports them.

    The reference limits every model to 8,192 tokens; 3.1 and later go to 131,072.
    """
    folder, _, _ = make_checkpoint(use_scaled_rope=True, n_layers=1)
    assert build(folder, 20_000, 1).model.params.max_seq_len == 20_000
    with pytest.raises(ValueError, match="limit of 131072"):
        build(folder, 131_073, 1)
    folder, _, _ = make_checkpoint(n_layers=1)
    with pytest.raises(ValueError, match="max_seq_len=8193 is beyond this model's limit of 8192"):
        build(folder, 8193, 1)


def test_echo_keeps_a_stop_token_inside_the_prompt(checkpoint_dir, shared_llama):
    """echo keeps a stop token inside the prompt.

    The reference cuts an echoed answer at the first stop token of the prompt, such as the eot_id of
    earlier turns of a dialog. Here only generated tokens are searched.
    """
    _, state, params = checkpoint_dir
    prompt = [256, 72, 265, 73]  # 265 is eot_id of a tokenizer with 256 ranks
    assert 265 in shared_llama.tokenizer.stop_tokens
    tokens, scores = shared_llama.generate([prompt], 5, 0, logprobs=True, echo=True)
    assert tokens[0][:4] == prompt
    assert scores is not None and len(scores[0]) == len(tokens[0])
    assert scores[0] == pytest.approx(reference.logprobs(state, params, tokens[0]), abs=1e-4)


def test_a_prompt_that_fills_the_window_is_scored_in_step(checkpoint_dir):
    """A prompt that fills the window is scored with the right shift.

    The reference scores such a prompt unshifted: token i against its own position.
    """
    folder, state, params = checkpoint_dir
    llama = build(folder, 20, 2)
    prompt = prompts_of([20])[0]
    tokens, scores = llama.generate([prompt], 5, 0, logprobs=True, echo=True)
    assert tokens == [prompt]
    assert scores is not None and scores[0][0] == 0.0
    assert scores[0] == pytest.approx(reference.logprobs(state, params, prompt), abs=1e-4)
    assert llama.generate([prompt], 5, 0) == ([[]], None)


def stopping_model(make_checkpoint, stop_id: int, **changes):
    """Make a checkpoint whose greedy answer is always stop_id.

    The row of this id in lm_head is large along the mean of all hidden states.
    """
    folder, state, _ = make_checkpoint(n_layers=1, seed=9, **changes)
    state["output.weight"].zero_()
    state["output.weight"][stop_id] = 1.0
    state["output.weight"][stop_id ^ 2] = -1.0  # the row of another id, which does not stop
    torch.save(state, folder / "consolidated.00.pth")
    return folder


@pytest.mark.parametrize(
    ("stop_id", "scaled", "stops"),
    [(257, False, True), (265, False, True), (264, False, False), (264, True, True)],
    ids=["end_of_text", "eot_id", "eom_id in 3.0", "eom_id from 3.1"],
)
def test_stop_tokens_are_those_of_the_release(stop_id, scaled, stops, make_checkpoint):
    """Stop tokens are those of the release.

    The reference stops on end_of_text and eot_id only; 3.1 and later end tool calls with eom_id, an
    id that is merely reserved in Llama 3.0. The stop token is left out of the answer.
    """
    folder = stopping_model(make_checkpoint, stop_id, use_scaled_rope=scaled)
    llama = build(folder)
    prompts = prompts_of([4, 9, 2, 13], seed=2)
    out = llama.generate(prompts, 6, temperature=0)[0]
    said = {token for answer in out for token in answer}
    if stops:
        assert [] in out and stop_id not in said
    else:
        assert stop_id in said and [] not in out


def test_unknown_params_are_refused(make_checkpoint):
    """Unknown params are refused: llama3 raises a TypeError, llama-models ignores the key."""
    folder, _, _ = make_checkpoint(n_layers=1)
    change_params(folder, sliding_window=4096)
    with pytest.raises(ValueError, match=r"params\.json: unknown key 'sliding_window'"):
        build(folder)
    change_params(folder, sliding_window=None, max_batch_size=32)
    assert build(folder).model.params.max_batch_size == 4


@pytest.mark.parametrize(
    ("dim", "given", "factor"), [(64, None, 8.0), (2048, None, 32.0), (3072, None, 32.0),
                                 (4096, None, 8.0), (64, 32.0, 32.0)],
)  # fmt: skip
def test_the_rope_factor_is_data(dim, given, factor):
    """The RoPE factor is read from the file.

    Meta's code hides a factor of 8 behind use_scaled_rope; 3.2 was trained with 32.
    """
    params: dict[str, Any] = {
        "dim": dim,
        "n_layers": 1,
        "n_heads": 16,
        "vocab_size": 512,
        "use_scaled_rope": True,
    }
    if given:
        params["rope_scale_factor"] = given
    assert ModelArgs.from_params(params, "params.json").rope_factor == factor


def test_a_rope_factor_of_32_changes_the_answer_as_the_formula_says(make_checkpoint):
    folder, state, params = make_checkpoint(use_scaled_rope=True, rope_scale_factor=32.0)
    prompt = prompts_of([90], seed=6)[0]
    scores = build(folder).generate([prompt], 1, 0, logprobs=True, echo=True)[1]
    assert scores is not None
    wanted = reference.logprobs(state, params, prompt)
    assert scores[0][:90] == pytest.approx(wanted, abs=1e-4)
    other = reference.logprobs(state, params | {"rope_scale_factor": 8}, prompt)
    assert max(abs(a - b) for a, b in zip(wanted, other, strict=True)) > 1e-4


def test_sampling_depends_on_seed_and_position_alone(checkpoint_dir, shared_llama):
    """Sampling depends on seed and position alone.

    The reference samples every row from one global generator: a neighbour changes the answer. Here
    neighbours, batch size and the cache change nothing, and the seed does.
    """
    folder, _, _ = checkpoint_dir
    prompts = prompts_of([6, 14, 3, 25, 9, 31, 2], seed=7)
    wanted = [
        shared_llama.generate([p], 30, 1.0, 1.0, seed=derived_seed(1, place))[0][0]
        for place, p in enumerate(prompts)
    ]
    assert shared_llama.generate(prompts, 30, 1.0, 1.0, seed=1)[0] == wanted
    others = prompts_of([5, 8, 60, 2, 4, 11, 7], seed=8)
    mixed = [p for pair in zip(prompts, others, strict=True) for p in pair]
    for place, found in enumerate(shared_llama.generate(mixed, 30, 1.0, 1.0, seed=1)[0][::2]):
        seed = derived_seed(1, 2 * place)
        assert found == shared_llama.generate([prompts[place]], 30, 1.0, 1.0, seed=seed)[0][0]
    assert build(folder, 128, 7).generate(prompts, 30, 1.0, 1.0)[0] == wanted
    one_at_a_time = build(folder, 128, 1)
    assert one_at_a_time.generate(prompts, 30, 1.0, 1.0)[0] == wanted
    other = build(folder, seed=2)
    assert other.generate(prompts, 30, 1.0, 1.0)[0] != wanted
    assert other.generate(prompts, 30, 1.0, 1.0, seed=1)[0] == wanted


def test_sampling_again_gives_another_sample_and_the_program_again_the_same(checkpoint_dir):
    """Sampling again gives another sample, and running the program again the same.

    In the reference five equal prompts get five samples, in one call or in five, and pass@k relies
    on it. Beam search, refused calls and calls with a seed change nothing in between.
    """
    folder, _, _ = checkpoint_dir
    prompt = prompts_of([9], seed=4)[0]

    def program(max_batch_size: int, between: Callable[[Llama], object]) -> list[list[int]]:
        llama = build(folder, 128, max_batch_size)
        found = llama.generate([prompt] * 5, 12, 1.0, 1.0)[0]
        for _ in range(5):
            between(llama)
            found += llama.generate([prompt], 12, 1.0, 1.0)[0]
        engine = llama.llm_engine
        for name in ("a", "b"):
            engine.add_request(name, prompt, SamplingParams(max_tokens=12, n=2))
        while engine.has_unfinished_requests():
            for output in engine.step():
                found += [a.token_ids for a in output.outputs if output.finished]
        return found

    def disturb(llama: Llama) -> None:
        llama.beam_search(["Hi"], 2, 3)
        llama.generate([prompt], 3, 1.0, 1.0, seed=9)
        with pytest.raises(ValueError, match="0 tokens"):
            llama.generate([prompt, []], 3)

    found = program(1, lambda _: None)
    assert len(found) == len({tuple(tokens) for tokens in found}) == 14
    assert program(5, disturb) == found


def test_a_given_seed_is_that_of_the_first_prompt(shared_llama):
    prompt = prompts_of([9], seed=4)[0]
    found = shared_llama.generate([prompt] * 3, 12, 1.0, 1.0, seed=6)[0]
    assert len({tuple(tokens) for tokens in found}) == 3
    (first,) = shared_llama.generate([prompt], 12, 1.0, 1.0, seed=6)[0]
    engine = shared_llama.llm_engine
    params = SamplingParams(max_tokens=12, seed=6, n=3)
    (output,) = engine.run([engine.prepare("", prompt, params)])
    assert first == found[0] == output.outputs[0].token_ids
    assert [answer.token_ids for answer in output.outputs] == found


def test_preemption_changes_no_answer(checkpoint_dir, shared_llama):
    """Preemption changes no answer.

    In a KV cache too small for all, some sequences give up their pages and are computed again.
    """
    llama = build(checkpoint_dir[0], kv_cache_memory_bytes=10 * PAGE_BYTES)
    scheduler = llama.engine.scheduler
    assert scheduler.pool.num_pages == 10
    prompts = prompts_of([20, 18, 25, 30], seed=8)
    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"logprobs": True, "echo": True, "seed": 3}
        wanted = shared_llama.generate(prompts, 60, temperature, 1.0, **settings)
        found = llama.generate(prompts, 60, temperature, 1.0, **settings)
        assert found[0] == wanted[0]
        assert found[1] is not None and wanted[1] is not None
        for ours, theirs in zip(found[1], wanted[1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert scheduler.num_preemptions > 0, "nobody was preempted: the test tests nothing"
    scheduler.check()


def test_evicted_prefixes_are_computed_again(checkpoint_dir, shared_llama):
    """Evicted prefixes are computed again: three prompts take turns in a cache for two."""
    llama = build(checkpoint_dir[0], 64, 1, kv_cache_memory_bytes=8 * PAGE_BYTES)
    assert llama.engine.scheduler.pool.num_pages == 4
    prompts = prompts_of([33, 33], seed=13)
    computed = []
    for prompt in (prompts[0], prompts[0], prompts[1], prompts[0]):
        before = llama.engine.stats.prompt_tokens
        assert llama.generate([prompt], 4, 0) == shared_llama.generate([prompt], 4, 0)
        computed.append(llama.engine.stats.prompt_tokens - before)
    assert computed[:3] == [33, 1, 33] and computed[3] > 1, computed


@pytest.mark.parametrize("kv_cache_dtype", [None, "int8"])
def test_prefix_reuse_changes_no_answer(checkpoint_dir, kv_cache_dtype):
    """Prefix reuse changes no answer; a second call computes only what is new."""
    llama = build(checkpoint_dir[0], kv_cache_dtype=kv_cache_dtype)
    prompts = prompts_of([50, 40, 33], seed=9)
    first = llama.generate(prompts, 10, temperature=0)
    before = llama.engine.stats.prompt_tokens
    assert before == 50 + 40 + 33
    assert llama.generate(prompts, 10, temperature=0) == first
    assert llama.engine.stats.prompt_tokens - before == 2 + 8 + 1


def test_prompts_that_arrive_together_share_their_prefix(checkpoint_dir, shared_llama):
    """Prompts that arrive together share their prefix.

    So do the answers of one request: what their prompts have in common is computed once.
    """
    llama = build(checkpoint_dir[0])
    common, *ends = prompts_of([48, 5, 9, 7], seed=14)
    prompts = [common + end for end in ends]
    wanted = [shared_llama.generate([prompt], 10, 0)[0][0] for prompt in prompts]
    assert llama.generate(prompts, 10, 0)[0] == wanted
    assert llama.engine.stats.prompt_tokens == 48 + 5 + 9 + 7
    before = llama.engine.stats.prompt_tokens
    params = SamplingParams(n=4, max_tokens=5, prompt_logprobs=0, ignore_eos=True)
    (output,) = llama.llm_engine.run([llama.llm_engine.prepare("n", common[::-1], params)])
    assert [len(answer.token_ids) for answer in output.outputs] == [5] * 4
    assert llama.engine.stats.prompt_tokens - before == 48 + 3 * 16  # the last page, for sampling


def test_chunked_prefill_changes_no_answer(checkpoint_dir, shared_llama):
    llama = build(checkpoint_dir[0])
    llama.engine.scheduler.token_budget = 7
    prompts = prompts_of([50, 40, 3, 33], seed=10)
    wanted = shared_llama.generate(prompts, 10, 0, logprobs=True, echo=True)
    found = llama.generate(prompts, 10, 0, logprobs=True, echo=True)
    assert found[0] == wanted[0]
    assert found[1] is not None and wanted[1] is not None
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_logprobs_of_a_sampled_answer_are_the_models_own(checkpoint_dir, shared_llama):
    """Logprobs of a sampled answer are the model's own.

    They are before temperature and top-p, and equal those of the answer scored again as a prompt.
    """
    _, state, params = checkpoint_dir
    prompt = prompts_of([8], seed=11)[0]
    (out,), scores = shared_llama.generate([prompt], 20, 0.7, 0.8, logprobs=True)
    assert scores is not None and len(scores[0]) == len(out)
    wanted = reference.logprobs(state, params, prompt + out)
    assert scores[0] == pytest.approx(wanted[8:], abs=1e-4)


def test_bf16_stays_near_float32(checkpoint_dir, shared_llama):
    """bf16, the default, stays near float32: total variation of the first token under 0.05."""
    folder, _, _ = checkpoint_dir
    llama = build(folder, dtype=None)
    assert llama.model.norm.weight.dtype == torch.bfloat16
    for prompt in prompts_of([5, 20, 60], seed=12):
        tokens = torch.tensor([prompt])
        rough = llama.model(tokens, 0)[0, -1].softmax(-1)
        exact = shared_llama.model(tokens, 0)[0, -1].softmax(-1)
        assert 0 < (rough - exact).abs().sum() / 2 < 0.05


def test_packed_weights_say_what_unpacked_ones_do(make_checkpoint):
    """Packed weights give what unpacked ones give.

    `pack` only affects speed: logits stay within bf16 rounding, tied and untied.
    """
    folder, _, params = make_checkpoint(seed=21, dim=128)
    for tied in (False, True):
        args = ModelArgs(**params, max_seq_len=64, max_batch_size=2, tied_output=tied)
        model = Transformer(args, dtype=torch.bfloat16)
        source = CheckpointReader(find(folder))
        for name, slot in model.named_shards().items():
            source.copy(name, slot)
        tokens = torch.tensor(prompts_of([20, 20], seed=22))
        plain = model(tokens, 0)
        pack_model(model)
        torch.testing.assert_close(model(tokens, 0), plain, atol=0.05, rtol=0.05)


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_answers_of_the_kernels_are_the_same_to_the_bit_alone_and_in_a_batch(
    make_checkpoint, dtype, monkeypatch
):
    """Answers of the kernels are the same bit for bit, alone and in a batch.

    Tokens and log probabilities do not depend on other requests or on the chunks of the prompt.
    """
    folder, _, _ = make_checkpoint(seed=24, dim=128)  # heads of 32, which the kernels support

    def answers(prompts: list[list[int]], budget: int) -> list[tuple[list[int], list[float]]]:
        monkeypatch.setattr("llama.engine.core.TOKEN_BUDGET", budget)
        llama = Llama.build(str(folder), None, 300, 8, device="cpu", dtype=dtype)
        tokens, logprobs = llama.generate(prompts, 12, 0.0, logprobs=True, echo=True)
        assert logprobs is not None
        return list(zip(tokens, logprobs, strict=True))

    prompts = prompts_of([5, 70, 23, 260, 1, 33], seed=25)
    together = answers(prompts, 2048)
    assert answers(prompts, 50) == together  # prompts are read in chunks
    assert [answers([prompt], 2048)[0] for prompt in prompts] == together


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_the_model_of_the_rounded_weights(make_checkpoint, tied):
    """int8 is the model of the rounded weights.

    All matrices except an untied embedding are rounded; a float32 model with those values agrees.
    """
    folder, _, params = make_checkpoint(seed=21, dim=128)
    args = ModelArgs(**params, max_seq_len=64, max_batch_size=2, tied_output=tied)
    models = [Transformer(args, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    source = CheckpointReader(find(folder))
    for model in models:
        for name, slot in model.named_shards().items():
            source.copy(name, slot)
    small, exact = models
    for module in exact.modules():
        if isinstance(module, Linear):
            rounded = BytesWeight.pack(module.weight.plain().bfloat16())
            module.weight.values.copy_(rounded.exact())
    pack_model(small, quantize="int8")
    sizes = {w.dtype: w.numel() for w in small.parameters() if w.dim() > 1}
    assert sizes.keys() == {torch.int8} | (set() if tied else {torch.bfloat16})
    tokens = torch.tensor(prompts_of([20, 20], seed=22))
    ours, theirs = (model(tokens, 0).softmax(-1) for model in models)
    # The loss of bf16 activations: the kernels sum in float32, PyTorch rounds more often.
    assert ((ours - theirs).abs().sum(-1) / 2).max() < (0.03 if KERNELS_RUN else 0.04)


def test_a_matrix_stored_once_is_held_once(make_checkpoint):
    """A matrix stored once is loaded once; otherwise a fifth of Meta's 3.2 1B would be twice."""
    folder, state, _ = make_checkpoint(seed=23)
    tied = state | {"output.weight": state["tok_embeddings.weight"]}
    torch.save(tied, folder / "consolidated.00.pth")
    model = Llama.build(str(folder), None, 64, 2, device="cpu", dtype="fp32").model
    assert model.params.tied_output and model.output.weight is model.tok_embeddings.weight


def test_where_int8_is_for(checkpoint_dir, capsys):
    assert check_quantize("int8", torch.bfloat16, torch.device("cuda")) == "int8"
    with pytest.raises(ValueError, match="quantize='int8' is not for mps: use dtype='bf16'"):
        check_quantize("int8", torch.bfloat16, torch.device("mps"))
    with pytest.raises(ValueError, match="kv_cache_dtype='int8' is not for mps: leave it out"):
        pick_kv_format("int8", torch.device("mps"))
    for names in ({"dtype": "int8"}, {"quantize": "int8"}, {"dtype": "auto", "quantize": "int8"}):
        asked: dict[str, Any] = names
        llama = Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", **asked)
        assert "cpu, int8, model_parallel_size=1" in capsys.readouterr().out
        assert llama.model.quantization == "int8"
        assert llama.model.new_kv_cache(1, 16).dtype is torch.bfloat16


def test_a_kv_cache_in_8_bits(checkpoint_dir, capsys):
    """An 8-bit KV cache stores more tokens in as many bytes.

    Meta's forward uses it too. "auto" is vLLM's name for no quantization.
    """
    told, cached, logits = [], [], []
    for name in ("auto", "int8"):
        options = read("llama", COMMANDS["chat"], [str(checkpoint_dir[0])], {
            "LLAMA_DEVICE": "cpu", "LLAMA_DTYPE": "bf16", "LLAMA_MAX_SEQ_LEN": "128",
            "LLAMA_KV_CACHE_MEMORY_BYTES": "40960", "LLAMA_KV_CACHE_DTYPE": name,
            "LLAMA_MAX_BATCH_SIZE": "9",
        })  # fmt: skip
        llama = load(options)
        told += re.findall(r"KV cache (.*?),", capsys.readouterr().err)
        cached.append(llama.model.new_kv_cache(1, 16).nbytes)
        logits.append(llama.model(torch.tensor(prompts_of([20], seed=22)), 0))
    assert told == ["160 tokens", "272 tokens in int8"]  # a head of 16 takes 32 bytes, or 18
    assert cached == [4096, 2304]
    assert not torch.equal(*logits) and (logits[0] - logits[1]).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': give int8, auto, or None"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype=8: give int8"),
        ({"quantize": "int7"}, "quantize='int7': give one of int8, fp8, int4, or None"),
        ({"quantize": 8}, "quantize=8: give one of"),
        ({"quantize": "int8", "dtype": "fp32"}, "quantize='int8' is for dtype='bf16', not fp32"),
        ({"quantize": "int8", "dtype": "int8"}, "dtype='int8': give one of bf16, fp16, fp32"),
        ({"dtype": "float64"}, "dtype='float64': give one of bf16, fp16, fp32, bfloat16"),
    ],
)
def test_what_cannot_be_quantized_is_refused(checkpoint_dir, asked, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", **asked)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "half", "float", "auto"])
def test_a_dtype_has_the_names_that_others_give_it(name):
    wanted = {"auto": torch.bfloat16, "half": torch.half, "float": torch.float}
    assert pick_dtype(name, torch.device("cpu")) is (wanted.get(name) or getattr(torch, name))


def test_text_and_chat_return_metas_keys(shared_llama):
    result = shared_llama.text_completion(["ab", "xyz"], 0.0, max_gen_len=4)
    assert [list(r) for r in result] == [["generation"]] * 2
    (scored,) = shared_llama.text_completion(["ab"], 0.0, max_gen_len=4, logprobs=True, echo=True)
    assert list(scored) == ["generation", "tokens", "logprobs"]
    assert scored["tokens"][:3] == ["<|begin_of_text|>", "a", "b"]
    assert len(scored["tokens"]) == len(scored["logprobs"]) == 7
    (chat,) = shared_llama.chat_completion([[{"role": "user", "content": "hi"}]], 0.0, 0.9, 4)
    assert chat == {"generation": {"role": "assistant", "content": chat["generation"]["content"]}}
    (chat,) = shared_llama.chat_completion(
        [[{"role": "user", "content": "hi"}]], 0.0, max_gen_len=4, logprobs=True
    )
    assert list(chat) == ["generation", "tokens", "logprobs"]
    assert isinstance(shared_llama.generate([[256, 65]], 3)[0][0], list)


def test_max_gen_len_none_is_what_fits(shared_llama):
    (out,) = shared_llama.generate([prompts_of([100])[0]], None, temperature=0)[0]
    (known,) = shared_llama.generate([prompts_of([100])[0]], 500, temperature=0)[0]
    assert out == known and 0 < len(out) <= 28


def test_a_build_leaves_pythons_traceback_alone(checkpoint_dir):
    """torch's groups put "[rank0]:" before each line of a traceback; a single process has none."""
    program = (
        "import sys; from llama import Llama; "
        "Llama.build(sys.argv[1], None, 64, 1, device='cpu'); raise KeyError('mine')"
    )
    command = [sys.executable, "-c", program, str(checkpoint_dir[0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)
    lines = done.stderr.splitlines()
    assert "Traceback (most recent call last):" in lines and lines[-1] == "KeyError: 'mine'"


def test_a_build_can_be_silent(checkpoint_dir, capfd, caplog, monkeypatch):
    """verbose=False prints nothing, and the advice about slow loads goes to the logger."""
    monkeypatch.setattr(generation, "_SLOW_LOAD_S", 0)
    monkeypatch.setattr(Loaded, "pack_command", lambda self: "llama convert A B")
    Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", dtype="bf16", verbose=False)
    assert capfd.readouterr() == ("", "")
    (record,) = [record for record in caplog.records if record.name == "llama.generation"]
    assert record.levelno == logging.WARNING and "llama convert A B" in record.getMessage()


def test_building_touches_no_global_state(checkpoint_dir):
    """Building changes no global state.

    The reference changes the default tensor type, the global seed and sys.stdout permanently.
    """
    torch.manual_seed(123)
    rng, out, threads = torch.get_rng_state(), sys.stdout, torch.get_num_threads()
    handlers, excepthook = list(logging.getLogger("llama").handlers), sys.excepthook
    said = io.StringIO()
    with redirect_stdout(said):
        llama = build(checkpoint_dir[0])
        llama.generate([[256, 65]], 5)
    assert said.getvalue().startswith("Loaded in ") and said.getvalue().count("\n") == 1
    assert (logging.getLogger("llama").handlers, sys.excepthook) == (handlers, excepthook)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (torch.get_default_dtype(), sys.stdout) == (torch.float32, out)
    assert torch.get_num_threads() == threads and torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_closed_llama_ends_its_requests_and_takes_no_more(checkpoint_dir):
    with build(checkpoint_dir[0]) as llama:
        engine = llama.llm_engine
        engine.add_request("a", [256, 65], SamplingParams(max_tokens=60, temperature=0))
        engine.step()
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort" and not engine.has_unfinished_requests()
    assert not llama.engine.runner.kv_cache.nbytes
    with pytest.raises(RuntimeError, match="closed: build another"):
        llama.generate([[256, 65]], 4)
    with pytest.raises(TypeError, match="a Llama cannot be copied or pickled"):
        copy.copy(llama)


def test_defaults_fit_the_memory(checkpoint_dir, capsys):
    """Defaults fit the memory: Llama.build("DIR") alone prints its choices."""
    llama = Llama.build(str(checkpoint_dir[0]), device="cpu")
    params = llama.model.params
    assert (params.max_seq_len, params.max_batch_size) == (8192, 32)
    assert "max_seq_len=8192, max_batch_size=32" in capsys.readouterr().out


BAD_GENERATE = [
    (("abc",), {}, TypeError, "prompt_tokens must be a list, got str"),
    (([[256], "abc"],), {}, TypeError, "prompt 1 must be a list of token ids, got str"),
    (([[256], []],), {}, ValueError, "prompt 1 has 0 tokens"),
    (([[1] * 129],), {}, ValueError, "prompt 0 has 129 tokens, but max_seq_len is 128"),
    (([[256, 512]],), {}, ValueError, "prompt 0 holds 512: token ids are 0 to 511"),
    (([[256, -1]],), {}, ValueError, "prompt 0 holds -1"),
    (([[256, 1.5]],), {}, ValueError, "prompt 0 holds 1.5"),
    (([[256]], -1), {}, ValueError, "max_gen_len=-1"),
    (([[256]], 5), {"temperature": -0.1}, ValueError, "temperature"),
    (([[256]], 5), {"temperature": math.nan}, ValueError, "temperature"),
    (([[256]], 5), {"temperature": math.inf}, ValueError, "temperature"),
    (([[256]], 5), {"top_p": 1.1}, ValueError, "top_p"),
    (([[256]], 5), {"top_p": math.nan}, ValueError, "top_p"),
    (([[256]], 5), {"seed": -1}, ValueError, "seed"),
]


@pytest.mark.parametrize(("args", "kwargs", "kind", "message"), BAD_GENERATE)
def test_bad_input_to_generate(args, kwargs, kind, message, shared_llama):
    """Bad input to generate gives a clear error before any work; the same Llama still answers."""
    steps = shared_llama.engine.stats.steps
    with pytest.raises(kind, match=message):
        shared_llama.generate(*args, **kwargs)
    assert shared_llama.engine.stats.steps == steps
    assert shared_llama.generate([[256, 65]], 3, 0)[0][0]


BAD_DIALOGS = [
    ("hello", "dialogs must be a list, got str"),
    ([[{"role": "wizard", "content": "hi"}]], "wizard"),
    ([[{"role": "user"}]], "content"),
    ([[{"role": "user", "content": None}]], "content"),
    (
        [[{"role": "user", "content": "hi"}], []],
        "dialog 1, messages must be a list of at least one message",
    ),
    ([{"role": "user", "content": "hi"}], "dialog 0, messages must be a list .* got {'content'"),
]


@pytest.mark.parametrize(("dialogs", "message"), BAD_DIALOGS)
def test_bad_dialogs(dialogs, message, shared_llama):
    with pytest.raises((TypeError, ValueError), match=message):
        shared_llama.chat_completion(dialogs)
    assert shared_llama.chat_completion([[{"role": "user", "content": "hi"}]], 0.0, 0.9, 3)


def test_bad_texts(shared_llama):
    with pytest.raises(TypeError, match="prompts must be a list, got str"):
        shared_llama.text_completion("hello")
    with pytest.raises(TypeError, match=r"prompts\[1\] is NoneType, not a string"):
        shared_llama.text_completion(["a", None])


BAD_BUILD = [
    ({"max_seq_len": 0}, "max_seq_len=0"),
    ({"max_batch_size": True}, "max_batch_size=True"),
    ({"seed": -3}, "seed=-3"),
    ({"dtype": "int3"}, "dtype='int3': give one of bf16, fp16, fp32"),
    ({"device": "abacus"}, "'abacus' is not a device"),
    ({"device": "meta"}, "'meta' is not a device"),
    ({"model_parallel_size": 2}, "model_parallel_size=2 does not divide the 1 processes"),
    ({"qq": 1}, r"^Llama\.build\(\) got an unexpected keyword argument 'qq'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BUILD)
def test_bad_arguments_to_build(change, message, checkpoint_dir):
    kwargs: dict[str, Any] = {"max_seq_len": 32, "max_batch_size": 1, "device": "cpu"} | change
    with pytest.raises((TypeError, ValueError), match=message):
        Llama.build(str(checkpoint_dir[0]), **kwargs)


def test_a_vocabulary_that_does_not_match_is_refused(make_checkpoint):
    folder, _, _ = make_checkpoint(vocab_size=640, n_layers=1)
    with pytest.raises(ValueError, match="has 512 tokens, but the model has vocab_size=640"):
        build(folder)


def test_a_missing_tokenizer_is_named(make_checkpoint, tmp_path):
    folder, _, _ = make_checkpoint(n_layers=1)
    (folder / "tokenizer.model").rename(tmp_path / "elsewhere.model")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        build(folder)
    llama = Llama.build(str(folder), str(tmp_path / "elsewhere.model"), 32, 1, device="cpu")
    assert llama.text_completion(["a"], max_gen_len=2)
    shutil.copy(tmp_path / "elsewhere.model", folder / "tokenizer.model")


def test_types_follow_the_device():
    assert pick_dtype(None, torch.device("cpu")) is torch.bfloat16
    assert pick_dtype("fp16", torch.device("cpu")) is torch.float16
    assert pick_dtype(torch.float32, torch.device("cpu")) is torch.float32


def test_fp16_stays_near_float32(checkpoint_dir, shared_llama):
    llama = build(checkpoint_dir[0], dtype="fp16")
    assert llama.model.norm.weight.dtype == torch.float16
    for prompt in prompts_of([5, 20], seed=12):
        tokens = torch.tensor([prompt])
        rough = llama.model(tokens, 0)[0, -1].softmax(-1)
        exact = shared_llama.model(tokens, 0)[0, -1].softmax(-1)
        assert 0 < (rough - exact).abs().sum() / 2 < 0.01


def test_a_row_of_nan_ends_its_own_request(checkpoint_dir, monkeypatch):
    """A row of NaN ends its own request and no other; its neighbours get their usual answers."""
    llama = build(checkpoint_dir[0])
    engine, model = llama.llm_engine, llama.model
    prompts = prompts_of([5, 9, 7], seed=15)
    wanted = [llama.generate([prompt], 6, 0)[0][0] for prompt in prompts]
    steps = list[int]()

    def with_a_bad_row(logits, hidden):
        found = logits(hidden)
        steps.append(len(found))
        if steps == [3]:  # the first such step; with --guess later ones may have three rows, too
            found[1] = math.nan
        return found

    for name in ("logits", "logits_share"):  # ranks compare the largest of each rank's share
        monkeypatch.setattr(model, name, partial(with_a_bad_row, getattr(model, name)))
    params = SamplingParams(max_tokens=6, temperature=0)
    outputs = engine.run(engine.prepare("", prompt, params) for prompt in prompts)
    assert [o.outputs[0].finish_reason for o in outputs][1] == "error"
    assert outputs[1].error is not None and "NaN" in outputs[1].error
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [wanted[0], wanted[2]]
    assert outputs[0].error is outputs[2].error is None


@pytest.mark.parametrize("penalty", [1e-40, 0.0, 11])
def test_penalties_that_overflow_are_refused(penalty):
    with pytest.raises(ValueError, match=r"repetition_penalty=.* from 0.01 to 10"):
        SamplingParams(repetition_penalty=penalty)


def test_empty_lists_give_empty_lists(shared_llama):
    """Empty lists give empty lists, on which programs that filter their prompts rely."""
    assert shared_llama.generate([]) == ([], None)
    assert shared_llama.generate([], logprobs=True) == ([], [])
    assert shared_llama.text_completion([]) == shared_llama.chat_completion([]) == []
    assert list(shared_llama.stream_text([])) == shared_llama.beam_search([]) == []


def test_numbers_and_rows_of_numpy_and_torch_are_understood(shared_llama):
    prompt = prompts_of([9], seed=16)[0]
    wanted = shared_llama.generate([prompt], 5, 0, seed=3)
    rows = [[np.array(prompt)], np.array([prompt]), torch.tensor([prompt]), [torch.tensor(prompt)]]
    for row in (*rows, [[np.int32(token) for token in prompt]]):
        assert (
            shared_llama.generate(row, np.int64(5), np.float32(0), seed=torch.tensor(3)) == wanted
        )


def test_weights_that_give_nan_are_an_error_and_not_an_answer(checkpoint_dir):
    llama = build(checkpoint_dir[0])
    weight = llama.model.norm.weight.clone()
    llama.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="logits hold NaN"):
        llama.generate(prompts_of([5, 9]), 4, 0)
    llama.model.norm.weight.copy_(weight)
    assert llama.generate(prompts_of([5]), 4, 0)[0][0]


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    alone = free_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.2)


def test_an_interrupted_call_leaves_nothing_behind(checkpoint_dir, monkeypatch):
    """An interrupted call leaves nothing behind.

    After Ctrl-C in the middle, the pages are free again, and the next call is served.
    """
    llama = build(checkpoint_dir[0])
    start, calls = llama.engine.runner.start, []

    def interrupt(scheduled):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return start(scheduled)

    monkeypatch.setattr(llama.engine.runner, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llama.generate(prompts_of([5, 9, 4, 4, 4, 4]), 20, 0)
    pool = llama.engine.scheduler.pool
    assert pool.num_free == pool.num_pages and not llama.engine.has_unfinished()
    assert llama.generate(prompts_of([5]), 8, 0)[0]
