"""Measure what quantized weights, activations or KV caches cost: perplexity, distance to bf16.

In: a folder with weights or a GGUF file, formats, and a text. Out: a row a format. The text is read
in windows of their own, of which the second halves count, as in llama.cpp's tool for perplexities:
the first tokens have little context. "KL" is the mean over all tokens of the Kullback-Leibler
divergence, in nats, of the next token's distribution from that of bf16, or of another reference; it
is steadier than the perplexity, which a wrong weight can also lower by chance.
"""

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import Column
from bench.run import Bench, Row, whole
from llama import Llama
from llama.ops.kv_cache import FORMATS as KV_FORMATS
from llama.weights.choice import QUANTIZED, ROUNDED_ACTIVATIONS

_TEXT = Path(__file__).resolve().parents[2] / "README.md"
_CACHES = {f"kv_{name}": name for name in KV_FORMATS if name}  # the model is in bf16
_AUTO = "auto"  # the formats of the files
# Formats of weights with activations that are rounded, such as int8+int8_token.
_ACTIVATIONS = {
    f"{weights}+{name}": (weights, name)
    for weights in (*QUANTIZED, _AUTO)
    for name, rounding in ROUNDED_ACTIVATIONS.items()
    if weights == _AUTO or rounding.is_e4m3 == (weights == "fp8")
}
_DEFAULT = (*QUANTIZED, *_CACHES)
_KNOWN = (*_DEFAULT, *_ACTIVATIONS, _AUTO)
_COLUMNS: list[Column] = [
    ("weights", "weights", ""), ("GB", "gb", ".3f"), ("perplexity", "perplexity", ".3f"),
    ("to first", "to_first", "+.2%"), ("+-", "to_first_error", ".2%"),
    ("KL", "kl", ".4f"), ("+-", "kl_error", ".4f"), ("same top token", "same_top", ".1%"),
]  # fmt: skip


def quality(
    formats: str = ",".join(_DEFAULT),
    text: str = str(_TEXT),
    window: int = 512,
    windows: int = 4,
    reference: str = "bf16",
    tokenizer: str | None = None,
    **flags: Any,
) -> None:
    """Measure the perplexity of a text by format of weights or KV cache, and the distance to bf16.

    "int8+int8" is a format of weights and one of activations. `reference` is the format that the
    others are compared with: with "int8", the row of "int8+int8" has the cost of activations alone.

    A GGUF file is measured in its own formats, "auto", and those with rounded activations, such as
    "auto+int8". A file without a vocabulary needs the `tokenizer` of its model.

    It needs trained weights: random ones have no quality to lose. It runs on a CPU and keeps all
    log-probabilities of the reference, which are 1 GB for 4 windows of Llama 3.
    """
    bench = Bench(**flags)
    if not Path(bench.model).exists():
        raise ValueError(f"model={bench.model!r}: give a folder or a GGUF file of trained weights")
    for name in (names := formats.split(",")):
        if name not in _KNOWN:
            raise ValueError(f"formats={name!r}: give some of {', '.join(_KNOWN)}")
    if reference not in ("bf16", *_KNOWN):
        raise ValueError(f"reference={reference!r}: give bf16 or one of {', '.join(_KNOWN)}")
    sizes = whole("window", window, 2), whole("windows", windows)
    expected = None
    rows = []
    for name in dict.fromkeys([reference, *names]):
        print(f"... {name}", file=sys.stderr, flush=True)
        llama = _build(bench.model, tokenizer, name, sizes[0])
        ids, found = _log_probabilities(llama, Path(text), *sizes)
        expected = found if expected is None else expected
        rows.append(
            {"weights": name, "gb": _num_bytes(llama) / 1e9, **compare(ids, expected, found)}
        )
    bench.report(_COLUMNS, rows, None)


def _build(model: str, tokenizer: str | None, name: str, window: int) -> Llama:
    """Return the model in a format; without a rounding of activations, they stay in bf16."""
    options: dict[str, Any] = {"device": "cpu", "kv_cache_dtype": _CACHES.get(name)}
    quantize, options["activations"] = _ACTIVATIONS.get(name, (name, "bf16"))
    options["quantize"] = quantize if quantize in QUANTIZED else None
    options["dtype"] = "auto" if quantize == _AUTO else "bf16"
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        return Llama.build(model, tokenizer, window, 1, **options)


def _num_bytes(llama: Llama) -> int:
    tensors = (*llama.model.parameters(), *llama.model.buffers())
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


@torch.inference_mode()
def _log_probabilities(
    llama: Llama, text: Path, window: int, windows: int
) -> tuple[Tensor, Tensor]:
    """Return the ids (windows, T) of the second halves of windows, and log-probabilities (..., V).

    T is half a window, rounded up.
    """
    num_new = window - 1  # the first token of a window is begin_of_text
    ids = llama.tokenizer.encode(text.read_text(), bos=False, eos=False)[: windows * num_new]
    if len(ids) < windows * num_new:
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than {windows} windows of {window}")
    begins = torch.full((windows, 1), llama.tokenizer.bos_id)
    tokens = torch.cat([begins, torch.tensor(ids).view(windows, num_new)], 1)
    half = window // 2
    rows = [llama.model(row[None], 0)[0, half:].log_softmax(-1) for row in tokens]
    return tokens[:, half:], torch.stack(rows)


def compare(ids: Tensor, expected: Tensor, found: Tensor) -> Row:
    """Compare two sets of log-probabilities (W, T, V) of the tokens that follow ids (W, T).

    The ratio of perplexities has a smaller error than both: it is of differences token by token.
    """
    logprobs, wanted = (x[:, :-1].gather(-1, ids[:, 1:, None]).double() for x in (found, expected))
    lost = wanted - logprobs
    pairs = zip(expected.flatten(0, 1), found.flatten(0, 1), strict=True)
    kl = torch.stack([(a.exp() * (a - b)).sum() for a, b in pairs]).double()
    return {
        "perplexity": math.exp(-logprobs.mean()),
        "to_first": math.exp(lost.mean()) - 1,
        "to_first_error": (lost.std() / math.sqrt(lost.numel())).item(),
        "kl": kl.mean().item(),
        "kl_error": (kl.std() / math.sqrt(len(kl))).item(),
        "same_top": (expected.argmax(-1) == found.argmax(-1)).double().mean().item(),
    }
