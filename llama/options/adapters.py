"""The LoRA adapters that the sequences of an engine can choose, by the hash of their content.

In: paths of adapters, and the items of a step. Out: which rows of the step have which adapter. The
same adapter under two names is stored once; names belong to `llama.requests.adapters`. A sequence
names its adapter by the hash in `SequenceSpec.adapter`.
"""

import threading

from llama.checkpoint.lora.unmerged import LoadedAdapter, load
from llama.common.device import free_bytes
from llama.engine.hooks import StepHook
from llama.engine.rows import Scheduled
from llama.engine.scheduler import Scheduler
from llama.engine.step import Step
from llama.model.transformer import Transformer
from llama.ops.adapters import AdapterRows, AdapterWeights
from llama.ops.batch import Batch


class AdapterStore(StepHook):
    """The adapters of one model on this rank.

    Any thread may read an adapter and add it. What a step uses stays in memory until it has ended,
    as the step refers to it.
    """

    def __init__(self, model: Transformer, scheduler: Scheduler, reserve: int = 0) -> None:
        """Start without adapters.

        Args:
            model: The model.
            scheduler: The scheduler of its sequences.
            reserve: The bytes of a GPU that a step needs, which adapters leave free.
        """
        self._model = model
        self._reserve = reserve
        self._scheduler = scheduler
        self._adapters: dict[bytes, LoadedAdapter] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._adapters)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._adapters

    @property
    def nbytes(self) -> int:
        """Return the bytes of all adapters on this rank."""
        return sum(adapter.weights.nbytes for adapter in list(self._adapters.values()))

    def read(self, path: str) -> LoadedAdapter:
        """Read an adapter for the model, without adding it.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: The adapter cannot be used; the message says why.
        """
        adapter = load(path, self._model)
        device = self._model.norm.weight.device
        if device.type == "cuda" and (free := free_bytes(device)) < self._reserve:
            raise ValueError(
                f"with this adapter {free >> 20} MiB of the GPU would be free, where a step needs "
                f"{self._reserve >> 20} MiB: drop another one, or build with a smaller KV cache "
                "(kv_cache_memory_bytes)"
            )
        return adapter

    def add(self, adapter: LoadedAdapter) -> None:
        """Let sequences choose an adapter from now on; an equal one is kept as it is."""
        with self._lock:
            self._adapters.setdefault(adapter.digest, adapter)
            self._scheduler.has_adapters = True

    def drop(self, digest: bytes) -> None:
        """Forget an adapter, which no live sequence may have."""
        with self._lock:
            self._adapters.pop(digest, None)
            self._scheduler.has_adapters = bool(self._adapters)

    def changes_batch(self, step: Step) -> bool:
        """Return whether a sequence of the step has an adapter."""
        return bool(self) and any(item.sequence.spec.adapter for item in step.items)

    def pack(self, step: Step, batch: Batch) -> Batch:
        """Return the batch with the adapters of its rows."""
        rows = self._rows_of(step.items) if self else None
        return batch if rows is None else batch.with_adapters(rows)

    def _rows_of(self, items: list[Scheduled]) -> AdapterRows | None:
        """Return the rows of a step that have adapters; None if none has one."""
        segments: list[tuple[int, int, AdapterWeights]] = []
        first = 0
        for item in items:
            digest = item.sequence.spec.adapter
            if digest:
                weights = self._adapters[digest].weights
                if segments and segments[-1][2] is weights and sum(segments[-1][:2]) == first:
                    begin, count, _ = segments.pop()
                    segments.append((begin, count + item.count, weights))
                else:
                    segments.append((first, item.count, weights))
            first += item.count
        return AdapterRows(segments) if segments else None
