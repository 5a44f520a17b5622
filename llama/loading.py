"""From the arguments of `Llama.build` to a loaded model: device, ranks, threads, memory, weights.

In: what the user asked for. Out: one rank's Transformer and the Tokenizer, or one clear error on
every rank before any weight is read. Nothing here runs the model.
"""

import dataclasses
import functools
import os
import sys

import torch

from llama.args import ModelArgs
from llama.checkpoint import weights
from llama.checkpoint.find import Checkpoint, find
from llama.device import DTYPES, free_bytes, pick_device, pick_dtype, set_num_threads
from llama.model import Transformer
from llama.parallel import ModelParallel, connect
from llama.tokenizer import Tokenizer

_SHARE = 0.9  # of what is free: activations and the allocator's slack need the rest
DEFAULT_SEQ_LEN, DEFAULT_BATCH_SIZE = 8192, 32  # what is aimed at where the user says nothing


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
    with parallel.agree("the arguments of Llama.build", world=True) as must_match:
        _check_sizes(max_seq_len, max_batch_size, seed)
        kind = pick_dtype(dtype, place)
        found = find(ckpt_dir)
        params = found.params
        params.check_ranks(parallel.size)
        tokenizer = load_tokenizer(tokenizer_path or found.tokenizer_path(), params)
        if max_seq_len is not None and max_seq_len > params.longest_context:
            raise ValueError(
                f"max_seq_len={max_seq_len} is beyond this model's limit of "
                f"{params.longest_context} tokens: build with that or less"
            )
        must_match += [params, max_seq_len, max_batch_size, seed, kind, place.type]
    if place.type == "cpu":
        set_num_threads()
    params = _choose_sizes(found, parallel, place, kind, max_seq_len, max_batch_size)
    with parallel.agree("the checkpoint", world=True):
        model = Transformer(params, parallel=parallel, device=place, dtype=_wide(kind))
        shows = parallel.global_rank == 0 and sys.stderr.isatty()
        pack = functools.partial(model.pack, int8=kind is torch.int8)
        weights.load(found, model, filled=pack, progress=shows)
    return model, tokenizer


def _wide(kind: torch.dtype) -> torch.dtype:
    """The type of activations, keys and values."""
    return torch.bfloat16 if kind is torch.int8 else kind


def _choose_sizes(
    found: Checkpoint,
    parallel: ModelParallel,
    place: torch.device,
    kind: torch.dtype,
    max_seq_len: int | None,
    max_batch_size: int | None,
) -> ModelArgs:
    """The params with the sizes asked for, or those that fit the rank with the least memory."""
    params = found.params
    free = parallel.all_reduce_min(free_bytes(place))
    with parallel.agree("the memory of the ranks", world=True):
        seq_len, batch_size = fit(
            free=free,
            weights=weights.bytes_of(found, parallel.size, kind),
            per_token=_bytes_per_token(params, parallel.size, _wide(kind)),
            longest=params.longest_context,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
        )
    return dataclasses.replace(params, max_seq_len=seq_len, max_batch_size=batch_size)


def describe(model: Transformer) -> str:
    """Device, type, ranks and sizes, as `Llama.build` prints them."""
    params, device = model.params, model.norm.weight.device
    dtype = model.norm.weight.dtype if model.output.scales is None else torch.int8
    name = next(name for name, value in DTYPES.items() if value is dtype)
    return (
        f"{device.type}, {name}, model_parallel_size={model.parallel.size}, "
        f"max_seq_len={params.max_seq_len}, max_batch_size={params.max_batch_size}"
    )


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


def fit(
    *,
    free: int,
    weights: int,
    per_token: int,
    longest: int,
    max_seq_len: int | None,
    max_batch_size: int | None,
) -> tuple[int, int]:
    """(max_seq_len, max_batch_size), chosen where None, for keys and values beside the weights.

    All sizes are bytes, of one rank; `per_token` is what one token's keys and values take, and
    `longest` the model's own limit in tokens. ValueError if what was asked for does not fit: it
    says what would.
    """
    room = int(free * _SHARE) - weights
    seq_len = max_seq_len or min(longest, DEFAULT_SEQ_LEN)
    if max_seq_len is None:
        while seq_len > 256 and seq_len * per_token * (max_batch_size or 1) > room:
            seq_len //= 2
    fits = max(room, 0) // (seq_len * per_token)
    batch_size = max_batch_size or max(1, min(DEFAULT_BATCH_SIZE, fits))
    if batch_size > fits:
        raise ValueError(
            f"the weights take {_gib(weights)} and the keys and values of max_batch_size="
            f"{batch_size} x max_seq_len={seq_len} take {_gib(batch_size * seq_len * per_token)}, "
            f"but {_gib(free)} are free on each rank's device: {_advice(room, per_token, seq_len)}"
        )
    return seq_len, batch_size


def _advice(room: int, per_token: int, seq_len: int) -> str:
    tokens = max(room, 0) // per_token
    if tokens >= seq_len:
        return f"max_batch_size={tokens // seq_len} would fit"
    if tokens >= 64:
        return f"max_batch_size=1 with max_seq_len={tokens // 64 * 64} would fit"
    return "use more ranks, a smaller dtype, or a device with more memory"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
