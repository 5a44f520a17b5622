"""The dimensions of a model, and the range of each that one rank holds.

In: the sizes of a model and a `Placement`. Out: a `RankShare`. The layer plan and the table of
tensors both read it, so that modules and files agree on what a rank holds. It knows no tensor and
no file.
"""

from dataclasses import dataclass
from fractions import Fraction

from llama.model.args import ModelArgs
from llama.ops.formats import N_BLOCK
from llama.ranks.placement import Placement


@dataclass(frozen=True)
class RankShare:
    """The part of every dimension of a model that one rank holds.

    Attributes:
        layers: The layers of the rank's pipeline stage.
        heads: The query heads.
        kv_heads: The key-value heads; several ranks can hold the same.
        ffn: The columns of the feed-forward block between its two matrices.
        vocab: The rows of the embedding and of the lm_head, which are token ids.
        has_embedding: Whether the rank's stage holds the token embedding. Where the lm_head is
            tied to it, the last stage does too.
        has_lm_head: Whether the rank's stage holds the lm_head.
        head_dim: Elements of one head.
        dim: The model dimension, which is not divided.
    """

    layers: range
    heads: range
    kv_heads: range
    ffn: range
    vocab: range
    has_embedding: bool
    has_lm_head: bool
    head_dim: int
    dim: int

    @classmethod
    def of(cls, params: ModelArgs, placement: Placement) -> "RankShare":
        """Compute what a rank with this placement holds."""
        heads, kv_heads = placement.heads(params.n_heads, params.kv_heads)
        return cls(
            layers=placement.layers(params.n_layers, _lm_head_layers(params)),
            heads=heads,
            kv_heads=kv_heads,
            ffn=placement.ffn_columns(params.ffn_dim),
            vocab=placement.blocks(params.vocab_size, N_BLOCK),
            has_embedding=placement.is_first or (placement.is_last and params.tied_output),
            has_lm_head=placement.is_last,
            head_dim=params.head_dim,
            dim=params.dim,
        )

    def rows(self, dimension: str) -> range:
        """Return the rows or columns of a dimension by its letter.

        Args:
            dimension: V vocabulary, E model dim, F feed-forward, Q and K query and key-value heads
                times head dim.
        """
        if dimension == "Q":
            return _elements(self.heads, self.head_dim)
        if dimension == "K":
            return _elements(self.kv_heads, self.head_dim)
        return {"E": range(self.dim), "F": self.ffn, "V": self.vocab}[dimension]


def _lm_head_layers(params: ModelArgs) -> Fraction:
    """Return the work of the lm_head, in layers, by the elements of their matrices.

    `llama.model.stage_layers` knows more: formats, and the device.
    """
    attention = 2 * (params.n_heads + params.kv_heads) * params.head_dim
    # The columns of all matrices of a layer, each of which has as many rows as the model dim.
    columns = attention + 3 * params.ffn_dim
    return Fraction(params.vocab_size, columns)


def distinct_ranks(params: ModelArgs, placement: Placement) -> list[Placement]:
    """Return the first of all ranks of a group that hold as much of each dimension."""
    ranks: dict[tuple[int, ...], Placement] = {}
    for peer in placement.peers():
        share = RankShare.of(params, peer)
        counts = (len(share.heads), len(share.kv_heads), len(share.ffn), len(share.vocab))
        ranks.setdefault(counts, peer)
    return list(ranks.values())


def vocab_widths(params: ModelArgs, placement: Placement) -> list[int]:
    """Return the number of vocabulary rows of each rank of a group."""
    return [len(RankShare.of(params, peer).vocab) for peer in placement.peers()]


def _elements(heads: range, head_dim: int) -> range:
    first = heads.start * head_dim
    return range(first, first + len(heads) * head_dim)
