"""The demo model's tokenizer: a small byte-level BPE over Llama 3's own pre-tokenization.

In: texts. Out: a `tokenizer.model` in Meta's format, and the runtime's Tokenizer that read it back.
The 256 special tokens are not in the file; they follow the ranks, as in every Llama 3 tokenizer.
"""

import base64
from pathlib import Path

from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BpeTokenizer

from llama.storage.token_files import byte_alphabet
from llama.tokenizer import Tokenizer

NUM_RANKS = 1792  # with the 256 special tokens, a vocabulary of 2,048


def train_bpe(texts: list[str]) -> BpeTokenizer:
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(Tokenizer.pat_str), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # the whole alphabet goes in first, so that any text has an encoding
    alphabet = list(byte_alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_RANKS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != NUM_RANKS:
        raise ValueError(f"the corpus gave {bpe.get_vocab_size()} ranks, not {NUM_RANKS}")
    return bpe


def make_tokenizer(path: Path, texts: list[str]) -> Tokenizer:
    """Train a BPE, write it in Meta's format, and hold that the runtime reads it the same way."""
    bpe, to_byte = train_bpe(texts), byte_alphabet()
    ranked = sorted((rank, token) for token, rank in bpe.get_vocab().items())
    with path.open("w") as file:
        for rank, token in ranked:
            raw = bytes(to_byte[letter] for letter in token)
            file.write(f"{base64.b64encode(raw).decode()} {rank}\n")
    tokenizer = Tokenizer(path)
    for text in texts:
        if tokenizer.encode(text, bos=False, eos=False) != bpe.encode(text).ids:
            raise ValueError(f"the written tokenizer disagrees with the trained one on {text!r}")
    return tokenizer
