"""Measure what quantized weights, activations or KV caches cost: perplexity, distance to bf16.

In: a folder with weights, formats, and a text. Out: a row a format. The text is read in windows of
their own. "KL" is the mean over all tokens of the Kullback-Leibler divergence, in nats, of the next
token's distribution from that of bf16, or of another reference; it is steadier than the perplexity,
which a wrong weight can also lower by chance.
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
# Formats of weights with activations that are rounded, such as int8+int8_token.
_ACTIVATIONS = {
    f"{weights}+{name}": (weights, name)
    for weights in ("int8", "int4")
    for name, rounding in ROUNDED_ACTIVATIONS.items()
    if rounding.device == "cpu"
}
_DEFAULT = (*QUANTIZED, *_CACHES)
_KNOWN = (*_DEFAULT, *_ACTIVATIONS)
_COLUMNS: list[Column] = [
    ("weights", "weights", ""), ("GB", "gb", ".3f"), ("perplexity", "perplexity", ".3f"),
    ("to first", "to_first", "+.2%"), ("KL", "kl", ".4f"), ("+-", "kl_error", ".4f"),
    ("same top token", "same_top", ".1%"),
]  # fmt: skip


def quality(
    formats: str = ",".join(_DEFAULT),
    text: str = str(_TEXT),
    window: int = 512,
    windows: int = 4,
    reference: str = "bf16",
    **flags: Any,
) -> None:
    """Measure the perplexity of a text by format of weights or KV cache, and the distance to bf16.

    "int8+int8" is a format of weights and one of activations. `reference` is the format that the
    others are compared with: with "int8", the row of "int8+int8" has the cost of activations alone.

    It needs a folder with trained weights: random ones have no quality to lose. It runs on a CPU
    and keeps all log-probabilities of the reference, which are 2 GB for 4 windows of Llama 3.
    """
    bench = Bench(**flags)
    if not Path(bench.model).is_dir():
        raise ValueError(f"model={bench.model!r}: give a folder with trained weights")
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
        num_bytes, ids, found = _log_probabilities(bench.model, name, Path(text), *sizes)
        expected = found if expected is None else expected
        rows.append({"weights": name, "gb": num_bytes / 1e9, **compare(ids, expected, found)})
    for row in rows:
        row["to_first"] = row["perplexity"] / rows[0]["perplexity"] - 1
    bench.report(_COLUMNS, rows, None)


@torch.inference_mode()
def _log_probabilities(
    folder: str, name: str, text: Path, window: int, windows: int
) -> tuple[int, Tensor, Tensor]:
    """Return the weights' bytes, ids (windows, window), log-probabilities (windows, window, V)."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "bf16"}
    options["kv_cache_dtype"] = _CACHES.get(name)
    quantize, options["activations"] = _ACTIVATIONS.get(name, (name, None))
    options["quantize"] = quantize if quantize in QUANTIZED else None
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        llama = Llama.build(folder, None, window, 1, **options)
    num_new = window - 1  # the first token of a window is begin_of_text
    ids = llama.tokenizer.encode(text.read_text(), bos=False, eos=False)[: windows * num_new]
    if len(ids) < windows * num_new:
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than {windows} windows of {window}")
    begins = torch.full((windows, 1), llama.tokenizer.bos_id)
    tokens = torch.cat([begins, torch.tensor(ids).view(windows, num_new)], 1)
    rows = [llama.model(row[None], 0)[0].log_softmax(-1) for row in tokens]
    stored = {
        x.data_ptr(): x.nbytes for m in (llama.model,) for x in (*m.parameters(), *m.buffers())
    }
    return sum(stored.values()), tokens, torch.stack(rows)


def compare(ids: Tensor, expected: Tensor, found: Tensor) -> Row:
    """Compare two sets of log-probabilities (W, T, V) of the tokens that follow ids (W, T)."""
    logprobs = found[:, :-1].gather(-1, ids[:, 1:, None]).double()
    pairs = zip(expected.flatten(0, 1), found.flatten(0, 1), strict=True)
    kl = torch.stack([(a.exp() * (a - b)).sum() for a, b in pairs]).double()
    return {
        "perplexity": math.exp(-logprobs.mean()),
        "kl": kl.mean().item(),
        "kl_error": (kl.std() / math.sqrt(len(kl))).item(),
        "same_top": (expected.argmax(-1) == found.argmax(-1)).double().mean().item(),
    }
