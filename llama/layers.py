"""The layers that hold weights: linear, embedding and norm, whole or divided among ranks.

In: sizes and a `ModelParallel`. Out: modules whose weights have no memory until `Transformer` gives
it. A linear layer packs its weight for the CPU's kernels, or quantizes it to int8, once it is
filled. Column-, row- and vocabulary-parallel layers follow Megatron-LM (Shoeybi et al., 2019).

Shapes: T tokens; N outputs and K inputs of a weight; E model dim.
"""

import torch
from torch import Tensor, nn

from llama.ops.linear import can_pack, embedding, linear, pack_if_supported, pack_int8
from llama.ops.norm import rms_norm
from llama.parallel import ModelParallel


def unfilled(
    *shape: int, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """A frozen weight; layers are born without memory, which `Transformer` then gives them."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """(T, in) -> (T, out) by this rank's weight, in whatever layout is fastest here. No bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = unfilled(n_out, n_in)
        self.scales: Tensor | None = None  # (out) of an int8 weight

    def pack(self, *, int8: bool = False) -> None:
        """Put the weight in this machine's fastest layout; views of it are invalid afterwards.

        int8: one byte per weight and one scale per row, if the shape can be packed.
        """
        weight = self.weight.data
        if int8 and can_pack(weight):
            weight, self.scales = pack_int8(weight)
        self.weight = nn.Parameter(pack_if_supported(weight), requires_grad=False)

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: of the result; float32 keeps what rounding to x's type would lose."""
        return linear(x, self.weight, self.scales, dtype=dtype)


class ColumnParallelLinear(Linear):
    """(T, in) -> (T, out / size): each rank holds `out / size` rows of the weight."""

    def __init__(self, n_in: int, n_out: int, parallel: ModelParallel) -> None:
        assert n_out % parallel.size == 0, (n_out, parallel.size)
        super().__init__(n_in, n_out // parallel.size)


class RowParallelLinear(Linear):
    """(T, in / size) -> (T, out), summed over the ranks: each holds `in / size` columns."""

    def __init__(self, n_in: int, n_out: int, parallel: ModelParallel) -> None:
        assert n_in % parallel.size == 0, (n_in, parallel.size)
        super().__init__(n_in // parallel.size, n_out)
        self.parallel = parallel

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.parallel.all_reduce(super().forward(x, dtype=dtype))


class VocabParallelEmbedding(nn.Module):
    """(T) token ids -> (T, dim): each rank holds `vocab / size` rows, and adds 0 for the rest."""

    def __init__(self, n_vocab: int, dim: int, parallel: ModelParallel) -> None:
        super().__init__()
        assert n_vocab % parallel.size == 0, (n_vocab, parallel.size)
        self.parallel = parallel
        self.num_local = n_vocab // parallel.size
        self.first = self.num_local * parallel.rank
        self.weight = unfilled(self.num_local, dim)
        self.scales: Tensor | None = None  # (vocab / size) of an int8 weight

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return embedding(tokens, self.weight, self.scales)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_local)
        x = embedding(local.masked_fill(elsewhere, 0), self.weight, self.scales)
        return self.parallel.all_reduce(x.masked_fill_(elsewhere[:, None], 0))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled(dim)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
