"""The tokenizer of a checkpoint: read from its folder, and written as Hugging Face's files.

In: the path of a tokenizer and the params of its model. Out: the Tokenizer that belongs to them,
and from a Tokenizer the contents of tokenizer.json and tokenizer_config.json.
"""

import os
from typing import Any

from llama.checkpoint import huggingface as hf
from llama.model.args import ModelArgs
from llama.prompts.template import jinja_template
from llama.prompts.tools import tool_format_of
from llama.tokenizer import Tokenizer, byte_alphabet

_BOS, _EOS, _EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
# Bytes as letters, with no pattern of its own and no space put before the text.
_BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
}  # fmt: skip
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_PAD = "<|finetune_right_pad_id|>"  # Llama 3.0 has none: there end_of_text pads


def load_tokenizer(path: str | os.PathLike[str], params: ModelArgs) -> Tokenizer:
    """The tokenizer of a model: its special tokens are those of the model's release."""
    # Only the rotary embedding tells 3.0 from later releases: the tokenizer files are equal.
    tokenizer = Tokenizer(path, llama_3_0=not params.use_scaled_rope)
    if tokenizer.n_words != params.vocab_size:
        raise ValueError(
            f"{os.fspath(path)} has {tokenizer.n_words} tokens, but the model has vocab_size="
            f"{params.vocab_size}: they do not belong together"
        )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Begin of text, every stop token, and the padding of Hugging Face's programs."""
    pad = tokenizer.special_tokens[_pad_token(tokenizer)]
    return hf.special_ids(tokenizer.bos_id, tokenizer.stop_tokens, pad)


def _pad_token(tokenizer: Tokenizer) -> str:
    return _PAD if _PAD in tokenizer.special_tokens else _EOS


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json with which the library `tokenizers` gives the same ids.

    They differ only where a text holds the name of a special token, which is its id there, and for
    runs of more than 25,000 characters without a space, which Meta's tokenizer cuts.
    """
    ranked = [
        tokenizer.model.decode_single_token_bytes(rank)
        for rank in range(tokenizer.n_words - len(tokenizer.special_tokens))
    ]
    letter_of = {byte: letter for letter, byte in byte_alphabet().items()}
    letters = {token: "".join(letter_of[byte] for byte in token) for token in ranked}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **_PLAIN, "special": True}
            for name, i in tokenizer.special_tokens.items()
        ],
        "normalizer": None,
        "pre_tokenizer": _split_by(tokenizer.pat_str),
        "post_processor": _begin_with(_BOS, tokenizer.bos_id),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken: a word that is a token is that token
            "vocab": {letters[token]: rank for rank, token in enumerate(ranked)},
            "merges": [f"{letters[a]} {letters[b]}" for a, b in merges(ranked)],
        },
    }


def merges(ranked: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Every two tokens that make up a third, in the order of the third's rank.

    tiktoken joins the two neighbours whose sum has the lowest rank, whichever they are. So each way
    to cut a token in two is a merge: with ab and bc before abc, it is (ab, c) and (a, bc).
    """
    tokens = set(ranked)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]


def _split_by(pattern: str) -> dict[str, Any]:
    by_pattern = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", **by_pattern}, _BYTE_LEVEL]}


def _begin_with(name: str, i: int) -> dict[str, Any]:
    """Put one special token before each text."""
    first, second = (
        [{"SpecialToken": {"id": name, "type_id": n}}, {"Sequence": {"id": text, "type_id": n}}]
        for n, text in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]}},
    }


def tokenizer_config(
    tokenizer: Tokenizer, params: ModelArgs, *, is_guard: bool = False
) -> dict[str, Any]:
    """The tokenizer_config.json: special tokens by role, the context, and the chat template."""
    tool_format = tool_format_of(params.rope_factor, is_guard=is_guard)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOT,  # as in Meta's Instruct releases
        "pad_token": _pad_token(tokenizer),
        "clean_up_tokenization_spaces": False,  # decoding gives the text back
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": params.longest_context,
        "chat_template": jinja_template(tool_format),
    }
