"""llama.cpp behind the benchmark's `Engine`, through the C functions that llama-cpp-python exposes.

In: a job with "gguf", a file that `gguf_file` wrote, then prompts as ids. Out: ids. Each sequence
has a slot, all that run are one llama_batch, and its own key-value cache (no unified one).
"""

import ctypes
import os
from pathlib import Path
from typing import Any

_REPACK = "BENCH_LLAMA_CPP_REPACK"  # 0: quantized weights stay in the file's order
UBATCH = 512  # tokens that go through the model at once: llama.cpp's own default


class LlamaCpp:
    """llama.cpp with one slot per sequence."""

    name = "llama.cpp"

    def __init__(self, job: dict[str, Any]) -> None:
        import numpy

        self.api = self._import()
        self.numpy = numpy
        self.vocab_size = job["params"]["vocab_size"]
        self.api.llama_backend_init()
        path = str(Path(job["gguf"])).encode()
        self.model = self.api.llama_model_load_from_file(path, self._model_settings())
        self.context = self.model and self.api.llama_init_from_model(
            self.model, self._settings(job)
        )
        if not self.context:
            raise RuntimeError(f"{self.name} cannot load {job['gguf']}")
        self.batch = self.api.llama_batch_init(self.num_batch, 0, 1)
        self.lengths = [0] * job["batch"]  # tokens that each slot holds
        self.latest: dict[int, int] = {}  # slot -> its newest id, which is not yet computed

    def _import(self) -> Any:
        """Return the module of the C functions."""
        import llama_cpp

        return llama_cpp

    def _model_settings(self) -> Any:
        """Return the parameters of the model."""
        params = self.api.llama_model_default_params()
        params.use_extra_bufts = os.environ.get(_REPACK) != "0"
        return params

    def _settings(self, job: dict[str, Any]) -> Any:
        """Return the parameters of the context.

        Flash attention stays at llama.cpp's default ("auto"), which turns it on. Keys and values
        have 16 bits as in every engine, and 32 where the weights have them.
        """
        settings = self.api.llama_context_default_params()
        padded = -(-job["longest"] // 256) * 256  # llama.cpp pads the cache to this anyway
        self.num_batch = job["batch"] * padded
        settings.n_ctx = settings.n_batch = self.num_batch
        settings.n_ubatch = min(UBATCH, self.num_batch)
        settings.n_seq_max = settings.n_outputs_max = job["batch"]
        settings.n_threads = settings.n_threads_batch = job["threads"]
        settings.kv_unified = False
        if job["dtype"] == "fp32":
            settings.type_k = settings.type_v = self.api.GGML_TYPE_F32
        return settings

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.finish()
        self._compute(dict(enumerate(prompts)))
        return list(self.latest.values())

    def step(self) -> list[int]:
        self._compute({slot: [token] for slot, token in self.latest.items()})
        return list(self.latest.values())

    def finish(self) -> None:
        for slot in list(self.latest):
            self._free(slot)

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        """A request waits for a slot; its prompt is read in the step where it gets one."""
        waiting = list(zip(prompts, answers, strict=True))[::-1]
        left: dict[int, int] = {}  # slot -> tokens still to come
        while waiting or left:
            rows = {slot: [self.latest[slot]] for slot in left}
            for slot in range(len(self.lengths)):
                if waiting and slot not in left:
                    rows[slot], left[slot] = waiting.pop()
            self._compute(rows)
            left = {slot: count - 1 for slot, count in left.items()}
            for slot in [slot for slot, count in left.items() if not count]:
                self._free(slot)
                del left[slot]

    def _compute(self, rows: dict[int, list[int]]) -> None:
        """Run the new tokens of these slots in one batch, and keep each slot's next id."""
        batch = self.batch
        count = 0
        for slot, tokens in rows.items():
            for token in tokens:
                batch.token[count] = token
                batch.pos[count] = self.lengths[slot]
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = slot
                batch.logits[count] = False
                self.lengths[slot] += 1
                count += 1
            batch.logits[count - 1] = True
        batch.n_tokens = count
        if error := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {error}")
        logits = self._logits()  # waits until all is computed
        shape = (len(rows), self.vocab_size)
        best = self.numpy.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape
        ).argmax(-1)
        self.latest |= dict(zip(rows, best.tolist(), strict=True))

    def _logits(self) -> Any:
        """Return the address of the logits of all rows that asked for them."""
        return self.api.llama_get_logits(self.context)

    def _free(self, slot: int) -> None:
        self._forget(slot)
        self.lengths[slot] = 0
        del self.latest[slot]

    def _forget(self, slot: int) -> None:
        """Remove the keys and values of a slot."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), slot, -1, -1)
