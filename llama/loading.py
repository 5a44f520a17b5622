"""From the arguments of `Llama.build` to a loaded model: device, ranks, threads, memory, weights.

In: what the user asked for. Out: one rank's Transformer, the Tokenizer and the size of the KV
cache, or one clear error on every rank before any weight is read. Nothing here runs the model.
"""

import functools
import sys
from dataclasses import dataclass, replace

import torch

from llama import gpu, weights
from llama.checkpoint import reader
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checks import number, path_like, whole_number
from llama.device import dtype_name, free_bytes, pick_device, pick_dtype, set_num_threads
from llama.engine.core import PAGE_SIZE, TOKEN_BUDGET
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.cpu import native
from llama.ranks.collectives import ModelParallel
from llama.ranks.groups import connect
from llama.tokenizer import Tokenizer

MEMORY_FRACTION = 0.9  # of what is free; the allocator's slack needs the rest
DEFAULT_SEQ_LEN = 8192  # aimed at where the user says nothing
DEFAULT_BATCH_SIZE, DEFAULT_BATCH_SIZE_CUDA = 32, 256
_CUDA_RESERVE = 3 << 29  # bytes: modules of cuBLAS, buffers of nccl, graphs
_SCORED_ROWS = 256  # rows of logits that a step holds at the least


@dataclass(frozen=True)
class Loaded:
    """One rank's model with its tokenizer, and how many pages its KV cache has. is_guard: it is
    Llama Guard, which has no tools."""

    model: Transformer
    tokenizer: Tokenizer
    num_pages: int
    is_guard: bool = False

    def describe(self, *, has_graphs: bool = False) -> str:
        """Device, type, ranks and sizes, as `Llama.build` prints them."""
        params, device = self.model.params, self.model.norm.weight.device
        dtype = self.model.norm.weight.dtype
        name = self.model.quantization or dtype_name(dtype)
        tokens = self.num_pages * PAGE_SIZE
        sequences = self.num_pages // pages_for(params.max_seq_len)
        return (
            f"{device.type}, {name}, model_parallel_size={self.model.parallel.size}, "
            f"max_seq_len={params.max_seq_len}, max_batch_size={params.max_batch_size}, "
            f"KV cache {tokens:,} tokens, {sequences} sequence{'s' * (sequences != 1)} of full "
            f"length at once{gpu.describe(self.model)}" + ", CUDA graphs" * has_graphs
        )


def load_model(
    ckpt_dir: str,
    tokenizer_path: str | None,
    max_seq_len: int | None,
    max_batch_size: int | None,
    model_parallel_size: int | None,
    seed: int,
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantize: str | None,
    kv_cache_memory_bytes: int | None,
    timeout_s: float,
) -> Loaded:
    """The arguments are those of `Llama.build`; the sizes chosen are in the model's params."""
    chosen_device = pick_device(device)
    number("timeout_s", timeout_s, 0, 10**6, above=True)
    parallel = connect(model_parallel_size, chosen_device, timeout_s)
    with parallel.agree("the arguments of Llama.build", world=True) as must_match:
        asked = Asked.checked(max_seq_len, max_batch_size, kv_cache_memory_bytes)
        whole_number("seed", seed, 0, 2**63 - 1)
        if quantize is None and isinstance(dtype, str) and dtype in weights.QUANTIZED:
            dtype, quantize = None, dtype  # as it was written before there was quantize=
        chosen_dtype = pick_dtype(dtype, chosen_device)
        weights.check_quantize(quantize, chosen_dtype, chosen_device)
        checkpoint = find(path_like("ckpt_dir", ckpt_dir))
        params = checkpoint.params
        params.check_ranks(parallel.size)
        tokenizer_file = path_like("tokenizer_path", tokenizer_path or checkpoint.tokenizer_path())
        tokenizer = load_tokenizer(tokenizer_file, params)
        if asked.max_seq_len is not None and asked.max_seq_len > params.longest_context:
            raise ValueError(
                f"max_seq_len={max_seq_len} is beyond this model's limit of "
                f"{params.longest_context} tokens: build with that or less"
            )
        allowed = gpu.asked_for()
        native.asked_for()  # a wrong name is told before weights are read
        must_match += [params, asked, seed, chosen_dtype, quantize, chosen_device.type]
    if chosen_device.type == "cpu":
        set_num_threads()
    kernels = gpu.kernels_for(params, parallel, chosen_device, chosen_dtype, PAGE_SIZE, allowed)
    sizes = _sizes_that_fit(checkpoint, parallel, chosen_device, chosen_dtype, quantize, asked)
    with parallel.agree("the checkpoint", world=True):
        args = replace(params, max_seq_len=sizes.max_seq_len, max_batch_size=sizes.max_batch_size)
        model = Transformer(args, parallel=parallel, device=chosen_device, dtype=chosen_dtype)
        model.use_kernels(kernels)
        shows = parallel.global_rank == 0 and sys.stderr.isatty()
        pack = functools.partial(model.pack, quantize=quantize)
        reader.load(checkpoint, model, filled=pack, progress=shows)
    return Loaded(model, tokenizer, sizes.num_pages, checkpoint.is_guard)


@dataclass(frozen=True)
class Asked:
    """The sizes that the user asked for; None leaves one to the memory."""

    max_seq_len: int | None
    max_batch_size: int | None
    kv_cache_memory_bytes: int | None

    @classmethod
    def checked(cls, seq_len: object, batch_size: object, kv_bytes: object) -> "Asked":
        return cls(
            whole_number("max_seq_len", seq_len, 1, 2**31, optional=True),
            whole_number("max_batch_size", batch_size, 1, 2**20, optional=True),
            whole_number("kv_cache_memory_bytes", kv_bytes, 1, 2**60, optional=True),
        )


@dataclass(frozen=True)
class Sizes:
    max_seq_len: int
    max_batch_size: int
    num_pages: int


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def _sizes_that_fit(
    checkpoint: Checkpoint,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None,
    asked: Asked,
) -> Sizes:
    """What was asked for, or what fits the rank with the least memory."""
    params, plan = checkpoint.params, LayerPlan.of(checkpoint.params, parallel.size)
    free = parallel.all_reduce_min(free_bytes(device))
    default = DEFAULT_BATCH_SIZE_CUDA if device.type == "cuda" else DEFAULT_BATCH_SIZE
    batch_size = asked.max_batch_size or default
    with parallel.agree("the memory of the ranks", world=True):
        return choose_sizes(
            replace(asked, max_batch_size=batch_size),
            free=free,
            weights=reader.bytes_of(checkpoint, parallel.size, dtype, quantize),
            reserve=_reserve(params, plan, device, dtype, batch_size),
            per_token=plan.kv_numbers_per_token * dtype.itemsize,
            longest=params.longest_context,
        )


def choose_sizes(
    asked: Asked, *, free: int, weights: int, reserve: int, per_token: int, longest: int
) -> Sizes:
    """Sizes for a KV cache beside the weights: as large as the memory, or as batch x length.

    All sizes are bytes, of one rank: `reserve` is what a step needs beside weights and KV cache,
    `per_token` what one token's keys and values take; `longest` is the model's own limit in tokens.
    max_batch_size is only how many sequences run at once: the pages are shared, and where they run
    out, the youngest waits. ValueError if not even one sequence of max_seq_len fits.
    """
    assert asked.max_batch_size is not None
    room = _room(free, weights, reserve)
    if asked.kv_cache_memory_bytes is not None:
        if asked.kv_cache_memory_bytes > room:
            raise ValueError(
                f"kv_cache_memory_bytes={asked.kv_cache_memory_bytes} is more than the "
                f"{max(room, 0)} bytes that are free beside the weights: ask for that or less"
            )
        room = asked.kv_cache_memory_bytes
    fitting = max(room, 0) // (per_token * PAGE_SIZE)
    seq_len = asked.max_seq_len or min(longest, DEFAULT_SEQ_LEN)
    if asked.max_seq_len is None:
        while seq_len > 256 and pages_for(seq_len) > fitting:
            seq_len //= 2
    if pages_for(seq_len) > fitting:
        raise ValueError(
            f"the weights take {_gib(weights)}, and the KV cache of one sequence of max_seq_len="
            f"{seq_len} takes {_gib(pages_for(seq_len) * PAGE_SIZE * per_token)}, but "
            f"{_gib(free)} are free on each rank's device"
            + ("" if asked.kv_cache_memory_bytes is None else f" and {_gib(room)} asked for")
            + f": {_advice(fitting * PAGE_SIZE)}"
        )
    num_pages = min(fitting, asked.max_batch_size * pages_for(seq_len))
    return Sizes(seq_len, asked.max_batch_size, num_pages)


def kv_tokens(
    checkpoint: Checkpoint,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None,
    free: int,
) -> int:
    """Tokens of KV cache that one of `ranks` ranks holds beside its weights, of `free` bytes."""
    params, plan = checkpoint.params, LayerPlan.of(checkpoint.params, ranks)
    batch_size = DEFAULT_BATCH_SIZE_CUDA if device.type == "cuda" else DEFAULT_BATCH_SIZE
    room = _room(
        free,
        reader.bytes_of(checkpoint, ranks, dtype, quantize),
        _reserve(params, plan, device, dtype, batch_size),
    )
    page = PAGE_SIZE * plan.kv_numbers_per_token * dtype.itemsize
    return max(room, 0) // page * PAGE_SIZE


def _room(free: int, weights: int, reserve: int) -> int:
    """Bytes for the KV cache; negative where not even the weights fit."""
    return min(int(free * MEMORY_FRACTION), free - reserve) - weights


def _reserve(
    params: ModelArgs, plan: LayerPlan, device: torch.device, dtype: torch.dtype, batch_size: int
) -> int:
    step = step_bytes(params, plan, dtype, batch_size)
    return step + (_CUDA_RESERVE if device.type == "cuda" else 0)


def _advice(num_tokens: int) -> str:
    if num_tokens >= 64:
        return f"max_seq_len={num_tokens // 64 * 64} would fit"
    return "use more ranks, a smaller dtype, or a device with more memory"


def step_bytes(params: ModelArgs, plan: LayerPlan, dtype: torch.dtype, batch_size: int) -> int:
    """What a step of TOKEN_BUDGET tokens holds on one rank beside weights and KV cache.

    The residual stream and its norm, q with k and v twice, gate and up with their product; and
    float32 logits three times over (whole, adjusted, sampled), for sequences or for scored rows.
    """
    per_token = 4 * plan.dim + 2 * plan.qkv_dim + 3 * plan.ffn_dim
    tokens = max(TOKEN_BUDGET, batch_size)
    rows = max(batch_size, _SCORED_ROWS)
    return tokens * per_token * dtype.itemsize + 3 * 4 * rows * params.vocab_size


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
