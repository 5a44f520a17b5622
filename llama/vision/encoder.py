"""The image encoder of Llama 3.2 Vision and its projector.

In: the tiles of an image. Out: tokens, to which cross-attention layers attend. The mathematics and
names are those of Meta's llama_models/llama3/multimodal/model.py. Meta always computes the largest
number of tiles, of which most are padding for a small image, and makes the tokens of a tile a
multiple of 8 by further rows. Padding is attended to, so that it cannot be left out; but its rows
are equal to one another. Here each different row is computed once: a key that stands for m equal
ones has log m added to its scores. Padding does not attend to padding. Weight and mask are elements
of the heads, so that the attention needs no mask of its own.

Shapes: r tiles of an image, N tokens of a tile, R different rows, W width, H heads of this rank, D
head dim, E model dim.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.model.args import ModelArgs, VisionArgs
from llama.model.layers import ColumnParallelLinear, Linear, RowParallelLinear, unfilled
from llama.ops.attention import attention
from llama.ops.batch import ForwardContext
from llama.ranks.parallel import Parallel
from llama.vision.tensors import VisionShare

_EPS = 1e-5
# What a score of padding for padding loses, before the scale: its weight becomes 0 in every type.
_MASKED = 1e4
_MULTIPLE = 32  # elements of a head for which the kernels compute attention
# The mean and the deviation of the pixels' channels (CLIP's).
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class _Biased(Linear):
    """A product with this rank's weight, and a bias: (..., K) -> (..., N)."""

    bias: nn.Parameter

    def add_bias(self, x: Tensor) -> Tensor:
        """Add the bias to rows (..., N)."""
        return x + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class _BiasedColumns(_Biased, ColumnParallelLinear):
    """A column-parallel product with a bias, which is added to this rank's outputs."""

    may_quantize = False

    def __init__(self, n_in: int, n_out: int, parallel: Parallel, widths: Sequence[int]) -> None:
        super().__init__(n_in, n_out, parallel, widths=widths)
        self.bias = unfilled(n_out)

    def combined(self, share: Tensor) -> Tensor:
        """Add the bias, and gather the outputs if there are `widths`."""
        return super().combined(self.add_bias(share))


class _BiasedRows(_Biased, RowParallelLinear):
    """A row-parallel product with a bias, which is added to the sum."""

    may_quantize = False

    def __init__(self, n_in: int, n_out: int, parallel: Parallel) -> None:
        super().__init__(n_in, n_out, parallel)
        self.bias = unfilled(n_out)

    def combined(self, share: Tensor) -> Tensor:
        """Sum over the ranks, and add the bias."""
        return self.add_bias(super().combined(share))


class _Columns(ColumnParallelLinear):
    may_quantize = False


class _Rows(RowParallelLinear):
    may_quantize = False


class LayerNorm(nn.Module):
    """Layer normalisation of rows (..., W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = unfilled(width)
        self.bias = unfilled(width)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows: x (..., W) -> (..., W)."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, _EPS)


class _KeyWeights:
    """How rows attend to rows of which some stand for several, and some are padding.

    Attributes:
        weights: (R) How many rows each one stands for.
        is_padding: (R) Whether a row is padding.
    """

    def __init__(self, num_real: int, counts: Sequence[tuple[int, int]]) -> None:
        """Describe the rows.

        Args:
            num_real: The rows that are no padding, which come first.
            counts: Numbers of rows of padding, one after the other, and how many rows each of them
                stands for.
        """
        counted = [(num_real, 1), *counts]
        self.weights = torch.cat([torch.full((n,), float(count)) for n, count in counted])
        self.is_padding = torch.arange(len(self.weights)) >= num_real

    def widened(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return heads with further elements: (R, H, D) each -> (3, H, R, D')."""
        num_rows, n_heads, head_dim = queries.shape
        # The scores are divided by the root of D. The logarithm has two parts, as bf16 has 8 bits.
        logs = self.weights.log() * math.sqrt(head_dim)
        high = logs.to(queries.dtype).float()
        ones = torch.ones_like(logs)
        is_padding = self.is_padding.float()
        of_queries = torch.stack([ones, ones, is_padding], 1)
        of_keys = torch.stack([high, logs - high, -_MASKED * is_padding], 1)
        end = head_dim + 3
        width = -(-end // _MULTIPLE) * _MULTIPLE
        wide = queries.new_zeros(3, n_heads, num_rows, width)
        for heads, given in zip(wide, (queries, keys, values), strict=True):
            heads[..., :head_dim] = given.transpose(0, 1)
        wide[0, ..., head_dim:end] = of_queries.to(queries)
        wide[1, ..., head_dim:end] = of_keys.to(keys)
        return wide


class _Attention(nn.Module):
    """Attention of all rows of an image to one another, without rotation."""

    def __init__(self, args: VisionArgs, share: VisionShare, parallel: Parallel) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        size = len(share.rows("h"))
        self.wq = _Columns(args.width, size, parallel)
        self.wk = _Columns(args.width, size, parallel)
        self.wv = _Columns(args.width, size, parallel)
        self.wo = _Rows(size, args.width, parallel)

    def forward(self, x: Tensor, weights: _KeyWeights, context: ForwardContext) -> Tensor:
        """Attend: x (R, W) -> (R, W)."""
        parts = [matrix(x, context) for matrix in (self.wq, self.wk, self.wv)]
        queries, keys, values = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        wide = weights.widened(queries, keys, values)
        attended = attention(wide, self.head_dim**-0.5, context.kernels)
        heads = attended[..., : self.head_dim].transpose(0, 1)
        out: Tensor = self.wo(heads.flatten(1), context)
        return out


class _FeedForward(nn.Module):
    """Two products with GELU between them."""

    def __init__(self, args: VisionArgs, share: VisionShare, parallel: Parallel) -> None:
        super().__init__()
        self.c_fc = _BiasedColumns(args.width, len(share.ffn), parallel, ())
        self.c_proj = _BiasedRows(len(share.ffn), args.width, parallel)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Run the block: x (R, W) -> (R, W)."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x, context)), context)
        return out


class _Block(nn.Module):
    """A block of the encoder; global ones have gates."""

    def __init__(
        self, args: VisionArgs, share: VisionShare, parallel: Parallel, *, has_gates: bool
    ) -> None:
        super().__init__()
        self.attn = _Attention(args, share, parallel)
        self.mlp = _FeedForward(args, share, parallel)
        self.ln_1 = LayerNorm(args.width)
        self.ln_2 = LayerNorm(args.width)
        self.has_gates = has_gates
        if has_gates:
            self.gate_attn = unfilled(1)
            self.gate_ffn = unfilled(1)

    def forward(self, x: Tensor, weights: _KeyWeights, context: ForwardContext) -> Tensor:
        """Run the block: x (R, W) -> (R, W)."""
        attended = self.attn(self.ln_1(x), weights, context)
        x = x + (self.gate_attn.tanh() * attended if self.has_gates else attended)
        part = self.mlp(self.ln_2(x), context)
        x = x + (self.gate_ffn.tanh() * part if self.has_gates else part)
        return x


class _Blocks(nn.Module):
    """Blocks one after the other, under Meta's name."""

    def __init__(self, blocks: list[_Block]) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)


class _Patches(nn.Module):
    """The product with the pixels of each patch, channel after channel, under Meta's names."""

    def __init__(self, n_in: int, widths: Sequence[int], parallel: Parallel) -> None:
        super().__init__()
        self._linear = _Columns(n_in, widths[parallel.rank], parallel, widths=widths)

    def forward(self, patches: Tensor, context: ForwardContext) -> Tensor:
        """Multiply: (..., P) -> (..., W)."""
        out: Tensor = self._linear(patches, context)
        return out


class _TileEmbedding(nn.Module):
    """A gated vector for each place of a tile."""

    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.embedding = unfilled(args.max_tiles, args.max_tiles, 1, args.width)
        self.gate = unfilled(1)

    def forward(self, rows: int, columns: int) -> Tensor:
        """Return the vectors of a grid of tiles, (r, 1, W)."""
        places = self.embedding[:rows, :columns].flatten(0, 1)
        gated: Tensor = places * self.gate.tanh()
        return gated


class VisionEncoder(nn.Module):
    """The encoder of one image: normalised tiles (r, 3, T, T) -> (r N, F)."""

    def __init__(self, params: ModelArgs, share: VisionShare, parallel: Parallel) -> None:
        super().__init__()
        args = share.args
        self.args = args
        peers = [VisionShare.of(params, peer) for peer in parallel.placement.peers()]
        widths = [len(peer.width) for peer in peers]
        self.conv1 = _Patches(len(share.rows("p")), widths, parallel)
        self.class_embedding = unfilled(args.width)
        self.positional_embedding = unfilled(args.tokens_per_tile, args.width)
        tiles = (args.max_tiles, args.max_tiles)
        self.gated_positional_embedding = unfilled(*tiles, args.tokens_per_tile, args.width)
        self.gated_positional_embedding_gate = unfilled(1)
        self.pre_tile_pos_embed = _TileEmbedding(args)
        self.post_tile_pos_embed = _TileEmbedding(args)
        self.ln_pre = LayerNorm(args.width)
        self.ln_post = LayerNorm(args.width)
        local = [_Block(args, share, parallel, has_gates=False) for _ in range(args.n_layers)]
        gated = [_Block(args, share, parallel, has_gates=True) for _ in range(args.n_global_layers)]
        self.transformer = _Blocks(local)
        self.global_transformer = _Blocks(gated)

    def forward(self, tiles: Tensor, rows: int, columns: int, context: ForwardContext) -> Tensor:
        """Encode an image.

        Args:
            tiles: (r, 3, T, T) normalised pixels, row by row of tiles.
            rows: The rows of tiles; r = rows * columns.
            columns: The columns of tiles.
            context: The kernels that may run.

        Returns:
            (r N, F): the result of each token, then the elements of all features of each dimension.
        """
        args = self.args
        num_tokens = args.tokens_per_tile
        num_real = len(tiles) * num_tokens
        num_missing = args.max_tiles - len(tiles)  # tiles of padding
        num_further = 8 - num_tokens % 8  # Meta adds 8 rows where none is needed, too
        x = self._embedded(tiles, rows, columns, context)
        weights = _KeyWeights(
            num_real,
            [(num_tokens if num_missing else 0, num_missing), (1, num_further * args.max_tiles)],
        )
        features = []
        for i, block in enumerate(self.transformer.resblocks):
            if i in args.features:
                features.append(x[:num_real])
            x = block(x, weights, context)
        x = self.ln_post(x)
        places = self.post_tile_pos_embed(rows, columns)
        real = x[:num_real].unflatten(0, (len(tiles), num_tokens)) + places
        further = [x[-1:] + places[:, 0]]
        counts = [(len(tiles), num_further)]
        if num_missing:
            further = [x[num_real:-1], *further, x[-1:]]
            counts = [(num_tokens, num_missing), *counts, (1, num_further * num_missing)]
        weights = _KeyWeights(num_real, counts)
        x = torch.cat([real.flatten(0, 1), *further])
        for block in self.global_transformer.resblocks:
            x = block(x, weights, context)
        return torch.cat([x[:num_real], torch.stack(features, -1).flatten(1)], 1)

    def _embedded(self, tiles: Tensor, rows: int, columns: int, context: ForwardContext) -> Tensor:
        """Return the different rows that the blocks get, (R, W).

        They are the tokens of the tiles, those of one tile of padding if there is any, and a row of
        zeros, which all further rows are.
        """
        args = self.args
        grid = args.chunk_size // args.patch_size
        patches = tiles.unflatten(3, (grid, -1)).unflatten(2, (grid, -1))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.conv1(patches, context) + self.pre_tile_pos_embed(rows, columns)
        gate = self.gated_positional_embedding_gate.tanh()
        first = self.class_embedding.expand(len(x), 1, -1)
        plain_places = self.positional_embedding * (1 - gate)
        x = torch.cat([first, x], 1) + plain_places
        x = x + self.gated_positional_embedding[:rows, :columns].flatten(0, 1) * gate
        parts = [self.ln_pre(x).flatten(0, 1)]
        if len(tiles) < args.max_tiles:
            padding = plain_places.clone()
            padding[0] += self.class_embedding
            parts.append(self.ln_pre(padding))
        parts.append(x.new_zeros(1, args.width))
        return torch.cat(parts)


class VisionModel(nn.Module):
    """The encoder and the projector to the text model's dimension, under Meta's names."""

    def __init__(self, params: ModelArgs, parallel: Parallel) -> None:
        super().__init__()
        share = VisionShare.of(params, parallel.placement)
        peers = [VisionShare.of(params, peer) for peer in parallel.placement.peers()]
        widths = [len(peer.out) for peer in peers]
        self.vision_encoder = VisionEncoder(params, share, parallel)
        self.vision_projection = _BiasedColumns(
            share.args.features_dim, len(share.out), parallel, widths
        )

    def forward(self, pixels: Tensor, rows: int, columns: int, context: ForwardContext) -> Tensor:
        """Encode an image.

        Args:
            pixels: (r, T, T, 3) uint8, row by row of tiles.
            rows: The rows of tiles; r = rows * columns.
            columns: The columns of tiles.
            context: The kernels that may run.

        Returns:
            (r N, E): the tokens that cross-attention layers make keys and values of.
        """
        like = self.vision_encoder.class_embedding
        tiles = normalized(pixels.to(like.device)).to(like.dtype)
        encoded = self.vision_encoder(tiles, rows, columns, context)
        out: Tensor = self.vision_projection(encoded, context)
        return out


def normalized(pixels: Tensor) -> Tensor:
    """Return pixels as the encoder takes them: (r, T, T, 3) uint8 -> (r, 3, T, T) float32."""
    mean = torch.tensor(MEAN, device=pixels.device)
    deviation = torch.tensor(DEVIATION, device=pixels.device)
    channels_last = (pixels.float() / 255 - mean) / deviation
    return channels_last.permute(0, 3, 1, 2)
