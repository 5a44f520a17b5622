"""From the arguments of `Llama.build` to a loaded model: device, ranks, threads, memory, weights.

In: what the user asked for. Out: one rank's Transformer and the Tokenizer, or one clear error on
every rank before any weight is read. Nothing here runs the model.
"""

import functools
import os
import sys

import torch

from llama import checkpoint
from llama.memory import fit, free_bytes
from llama.model import ModelArgs, Transformer
from llama.parallel import ModelParallel, connect, pick_device
from llama.threads import settle_threads
from llama.tokenizer import Tokenizer

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,  # weights; all else is bf16
}


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
    timeout_s: float,
) -> tuple[Transformer, Tokenizer]:
    """The arguments are those of `Llama.build`; the sizes chosen are in the model's params."""
    place = pick_device(device)
    parallel = connect(model_parallel_size, place, timeout_s)
    with parallel.together("the arguments of Llama.build", world=True) as facts:
        _check_sizes(max_seq_len, max_batch_size, seed)
        kind = pick_dtype(dtype, place)
        found = checkpoint.find(ckpt_dir)
        params = found.params
        params.check_ranks(parallel.size)
        params.tied_output = checkpoint.is_tied(found)
        tokenizer = load_tokenizer(tokenizer_path or found.tokenizer_path(), params)
        if max_seq_len is not None and max_seq_len > params.longest_context:
            raise ValueError(
                f"max_seq_len={max_seq_len} is beyond this model's limit of "
                f"{params.longest_context} tokens: build with that or less"
            )
        facts += [params, max_seq_len, max_batch_size, seed, kind, place.type]
    if place.type == "cpu":
        settle_threads()
    _choose_sizes(found, parallel, place, kind, max_seq_len, max_batch_size)
    with parallel.together("the checkpoint", world=True):
        model = Transformer(params, parallel=parallel, device=place, dtype=_wide(kind))
        shows = parallel.global_rank == 0 and sys.stderr.isatty()
        pack = functools.partial(model.pack, int8=kind is torch.int8)
        checkpoint.load(found, model, filled=pack, progress=shows)
    return model, tokenizer


def _wide(kind: torch.dtype) -> torch.dtype:
    """The type of activations, keys and values."""
    return torch.bfloat16 if kind is torch.int8 else kind


def _choose_sizes(
    found: checkpoint.Checkpoint,
    parallel: ModelParallel,
    place: torch.device,
    kind: torch.dtype,
    max_seq_len: int | None,
    max_batch_size: int | None,
) -> None:
    """Write into the params what was asked for or what fits the rank with the least memory."""
    params = found.params
    free = parallel.smallest(free_bytes(place))
    with parallel.together("the memory of the ranks", world=True):
        params.max_seq_len, params.max_batch_size = fit(
            free=free,
            weights=checkpoint.bytes_of(found, parallel.size, kind),
            per_token=_bytes_per_token(params, parallel.size, _wide(kind)),
            longest=params.longest_context,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
        )


def describe(model: Transformer) -> str:
    """Device, type, ranks and sizes, as `Llama.build` prints them."""
    params, device = model.params, model.norm.weight.device
    dtype = model.norm.weight.dtype if model.output.scales is None else torch.int8
    name = next(name for name, value in _DTYPES.items() if value is dtype)
    return (
        f"{device.type}, {name}, model_parallel_size={model.parallel.size}, "
        f"max_seq_len={params.max_seq_len}, max_batch_size={params.max_batch_size}"
    )


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type of the weights; by default bf16 where the device has it, else fp16."""
    if dtype is None:
        lacks = device.type == "cuda" and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.float16 if lacks else torch.bfloat16
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(_DTYPES)}, or None")
    if chosen is torch.int8 and device.type != "cpu":
        raise ValueError(f"dtype='int8' is for device='cpu', not {device.type}: use 'bf16'")
    return chosen


def load_tokenizer(path: str | os.PathLike[str], params: ModelArgs) -> Tokenizer:
    """The tokenizer of a model: its special tokens are those of the model's release."""
    # Llama 3.0 is told from 3.1 and later by its rotary embedding: the tokenizer files are equal.
    first_release = not params.use_scaled_rope
    if str(path).endswith(".json"):
        tokenizer = Tokenizer.from_tokenizer_json(str(path), llama_3_0=first_release)
    else:
        tokenizer = Tokenizer(str(path), llama_3_0=first_release)
    if tokenizer.n_words != params.vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.n_words} tokens, but the model has vocab_size="
            f"{params.vocab_size}: they do not belong together"
        )
    return tokenizer


def _bytes_per_token(params: ModelArgs, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on one rank."""
    n_kv_heads = max(1, params.kv_heads // ranks)
    return 2 * params.n_layers * n_kv_heads * params.head_dim * dtype.itemsize


def _check_sizes(max_seq_len: int | None, max_batch_size: int | None, seed: int) -> None:
    for name, value in (("max_seq_len", max_seq_len), ("max_batch_size", max_batch_size)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{name}={value!r}: give a whole number from 1, or None")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")
