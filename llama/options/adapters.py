"""The LoRA adapters that the sequences of an engine can choose, by the hash of their content.

In: paths of adapters, and the items of a step. Out: which rows of the step have which adapter. The
same adapter under two names is stored once; names belong to `llama.requests.adapters`. A sequence
names its adapter by the hash in `SequenceSpec.adapter`.

On a GPU an adapter also has a number, by which kernels find it, so that recorded steps may have
adapters. There are so many numbers; further adapters are computed operator by operator.
"""

import threading
from collections.abc import Iterable

from llama.checkpoint.lora.unmerged import LoadedAdapter, load, products_of
from llama.common.device import free_bytes
from llama.engine.hooks import StepHook
from llama.engine.rows import Scheduled
from llama.engine.scheduler import Scheduler
from llama.engine.step import Step
from llama.model.transformer import Transformer
from llama.ops.adapters import AdapterRows, AdapterTable, AdapterWeights
from llama.ops.batch import Batch
from llama.ops.sample import on_device_of

_MAX_NUMBERS = 256  # 4.7 MB for the table of an 8B


class NumberedAdapters:
    """The adapters that kernels find by number.

    Attributes:
        table: The table that the kernels read.
    """

    def __init__(self, table: AdapterTable) -> None:
        self.table = table
        self._numbers: dict[bytes, int] = {}
        self._free = list(range(len(table.fields)))

    @classmethod
    def of(cls, model: Transformer) -> "NumberedAdapters | None":
        """Return memory for the adapters of a model; None where no kernel computes them."""
        if "add_updates" not in model.kernels.functions:
            return None
        products = [linear.names[0] for block in model.blocks() for linear in products_of(block)]
        return cls(AdapterTable(products, _MAX_NUMBERS, model.norm.weight.device))

    def add(self, adapter: LoadedAdapter) -> None:
        """Give an adapter a number, if one is left."""
        if self._free and adapter.digest not in self._numbers:
            number = self._free.pop()
            self.table.put(number, adapter.weights)
            self._numbers[adapter.digest] = number

    def drop(self, digest: bytes) -> None:
        """Take an adapter's number back."""
        number = self._numbers.pop(digest, None)
        if number is not None:
            self._free.append(number)

    def has_all(self, digests: Iterable[bytes]) -> bool:
        """Return whether each adapter has a number; b"" stands for no adapter."""
        return all(not digest or digest in self._numbers for digest in digests)

    def of_rows(self, digests: Iterable[bytes]) -> list[int]:
        """Return the numbers of adapters, -1 for none."""
        return [self._numbers.get(digest, -1) for digest in digests]


class AdapterStore(StepHook):
    """The adapters of one model on this rank.

    Any thread may read an adapter and add it. What a step uses stays in memory until it has ended,
    as the step refers to it.

    Args:
        model: The model.
        scheduler: The scheduler, which is told whether there are adapters.
        reserve: The bytes of a GPU that a step needs, which adapters leave free.
        numbered: The adapters that kernels find by number, if there are such kernels.
    """

    def __init__(
        self,
        model: Transformer,
        scheduler: Scheduler,
        reserve: int = 0,
        numbered: NumberedAdapters | None = None,
    ) -> None:
        self._model = model
        self._reserve = reserve
        self._scheduler = scheduler
        self._numbered = numbered
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
            kept = self._adapters.setdefault(adapter.digest, adapter)
            if self._numbered is not None:
                self._numbered.add(kept)
            self._scheduler.has_adapters = True

    def drop(self, digest: bytes) -> None:
        """Forget an adapter, which no live sequence may have."""
        with self._lock:
            if self._numbered is not None:
                self._numbered.drop(digest)
            self._adapters.pop(digest, None)
            self._scheduler.has_adapters = bool(self._adapters)

    def changes_batch(self, step: Step) -> bool:
        """Return whether a sequence of the step has an adapter without a number."""
        if not self:
            return False
        digests = [item.sequence.spec.adapter for item in step.items]
        return not self._numbered.has_all(digests) if self._numbered else any(digests)

    def pack(self, step: Step, batch: Batch) -> Batch:
        """Return the batch with the adapters of its rows."""
        segments = self._segments_of(step.items) if self else []
        if not segments:
            return batch
        numbered = self._numbered
        digests = [item.sequence.spec.adapter for item in step.items]
        if numbered is None or not numbered.has_all(digests):
            return batch.with_adapters(AdapterRows(segments))
        numbers = []
        for item, number in zip(step.items, numbered.of_rows(digests), strict=True):
            numbers += [number] * item.count
        on_device = on_device_of(batch.slots, numbers)
        return batch.with_adapters(AdapterRows(segments, on_device, numbered.table))

    def _segments_of(self, items: list[Scheduled]) -> list[tuple[int, int, AdapterWeights]]:
        """Return the rows of a step that have adapters."""
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
        return segments
