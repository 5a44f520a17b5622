"""bf16 rounded to int8 at load: one byte a weight, in blocks as bf16 has them, and a scale per row.

The largest number of a row becomes 127; the error is at most half of the row's scale. Sums are in
float32, and the scale is applied to the sum. The kernels are those of linear.cpp, with the promises
of `llama.weights.blocks`.
"""

from typing import Self

import torch
from torch import Tensor

from llama.device import use_huge_pages
from llama.ops.cpu import native
from llama.weights.blocks import N_BLOCK, BlockedWeight, can_pack, in_blocks, workspace


class Int8Weight(BlockedWeight):
    """values: (N/32, K/2, 32, 2) int8; scales: (N) float32."""

    quantization = "int8"
    product = "linear_int8"
    scales: Tensor

    def __init__(self, shape: tuple[int, int], values: Tensor, scales: Tensor) -> None:
        super().__init__(shape, values)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

    @classmethod
    def num_bytes(cls, n: int, k: int, dtype: torch.dtype) -> int:
        return n * k + 4 * n

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return can_pack(plain)

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        assert can_pack(plain), (plain.shape, plain.dtype, plain.device)
        n, k = plain.shape
        values = torch.empty(n // N_BLOCK, k // 2, N_BLOCK, 2, dtype=torch.int8)
        use_huge_pages(values)
        scales = torch.empty(n)
        if native.kernels() is not None:
            room = workspace("pack_workspace", k, torch.get_num_threads())
            native.call("pack_int8", plain, values, scales, room, n, k)
            return cls((n, k), values, scales)
        torch.div(plain.abs().amax(1).float(), 127, out=scales)
        units = scales.masked_fill(scales == 0, 1)
        values.copy_(in_blocks((plain.float() / units[:, None]).round()))
        return cls((n, k), values, scales)

    def rows(self, ids: Tensor) -> Tensor:
        return (super().rows(ids) * self.scales[ids].unsqueeze(-1)).bfloat16()

    def exact(self) -> Tensor:
        return self.unpacked() * self.scales[:, None]

    def plain(self) -> Tensor:
        return self.exact().bfloat16()
