"""A check of kernels or graphs and its result, as processes exchange them in JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from llama.common.device import DTYPES
from llama.kernels.cuda.launch import Sizes, Tile
from llama.kernels.cuda.table import table
from llama.ops.kernels import Kernels
from llama.weights.groups import QuantKey

Choice = tuple[Sizes, Tile]  # sizes of a product, and the fastest tile for them
Formats = tuple[str | QuantKey | None, ...]  # formats of weights, as `quantize=` or a file has them
LENGTHS = (1, 15, 16, 17, 255, 4097)  # sequence lengths around the edges of pages and blocks


@dataclass(frozen=True)
class Job:
    """Kernels to check on one device, in one dtype, at the sizes of a model on one rank.

    Attributes:
        device: A torch device, such as "cuda:0".
        dtype: One of `llama.common.device.DTYPES`.
        names: The kernels to check, or `GRAPH`.
        vocab_size: Outputs of lm_head on all ranks.
        vocab_rows: Outputs of lm_head on this rank.
        lengths: Lengths of the sequences that attention is checked with.
        in_use: Kernels that run while something else is checked.
        formats: The formats of weights that products are checked with.
        kv_format: The format of the KV cache.
        activations: How products round their inputs, None where they do not.
        stage: The pipeline stage whose graphs are checked.
        stages: The number of stages; of more than three, the first, one middle and the last differ.
    """

    device: str
    dtype: str
    names: tuple[str, ...]
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    vocab_rows: int
    page_size: int
    lengths: tuple[int, ...] = LENGTHS
    in_use: tuple[str, ...] = ()
    formats: Formats = (None,)
    kv_format: str | None = None
    activations: str | None = None
    stage: int = 0
    stages: int = 1


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        reasons: For each kernel why it must not be used, None where it may be.
        tiles: The fastest tiles of products.
        is_final: Whether a later check would have the same result. It may not where the machine
            was at fault: without a compiler or memory, or where no child process ran.
    """

    reasons: dict[str, str | None] = field(default_factory=dict)
    tiles: list[Choice] = field(default_factory=list)
    is_final: bool = True

    @property
    def passed(self) -> list[str]:
        """The kernels that may be used."""
        return [name for name, reason in self.reasons.items() if reason is None]

    @property
    def failed(self) -> dict[str, str]:
        """The kernels that must not be used, and why."""
        return {name: reason for name, reason in self.reasons.items() if reason is not None}

    def __or__(self, other: "CheckResult") -> "CheckResult":
        """Return both results as one."""
        return CheckResult(
            self.reasons | other.reasons,
            self.tiles + other.tiles,
            self.is_final and other.is_final,
        )

    def kernels(self, dtype: str, names: Sequence[str]) -> Kernels:
        """Return the kernels among `names` that passed, for a model of this dtype."""
        passed = frozenset(names) & set(self.passed)
        dtypes = frozenset({DTYPES[dtype]})
        return table(passed, dtypes, dict(self.tiles))


JOB = TypeAdapter(Job)  # conversion to JSON and back
RESULT = TypeAdapter(CheckResult)
