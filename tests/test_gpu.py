"""Tests that need a GPU: python -m pytest -m gpu. The CPU is the oracle.

Models are tiny; `scripts/gpu_check.py` has the real shapes and the times.
"""

import dataclasses
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from bench import gpu_ranks
from bench.gpu_ranks import LAYOUTS, PROMPTS
from helpers.drafts import drafter_of
from helpers.launch import environment
from llama import Llama, SamplingParams
from llama.common.device import free_bytes
from llama.gpu.cases import Cases, Computed
from llama.gpu.check import check_kernels
from llama.kernels.cuda.table import SCALED_NAMES, table
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.shapes import SHAPES
from llama.ops.attention import paged_attention
from llama.ops.batch import Batch
from llama.ops.kv_cache import FORMATS
from llama.ops.rope import precompute_freqs_cis, rope_and_store
from llama.options.graphs.recorder import CudaRecorder
from llama.options.graphs.step_graphs import StepGraphs
from llama.weights.choice import QUANTIZED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
WIDE = {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 64}  # and 512 tokens


@pytest.fixture(scope="module")
def wide(make_checkpoint) -> str:
    """A model whose heads, of 64 elements, are large enough for the kernels."""
    return str(make_checkpoint(**WIDE)[0])


def build(folder: str, dtype: str, device: str = "cuda") -> Llama:
    return Llama.build(folder, None, 512, 8, device=device, dtype=dtype)


def graphs_of(llama: Llama) -> StepGraphs | None:
    graphs = llama.engine.runner.replayer
    assert graphs is None or isinstance(graphs, StepGraphs)
    return graphs


def test_float32_gives_the_ids_of_the_cpu(wide):
    """float32 gives the ids of the CPU.

    Answers are greedy and sampled with filters, with log probabilities; graphs are used.
    """
    gpu, cpu = build(wide, "fp32"), build(wide, "fp32", "cpu")
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 0.0, "logprobs": True},
    ]
    for settings in ways:
        ours, theirs = (x.generate(PROMPTS, 40, **settings) for x in (gpu, cpu))
        assert ours[0] == theirs[0], settings
        for a, b in zip(ours[1] or [], theirs[1] or [], strict=True):
            assert a == pytest.approx(b, abs=1e-3)
    graphs = graphs_of(gpu)
    assert graphs is not None and graphs._graphs, "no step was replayed"


@pytest.mark.parametrize(
    ("shape", "format", "kv_format"),
    [("8b", None, None), ("8b", None, "int8"), ("1b", None, None)]
    + [("8b", name, None) for name in QUANTIZED],
)
def test_each_kernel_agrees_with_its_op_in_all_cases(shape, format, kv_format):
    """Each kernel agrees with PyTorch's operator at the sizes of a real model, with every tile."""
    params = ModelArgs(**SHAPES[shape])
    plan = LayerPlan.of(params, kv_format=FORMATS[kv_format])
    device = torch.device("cuda", 0)
    computed = Computed(plan, params.vocab_size, device, torch.bfloat16, (format,))
    names = ("linear",) if format else computed.names
    if kv_format is not None:
        names = ("attention", "rope_and_store")
    checked = check_kernels(Cases(computed, every=True), names)
    assert checked.reasons == dict.fromkeys(names)


def test_keys_far_into_a_large_cache_are_read_and_written_where_they_are():
    """Offsets around 2**31 elements lead to the same keys as in a small cache."""
    kernels = table({"attention", "rope_and_store"}, {torch.bfloat16})
    device = torch.device("cuda", 0)
    heads, page_size = 8, 16
    page_shape = (page_size, heads, 128)
    elements = page_size * heads * 128
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device).bfloat16()

    small = normal(2, 9, *page_shape)
    queries = normal(3, 4 * heads, 128)
    _, batch = Batch.pack(
        [], [0, 16, 130], [1, 1, 1], [[8], [0, 1], [*range(9)]], page_size, [], device
    )
    batch = batch.with_kernels(kernels)
    qkv = normal(3, 6 * heads, 128)
    freqs = precompute_freqs_cis(128, 3, 5e5).to(device)
    slots = torch.tensor([0, 17, 143], device=device)
    attended = paged_attention(queries, small, batch)
    for num_pages in (2**31 // elements - 1, 2**31 // elements + 9):
        large = small.new_empty(2, num_pages, *page_shape)
        far = num_pages - 9
        large[:, far:] = small
        far_batch = dataclasses.replace(batch, page_table=batch.page_table + far)
        torch.testing.assert_close(paged_attention(queries, large, far_batch), attended)
        stored = small.clone()
        rope_and_store(qkv, freqs, stored, slots, kernels)
        rope_and_store(qkv, freqs, large, slots + far * page_size, kernels)
        torch.testing.assert_close(large[:, far:], stored)
        del large


def test_a_draft_model_guesses_in_graphs_of_its_own(wide, monkeypatch):
    """A draft model drafts in graphs of its own.

    It is the model itself, so nearly all drafts are right, and the ids are those of the CPU.
    """
    gpu = Llama.build(wide, None, 512, 8, device="cuda", dtype="fp32", speculate=wide)
    core = gpu.engine
    drafter = drafter_of(core)
    monkeypatch.setattr(drafter, "choose", lambda rates, *_: [len(x) for x in rates])
    wanted = build(wide, "fp32", "cpu").generate(PROMPTS, 40, 0.0)[0]
    assert gpu.generate(PROMPTS, 40, 0.0)[0] == wanted
    assert core.stats.accepted_tokens > 0.9 * core.stats.draft_tokens > 50
    assert core.runner.replayer and drafter._runner.replayer
    gpu.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_kernels_graphs_and_torch_alone_say_nearly_the_same(wide, dtype, monkeypatch):
    """Kernels, graphs and PyTorch alone give nearly the same log probabilities.

    The same tokens are scored and generated in each way.
    """
    found: list[tuple[list, list[float]]] = []
    for ways in ("none", "graph", ""):
        monkeypatch.setenv("LLAMA_GPU_KERNELS", ways)
        llama = build(wide, dtype)
        assert bool(llama.model.kernels.names - {"graph"}) == (ways == "")
        assert (graphs_of(llama) is not None) == (ways != "none")
        params = SamplingParams(
            temperature=0.0, max_tokens=30, logprobs=0, prompt_logprobs=0, ignore_eos=True
        )
        outputs = llama.llm_engine.run(
            [llama.llm_engine.prepare("", prompt, params) for prompt in PROMPTS]
        )
        scored = llama.generate([[256, *range(65, 125)]], 1, 0.0, logprobs=True, echo=True)[1]
        assert scored is not None
        found.append(([o.outputs[0].token_ids[:1] for o in outputs], scored[0][1:60]))
        llama.close()
    (first, scores), *others = found
    for ids, other in others:
        assert ids == first
        assert other == pytest.approx(scores, abs=0.15)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_quantized_weights_and_a_cache_in_8_bits_say_nearly_what_a_cpu_says(wide, quantize):
    """Quantized weights and an 8-bit cache give nearly the CPU's results.

    Both have the same codes, so that only the order of sums differs.
    """
    found = []
    for device in ("cuda", "cpu"):
        llama = Llama.build(
            wide, None, 512, 8, device=device, quantize=quantize, kv_cache_dtype="int8"
        )
        assert llama.model.quantization == quantize
        scored = llama.generate([[256, *range(65, 125)]], 1, 0.0, logprobs=True, echo=True)[1]
        assert scored is not None
        found.append(scored[0][1:60])
        if device == "cuda":
            assert "linear" in llama.model.kernels.names
            assert all(0 < len(x) <= 30 for x in llama.generate(PROMPTS, 30, 0.0)[0])
        llama.close()
    assert found[0] == pytest.approx(found[1], abs=0.15)


def test_activations_in_e4m3_change_scores_a_little(wide):
    """A CPU, which has the same definition, is as near: rounding moves some codes by one."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply e4m3")
    prompt = [256, *(65 + i * 7 % 60 for i in range(300))]
    found = []
    for device, activations in (("cuda", "bf16"), ("cuda", "fp8"), ("cpu", "fp8")):
        llama = Llama.build(
            wide, None, 512, 8, device=device, quantize="fp8", activations=activations
        )
        scored = llama.generate([prompt], 1, 0.0, logprobs=True, echo=True)[1]
        assert scored is not None
        if activations == "fp8" and device == "cuda":
            assert {*SCALED_NAMES} <= llama.model.kernels.names
        found.append(scored[0][1:])
        llama.close()
    assert found[0] != found[1]
    for others in found[1:]:
        assert others == pytest.approx(found[0], abs=1)


def test_prompts_that_come_among_answers_change_none(wide):
    """Prompts that arrive among answers change none.

    Steps of prompts and answers run as graphs, as steps of answers alone do.
    """
    found = []
    for device in ("cuda", "cpu"):
        llama = build(wide, "fp32", device)
        engine, answers = llama.llm_engine, dict[str, list[int]]()
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS * 2):
            engine.add_request(str(i), [*prompt, i], params)
            for _ in range(3):
                answers |= {x.request_id: x.outputs[0].token_ids for x in engine.step()}
        while engine.has_unfinished_requests():
            answers |= {x.request_id: x.outputs[0].token_ids for x in engine.step()}
        found.append(answers)
        llama.close()
    assert found[0] == found[1] and len(found[0]) == 2 * len(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_share_a_gpu_are_one_process(layout, make_checkpoint, tmp_path):
    """Ranks that share a GPU give the ids of one process, step by step and in graphs.

    Sums by gloo cannot be captured, which an NCCL before 2.30 leaves; stages have graphs between
    messages of gloo as well.
    """
    folder = str(make_checkpoint(num_shards=2, **WIDE)[0])
    job = gpu_ranks.Job({"wide": folder}, str(tmp_path), layout, dry=False)
    _, found = gpu_ranks.run(job)
    wanted = build(folder, "fp32", "cpu").generate(PROMPTS, 12, 0.0)[0]
    for way in ("eager", "graphs"):
        result = found[f"wide fp32, {way}"]
        assert result["ids"][: len(wanted)] == wanted
        has_graphs = way == "graphs" and (result["backend"] == "nccl" or layout.size == 1)
        assert result["replays"] >= 10 if has_graphs else result["replays"] == 0


def test_nccl_s_sums_can_be_captured(tmp_path):
    """NCCL's sums can be captured.

    A group of one, in a process of its own, captures the sum as a larger group would.
    """
    code = """
import torch, torch.distributed as dist
from llama.options.graphs.recorder import CudaRecorder
place = torch.device("cuda", 0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=place)
x = torch.ones(64, device=place)
def add():
    y = x.clone()
    dist.all_reduce(y)
    return (y * 2,)
recorder = CudaRecorder(place)
(out,), replay = recorder.record(add, [x])
x.fill_(5)
replay()
assert (out == 10).all(), out
recorder.close()
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_memory_stays_within_what_was_reckoned(wide):
    """Memory stays within the estimate.

    It includes weights, KV cache and steps of the most rows and tokens; a second model fits into
    the memory of the first.
    """
    device = torch.device("cuda", 0)
    before = free_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    llama = build(wide, "bf16")
    prompts = [[256, *range(200)] for _ in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama.generate(prompts, 200, 0.7, 0.9)
    assert torch.cuda.max_memory_allocated(device) < 0.95 * before
    kv_cache = llama.engine.runner.kv_cache
    assert kv_cache.nbytes <= 0.9 * before
    nbytes = kv_cache.nbytes
    del kv_cache
    with_cache = torch.cuda.memory_allocated(device)
    llama.close()
    assert with_cache - torch.cuda.memory_allocated(device) >= nbytes
    del llama
    again = build(wide, "bf16")
    assert again.generate(prompts[:1], 4, 0.0)[0][0]


def test_weights_come_to_the_gpu_as_they_are(make_checkpoint):
    """Weights are copied to the GPU unchanged, by threads through pinned buffers.

    There are one shard and four, of the same dtype and another.
    """
    for shards in (1, 4):
        folder = str(make_checkpoint(num_shards=shards, **WIDE)[0])
        for dtype in ("fp32", "bf16"):
            ours, theirs = build(folder, dtype), build(folder, dtype, "cpu")
            state = theirs.model.state_dict()
            for name, weight in ours.model.state_dict().items():
                assert torch.equal(weight.cpu(), state[name]), (shards, dtype, name)


def test_a_step_waits_for_the_device_once():
    """A step waits for the device once.

    It uses events, not synchronisations: a recorder's replay returns before the device has
    finished.
    """
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    recorder = CudaRecorder(device)

    def work() -> tuple[torch.Tensor]:
        y = x
        for _ in range(60):
            y = (y @ x) * 1e-2
        return (y,)

    _, replay = recorder.record(work, [x])
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    replay()
    done.record()
    assert not done.query(), "the replay has waited"
    torch.cuda.synchronize()
    recorder.close()
