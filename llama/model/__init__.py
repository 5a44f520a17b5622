"""The model, with `Transformer` and its parts under the names that Meta's scripts import."""

from llama.model.args import ModelArgs
from llama.model.kinds import Attention, FeedForward
from llama.model.layers import RMSNorm
from llama.model.transformer import Transformer, TransformerBlock

__all__ = ["Attention", "FeedForward", "ModelArgs", "RMSNorm", "Transformer", "TransformerBlock"]
