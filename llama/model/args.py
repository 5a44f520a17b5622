"""The sizes of a model, as params.json or a translated config.json states them.

In: the contents of the file. Out: a `ModelArgs`. No file is opened, and no tensor is made.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from llama.common.checks import FieldError, Range, brief, check_ranges, errors_in
from llama.ops.rope import HIGH_TURNS, LOW_TURNS, RopeScaling, Yarn

# Keys that some releases of params.json carry and that change nothing here.
HARMLESS_PARAMS = frozenset({"max_batch_size", "max_seq_len", "model_parallel_size"})
_DIMS_OF_3_2 = (2048, 3072)  # Llama 3.2 1B and 3B: their RoPE factor is 32, not in params.json

MAX_SIZE = 2**24  # largest vocabulary, and largest multiple of the ffn size


@dataclass(frozen=True)
class VisionArgs:
    """The sizes of the parts of a model that read images; the defaults are those of Meta's models.

    Attributes:
        num_cross_layers: The cross-attention layers, spread among the layers of text.
        chunk_size: The pixels of a tile's side.
        max_tiles: The largest number of tiles of an image.
        patch_size: The pixels of a patch's side; each patch is a token.
        width: The elements of a token in the encoder.
        n_heads: The attention heads of the encoder.
        ffn_dim: The columns of its feed-forward blocks.
        n_layers: Its blocks within which tiles differ by their pixels and places.
        n_global_layers: The gated blocks after these.
        features: The blocks whose inputs are a part of the result.
    """

    num_cross_layers: Annotated[int, Range(1, 2**13)]
    chunk_size: Annotated[int, Range(1, 2**14)] = 560
    max_tiles: Annotated[int, Range(1, 16)] = 4
    patch_size: Annotated[int, Range(1, 2**10)] = 14
    width: Annotated[int, Range(1, 2**16)] = 1280
    n_heads: Annotated[int, Range(1, 2**10)] = 16
    ffn_dim: Annotated[int, Range(1, 2**18)] = 5120
    n_layers: Annotated[int, Range(1, 2**10)] = 32
    n_global_layers: Annotated[int, Range(1, 2**10)] = 8
    features: tuple[int, ...] = (3, 7, 15, 23, 30)

    @property
    def head_dim(self) -> int:
        """Return the elements of a head of the encoder."""
        return self.width // self.n_heads

    @property
    def tokens_per_tile(self) -> int:
        """Return the tokens of a tile: its patches and the class token."""
        return (self.chunk_size // self.patch_size) ** 2 + 1

    @property
    def features_dim(self) -> int:
        """Return the elements of a token of the encoder's result."""
        return self.width * (1 + len(self.features))

    def cross_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers of text before which the cross-attention layers run, in order."""
        step = -(-n_layers // self.num_cross_layers)
        last_first = range(n_layers - 1, -1, -step)[: self.num_cross_layers]
        return tuple(reversed(last_first))

    def check(self, n_layers: int) -> None:
        """Check that the sizes fit one another, and a model of so many layers.

        Raises:
            ValueError: They do not.
        """
        check_ranges(self)
        if len(self.cross_layers(n_layers)) != self.num_cross_layers:
            raise ValueError(
                f"{self.num_cross_layers} cross-attention layers cannot be spread among "
                f"{n_layers} layers"
            )
        if self.chunk_size % self.patch_size or self.width % self.n_heads:
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of "
                f"patch_size={self.patch_size}, and width={self.width} of n_heads={self.n_heads}"
            )
        if not all(0 <= block < self.n_layers for block in self.features):
            raise ValueError(f"features={self.features} are not all below {self.n_layers} blocks")


@dataclass(frozen=True)
class ModelArgs:
    """The contents of params.json, under Meta's names, and the two sizes of the run.

    `head_size`, `rope_scale_factor` and all after it, but for the sizes of the run, are not Meta's:
    Meta's files leave them to be inferred, Hugging Face's config.json states them. The largest
    values that are accepted are 60 times those of the 405B model, with which nothing overflows or
    is slow.
    """

    dim: Annotated[int, Range(1, 2**20)] = 4096
    n_layers: Annotated[int, Range(1, 2**13)] = 32
    n_heads: Annotated[int, Range(1, 2**16)] = 32
    n_kv_heads: Annotated[int | None, Range(1, 2**16)] = None  # None: as many as n_heads
    head_size: Annotated[int | None, Range(2, 2**16)] = None  # None: dim / n_heads
    vocab_size: Annotated[int, Range(1, MAX_SIZE)] = -1
    multiple_of: Annotated[int, Range(1, MAX_SIZE)] = 256  # the ffn size is rounded up to this
    ffn_dim_multiplier: Annotated[float | None, Range(0, 1e3, above=True)] = None
    norm_eps: Annotated[float, Range(0, 1.0, above=True)] = 1e-5
    rope_theta: Annotated[float, Range(0, 1e12, above=True)] = 500000
    use_scaled_rope: bool = False
    rope_scale_factor: Annotated[float | None, Range(0, 1e6, above=True)] = None
    rope_original_context: Annotated[int, Range(1, 2**40)] = 8192  # tokens, before scaling
    # Turns in that context: frequencies of fewer are scaled, and those of more are kept.
    rope_low_freq_factor: Annotated[float, Range(0, 1e6, above=True)] = LOW_TURNS
    rope_high_freq_factor: Annotated[float, Range(0, 1e6, above=True)] = HIGH_TURNS
    rope_linear_factor: Annotated[float, Range(0, 1e6, above=True)] = 1.0  # divides all frequencies
    rope_yarn_factor: Annotated[float | None, Range(0, 1e6, above=True)] = None  # None: no YaRN
    rope_beta_fast: Annotated[float, Range(0, 1e6, above=True)] = 32.0  # YaRN's, as the next two
    rope_beta_slow: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    rope_truncate: bool = True
    rope_attention_factor: Annotated[float, Range(0, 1e6, above=True)] = 1.0  # multiplies q and k
    context_length: Annotated[int | None, Range(1, 2**40)] = None
    tied_output: bool = False
    is_causal: bool = True  # whether a token attends only to those before it
    vision: VisionArgs | None = None  # the parts that read images; None: the model reads text alone

    max_batch_size: int = 32  # sequences that run at once
    max_seq_len: int = 2048  # tokens of prompt and answer together

    @property
    def head_dim(self) -> int:
        """Return the elements of one head."""
        return self.head_size or self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Return the number of key-value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def ffn_dim(self) -> int:
        """Return Meta's size: 2/3 of 4 x dim, times the multiplier, up to the next multiple."""
        ffn_dim = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            ffn_dim = int(self.ffn_dim_multiplier * ffn_dim)
        return -(-ffn_dim // self.multiple_of) * self.multiple_of

    @property
    def rope_factor(self) -> float | None:
        """Return the divisor of low frequencies: as given, else 32 for 3.2's shapes, else 8."""
        if not self.use_scaled_rope:
            return None
        if self.rope_scale_factor:
            return self.rope_scale_factor
        return 32.0 if self.dim in _DIMS_OF_3_2 else 8.0

    @property
    def yarn(self) -> Yarn | None:
        """Return YaRN's scaling of RoPE; None for a model without it."""
        if self.rope_yarn_factor is None:
            return None
        betas = (self.rope_beta_fast, self.rope_beta_slow)
        return Yarn(self.rope_yarn_factor, *betas, self.rope_truncate)

    @property
    def rope_scaling(self) -> RopeScaling:
        """Return the scaling of RoPE."""
        return RopeScaling(
            self.rope_factor,
            self.rope_original_context,
            self.rope_linear_factor,
            self.yarn,
            self.rope_attention_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
        )

    @property
    def longest_context(self) -> int:
        """Return the context length that the model was trained for, in tokens."""
        if self.context_length:
            return self.context_length
        return 131072 if self.use_scaled_rope else 8192

    @classmethod
    def from_params(cls, params: dict[str, Any], source: str) -> "ModelArgs":
        """Check the contents of a params.json.

        Args:
            params: The contents.
            source: The file, as errors name it.

        Raises:
            ValueError: A key is unknown or missing, or a value is out of range.
        """
        known = {f.name for f in fields(cls)} - HARMLESS_PARAMS - {"vision"}
        for key in sorted(params.keys() - known - HARMLESS_PARAMS):
            raise ValueError(
                f"{source}: unknown key {brief(key)}. This runtime knows text models with the keys "
                f"{', '.join(sorted(known))}; a key that it ignored could change the answers"
            )
        for key in ("dim", "n_layers", "n_heads", "vocab_size"):
            if key not in params:
                raise ValueError(f"{source}: the key {key!r} is missing, which every Llama has")
        args = cls(**{key: value for key, value in params.items() if key in known})
        args.check(source)
        return args

    def check(self, source: str) -> None:
        """Check that the sizes are numbers that fit one another.

        Raises:
            ValueError: They do not; the error names `source`.
        """
        with errors_in(source):
            check_ranges(self)
            for name in ("use_scaled_rope", "rope_truncate", "tied_output", "is_causal"):
                if not isinstance(getattr(self, name), bool):
                    raise ValueError(f"{name}={brief(getattr(self, name))} must be true or false")
            if self.head_size is not None and self.head_size % 2:
                raise ValueError(f"head_size={self.head_size} must be even: RoPE turns pairs")
            if self.head_size is None and (self.dim % self.n_heads or self.head_dim % 2):
                raise ValueError(
                    f"dim={self.dim} / n_heads={self.n_heads} must be an even whole number, the "
                    "size of a head"
                )
            if self.n_heads % self.kv_heads:
                raise ValueError(
                    f"n_kv_heads={self.kv_heads} does not divide n_heads={self.n_heads}"
                )
            if self.yarn and (self.rope_theta <= 1 or self.rope_beta_fast < self.rope_beta_slow):
                raise ValueError(
                    f"rope_theta={self.rope_theta}, beta_fast={self.rope_beta_fast}, "
                    f"beta_slow={self.rope_beta_slow}: YaRN needs a theta above 1, and a beta_fast "
                    "of at least beta_slow"
                )
            if self.rope_low_freq_factor >= self.rope_high_freq_factor:
                raise ValueError(
                    f"low_freq_factor={self.rope_low_freq_factor} must be below high_freq_factor="
                    f"{self.rope_high_freq_factor}: frequencies between them are blended"
                )
            if self.ffn_dim < 1:
                raise ValueError(f"ffn_dim_multiplier={self.ffn_dim_multiplier} leaves no ffn")
            if self.vision is not None:
                self.vision.check(self.n_layers)

    def check_ranks(self, size: int) -> None:
        """Check that a model-parallel group of `size` ranks can divide this model.

        Raises:
            ValueError: There are more ranks than heads, ffn columns or rows of the vocabulary.
        """
        for name, whole in self._divided().items():
            if size > whole:
                raise FieldError.of(
                    "model_parallel_size",
                    f"={size} is more than {name}={whole}, and each rank holds "
                    f"at least one: use at most {min(self._divided().values())} ranks",
                )

    def check_shards(self, count: int) -> None:
        """Check that Meta's layout can have this model in `count` shards, which are equal.

        Raises:
            ValueError: It cannot; the error names the size that is not divisible.
        """
        parts = self._divided()
        for name, whole in parts.items():
            if whole % count:
                raise FieldError.of(
                    "model_parallel_size",
                    f"={count} does not divide {name}={whole}: use a size that "
                    f"divides {', '.join(f'{n}={w}' for n, w in parts.items())}",
                )
        if self.kv_heads % count and count % self.kv_heads:
            raise FieldError.of(
                "model_parallel_size",
                f"={count} neither divides nor is a multiple of "
                f"n_kv_heads={self.kv_heads}: use a size that does",
            )

    def _divided(self) -> dict[str, int]:
        """Return the sizes that ranks or shards divide, by name."""
        sizes = {"n_heads": self.n_heads, "ffn_dim": self.ffn_dim, "vocab_size": self.vocab_size}
        if self.vision is not None:
            sizes["vision n_heads"] = self.vision.n_heads
        return sizes
