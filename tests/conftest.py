"""Shared fixtures: a tokenizer, a small random checkpoint, a loaded `Llama`, the CPU kernels."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.kernels import HAS_KERNELS
from helpers.launch import DEMO
from llama import Llama
from llama.ops.cpu import native

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
EMULATED_AMX = [  # by a header that takes the place of the CPU's tiles; no variable of it is shared
    "-march=native", "-D__AMX_TILE__", "-D__AMX_BF16__", "-fno-gnu-unique",
    "-include", str(Path(__file__).resolve().parent / "helpers" / "amx_emulated.h"),
]  # fmt: skip
BODIES = {  # of the kernels: how they are compiled for a CPU, and what tells one that runs them
    "native": (["-march=native"], {"avx2"}),
    "amx": (EMULATED_AMX, {"avx512_bf16"}),
    "avx512": (["-march=skylake-avx512"], {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": (["-march=haswell"], {"avx2"}),
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable[..., tuple[Path, dict, dict]]:
    """make_checkpoint(num_shards=1, seed=0, **params) -> (folder, state, params)."""

    def make(num_shards: int = 1, seed: int = 0, **changes) -> tuple[Path, dict, dict]:
        params = {**PARAMS, **changes}
        state = random_state(params, seed)
        folder = tmp_path_factory.mktemp("checkpoint")
        write_meta(folder, params, state, num_shards)
        write_byte_tokenizer(folder)
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
    """The demo model, float32 on the CPU, for many tests; none of them may change it."""
    return Llama.build(str(DEMO), None, 384, 64, device="cpu", dtype="fp32")


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
            ],
        ),
    ],
)
def device(request) -> torch.device:
    """The CPU, and a CUDA GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, and two-core machines stay quiet."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> dict[str, ctypes.CDLL]:
    """The kernels as compiled for this CPU, and for others that it can stand for."""
    folder = tmp_path_factory.mktemp("kernels")
    built = {}
    for name, (cpu_flags, needs) in BODIES.items():
        if native.cpu_flags() >= needs:
            with pytest.MonkeyPatch.context() as patch:
                flags = [f for f in native._COMPILE if f != "-march=native"]
                patch.setattr(native, "_COMPILE", [*flags, *cpu_flags])
                built[name] = native.load(folder)
    return built


@pytest.fixture(params=BODIES)
def kernels(request, monkeypatch):
    """An op with its kernel, in each body that runs here."""
    if not HAS_KERNELS:
        pytest.skip("needs x86-64 with AVX2, and g++")
    libraries = request.getfixturevalue("libraries")
    if request.param not in libraries:
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setattr(native, "kernels", lambda: libraries[request.param])


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
