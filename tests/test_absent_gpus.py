"""Models on GPUs that are absent: their names and their limits, and the CPU's values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.absent_device import AbsentDevice, absent_gpu, refuse_float64
from helpers.adapters import (
    DOWN,
    EMBEDDING,
    PREFIX,
    QUERY,
    merged_state,
    update_of,
    write_adapter,
)
from helpers.checkpoints import write_byte_tokenizer
from helpers.tape import Again
from helpers.weights import hf_model
from llama import Llama, Transformer
from llama.assembly import _state_bytes, assemble
from llama.checkpoint.find import find
from llama.engine.sequence import SequenceState
from llama.kernels.cpu import native
from llama.loading.files import Files
from llama.loading.memory import estimate_memory
from llama.loading.sizes import Memory
from llama.options import largest_step
from llama.options.engine_options import EngineOptions
from llama.ranks.placement import Placement

PROMPTS = [[256, 70, 71], [256, 77], [256, *range(65, 90)]]


@pytest.fixture
def mac(monkeypatch) -> Iterator[None]:
    """A Mac with 1 GiB for its GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    with AbsentDevice("mps", refuse_float64):
        yield


def build(folder: str, device: str | None, dtype: str | None = "fp32") -> Llama:
    return Llama.build(folder, None, 128, 4, device=device, dtype=dtype)


def test_a_mac_gives_the_ids_of_the_cpu(mac, checkpoint_dir):
    """The default device of a Mac is its GPU, and requests of every kind give the CPU's ids.

    A past fault: each sampled request failed, because MPS has no float64.
    """
    gpu = build(str(checkpoint_dir[0]), None)
    assert gpu.engine.runner.kv_cache.device.type == "mps"
    cpu = build(str(checkpoint_dir[0]), "cpu")
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": True},
        {"temperature": 0.6, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_p": 1.0, "seed": 4, "logprobs": True},
    ]
    for settings in ways:
        ours, theirs = (llama.generate(PROMPTS, 20, **settings) for llama in (gpu, cpu))
        assert ours[0] == theirs[0], settings
        for a, b in zip(ours[1] or [], theirs[1] or [], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    for kind in ("mean", "last"):
        for x, y in zip(*(llama.embed(PROMPTS, pooling=kind) for llama in (gpu, cpu)), strict=True):
            assert x.tolist() == pytest.approx(y.tolist(), abs=1e-4)
    (states,) = gpu.hidden_states(PROMPTS[:1], [1], "last")
    assert states[1].device.type == "cpu"


def test_a_mac_merges_adapters_without_float64(mac, tmp_path):
    """A Mac's GPU merges in float32: matrices of the layers and of the ends, by LoRA and DoRA."""
    model = hf_model(vocab_size=512)
    model.save_pretrained(tmp_path / "base")
    write_byte_tokenizer(tmp_path / "base")
    norm = {f"{PREFIX}model.norm.weight": torch.full((64,), 3.0)}
    tensors = norm | update_of(model, QUERY, DOWN, EMBEDDING, dora=True)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    expected = merged_state(model, tensors)
    llama = Llama.build(str(tmp_path / "base"), None, 64, 1, dtype="fp32", lora=adapter)
    shards = llama.model.named_shards()
    for name, values in expected.items():
        assert shards[name].device.type == "mps"
        torch.testing.assert_close(shards[name].cpu(), values.float(), atol=2e-6, rtol=2e-6)


def test_a_mac_s_kv_cache_stays_below_its_limit(checkpoint_dir):
    """The KV cache on a Mac has less than 4 GiB, beyond which its GPU fails with a tensor."""
    found = find(checkpoint_dir[0])
    tokens = {}
    for device in ("mps", "cpu"):
        files = Files(found, torch.bfloat16, None, Placement(), torch.device(device))
        memory = estimate_memory(files, 64 << 30, 32)
        both = Memory.of_all([memory, memory])  # with a draft model there are two
        tokens[device] = memory.kv_tokens
        assert both.kv_tokens <= memory.kv_tokens
        if device == "mps":
            assert memory.per_token * both.kv_tokens < 1 << 32
    assert tokens["mps"] * memory.per_token < 1 << 32 < tokens["cpu"] * memory.per_token


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=["V100", "T4"])
def test_gpus_without_bf16_run_fp16(checkpoint_dir, monkeypatch, capability):
    """A V100 and a T4 run the model in fp16, as Meta's code does, with torch's operators.

    Graphs are off here, because an absent GPU cannot capture them; kernels are not, as they are not
    for such a GPU.
    """
    monkeypatch.setenv("LLAMA_GPU_KERNELS", "attention,linear,sample")
    with absent_gpu(capability):
        gpu = build(str(checkpoint_dir[0]), "cuda", None)
        assert not gpu.model.kernels.names
        assert gpu.engine.runner.kv_cache.dtype is torch.float16
        cpu = build(str(checkpoint_dir[0]), "cpu", "fp16")
        tokens = torch.tensor(PROMPTS[2:])
        logits = gpu.model.forward(tokens.to("cuda:0"), 0)
        assert logits.dtype is torch.float32
        assert torch.allclose(logits.cpu(), cpu.model.forward(tokens, 0), atol=0.05)
        for temperature in (0.0, 0.8):
            answers = gpu.generate(PROMPTS, 20, temperature, seed=1)[0]
            assert all(0 < len(answer) <= 20 for answer in answers)


def test_a_model_on_a_gpu_does_not_ask_for_the_cpu_s_kernels(checkpoint_dir, monkeypatch):
    """A model on a GPU does not ask for the CPU kernels, which g++ would compile for 20 seconds."""
    monkeypatch.setenv("LLAMA_GPU_KERNELS", "none")

    def compile_kernels() -> None:
        raise AssertionError("the CPU kernels are compiled")

    monkeypatch.setattr(native, "kernels", compile_kernels)
    with absent_gpu((9, 0)):
        gpu = build(str(checkpoint_dir[0]), "cuda", None)
        for temperature in (0.0, 0.8):
            assert all(gpu.generate(PROMPTS, 5, temperature, seed=1, logprobs=True)[0])


def test_metas_forward_takes_what_its_tokens_need(checkpoint_dir, monkeypatch):
    """Meta's forward on a GPU allocates what its tokens need, and answers as on the CPU.

    A past fault: it allocated keys and values of max_batch_size x max_seq_len tokens, with CUDA's
    default batch 275 GB for the 8B.
    """
    monkeypatch.setenv("LLAMA_GPU_KERNELS", "none")
    tokens = torch.randint(512, (3, 90), generator=torch.Generator().manual_seed(1))
    with absent_gpu((9, 0)):
        gpu = Llama.build(str(checkpoint_dir[0]), None, 128, device="cuda", dtype="fp32").model
        cpu = build(str(checkpoint_dir[0]), "cpu").model
        allocated: list[int] = []
        new_kv_cache = gpu.new_kv_cache

        def counted(num_pages: int, page_size: int) -> Tensor:
            allocated.append(num_pages * page_size)
            return new_kv_cache(num_pages, page_size)

        monkeypatch.setattr(gpu, "new_kv_cache", counted)
        for rows, start, end in ((1, 0, 20), (1, 20, 21), (3, 0, 40), (3, 40, 41), (2, 41, 90)):
            part = tokens[:rows, start:end]
            logits = gpu.forward(part.to("cuda:0"), start).cpu()
            assert torch.allclose(logits, cpu.forward(part, start), atol=1e-4)
        assert gpu.params.max_batch_size == 256
        assert allocated[0] == 32 and len(allocated) < 5 and max(allocated) <= 2 * 3 * 96


def test_a_build_runs_the_largest_step_first(checkpoint_dir, monkeypatch):
    """A GPU runs a step of the most tokens at build, and its memory is left free.

    A past fault: the memory was reckoned, and the first request waited for cuBLAS to load.
    """
    monkeypatch.setenv("LLAMA_GPU_KERNELS", "none")
    steps: list[int] = []
    run = Transformer.run_layers

    def run_layers(model: Transformer, x: Tensor, *rest: Any) -> Tensor:
        steps.append(len(x))
        return run(model, x, *rest)

    monkeypatch.setattr(Transformer, "run_layers", run_layers)
    sampled: list[SequenceState] = []
    sample = largest_step.sample

    def sample_all(logits: Tensor, sequences: list[SequenceState], *rest: Any) -> Any:
        sampled.extend(sequences)
        return sample(logits, sequences, *rest)

    monkeypatch.setattr(largest_step, "sample", sample_all)
    page = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, slots, elements, bytes
    num_pages = {}
    with absent_gpu((9, 0)):
        model = build(str(checkpoint_dir[0]), "cuda").model
        assert steps == [4 * 128]  # all that four sequences of 128 tokens can be
        assert len(sampled) == 4 and all(seq.spec.has_penalties for seq in sampled)
        captured = (64 + 4) * _state_bytes(model)
        # Beside the captured states, 16 of 40 pages are for logits.
        for peak in (0, (1 << 30) - 40 * page - captured):
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, peak=peak: peak)
            core = assemble(
                model,
                EngineOptions(
                    num_pages=32, token_budget=64, recorder_for=lambda model: Again(1 << 30)
                ),
            ).core
            num_pages[peak] = core.runner.num_pages
            assert steps.count(64) == len(num_pages)
    assert [*num_pages.values()] == [32, pytest.approx(24, abs=2)]
