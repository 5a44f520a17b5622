"""One section of `scripts/gpu_check.py`: its device, the size of its work, and its results.

In: a section's name and a folder. Out: models and engines whose steps run as a mode says, and lines
of JSON in the folder's results.jsonl: {"section", "what", "mode", "value", "unit"}, with the "bar"
and the "goal" that were set for it. A mode is how steps run: replayed with the Triton kernels that
passed their check ("graphs+kernels"), replayed ("graphs"), and operator by operator in torch
("torch").
"""

import contextlib
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.shapes import SHAPES, random_model, write_tokenizer
from llama import Tokenizer, Transformer
from llama.assembly import assemble
from llama.engine.core import PAGE_SIZE
from llama.gpu import selection
from llama.gpu.cases import Computed
from llama.kernels.cuda.table import table
from llama.ops.kernels import NO_KERNELS
from llama.options.engine_options import EngineOptions
from llama.options.graphs.recorder import CudaRecorder, Outputs, Recorder
from llama.requests.llm_engine import LLMEngine

MODES = ("graphs+kernels", "graphs", "torch")
DRY_KERNELS = (
    "add_norm",
    "rope_and_store",
    "silu_mul",
    "adapters",
    "sample",
)  # quick, dry
H200 = {"read bandwidth": 4.3e12, "matrix rate": 7.9e14}  # what its machine.py would find
# Tokens a second, or seconds, on one H200 with random weights in bf16: first bar, goal, and which
# rate another GPU's bar goes by.
BARS: dict[str, tuple[float, float, str]] = {
    "8b batch 1": (225, 256, "read bandwidth"),
    "1b batch 1": (1000, 1300, "read bandwidth"),
    "8b batch 64 context 2048": (6000, 7300, "read bandwidth"),
    "8b 128 x (32, 2048)": (9500, 13_000, "read bandwidth"),
    "8b prefill 4096": (35_000, 42_000, "matrix rate"),
    "8b 256 mixed requests": (8000, 10_600, "read bandwidth"),
    "8b load": (2.0, 0.6, ""),
    "times transformers, batch 1": (2.5, 4, ""),
    "times transformers, batch 32": (2.5, 4, ""),
}
_DRY_SHAPE = {
    "dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512, "multiple_of": 32,
    "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


def read_results(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Section:
    """The device of a section, the size of its work, and its results."""

    def __init__(self, name: str, out: Path, *, dry: bool) -> None:
        self.name = name
        self.out = out
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.dry_kernels = table(DRY_KERNELS, frozenset({self.dtype}))

    def say(self, what: str, value: Any, unit: str = "", **more: Any) -> None:
        """Write one figure to disk at once."""
        row = {"section": self.name, "what": what, "value": value, "unit": unit} | more
        if what in BARS and more.get("mode", MODES[0]) == MODES[0]:
            bar, goal, rate = BARS[what]
            scale = self.found(rate) / H200[rate] if rate else 1.0
            row["bar"] = bar * scale
            row["goal"] = goal * scale
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def found(self, rate: str) -> float:
        """Return a rate of the machine, from the section `facts`."""
        rows = [row for row in read_results(self.out) if row.get("what") == rate]
        return rows[-1]["value"] if rows else H200[rate]

    def params(self, shape: str) -> dict[str, Any]:
        return dict(_DRY_SHAPE if self.dry else SHAPES[shape])

    def size(self, real: int, dry: int) -> int:
        return dry if self.dry else real

    def model(self, shape: str, longest: int, batch: int) -> Transformer:
        params = self.params(shape) | {"max_seq_len": longest, "max_batch_size": batch}
        return random_model(params, self.dtype, str(self.device))

    @contextlib.contextmanager
    def engine(
        self, model: Transformer, mode: str, num_tokens: int, **options: Any
    ) -> Iterator[LLMEngine]:
        """Yield a new engine over `model` whose steps run in the given mode.

        The KV cache is freed at the end of the block, as two of them would not fit. Options are
        those of `EngineOptions`.
        """
        engine = self._engine(model, mode, num_tokens, options)
        try:
            yield engine
        finally:
            engine.discard_all()
            engine.core.close()
            engine.core.runner.kv_cache = torch.empty(0)
            gc.collect()

    def _engine(
        self, model: Transformer, mode: str, num_tokens: int, options: dict[str, Any]
    ) -> LLMEngine:
        has_kernels = "kernels" in mode
        for each in {model, options.get("draft_model", model)}:
            if self.dry:
                each.use_kernels(self.dry_kernels if has_kernels else NO_KERNELS)
            else:
                allowed = selection.allowed_kernels() if has_kernels else frozenset()
                computed = Computed(each.plan, each.params.vocab_size, self.device, self.dtype)
                each.use_kernels(selection.kernels_for(computed, each.parallel, allowed))
        assembled = assemble(
            model,
            EngineOptions(
                num_pages=-(-num_tokens // PAGE_SIZE) + 1,
                async_scheduling=True,
                recorder_for=lambda model: None if mode == "torch" else self._recorder(),
                **options,
            ),
        )
        with tempfile.TemporaryDirectory() as scratch:
            write_tokenizer(path := Path(scratch, "tokenizer.model"), model.vocab_size)
            tokenizer = Tokenizer(path)
        return LLMEngine(
            assembled.core, assembled.adapters, tokenizer, model.params.max_seq_len, seed=0
        )

    def _recorder(self) -> Recorder:
        return Again() if self.dry else CudaRecorder(self.device)


class Again:
    """A recorder that runs the function again: a graph, on a machine that has none."""

    def record(
        self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        outputs = function()

        def replay() -> None:
            for kept, new in zip(outputs, function(), strict=True):
                kept.copy_(new)

        return outputs, replay

    def free_bytes(self) -> int:
        return 1 << 50

    def close(self) -> None:
        pass
