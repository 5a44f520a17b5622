"""params.json of a Llama 3 model, or config.json, translated: contents in, `ModelArgs` out.

No file is opened, and no tensor is made.
"""

from dataclasses import dataclass, fields
from typing import Any

from llama.checks import brief, errors_in, limits_of, number, whole_number, within

# Keys that some releases of params.json carry and that change nothing here.
HARMLESS_PARAMS = frozenset({"max_batch_size", "max_seq_len", "model_parallel_size"})
_DIM_OF_3_2 = (2048, 3072)  # Llama 3.2 1B and 3B: their params.json hides a RoPE factor of 32

MAX_SIZE = 2**24  # of what a file says


@dataclass(frozen=True)
class ModelArgs:
    """What params.json says of a model, under Meta's names, and the two sizes of the run.
    `rope_scale_factor`, `context_length` and `tied_output` are ours: Meta's files leave them to be
    inferred, Hugging Face's config.json states them. The largest values that are taken are 60 times
    those of the 405B model: nothing overflows or is slow."""

    dim: int = within(4096, 1, 2**20)
    n_layers: int = within(32, 1, 2**13)
    n_heads: int = within(32, 1, 2**16)
    n_kv_heads: int | None = within(None, 1, 2**16)  # None: as many as n_heads
    vocab_size: int = within(-1, 1, MAX_SIZE)
    multiple_of: int = within(256, 1, MAX_SIZE)  # the ffn size is rounded up to this
    ffn_dim_multiplier: float | None = within(None, 0, 1e3)
    norm_eps: float = within(1e-5, 0, 1.0)
    rope_theta: float = within(500000, 0, 1e12)
    use_scaled_rope: bool = False
    rope_scale_factor: float | None = within(None, 0, 1e6)
    context_length: int | None = within(None, 1, 2**40)
    tied_output: bool = False

    max_batch_size: int = 32  # sequences that run at once
    max_seq_len: int = 2048  # tokens of prompt and answer together

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ffn_dim(self) -> int:
        """Meta's rule: 2/3 of 4 x dim, times the multiplier, up to the next multiple."""
        wide = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            wide = int(self.ffn_dim_multiplier * wide)
        return -(-wide // self.multiple_of) * self.multiple_of

    @property
    def rope_factor(self) -> float | None:
        """The divisor of slow frequencies: as given, else 32 for 3.2's shapes, else 8."""
        if not self.use_scaled_rope:
            return None
        return self.rope_scale_factor or (32.0 if self.dim in _DIM_OF_3_2 else 8.0)

    @property
    def longest_context(self) -> int:
        """Tokens that the model was made for."""
        return self.context_length or (131072 if self.use_scaled_rope else 8192)

    @classmethod
    def from_params(cls, params: dict[str, Any], source: str) -> "ModelArgs":
        """The checked contents of a params.json; `source` names the file in errors."""
        known = {f.name for f in fields(cls)} - HARMLESS_PARAMS
        for key in sorted(params.keys() - known - HARMLESS_PARAMS):
            raise ValueError(
                f"{source}: unknown key {brief(key)}. This runtime knows text models with the keys "
                f"{', '.join(sorted(known))}; a key that it ignored could change the answers"
            )
        for key in ("dim", "n_layers", "n_heads", "vocab_size"):
            if key not in params:
                raise ValueError(f"{source}: the key {key!r} is missing: fetch the file again")
        args = cls(**{key: value for key, value in params.items() if key in known})
        args.check(source)
        return args

    def check(self, source: str) -> None:
        """ValueError, naming `source`, unless the sizes are numbers that fit one another."""
        with errors_in(source):
            for name, (kind, low, high, optional) in limits_of(ModelArgs).items():
                value = getattr(self, name)
                if kind is int:
                    whole_number(name, value, int(low), int(high), optional=optional)
                elif value is not None or not optional:
                    number(name, value, low, high, above=True)
            for name in ("use_scaled_rope", "tied_output"):
                if not isinstance(getattr(self, name), bool):
                    raise ValueError(f"{name}={brief(getattr(self, name))} must be true or false")
            if self.dim % self.n_heads or self.head_dim % 2:
                sizes = f"dim={self.dim} / n_heads={self.n_heads}"
                raise ValueError(f"{sizes} must be an even whole number, the size of a head")
            if self.n_heads % self.kv_heads:
                words = f"n_kv_heads={self.kv_heads} does not divide n_heads={self.n_heads}"
                raise ValueError(words)
            if self.ffn_dim < 1:
                raise ValueError(f"ffn_dim_multiplier={self.ffn_dim_multiplier} leaves no ffn")

    def check_ranks(self, size: int) -> None:
        """ValueError unless a model-parallel group of `size` ranks can share this model."""
        parts = {"n_heads": self.n_heads, "ffn_dim": self.ffn_dim, "vocab_size": self.vocab_size}
        for name, whole in parts.items():
            if whole % size:
                raise ValueError(
                    f"model_parallel_size={size} does not divide {name}={whole}: use a size that "
                    f"divides {', '.join(f'{n}={w}' for n, w in parts.items())}"
                )
        if self.kv_heads % size and size % self.kv_heads:
            raise ValueError(
                f"model_parallel_size={size} neither divides nor is a multiple of "
                f"n_kv_heads={self.kv_heads}: use a size that does"
            )
