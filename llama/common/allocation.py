"""Tensors in host memory that is pinned, in huge pages, or not yet resident.

In: an array, a tensor, or a shape with its dtype and device. Out: a tensor.
"""

import contextlib
import ctypes
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pinned(x: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return an array in pinned memory, which a GPU copies from asynchronously.

    torch keeps the memory until the copy is done.
    """
    host = torch.from_numpy(x)
    return host.pin_memory() if device.type == "cuda" else host


_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # madvise(2)


def use_huge_pages(tensor: Tensor) -> Tensor:
    """Ask Linux for pages of 2 MiB under a tensor of host memory, before it is first written."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if start < end and tensor.device.type == "cpu" and sys.platform == "linux":
        address = ctypes.c_void_p(start)
        length = ctypes.c_size_t(end - start)
        with contextlib.suppress(AttributeError):  # a C library without madvise
            ctypes.CDLL(None).madvise(address, length, _MADV_HUGEPAGE)
    return tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros like torch.zeros, but host memory becomes resident only when it is written.

    torch would write the zeros, although fresh memory of the system is zero already. The pages have
    2 MiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = use_huge_pages(torch.from_numpy(np.zeros(size + 63, np.uint8)))
    first = -raw.data_ptr() % 64  # the beginning of a cache line
    return raw[first : first + size].view(dtype).view(shape)
