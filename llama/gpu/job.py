"""A check of kernels or graphs, and its result, as they travel between processes in JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from llama.device import DTYPES
from llama.ops.triton.kernels import KernelSet, Sizes, Tile
from llama.weights import QuantKey

Choice = tuple[Sizes, Tile]  # and the tile that is fastest for them
Formats = tuple[str | QuantKey | None, ...]  # of weights, as `quantize=` or a file has them
LENGTHS = (1, 15, 16, 17, 255, 4097)


@dataclass(frozen=True)
class Job:
    """Kernels to check by name, on one device, in one type, at the sizes of a model on one rank."""

    device: str
    dtype: str  # one of llama.device.DTYPES
    names: tuple[str, ...]
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    vocab_rows: int  # of the head on this rank
    page_size: int
    lengths: tuple[int, ...] = LENGTHS  # of sequences
    in_use: tuple[str, ...] = ()  # kernels that run while something else is checked
    formats: Formats = (None,)
    kv_format: str | None = None  # of the KV cache


@dataclass(frozen=True)
class CheckResult:
    """Why each kernel that was checked must not be used, None where it may, and chosen tiles.

    is_final: a later check would say the same; not so where memory was short or no child ran.
    """

    reasons: dict[str, str | None] = field(default_factory=dict)
    tiles: list[Choice] = field(default_factory=list)
    is_final: bool = True

    @property
    def passed(self) -> list[str]:
        return [name for name, reason in self.reasons.items() if reason is None]

    @property
    def failed(self) -> dict[str, str]:
        return {name: reason for name, reason in self.reasons.items() if reason is not None}

    def __or__(self, other: "CheckResult") -> "CheckResult":
        is_final = self.is_final and other.is_final
        return CheckResult(self.reasons | other.reasons, self.tiles + other.tiles, is_final)

    def kernels(self, dtype: str, names: Sequence[str]) -> KernelSet:
        """Those of `names` that passed."""
        passed, dtypes = frozenset(names) & set(self.passed), frozenset({DTYPES[dtype]})
        return KernelSet(passed, dtypes, dict(self.tiles))


JOB, RESULT = TypeAdapter(Job), TypeAdapter(CheckResult)  # to JSON and back
