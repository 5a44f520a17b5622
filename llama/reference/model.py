"""The Transformer of Llama 3, on the model-parallel layers of fairscale.

In: token ids (B, S), and the position of the first of them. Out: float32 logits (B, S, V). Each
layer has a contiguous cache of the keys and values of earlier positions. All ranks of a group run
this code, each with its part of every matrix. Nothing here knows files, text or sampling.

Shapes: B sequences, S tokens of this call, P position of the first, E model dim, H query heads,
K key-value heads, D head dim, F feed-forward columns, V vocabulary. R ranks share the model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import layers as parallel
from fairscale.nn.model_parallel.initialize import get_model_parallel_world_size
from torch import Tensor, nn


@dataclass
class ModelArgs:
    """The contents of params.json under Meta's names, and the two sizes of the cache."""

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int | None = None  # None: as many as n_heads
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    use_scaled_rope: bool = False
    rope_scale_factor: float | None = None  # in no file of Meta's: inferred there
    max_batch_size: int = 32
    max_seq_len: int = 2048

    @property
    def ffn_dim(self) -> int:
        """Columns, F: 2/3 of 4 E, times the multiplier, rounded up to a multiple."""
        columns = int((self.ffn_dim_multiplier or 1.0) * int(2 * 4 * self.dim / 3))
        return math.ceil(columns / self.multiple_of) * self.multiple_of


def rope_rotations(args: ModelArgs, device: torch.device) -> Tensor:
    """Return the rotation of each pair of a head at each position, (max_seq_len, D / 2) complex.

    Llama 3.1 was trained on 8,192 positions, and then extended: pairs that turn less than once in
    8,192 positions are slowed down by the whole factor, those that turn more than 4 times are kept,
    and those in between are interpolated.
    """
    head_dim = args.dim // args.n_heads
    speeds = args.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)  # (D / 2)
    if args.use_scaled_rope:
        is_3_2 = args.dim in (2048, 3072)  # no other model has these sizes
        factor = args.rope_scale_factor or (32 if is_3_2 else 8)
        turns = 8192 * speeds / (2 * math.pi)
        kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
        speeds = kept * speeds + (1 - kept) * speeds / factor
    angles = torch.outer(torch.arange(args.max_seq_len), speeds)  # radians
    return torch.polar(torch.ones_like(angles), angles).to(device)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn neighbouring pairs of x (B, S, heads, D), in float32, by rotations (S, D / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, S, heads, D / 2)
    return torch.view_as_real(pairs * rotations[:, None]).flatten(-2).to(x.dtype)


def _unfilled(layer: Callable[..., nn.Module], *sizes: int, **options: object) -> nn.Module:
    """Return a layer of fairscale whose weight has this rank's shape, and no memory.

    fairscale allocates the weight of all ranks and fills it with random numbers. Here a shard's
    tensor takes its place, so nothing is drawn, and the memory is given back at once.
    """
    return layer(*sizes, init_method=lambda weight: weight, **options).to("meta")


def _columns(inputs: int, outputs: int, gather: bool = False) -> nn.Module:
    """(..., inputs) -> (..., outputs / R), or all outputs; the weight is (outputs / R, inputs)."""
    linear = parallel.ColumnParallelLinear
    return _unfilled(linear, inputs, outputs, bias=False, gather_output=gather)


def _rows(inputs: int, outputs: int) -> nn.Module:
    """(..., inputs / R) -> (..., outputs), summed over ranks; the weight: (outputs, inputs / R)."""
    linear = parallel.RowParallelLinear
    return _unfilled(linear, inputs, outputs, bias=False, input_is_parallel=True)


class RMSNorm(nn.Module):
    """Divides a vector by its root mean square, in float32, and scales each element."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.eps = args.norm_eps
        self.weight = nn.Parameter(torch.empty(args.dim, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E) in the type of x."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention whose query heads share key-value heads in groups, with its cache."""

    def __init__(self, args: ModelArgs, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        ranks = get_model_parallel_world_size()
        # With more ranks than key-value heads, each head lies on several neighbouring ranks.
        kv_heads = max(args.n_kv_heads or args.n_heads, ranks)
        self.head_dim = args.dim // args.n_heads
        self.n_kv_heads = kv_heads // ranks
        self.wq = _columns(args.dim, args.n_heads * self.head_dim)
        self.wk = _columns(args.dim, kv_heads * self.head_dim)
        self.wv = _columns(args.dim, kv_heads * self.head_dim)
        self.wo = _rows(args.n_heads * self.head_dim, args.dim)
        size = (args.max_batch_size, args.max_seq_len, self.n_kv_heads, self.head_dim)
        self.cache_k = torch.zeros(size, dtype=dtype, device=device)
        self.cache_v = torch.zeros(size, dtype=dtype, device=device)

    def forward(self, x: Tensor, start_pos: int, rotations: Tensor, mask: Tensor) -> Tensor:
        """Let each token attend to those before it and itself: (B, S, E) -> (B, S, E).

        The cache is filled up to position P, start_pos. `rotations` (S, D / 2) are those of the
        tokens, and `mask` (S, P + S) is minus infinity for the keys after a query, else 0.
        """
        batch, length, _ = x.shape
        end_pos = start_pos + length
        queries = self.wq(x).view(batch, length, -1, self.head_dim)  # (B, S, H / R, D)
        keys = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim)
        values = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim)
        queries, keys = rotate(queries, rotations), rotate(keys, rotations)

        self.cache_k[:batch, start_pos:end_pos] = keys
        self.cache_v[:batch, start_pos:end_pos] = values
        keys, values = self.cache_k[:batch, :end_pos], self.cache_v[:batch, :end_pos]

        group_size = queries.shape[2] // self.n_kv_heads  # query heads of one key-value head
        keys = keys.repeat_interleave(group_size, dim=2)  # (B, P + S, H / R, D)
        values = values.repeat_interleave(group_size, dim=2)
        queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
        scores = queries @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        weights = torch.softmax(scores.float() + mask, dim=-1).to(x.dtype)  # (B, H / R, S, P + S)
        mixed = (weights @ values).transpose(1, 2).flatten(2)  # (B, S, H / R * D)
        out: Tensor = self.wo(mixed)
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2 (silu(w1 x) * w3 x), with F / R columns on each rank."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = _columns(args.dim, args.ffn_dim)
        self.w2 = _rows(args.ffn_dim, args.dim)
        self.w3 = _columns(args.dim, args.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, E) -> (B, S, E)."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each on a normed input and added to the stream."""

    def __init__(self, args: ModelArgs, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention = Attention(args, dtype, device)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args)
        self.ffn_norm = RMSNorm(args)

    def forward(self, x: Tensor, start_pos: int, rotations: Tensor, mask: Tensor) -> Tensor:
        """(B, S, E) -> (B, S, E), as `Attention.forward`."""
        x = x + self.attention(self.attention_norm(x), start_pos, rotations, mask)
        x = x + self.feed_forward(self.ffn_norm(x))
        return x


class Transformer(nn.Module):
    """One rank's part of a model with the sizes `args`, in the model-parallel group that exists.

    `state` has this rank's part of each tensor by Meta's names. A ValueError says that the ranks do
    not divide the model, a RuntimeError that a tensor is missing, unknown or of another shape.
    """

    def __init__(
        self, args: ModelArgs, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        _check_ranks(args)
        self.params = args
        self.device = device
        embedding = parallel.VocabParallelEmbedding  # its weight: (V / R, E)
        self.tok_embeddings = _unfilled(embedding, args.vocab_size, args.dim)
        blocks = (TransformerBlock(args, dtype, device) for _ in range(args.n_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(args)
        self.output = _columns(args.dim, args.vocab_size, gather=True)
        self.rotations = rope_rotations(args, device)
        weights = {name: tensor.to(device, dtype) for name, tensor in state.items()}
        self.load_state_dict(weights, assign=True)  # They become the parameters: one copy exists.

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        """Return the logits (B, S, V) of the tokens that follow, float32, the same on every rank.

        Args:
            tokens: (B, S) ids at positions P to P + S, whose keys and values stay in the cache.
            start_pos: P. The cache must hold the positions before.
        """
        end_pos = start_pos + tokens.shape[1]
        hidden = torch.full((tokens.shape[1], end_pos), -math.inf, device=self.device)
        mask = hidden.triu(start_pos + 1)  # query i is at position P + i, and sees keys up to it
        h = self.tok_embeddings(tokens)  # (B, S, E)
        for layer in self.layers:
            h = layer(h, start_pos, self.rotations[start_pos:end_pos], mask)
        logits: Tensor = self.output(self.norm(h))
        return logits.float()


def _check_ranks(args: ModelArgs) -> None:
    ranks, kv_heads = get_model_parallel_world_size(), args.n_kv_heads or args.n_heads
    sizes = {"n_heads": args.n_heads, "ffn_dim": args.ffn_dim, "vocab_size": args.vocab_size}
    if kv_heads % ranks and ranks % kv_heads:
        sizes["n_kv_heads"] = kv_heads
    if wrong := {name: size for name, size in sizes.items() if size % ranks}:
        raise ValueError(f"{ranks} ranks do not divide the sizes {wrong}: start a number that does")
