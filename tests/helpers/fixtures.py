"""Shared fixtures: a tokenizer, a small checkpoint, a loaded `Llama`, CPU kernels, distributions.

It is a pytest plugin that conftest.py loads only where tests run, because it imports torch.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import long_demo, random_state, write_byte_tokenizer, write_meta
from helpers.kernels import BODIES, HAS_KERNELS, INTEGER_BODIES, library
from helpers.launch import DEMO
from llama import Llama
from llama.engine.core import EngineCore
from llama.engine.sampler import sample
from llama.engine.sequence import SequenceState
from llama.kernels.cpu import native
from llama.ops import sample as sample_op
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.speculation.hook import speculate
from llama.options.speculation.texts import Lookup
from llama.ranks.parallel import Parallel

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


class _RepeatingDrafter(Drafter):
    """A drafter that repeats earlier text and appends a wrong token."""

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        texts = [x.seq.tokens for x in states]
        return [[*Lookup(tokens).draft(len(tokens) % 5), 65] for tokens in texts]


@pytest.fixture(autouse=True, scope="session")
def _drafts_everywhere(pytestconfig: pytest.Config) -> Iterator[list[EngineCore]]:
    """Use drafts in every engine of this process, given --guess; yield the engines that did.

    A program in another process is not affected.
    """
    cores: list[EngineCore] = []
    with pytest.MonkeyPatch.context() as patched:
        if pytestconfig.option.guess:
            made = EngineCore.__init__

            def init(core: EngineCore, *args: Any) -> None:
                made(core, *args)
                if not core.runner.async_scheduling:
                    speculate(core, _RepeatingDrafter(7, Parallel(), []))
                cores.append(core)

            patched.setattr(EngineCore, "__init__", init)
        yield cores
    if pytestconfig.option.guess:
        stats = [core.stats for core in cores]
        print(f"\n{sum(x.accepted_tokens for x in stats)} of {sum(x.draft_tokens for x in stats)}")


def model_params(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of params.json; helpers/over_ranks.py replaces this function."""
    return {**PARAMS, **changes}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable[..., tuple[Path, dict, dict]]:
    """A function make_checkpoint(num_shards, seed, **params) -> (folder, state, params)."""

    def make(
        num_shards: int = 1, seed: int = 0, num_tokens: int = 512, **changes
    ) -> tuple[Path, dict, dict]:
        params = model_params(changes)
        state = random_state(params, seed)
        folder = tmp_path_factory.mktemp("checkpoint")
        write_meta(folder, params, state, num_shards)
        write_byte_tokenizer(folder, num_tokens)
        return folder, state, params

    return make


@pytest.fixture(scope="session")
def checkpoint_dir(make_checkpoint) -> tuple[Path, dict, dict]:
    return make_checkpoint()


@pytest.fixture(scope="session")
def shared_llama(checkpoint_dir) -> Llama:
    """One float32 model on the CPU for many tests; none of them may change it."""
    return Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def demo() -> Llama:
    """The demo model in float32 on the CPU, for many tests; none of them may change it."""
    return Llama.build(str(DEMO), None, 512, 64, device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def long_demo_dir(tmp_path_factory) -> str:
    """The demo model for tests that need more than the 512 tokens of its context."""
    return str(long_demo(tmp_path_factory.mktemp("long") / "demo"))


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Run tests with one thread: tiny models are fastest so, and two-core machines stay quiet.

    OMP_NUM_THREADS overrides the number: no test may depend on it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BODIES)
def kernels(request, monkeypatch) -> str:
    """Run a test with each compiled variant of the kernels; the value is the variant's name."""
    return _run(request.param, monkeypatch)


@pytest.fixture(params=INTEGER_BODIES)
def integer_kernels(request, monkeypatch) -> str:
    """Run a test with each variant whose integer products may differ; the value is its name."""
    return _run(request.param, monkeypatch)


def _run(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if not HAS_KERNELS:
        pytest.skip("needs x86-64 with AVX2, and g++")
    if not native.cpu_flags() >= INTEGER_BODIES[name].needs:
        pytest.skip(f"this CPU has no {name}")
    body = library(name)
    monkeypatch.setattr(native, "kernels", lambda: body)
    return name


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """A device for the PyTorch implementation: always the CPU, and a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    return torch.device(request.param)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)


@pytest.fixture
def distribution(monkeypatch) -> Callable[[Tensor, SequenceState], Tensor]:
    """A function distribution(logits (V), sequence) -> (V), the shares of 4,096 evenly spread
    draws.

    Each share is within 1 / 4,096 of its probability: a histogram without chance. The weights that
    race are computed by torch; the winner is found by inverse transform.
    """
    n = 4096
    numbers = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n

    def is_after(fixed_probs: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
        sums = fixed_probs.double().cumsum(dim=1)
        return sums <= numbers * sums[:, -1:]

    def measure(logits: Tensor, seq: SequenceState) -> Tensor:
        ids = sample(logits.expand(n, -1), [seq] * n).ids
        return ids.bincount(minlength=len(logits)) / n

    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(sample_op, "_finishes", lambda *given: is_after(*given).int())
    monkeypatch.setattr(sample_op, "_can_win", lambda fixed_probs, _: fixed_probs > 0)
    return measure
