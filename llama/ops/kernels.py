"""The table of kernels that may replace PyTorch in the operators: from a name to a function.

In: the functions that `llama.kernels` has for a machine. Out: for an operator, the result of its
kernel, or None where its PyTorch body must compute. A model holds its table and hands it to each
operator. What a kernel is written in, and how it is compiled, must not be known here. This file
imports nothing of torch, since the package's face registers the default table with it.

A kernel that fails while a model runs is dropped, and PyTorch computes the operator in its place
within the same step (`Kernels.dropping_failed`). So a rank of several goes on with the sums that
the others wait for, whether or not the kernel works for them, and no step has to run again.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Kernel = Callable[..., Any]


class KernelError(RuntimeError):
    """A kernel that cannot be compiled or launched: PyTorch's operators can go on in its place.

    No input of the operator has changed, so that PyTorch computes it from the same ones.
    """


class _Droppable:
    """A kernel that is dropped at its first failure, with a warning."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        self._name = name
        self._kernel: Kernel | None = kernel

    @property
    def is_dropped(self) -> bool:
        return self._kernel is None

    def __call__(self, *args: Any) -> Any:
        if self._kernel is None:
            return None
        try:
            return self._kernel(*args)
        except KernelError as error:
            self._kernel = None
            text = f"torch runs in place of the GPU's kernel for {self._name}: {error}"
            warnings.warn(text, stacklevel=3)
            return None


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels that the operators of one model may run. The empty table is PyTorch alone.

    Attributes:
        functions: The kernels, by the name of the operator that each replaces. A kernel takes the
            operator's arguments, except `kernels`, by position. It returns None for tensors that
            it does not take.
        names: The names by which users know the kernels, where they can switch them off.
    """

    functions: Mapping[str, Kernel] = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kernels":
        """Return the table itself, which copies of a model share."""
        return self

    def has(self, name: str) -> bool:
        """Return whether there is a kernel for an operator, and it has not been dropped."""
        function = self.functions.get(name)
        is_dropped = isinstance(function, _Droppable) and function.is_dropped
        return function is not None and not is_dropped

    def dropping_failed(self) -> "Kernels":
        """Return a table of the same kernels, each of which is dropped where it fails."""
        functions = {name: _Droppable(name, kernel) for name, kernel in self.functions.items()}
        return Kernels(functions, self.names)

    def run(self, name: str, *args: Any) -> Any:
        """Return the result of an operator's kernel; None where there is none for the arguments."""
        function = self.functions.get(name)
        return None if function is None else function(*args)


NO_KERNELS = Kernels()  # every operator runs its PyTorch body
_default: list[Callable[[], Kernels]] = []


def set_default(find: Callable[[], Kernels]) -> None:
    """Register the function that finds the kernels of models that are made without any.

    The package's face calls it once, so that models and operators need not know any kernel.
    """
    _default[:] = [find]


def default_kernels() -> Kernels:
    """Return the kernels of a model that is made without any, such as one of a research script."""
    return _default[0]() if _default else NO_KERNELS
