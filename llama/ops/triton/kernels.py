"""Which Triton kernels run on which device: those that the self-check found right there.

In: names of kernels, and a device. Out: for an op, whether it may use its kernel on some tensors;
where it may not, it runs its torch body, which is the definition. It does not import Triton: an op
imports its kernel's module only after it has asked here.

Nothing is in use until `use` is called, so a process that never does runs torch alone. Tests call
it for the CPU, under TRITON_INTERPRET=1, to run whole steps through the kernels.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("attention", "add_norm", "rope_and_store", "silu_mul", "linear", "sample")
DTYPES = (torch.bfloat16, torch.float16)  # products of float32 would be rounded to TF32
LOGITS = (torch.float32,)  # what "sample" takes, whatever the model's type


@dataclass(frozen=True)
class _InUse:
    names: frozenset[str]
    dtypes: frozenset[torch.dtype]


_in_use: dict[torch.device, _InUse] = {}


def use(
    device: torch.device, names: Collection[str], dtypes: Collection[torch.dtype] = DTYPES
) -> None:
    """From now on `device` runs these kernels on tensors of these types, and no others."""
    unknown = set(names) - set(NAMES)
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}: there are {', '.join(NAMES)}")
    _in_use[device] = _InUse(frozenset(names), frozenset(dtypes))


def in_use(device: torch.device) -> frozenset[str]:
    """The names of the kernels that run on `device`."""
    found = _in_use.get(device)
    return found.names if found else frozenset()


def has_kernel(name: str, *tensors: Tensor) -> bool:
    """Whether the op `name` runs its kernel on these tensors, of one device and one type."""
    if not _in_use:
        return False
    first = tensors[0]
    found = _in_use.get(first.device)
    return (
        found is not None
        and name in found.names
        and first.dtype in (LOGITS if name == "sample" else found.dtypes)
        and all(x.device == first.device and x.dtype is first.dtype for x in tensors[1:])
    )
