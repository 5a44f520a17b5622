"""The layers that hold weights: linear, embedding and norm, whole or divided among ranks.

In: sizes and a `ModelParallel`. Out: modules whose weights have no memory until `Transformer` gives
it. A matrix is a `Weight`; a state dict shows each plain, under Meta's name. Column-, row- and
vocabulary-parallel layers follow Megatron-LM (Shoeybi et al., 2019).

Shapes: ... any leading dimensions; N outputs and K inputs of a weight; E model dim.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llama import weights
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.norm import rms_norm
from llama.ranks.collectives import ModelParallel
from llama.weights import PlainWeight, Weight


class WatchedModule(nn.Module):
    """A module that counts its changes: another part, weight, forward, class or setting. Hooks, and
    where the numbers of a weight lie, `llama.model.execution` sees itself."""

    num_changes = 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)  # type: ignore[arg-type]
        self._count()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._count()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self._count()

    def _count(self) -> None:
        self.__dict__["num_changes"] = self.num_changes + 1


def apply(part: nn.Module, x: Tensor, context: ForwardContext) -> Tensor:
    """Call a part of a layer that takes rows `x`, and let the context reach it.

    The context goes by keyword, so that forward hooks see the arguments that Meta's parts have. A
    module, or a forward, that a user has put in place of ours may know the rows alone.
    """
    forward = part.__dict__.get("forward", type(part).forward)
    out: Tensor = part(x, context=context) if _takes_context(forward) else part(x)
    return out


@functools.lru_cache(64)
def _takes_context(forward: Callable[..., Any]) -> bool:
    return "context" in inspect.signature(forward).parameters


def unfilled(
    *shape: int, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """A frozen weight; layers are born without memory, which `Transformer` then gives them."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Matrix(WatchedModule):
    """A weight (N, K) in some format; state dicts show it plain."""

    weight: Weight
    names: Sequence[str] = ()  # of the tensors of Meta's checkpoint that it is made of, in order

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight = PlainWeight.pack(torch.empty(n_out, n_in, device="meta"))

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight" and isinstance(value, Tensor):  # as any module of torch takes one
            value = PlainWeight.pack(value.data)
        super().__setattr__(name, value)

    def pack(self, quantize: str | None = None) -> None:
        """Put a plain weight in the format asked for, or the fastest; views are invalid then."""
        if isinstance(self.weight, PlainWeight):
            plain = self.weight.plain()
            self.weight = weights.packed(plain, quantize, plain.device)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.plain()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """torch's hook of `load_state_dict`, which does not know of formats."""
        _, _, missing, _, errors = args
        name = f"{prefix}weight"
        if name not in state_dict:
            missing.append(name)
        elif _has_shape(name, state_dict[name], self.weight.shape, errors):
            self.weight = self.weight.refilled(state_dict[name])


class Linear(Matrix):
    """(..., in) -> (..., out) by this rank's weight. No bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_out, n_in)

    def forward(
        self,
        x: Tensor,
        context: ForwardContext = DEFAULT_CONTEXT,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """dtype: of the result; float32 keeps what rounding to x's type would lose."""
        return self.weight.linear(x, dtype, context)


class ColumnParallelLinear(Linear):
    """(..., in) -> (..., n_out), this rank's rows of the weight; or with gather_output (..., out)
    on every rank, the rows of all."""

    def __init__(
        self, n_in: int, n_out: int, parallel: ModelParallel, *, gather_output: bool = False
    ) -> None:
        super().__init__(n_in, n_out)
        self.parallel = parallel
        self.gather_output = gather_output

    def forward(
        self,
        x: Tensor,
        context: ForwardContext = DEFAULT_CONTEXT,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        out = self.share(x, context, dtype=dtype)
        return self.parallel.all_gather(out) if self.gather_output else out

    def share(
        self,
        x: Tensor,
        context: ForwardContext = DEFAULT_CONTEXT,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """(..., in) -> (..., n_out): this rank's part, with or without gather_output."""
        return super().forward(x, context, dtype=dtype)


class RowParallelLinear(Linear):
    """(..., n_in) -> (..., out), summed over the ranks: `n_in` are the columns of this rank."""

    def __init__(self, n_in: int, n_out: int, parallel: ModelParallel) -> None:
        super().__init__(n_in, n_out)
        self.parallel = parallel

    def forward(
        self,
        x: Tensor,
        context: ForwardContext = DEFAULT_CONTEXT,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self.parallel.all_reduce(super().forward(x, context, dtype=dtype))


class VocabParallelEmbedding(Matrix):
    """(...) ids -> (..., dim): each rank holds the rows of some ids, `own`, and adds 0 for the
    rest."""

    def __init__(self, own: range, dim: int, parallel: ModelParallel) -> None:
        super().__init__(len(own), dim)
        self.parallel = parallel
        self.own = own

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return self.weight.rows(tokens)
        local = tokens - self.own.start
        elsewhere = (local < 0) | (local >= len(self.own))
        x = self.weight.rows(local.masked_fill(elsewhere, 0))
        return self.parallel.all_reduce(x.masked_fill_(elsewhere.unsqueeze(-1), 0))


class RMSNorm(WatchedModule):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled(dim)

    def forward(self, x: Tensor, context: ForwardContext = DEFAULT_CONTEXT) -> Tensor:
        return rms_norm(x, self.weight, self.eps, context.kernels)


class FusedBlock(WatchedModule):
    """A block that holds several of Meta's matrices as one, `fused`; state dicts show each. rows:
    of each matrix by Meta's name, in the order in which they are stored."""

    elsewhere: ClassVar[dict[str, str]] = {}  # what only Meta's block has, and where to find it

    def __init__(self, fused: str, rows: dict[str, int]) -> None:
        super().__init__()
        self.fused, self.rows = fused, rows
        self.register_state_dict_post_hook(_show_parts)
        self.register_load_state_dict_pre_hook(_fuse_parts)

    def parts(self) -> dict[str, Tensor]:
        """Meta's name of each matrix -> its rows: views, or copies where the weight is packed."""
        plain: Any = self.get_submodule(f"{self.fused}.weight")
        return dict(zip(self.rows, plain.plain().split(list(self.rows.values())), strict=True))

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
    parts = {f"{prefix}{name}.weight": part for name, part in block.parts().items()}
    state_dict.update(parts | others)


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
