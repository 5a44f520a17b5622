"""Meta's Llama 3 API as a runtime: the names that Meta's package exports."""

from llama.generation import Llama
from llama.model import ModelArgs, Transformer
from llama.tokenizer import ChatFormat, Dialog, Message, Tokenizer

__all__ = ["ChatFormat", "Dialog", "Llama", "Message", "ModelArgs", "Tokenizer", "Transformer"]
