"""A device that this machine lacks, such as a Mac's GPU, as programs see it through PyTorch.

In: the name of a device. Out: a context in which tensors can be on that device. They have its name
and real values, in host memory, which the CPU computes. What the device lacks raises its error.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Refusal = Callable[[Tensor], None]  # raises the device's error for a tensor that it cannot hold

# Functions for which the host waits for a GPU: they read values, or copy memory that is not pinned.
_WAITS = {"new_tensor", "item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"}
_MOVES = {"copy_", "to", "cpu", "__get__", "__set__", "set_", "index_put_", "__setitem__"}


class AbsentTensor(Tensor):
    """A tensor in host memory that says it is on the device of its `AbsentDevice`."""


class AbsentDevice(TorchFunctionMode):
    """Puts tensors on an absent device, and lets the CPU compute its operators.

    Args:
        device: The device.
        refuse: Raises the device's error for a tensor that it cannot hold.

    Attributes:
        waits: The calls for which the host would have waited for the device.
    """

    def __init__(self, device: str, refuse: Refusal = lambda values: None) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._device = torch.device(device)
        self._refuse = refuse
        flags = {f"is_{kind}": kind == self._device.type for kind in ("cpu", "cuda", "mps")}
        self._type: Any = type("OnDevice", (AbsentTensor,), {"device": self._device, **flags})

    def put(self, values: Tensor) -> Tensor:
        """Return these values on the device."""
        self._refuse(values)
        return values.as_subclass(self._type)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "pin_memory":  # all memory is the host's
            return args[0]
        kwargs.pop("pin_memory", None)
        if func is torch.mm and "out_dtype" in kwargs:  # the CPU has no such product
            wide = kwargs.pop("out_dtype")
            args = [x.to(wide) for x in args]
        if name == "cpu":
            target: Any = torch.device("cpu")
        else:
            target = next((x for x in leaves if _is_device(x)), None)
        if name in _WAITS and any(isinstance(x, AbsentTensor) for x in leaves):
            self.waits.append(name)
        self._check_devices(name, leaves)
        result = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if target is not None and isinstance(result, Tensor):
            plain = result.as_subclass(Tensor)
            return self.put(plain) if torch.device(target) == self._device else plain
        for x in tree_leaves(result):
            if isinstance(x, AbsentTensor):
                self._refuse(x)
        return result

    def _check_devices(self, name: str, leaves: list[Any]) -> None:
        """Raise the error of operators whose tensors are on two devices; a number may be on any."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        are_ours = {isinstance(x, AbsentTensor) for x in tensors if x.dim()}
        if len(are_ours) > 1 and name not in _MOVES:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def _is_device(x: Any) -> bool:
    is_name = isinstance(x, str) and x.partition(":")[0] in ("cpu", "cuda", "mps")
    return is_name or isinstance(x, torch.device)


def _on_host(x: Any) -> Any:
    return torch.device("cpu") if _is_device(x) else x


@contextlib.contextmanager
def absent_gpu(capability: tuple[int, int], memory: int = 16 << 30) -> Iterator[AbsentDevice]:
    """Let torch find one CUDA GPU, whose operators the CPU computes as they are called.

    Graphs cannot be captured there, and no check of kernels can run in a child process.
    """
    event = SimpleNamespace(record=lambda stream=None: None, synchronize=lambda: None)
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device: capability,
        "mem_get_info": lambda device: (memory, memory),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
        "reset_peak_memory_stats": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "Event": lambda: event,
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        yield stack.enter_context(AbsentDevice("cuda:0"))


def refuse_float64(values: Tensor) -> None:
    """Raise the error of a Mac's GPU, which has no float64."""
    if values.dtype is torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )
