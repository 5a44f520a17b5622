"""The modules that have weights: linear, embedding and norm, whole or divided among ranks.

In: the sizes of this rank and a `Parallel`. Out: modules whose weights have no memory until
`Transformer` allocates it. A matrix is a `Weight`; a state dict shows each matrix plain, under
Meta's name. Column-, row- and vocabulary-parallel layers follow Megatron-LM (Shoeybi et al., 2019).

Shapes: ... any leading dimensions; N outputs and K inputs of a weight; E model dim.
"""

import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llama.common.allocation import use_huge_pages
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.norm import rms_norm
from llama.ranks.parallel import Parallel
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight


class Changes:
    """Whether one of the modules has changed that report to this object.

    Attributes:
        has_any: Whether one has.
    """

    has_any = True


class WatchedModule(nn.Module):
    """A module that says when it changes: another part, weight, forward, class or setting.

    `llama.model.execution` then looks at all modules again, once. It sees hooks by itself.
    """

    def report_to(self, changes: Changes) -> None:
        """Report each change of this module there from now on."""
        self.__dict__["_changes"] = changes

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._has_changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._has_changed()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a part, and say that this module has changed."""
        super().add_module(name, module)
        self._has_changed()

    def _has_changed(self) -> None:
        changes = self.__dict__.get("_changes")
        if changes is not None:
            changes.has_any = True


class WatchedList(WatchedModule, nn.ModuleList):
    """A list of modules that says when one is replaced."""


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
    """Make a frozen parameter; by default it has no memory, which `Transformer` allocates later."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Matrix(WatchedModule):
    """A weight (N, K) in some format; state dicts show it plain.

    Attributes:
        weight: The weight.
        names: Meta's names of the tensors that it is made of, in order.
        may_quantize: Whether it is quantized where the model is; else it keeps the model's type.
    """

    weight: Weight
    names: Sequence[str] = ()
    may_quantize: ClassVar[bool] = True

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight = PlainWeight.pack(torch.empty(n_out, n_in, device="meta"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor):  # PyTorch's modules take tensors
            value = PlainWeight.pack(value.data)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.plain()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load a plain matrix into the format that the weight has."""
        _, _, missing, _, errors = args
        name = f"{prefix}weight"
        if name not in state_dict:
            missing.append(name)
        elif _has_shape(name, state_dict[name], self.weight.shape, errors):
            self.weight = self.weight.refilled(state_dict[name])


class Linear(Matrix):
    """A product with this rank's weight, (..., K) -> (..., N), without a bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_out, n_in)

    def forward(
        self,
        x: Tensor,
        context: ForwardContext = DEFAULT_CONTEXT,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply, and combine the products of all ranks: x (..., K).

        Args:
            x: The rows.
            context: What is known of the rows, such as the step's `Batch`.
            dtype: The type of the result; float32 keeps what rounding to the type of x would lose.
        """
        return self.combined(self.share(x, context, dtype))

    def share(self, x: Tensor, context: ForwardContext, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply by this rank's weight alone: x (..., K) -> (..., N); see `forward`."""
        updates = context.updates_of(self.names)
        return self.weight.linear(x, dtype, context, updates)

    def combined(self, share: Tensor) -> Tensor:
        """Combine the products (..., N) of all ranks; here there is one."""
        return share


class ColumnParallelLinear(Linear):
    """A product whose outputs the ranks divide: (..., in) -> (..., n_out).

    With `widths`, which has n_out of each rank, every rank gets the outputs of all, (..., out).
    """

    def __init__(
        self, n_in: int, n_out: int, parallel: Parallel, *, widths: Sequence[int] = ()
    ) -> None:
        super().__init__(n_in, n_out)
        self.parallel = parallel
        self.widths = widths

    def combined(self, share: Tensor) -> Tensor:
        """Gather the outputs if there are `widths`."""
        return self.parallel.all_gather(share, self.widths) if self.widths else share


class RowParallelLinear(Linear):
    """A product whose inputs the ranks divide: (..., n_in) -> (..., out), summed over the ranks."""

    def __init__(self, n_in: int, n_out: int, parallel: Parallel) -> None:
        super().__init__(n_in, n_out)
        self.parallel = parallel

    def combined(self, share: Tensor) -> Tensor:
        """Sum over the ranks."""
        return self.parallel.all_reduce(share)


class VocabParallelEmbedding(Matrix):
    """The token embedding: ids (...) -> (..., E).

    Each rank has the rows of some ids, `own`, and adds zeros for all others.
    """

    def __init__(self, own: range, dim: int, parallel: Parallel) -> None:
        super().__init__(len(own), dim)
        self.parallel = parallel
        self.own = own

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up ids (...) -> (..., E)."""
        if self.parallel.size == 1:
            return self.weight.rows(tokens)
        local = tokens - self.own.start
        is_elsewhere = (local < 0) | (local >= len(self.own))
        x = self.weight.rows(local.masked_fill(is_elsewhere, 0))
        return self.parallel.all_reduce(x.masked_fill_(is_elsewhere.unsqueeze(-1), 0))


class RMSNorm(WatchedModule):
    """Root-mean-square normalisation of rows (..., E)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled(dim)

    def forward(self, x: Tensor, context: ForwardContext = DEFAULT_CONTEXT) -> Tensor:
        """Normalise rows: x (..., E) -> (..., E)."""
        return rms_norm(x, self.weight, self.eps, context.kernels)


class FusedBlock(WatchedModule):
    """A block that has several of Meta's matrices as one; state dicts show each of them.

    Attributes:
        fused: The name of the fused matrix.
        rows: The rows of each matrix, by Meta's name, in the order in which they are stored.
        elsewhere: What only Meta's block has, and a hint where to find it.
    """

    elsewhere: ClassVar[dict[str, str]] = {}

    def __init__(self, fused: str, rows: dict[str, int]) -> None:
        super().__init__()
        self.fused = fused
        self.rows = rows
        module: Any = self  # PyTorch does not annotate these methods
        module.register_state_dict_post_hook(_show_parts)
        module.register_load_state_dict_pre_hook(_fuse_parts)

    def parts(self) -> dict[str, Tensor]:
        """Return the rows of each matrix, by Meta's name: views, or copies of a packed weight."""
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


def allocate(
    root: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype,
    late: Container[nn.Module] = (),
) -> None:
    """Give every parameter of some modules its memory.

    Args:
        root: The modules.
        device: Where the memory is.
        dtype: The type of the elements.
        late: Matrices that get their memory when their turn comes.
    """
    for module in list(root.modules()):
        if isinstance(module, Matrix):
            module_device = "meta" if module in late else device
            module.weight = PlainWeight.empty(*module.weight.shape, module_device, dtype)
            use_huge_pages(module.weight.values)  # before the first access, which decides it
    for module in root.modules():
        if isinstance(module, PlainWeight):
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, unfilled(*weight.shape, device=device, dtype=dtype))


def name_matrices(root: nn.Module) -> None:
    """Give every matrix Meta's names of the tensors that it is made of."""
    modules = dict(root.named_modules())
    for path, module in modules.items():
        if not isinstance(module, Matrix):
            continue
        parent_path, _, name = path.rpartition(".")
        parent: Any = modules[parent_path]
        is_fused = getattr(parent, "fused", None) == name
        names = parent.rows if is_fused else [name]
        prefix = f"{parent_path}." if parent_path else ""
        module.names = [f"{prefix}{part}.weight" for part in names]


def _show_parts(block: FusedBlock, state_dict: Any, prefix: str, _: Any) -> None:
    """Replace the fused matrix by Meta's matrices, after a block has saved its weights."""
    del state_dict[f"{prefix}{block.fused}.weight"]
    others = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    parts = {f"{prefix}{name}.weight": part for name, part in block.parts().items()}
    state_dict.update(parts | others)


def _fuse_parts(block: FusedBlock, state_dict: Any, prefix: str, *args: Any) -> None:
    """Replace Meta's matrices by the fused one, before a block loads its weights."""
    _, _, missing, _, errors = args
    parts = []
    for name, present in block.parts().items():
        key = f"{prefix}{name}.weight"
        if key not in state_dict:
            missing.append(key)
        part = state_dict.pop(key, present)
        parts.append(part if _has_shape(key, part, tuple(present.shape), errors) else present)
    state_dict[f"{prefix}{block.fused}.weight"] = torch.cat([part.to(parts[0]) for part in parts])


def _has_shape(name: str, given: Tensor, shape: tuple[int, ...], errors: list[str]) -> bool:
    """Return whether a tensor has this shape; add an error if it does not."""
    if tuple(given.shape) != shape:
        errors.append(f"{name} has shape {tuple(given.shape)}, the model's is {shape}")
    return tuple(given.shape) == shape
