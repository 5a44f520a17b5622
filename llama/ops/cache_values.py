"""The values in a KV cache, whatever its format: filled with given ones, and read as float32.

In: a cache of any number of layers. Out: its values. Comparisons of kernels and of graphs need
them; no step does.

Shapes: P pages, S slots per page, K KV heads, W elements of a row of the cache, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llama.ops.kv_cache import format_of


def fill_cache(kv_cache: Tensor, head_dim: int, draw: Callable[..., Tensor]) -> Tensor:
    """Fill a cache (..., P, S, K, W) with keys and values that `draw` returns for a shape."""
    *_, p, s, k, _ = kv_cache.shape
    for plane in kv_cache.flatten(0, -5):
        slots = torch.arange(p * s, device=plane.device)
        values = draw(p * s, k, head_dim)
        kv_format = format_of(plane)
        kv_format.store(plane, slots, values)
    return kv_cache


def read_cache(kv_cache: Tensor) -> Tensor:
    """Return a float32 copy (..., P * S, K, D) of what a cache (..., P, S, K, W) stores."""
    *_, p, s, _k, _w = kv_cache.shape
    slots = torch.arange(p * s, device=kv_cache.device)
    planes = []
    for plane in kv_cache.flatten(0, -5):
        kv_format = format_of(plane)
        values = kv_format.load(plane, slots, torch.float32)
        planes.append(values)
    return torch.stack(planes)
