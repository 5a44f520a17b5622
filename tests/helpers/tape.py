"""Recorders of steps for machines without a GPU. `TapeRecorder` replays the operators of a step.

Input: the function that a CUDA graph would capture. Output: a replay that repeats its operators
with the same tensors and numbers as in the recording, as a graph does, and none of the Python code
around them. A length that was read on the host therefore stays as it was, and a tensor made from a
list is an error: what a graph could not do, or would do wrongly, shows on a CPU.

The recorder sees what goes through PyTorch's dispatcher. While it records, the CPU kernels are
disabled, as they are on a GPU.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama.kernels.cpu import native
from llama.model.transformer import Transformer
from llama.options.graphs.recorder import Outputs

_READS_VALUES = {  # on a GPU the host would wait for these results, which a capture does not allow
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "bincount", "_unique2",
    "unique_dim", "unique_consecutive", "masked_select", "equal", "is_nonzero",
    "repeat_interleave", "histc",
}  # fmt: skip
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class NotCapturable(RuntimeError):
    """A step does what a CUDA graph cannot capture; the message names the operator."""


class TapeRecorder:
    """A recorder of functions onto tapes.

    `owned` are the model's tensors: a recorded function may read them although it did not make
    them.
    """

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
            _poison(output)  # a capture computes nothing
        return outputs, lambda: tape.replay(outputs)

    def free_bytes(self) -> int:
        return 1 << 50

    def close(self) -> None:
        pass


class Again:
    """A recorder that runs the function again, on a device of `free` bytes.

    It is no check of what a graph could capture, and takes the CPU's kernels, so that results have
    the bits of steps that are not recorded.
    """

    def __init__(self, free: int = 1 << 50) -> None:
        self.free = free
        self.num_replays = 0

    def record(
        self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        def replay() -> None:
            self.num_replays += 1
            function()

        return function(), replay

    def free_bytes(self) -> int:
        return self.free

    def close(self) -> None:
        pass


class _Tape(TorchDispatchMode):
    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self._owned = owned
        # id -> each tensor that an operator returned; kept alive
        self._made: dict[int, Tensor] = {}
        # operator, arguments, and the tensors that it returned
        self._calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that the first operator does not import torch.compile for a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        made = _tensors(out)
        self._calls.append((func, args, kwargs, made))
        self._made |= {id(x): x for x in made}
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
        """Repeat the operators; the new values of `outputs` are written in place."""
        now: dict[int, Tensor] = {}

        def present(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [present(y) for y in x]
            return now.get(id(x), x)

        for func, args, kwargs, made in self._calls:
            present_kwargs = {name: present(x) for name, x in kwargs.items()}
            again = _tensors(func(*map(present, args), **present_kwargs))
            if "empty" in func._schema.name:
                for x in again:
                    _poison(x)
            for old, new in zip(made, again, strict=True):
                now[id(old)] = new
        for output in outputs:
            output.copy_(now.get(id(output), output))


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or results, which lists and dicts may hold."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [x for part in tree for x in _tensors(part)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # identifies the storage, of fake tensors too


def _poison(x: Tensor) -> None:
    """Fill a tensor with values that expose a read before the first write."""
    if x.is_floating_point():
        x.fill_(math.nan)
    elif x.dtype in (torch.int32, torch.int64):
        x.fill_(-(2**30))
