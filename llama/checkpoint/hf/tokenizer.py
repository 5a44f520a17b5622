"""A tokenizer as Hugging Face's files, for conversion.

In: a Tokenizer and the sizes of its model. Out: the contents of tokenizer.json and
tokenizer_config.json, and the ids of special tokens in config.json. No file is written here.
"""

from typing import Any

from llama.checkpoint.hf import config as hf
from llama.model.args import ModelArgs
from llama.prompts.template import jinja_template
from llama.prompts.tools import tool_format_of
from llama.storage.token_files import IMAGE, AddedToken, byte_alphabet
from llama.tokenizer import Tokenizer

_PAD = "<|finetune_right_pad_id|>"
_UNUSED_IMAGE = "<|reserved_special_token_image|>"
# Bytes are written as letters; the pattern is in a pre-tokenizer before this one.
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of special tokens as config.json has them, with every stop token."""
    return hf.special_ids(tokenizer.bos_id, tokenizer.stop_tokens, _pad_id(tokenizer))


def _pad_id(tokenizer: Tokenizer) -> int:
    """Return the token that pads in Hugging Face's programs; Llama 3.0 has no token for it."""
    metas = tokenizer.special_tokens.get(_PAD, tokenizer.eos_id)
    return tokenizer.roles.get("pad_token", metas)


def _eos_id(tokenizer: Tokenizer) -> int:
    """Return the token that files name as the eos_token.

    Where the model's own files name none, this is `<|eot_id|>`, the choice of Meta's Instruct
    releases.
    """
    metas = tokenizer.eos_id if tokenizer.eot_id is None else tokenizer.eot_id
    return tokenizer.roles.get("eos_token", metas)


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer.json with which the library `tokenizers` gives the same ids.

    The ids differ in two cases: the name of a special token in a text is always its id there, and
    Meta's tokenizer cuts runs of more than 25,000 characters without a space.
    """
    letter_of = {byte: letter for letter, byte in byte_alphabet().items()}
    letters = {token: "".join(letter_of[byte] for byte in token) for token in tokenizer.ranks}
    ranked = sorted(letters, key=tokenizer.ranks.__getitem__)
    vocab = {letters[token]: tokenizer.ranks[token] for token in ranked}
    if tokenizer.ranks[ranked[-1]] >= len(ranked):
        # The library numbers added tokens after all of these, unless they are among them.
        vocab |= {token["content"]: token["id"] for token in _added_tokens(tokenizer)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokenizer),
        "normalizer": None,
        "pre_tokenizer": _split_by(tokenizer.pat_str),
        "post_processor": _begin_with(tokenizer.decode(tokenizer.bos_id), tokenizer.bos_id),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a word that is a token becomes that token, as in tiktoken
            "vocab": vocab,
            "merges": [f"{letters[a]} {letters[b]}" for a, b in merges(ranked)],
        },
    }


def _added_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the added tokens as tokenizer.json has them.

    The library numbers them without a gap, so that fillers for unused ids between them are written.
    What stands for an image comes last, after the rows of the lm_head.
    """
    added_ids = (token.id for token in tokenizer.added_tokens.values())
    last_id = max(*tokenizer.ranks.values(), *added_ids)
    names = dict(tokenizer.special_tokens)
    if tokenizer.image_id is not None:
        if IMAGE in names:  # a name of Meta's that no prompt has
            names = {_UNUSED_IMAGE if name == IMAGE else name: x for name, x in names.items()}
        last_id = names[IMAGE] = tokenizer.image_id
    entries = []
    for name, token_id in names.items():
        token = tokenizer.added_tokens.get(name, AddedToken(token_id))
        if token_id <= last_id:
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "special": token.special}
            fixed = {"single_word": False, "normalized": False}
            entries.append({"id": token_id, "content": name, **fixed, **flags})
    return entries


def merges(ranked: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return every two tokens that make up a third, in the order of the third's rank.

    tiktoken joins the two neighbours whose sum has the lowest rank, whichever they are. So each way
    to cut a token in two is a merge: with ab and bc before abc, it is (ab, c) and (a, bc).

    Args:
        ranked: All tokens but the special ones, in the order of their ranks.
    """
    tokens = set(ranked)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]


def _split_by(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that splits a text into the matches of a pattern."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]}


def _begin_with(name: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor that puts one special token before each text."""

    def template(text: str, type_id: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": name, "type_id": type_id}},
            {"Sequence": {"id": text, "type_id": type_id}},
        ]

    first = template("A", 0)
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + template("B", 1),
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def tokenizer_config(
    tokenizer: Tokenizer, params: ModelArgs, *, is_guard: bool = False
) -> dict[str, Any]:
    """Return the tokenizer_config.json: special tokens by role, the context, the chat template.

    Args:
        tokenizer: The tokenizer.
        params: The sizes of its model.
        is_guard: Whether the model is Llama Guard, whose template has no tools.
    """
    tool_format = tool_format_of(params.rope_factor, is_guard=is_guard)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.decode(tokenizer.bos_id),
        "eos_token": tokenizer.decode(_eos_id(tokenizer)),
        "pad_token": tokenizer.decode(_pad_id(tokenizer)),
        "clean_up_tokenization_spaces": False,  # decoding must give the text back
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": params.longest_context,
        "chat_template": jinja_template(tool_format, has_images=tokenizer.image_id is not None),
    }
