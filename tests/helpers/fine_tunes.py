"""Files of fine-tunes of Llama 3: tokenizers with names and ids of their own, and tiny models.

The names are those of published models, over the ranks of the demo model: with ranks 0..n-1, the id
128000 + i of Llama 3's own vocabulary is n + i here.
"""

import functools
import json
from pathlib import Path
from typing import Any

import tiktoken.load
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from helpers.launch import DEMO
from helpers.weights import hf_model
from llama.tokenizer import Tokenizer

KINDS = ("meta", "r1", "chatml", "hermes", "tulu")
# What config.json or generation_config.json name as the ends of an answer, as offsets.
_EOS: dict[str, int | list[int]] = {
    "meta": [1, 8, 9],
    "r1": 1,
    "chatml": 256,
    "hermes": [1, 40],
    "tulu": 1,
}
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def names_of(kind: str) -> dict[int, str]:
    """Return the names of the added tokens of a kind of model, by the offset of their ids."""
    names = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    if kind == "r1":
        names |= {0: "<｜begin▁of▁sentence｜>", 1: "<｜end▁of▁sentence｜>"}
        names |= {11: "<｜User｜>", 12: "<｜Assistant｜>", 13: "<think>", 14: "</think>"}
    elif kind == "chatml":
        names |= {256: "<|im_end|>", 257: "<|im_start|>"}
    elif kind == "hermes":
        names |= {11: "<tool_call>", 12: "</tool_call>", 39: "<|im_start|>", 40: "<|im_end|>"}
    elif kind == "tulu":
        names |= {256: "<pad>"}
    free = (i for i in range(256) if i not in names)
    reserved = {i: f"<|reserved_special_token_{n}|>" for n, i in enumerate(free)}
    return dict(sorted((reserved | names).items()))


def num_rows(kind: str, num_ranks: int) -> int:
    """Return the rows of a model of a kind: Tulu's have seven without a token."""
    return num_ranks + {"chatml": 258, "tulu": 264}.get(kind, 256)


@functools.cache
def ranks_of(path: Path = DEMO / "tokenizer.model") -> dict[bytes, int]:
    """Return the ranks of a tokenizer.model, as tiktoken reads it."""
    return tiktoken.load.load_tiktoken_bpe(str(path))


def make_tokenizer(folder: Path, kind: str, ranks: dict[bytes, int] | None = None) -> int:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json of a fine-tune.

    Args:
        folder: where they are written.
        kind: one of KINDS.
        ranks: the BPE tokens; those of the demo model, if None.

    Returns:
        The rows of a model with this tokenizer.
    """
    ranks = ranks_of() if ranks is None else ranks
    names = names_of(kind)
    shown = {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<|im_start|>"}
    added = []
    for offset, name in names.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        is_special = name not in shown
        added.append({"id": len(ranks) + offset, "content": name, **flags, "special": is_special})
    eos = _EOS[kind]
    first_eos = eos if isinstance(eos, int) else eos[-1]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[0],
        "eos_token": names[first_eos],
        "clean_up_tokenization_spaces": False,
    }
    if kind == "r1":  # older files have an object for a token
        config["bos_token"] = {"__type": "AddedToken", "content": names[0], "lstrip": False}
    if kind == "tulu":
        config["pad_token"] = "<pad>"
    ids = [len(ranks) + i for i in eos] if isinstance(eos, list) else len(ranks) + eos
    generation = {"bos_token_id": len(ranks), "eos_token_id": ids, "do_sample": True}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, **bpe_of(ranks)},
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return num_rows(kind, len(ranks))


def bpe_of(ranks: dict[bytes, int], pattern: str = _PATTERN) -> dict[str, Any]:
    """Return all of a tokenizer.json but the added tokens, as Llama 3's releases have it."""
    letter_of = bytes_to_unicode()
    vocab = {"".join(letter_of[b] for b in token): rank for token, rank in ranks.items()}
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pre_tokenizers = [split, {"type": "ByteLevel", **byte_level}]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def make_model(folder: Path, kind: str, **config: Any) -> Path:
    """Write a tiny random model in Hugging Face's layout with the tokenizer of a fine-tune.

    Args:
        folder: where it is written.
        kind: one of KINDS.
        config: values of config.json that replace those of `hf_model`.

    Returns:
        The folder.
    """
    rows = make_tokenizer(folder, kind)
    path = folder / "generation_config.json"
    generation = path.read_text()
    ids = json.loads(generation)
    special = {key: ids[key] for key in ("bos_token_id", "eos_token_id")}
    hf_model(vocab_size=rows, **special, **config).save_pretrained(folder)
    path.write_text(generation)
    return folder


def chain_model(folder: Path, kind: str, text: str) -> Path:
    """Write a model of a kind whose greedy answers are known, also to other processes.

    Its layers add next to nothing, and its lm_head knows one successor of each token of the text,
    so that a prompt that ends with the first token is answered with the others.

    Args:
        folder: where it is written.
        kind: one of KINDS.
        text: tokens that all differ, added tokens by their names.

    Returns:
        The folder.
    """
    rows = make_tokenizer(folder, kind)
    tokenizer = Tokenizer(folder / "tokenizer.json", vocab_size=rows)
    ids = tokenizer.encode(text, bos=False, eos=False, allowed_special="all")
    assert len(set(ids)) == len(ids), "a token has two successors"
    make_model(folder, kind)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(1e-6)  # a warning names rows of zeros
    embedding = weights["model.embed_tokens.weight"]
    lm_head = weights["lm_head.weight"].zero_()
    lm_head[ids[1:]] = embedding[ids[:-1]] / embedding[ids[:-1]].norm(dim=1, keepdim=True)
    save_file(weights, path, {"format": "pt"})
    return folder
