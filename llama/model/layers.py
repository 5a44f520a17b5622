"""The layers that hold weights: linear, embedding and norm, whole or divided among ranks.

In: sizes and a `ModelParallel`. Out: modules whose weights have no memory until `Transformer` gives
it. A linear layer packs its weight for the CPU's kernels, or quantizes it to int8, once it is
filled; a state dict shows each weight plain, under Meta's name. Column-, row- and vocabulary-
parallel layers follow Megatron-LM (Shoeybi et al., 2019).

Shapes: ... any leading dimensions; N outputs and K inputs of a weight; E model dim.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llama.ops.linear import can_pack, embedding, linear, pack_if_supported, pack_int8, unpack
from llama.ops.norm import rms_norm
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel


def unfilled(
    *shape: int, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """A frozen weight; layers are born without memory, which `Transformer` then gives them."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Matrix(nn.Module):
    """A weight (N, K), in whatever layout is fastest here; state dicts show it plain."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight = unfilled(n_out, n_in)
        self.scales: Tensor | None = None  # (N) of an int8 weight

    def pack(self, *, int8: bool = False) -> None:
        """Put the weight in this machine's fastest layout; views of it are invalid afterwards.

        int8: one byte per weight and one scale per row, if the shape can be packed.
        """
        weight = self.weight.data
        if int8 and can_pack(weight):
            weight, self.scales = pack_int8(weight)
        self.weight = nn.Parameter(pack_if_supported(weight), requires_grad=False)

    def plain(self) -> Tensor:
        """The weight (N, K): itself, or a copy where it is packed; bf16 where it is int8."""
        if self.weight.dim() == 2:
            return self.weight.data
        plain = unpack(self.weight.data, self.scales)
        return plain if self.scales is None else plain.bfloat16()

    def fill(self, plain: Tensor) -> None:
        """Copy new values (N, K) in, into the present layout."""
        if self.weight.dim() == 2:
            self.weight.data.copy_(plain)
            return
        copy = torch.empty(plain.shape, dtype=torch.bfloat16).copy_(plain)
        self.weight = nn.Parameter(copy, requires_grad=False)
        self.pack(int8=self.scales is not None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.plain()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """torch's hook of `load_state_dict`, which does not know of the packed layout."""
        _, _, missing, _, errors = args
        name = f"{prefix}weight"
        if name not in state_dict:
            missing.append(name)
        elif _has_shape(name, state_dict[name], self.plain_shape, errors):
            self.fill(state_dict[name])

    @property
    def plain_shape(self) -> tuple[int, int]:
        if self.weight.dim() == 2:
            return self.weight.shape[0], self.weight.shape[1]
        blocks, pairs, rows, _ = self.weight.shape
        return blocks * rows, pairs * 2


class Linear(Matrix):
    """(..., in) -> (..., out) by this rank's weight. No bias."""

    kernels: KernelSet = TORCH_ONLY  # see `Transformer.use_kernels`

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_out, n_in)

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: of the result; float32 keeps what rounding to x's type would lose."""
        return linear(x, self.weight, self.scales, dtype=dtype, kernels=self.kernels)


class ColumnParallelLinear(Linear):
    """(..., in) -> (..., out / size): each rank holds `out / size` rows of the weight.

    gather_output: the result is (..., out) on every rank.
    """

    def __init__(
        self, n_in: int, n_out: int, parallel: ModelParallel, *, gather_output: bool = False
    ) -> None:
        assert n_out % parallel.size == 0, (n_out, parallel.size)
        super().__init__(n_in, n_out // parallel.size)
        self.parallel = parallel
        self.gather_output = gather_output

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        out = self.share(x, dtype=dtype)
        return self.parallel.all_gather(out) if self.gather_output else out

    def share(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """(..., in) -> (..., out / size): this rank's part of the result, with or without
        gather_output."""
        return super().forward(x, dtype=dtype)


class RowParallelLinear(Linear):
    """(..., in / size) -> (..., out), summed over the ranks: each holds `in / size` columns."""

    def __init__(self, n_in: int, n_out: int, parallel: ModelParallel) -> None:
        assert n_in % parallel.size == 0, (n_in, parallel.size)
        super().__init__(n_in // parallel.size, n_out)
        self.parallel = parallel

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.parallel.all_reduce(super().forward(x, dtype=dtype))


class VocabParallelEmbedding(Matrix):
    """(...) ids -> (..., dim): each rank holds `vocab / size` rows, and adds 0 for the rest."""

    def __init__(self, n_vocab: int, dim: int, parallel: ModelParallel) -> None:
        assert n_vocab % parallel.size == 0, (n_vocab, parallel.size)
        super().__init__(n_vocab // parallel.size, dim)
        self.parallel = parallel
        self.num_local = n_vocab // parallel.size
        self.first = self.num_local * parallel.rank

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return embedding(tokens, self.weight, self.scales)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_local)
        x = embedding(local.masked_fill(elsewhere, 0), self.weight, self.scales)
        return self.parallel.all_reduce(x.masked_fill_(elsewhere.unsqueeze(-1), 0))


class RMSNorm(nn.Module):
    kernels: KernelSet = TORCH_ONLY

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled(dim)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.kernels)


class FusedBlock(nn.Module):
    """A block that holds several of Meta's matrices as one, `fused`; state dicts show each.

    `rows`: of each matrix by Meta's name, in the order in which they are stored.
    `elsewhere`: what Meta's block also has and this one does not, and where to find it.
    """

    elsewhere: ClassVar[dict[str, str]] = {}
    kernels: KernelSet = TORCH_ONLY

    def __init__(self, fused: str, rows: dict[str, int]) -> None:
        super().__init__()
        self.fused, self.rows = fused, rows
        self.register_state_dict_post_hook(_show_parts)
        self.register_load_state_dict_pre_hook(_fuse_parts)

    def parts(self) -> dict[str, Tensor]:
        """Meta's name of each matrix -> its rows: views, or copies where the weight is packed."""
        plain = self.get_submodule(self.fused).plain()  # type: ignore[operator]
        return dict(zip(self.rows, plain.split(list(self.rows.values())), strict=True))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            hint = self.elsewhere.get(name)
            if name in self.__dict__.get("rows", {}):
                hint = f"it is part of {self.fused}; state_dict() and parts() have it by this name"
            raise (AttributeError(f"{error}: {hint}") if hint else error) from None


def _show_parts(block: FusedBlock, state_dict: Any, prefix: str, _: Any) -> None:
    """After a block has saved its weights: Meta's names and parts instead of the fused matrix."""
    del state_dict[f"{prefix}{block.fused}.weight"]
    others = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    for name, part in block.parts().items():
        state_dict[f"{prefix}{name}.weight"] = part
    state_dict.update(others)


def _fuse_parts(block: FusedBlock, state_dict: Any, prefix: str, *args: Any) -> None:
    """Before a block loads its weights: the fused matrix instead of Meta's parts."""
    _, _, missing, _, errors = args
    found = []
    for name, present in block.parts().items():
        key = f"{prefix}{name}.weight"
        if key not in state_dict:
            missing.append(key)
        part = state_dict.pop(key, present)
        found.append(part if _has_shape(key, part, tuple(present.shape), errors) else present)
    state_dict[f"{prefix}{block.fused}.weight"] = torch.cat([p.to(found[0]) for p in found])


def _has_shape(name: str, given: Tensor, shape: tuple[int, ...], errors: list[str]) -> bool:
    if tuple(given.shape) != shape:
        errors.append(f"{name} has shape {tuple(given.shape)}, the model's is {shape}")
    return tuple(given.shape) == shape
