"""Llama 3 written out for a reader: Meta's API on fairscale's layers.

In: a folder of Meta's weights, and prompts. Out: tokens, texts and log-probabilities. `model.py`
has the Transformer, `generation.py` all around it. It is the oracle of tests and of `llama verify`,
and imports of the project only the tokenizer; nothing that answers users imports it.
"""

from llama.reference.generation import Llama

__all__ = ["Llama"]
