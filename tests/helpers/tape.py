"""A recorder of steps for machines without a GPU: the operators of a step, replayed from a tape.

In: the function that a CUDA graph would capture. Out: a replay that repeats its operators with the
very tensors and numbers of the recording, as a graph does, and nothing that Python would do anew.
So a length that was read on the host stays what it was, and a tensor that was made from a list is
an error: what a graph could not do, or would do wrongly, shows on a CPU.

It sees what goes through torch's dispatcher, and while it records, as on a GPU, the CPU's kernels
are not there.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from llama.engine.graphs import Outputs
from llama.model.transformer import Transformer
from llama.ops.cpu import native

_READS_VALUES = {  # on a GPU the host would wait for these, which a capture does not allow
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "bincount", "_unique2",
    "unique_dim", "unique_consecutive", "masked_select", "equal", "is_nonzero",
    "repeat_interleave", "histc",
}  # fmt: skip
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class NotCapturable(RuntimeError):
    """A step does what a CUDA graph cannot capture; the message names the operator."""


class TapeRecorder:
    """Records onto tapes. owned: the model's tensors, which a recorded function may read and did
    not make itself; they stay where they are."""

    def __init__(self, owned: Iterable[Tensor]) -> None:
        self._owned = {_storage(x) for x in owned}

    @classmethod
    def of_model(cls, model: Transformer) -> "TapeRecorder":
        return cls([*model.parameters(), *model.buffers(), model.freqs_cis])

    def record(
        self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        tape = _Tape(self._owned | {_storage(x) for x in inputs})
        with tape, mock.patch.object(native, "kernels", lambda: None):
            outputs = function()
        for output in outputs:
            _poison(output)  # a capture runs nothing
        return outputs, lambda: tape.replay(outputs)

    def free_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _Tape(TorchDispatchMode):
    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self._owned = owned
        self._made: dict[int, Tensor] = {}  # id -> each tensor that an operator gave; kept alive
        self._calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, out))
        self._made |= {id(x): x for x in _tensors(out)}
        return out

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.split("::")[1]
        given = _tensors((args, kwargs))
        if name in _READS_VALUES:
            raise NotCapturable(f"{name} reads values of a tensor on the host")
        if name in _INDEXES and any(x.dtype is torch.bool for x in _tensors(args[1])):
            raise NotCapturable(f"{name} by a mask has a shape that depends on values")
        if len({x.device.type for x in given}) > 1:
            raise NotCapturable(f"{name} copies between the host and the device")
        for x in given:
            if id(x) not in self._made and _storage(x) not in self._owned:
                raise NotCapturable(f"{name} reads a tensor {tuple(x.shape)} that was made on the "
                                    "host, or lies where it would not stay")  # fmt: skip

    def replay(self, outputs: Outputs) -> None:
        """Repeat the operators; `outputs` get the new values where they are."""
        now: dict[int, Tensor] = {}

        def present(x: Any) -> Any:
            return now.get(id(x), x) if isinstance(x, Tensor) else x

        for func, args, kwargs, out in self._calls:
            again = func(*tree_map(present, args), **tree_map(present, kwargs))
            if "empty" in func._schema.name:
                for x in _tensors(again):
                    _poison(x)
            now |= {id(x): y for x, y in zip(_tensors(out), _tensors(again), strict=True)}
        for output in outputs:
            output.copy_(now.get(id(output), output))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # its identity, which fake tensors have too


def _poison(x: Tensor) -> None:
    """What a step reads before it has written it shows."""
    if x.is_floating_point():
        x.fill_(math.nan)
    elif x.dtype in (torch.int32, torch.int64):
        x.fill_(-(2**30))
