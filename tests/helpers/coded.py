"""Quantized matrices with random codes, as files of other programs have them."""

import torch

from llama.weights.coded import Coded

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
TABLES = {
    "symmetric": torch.arange(-8.0, 8), "unsigned": torch.arange(16.0),
    "curved": torch.tensor(IQ4).float(), "bytes": torch.arange(-128.0, 128),
    "six bits": torch.arange(-32.0, 32), "e4m3": E4M3,
}  # fmt: skip


def coded(name: str, shape: tuple[int, int], group: int, offsets: bool, kept: torch.dtype) -> Coded:
    random = torch.Generator().manual_seed(3)
    (n, k), table = shape, TABLES[name]
    codes = torch.randint(0, len(table), shape, dtype=torch.uint8, generator=random)
    if name == "e4m3":
        codes[codes & 127 == 127] = 0x39  # replaces the two codes of NaN
    scales = torch.rand(2, n, k // group, generator=random) / 50 + 1e-3
    if kept is torch.uint8:  # integers times a float16 that 8 groups share
        units = (scales[..., ::8] / 64).half().float().repeat_interleave(8, -1)
        scales = units * torch.randint(-127, 128, scales.shape, generator=random)
    scale, offset = scales.half().float() if kept is torch.float16 else scales
    return Coded(codes, table, scale, -offset if offsets else None)
