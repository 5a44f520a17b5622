"""Vocabularies whose words are not the first ids, against the packages tokenizers and gguf.

One has words after the special tokens, as vocabularies have that were extended; the other has its
special tokens first, as transformers trains vocabularies.
"""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from helpers.fine_tunes import make_tokenizer
from helpers.gguf_files import PARAMS, write_gguf
from helpers.prompts import user
from helpers.weights import hf_model
from llama import Llama, SamplingParams
from llama.checkpoint.find import find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.convert import convert
from llama.prompts.template_format import TemplateFormat
from llama.requests.detokenizer import Detokenizer
from llama.requests.grammar import GrammarCompiler
from llama.sampling_params import StructuredOutput
from llama.tokenizer import Tokenizer

PLAIN: dict[str, Any] = {"bos": False, "eos": False}
WORDS = ["zylph", " zylph", " quuxification", "жук", " 한국어", "👍🏽"]
PIECES = [*WORDS, "s", " the", "zyl", "quux", "ж", "국", "\n\n", "1234", " ", "<|", "é", "\x85"]
CORPUS = [f"{a} {b}{c}, {d}" for a in WORDS for b in WORDS for c in PIECES for d in PIECES[:4]]


def extend(path: Path) -> None:
    """Put words after the special tokens of a tokenizer.json, each with the merges it needs."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    vocab |= {token["content"]: token["id"] for token in content["added_tokens"]}
    for word in WORDS:
        while True:
            theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
            first, *others = theirs.encode(word).tokens
            if not others:
                break
            vocab[first + others[0]] = len(vocab)
            merges.append(f"{first} {others[0]}")
    path.write_text(json.dumps(content), encoding="utf-8")


def retrain(folder: Path) -> None:
    """Replace a tokenizer by one that transformers trains, with its special tokens first."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    trained = theirs.train_new_from_iterator(iter(CORPUS), 700)
    trained.save_pretrained(folder)


@pytest.fixture(scope="module", params=["extended", "retrained"])
def folder(request, tmp_path_factory) -> Path:
    """A tiny random model with such a vocabulary."""
    path = tmp_path_factory.mktemp(request.param)
    make_tokenizer(path, "meta")
    if request.param == "extended":
        extend(path / "tokenizer.json")
    else:
        retrain(path)
    theirs = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    eos = {"eos_token_id": theirs.token_to_id("<|end_of_text|>")}
    (path / "generation_config.json").write_text(json.dumps(eos))
    hf_model(vocab_size=theirs.get_vocab_size(), **eos).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(folder) -> Tokenizer:
    return load_tokenizer(find(folder))


@pytest.fixture(scope="module")
def theirs(folder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def random_text(rng: random.Random, names: list[str]) -> str:
    return "".join(rng.choices([*PIECES, *names], k=rng.randint(1, 12)))


def test_ids_and_texts_are_those_of_tokenizers(ours, theirs):
    """Texts have the same ids, pieces of a stream are the same text, and names are not matched."""
    names = list(ours.added_tokens)
    assert {x: theirs.token_to_id(x) for x in names} == {x: ours.added_tokens[x].id for x in names}
    assert ours.n_words == theirs.get_vocab_size() == len(ours.ranks) + len(names)
    special = set(ours.special_tokens.values())
    rng = random.Random(1)
    for _ in range(500):
        text = random_text(rng, names[:20])
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, **PLAIN, allowed_special="all") == ids, repr(text)
        stream = Detokenizer(ours)
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids)
        between = ours.encode(text, **PLAIN)
        assert not special.intersection(between)
        assert ours.decode(between) == text


def test_a_token_that_another_file_adds_comes_after_all_words(folder, tmp_path):
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": "<|begin_of_text|>"}
    config |= {"eos_token": "<|eot_id|>", "extra_special_tokens": ["<|new|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    new_id = theirs.convert_tokens_to_ids("<|new|>")
    assert Tokenizer(tmp_path / "tokenizer.json").special_tokens["<|new|>"] == new_id


def test_random_ids_are_the_text_of_tokenizers(ours, theirs):
    rng = random.Random(2)
    for _ in range(200):
        ids = rng.choices(range(ours.n_words), k=20)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_a_mask_allows_each_word_that_begins_the_answer(ours):
    """A mask allows each word that begins one of the choices, wherever its id is, and no other."""
    choices = [" zylph", "zylphs", "жук 👍🏽", "<|eot_id|>"]
    compiler = GrammarCompiler(ours)
    matcher = compiler.matcher(StructuredOutput(choice=choices))
    bits = np.zeros((1, -(-ours.n_words // 32)), np.int32)
    matcher.fill_allowed([], 0, [], bits)
    mask = np.unpackbits(bits.view(np.uint8), bitorder="little")
    starts = [choice.encode() for choice in choices]
    expected = {i for word, i in ours.ranks.items() if any(x.startswith(word) for x in starts)}
    assert ours.ranks[b" zylph"] in expected
    assert set(np.flatnonzero(mask).tolist()) == expected
    (word,) = ours.encode(" zylph", **PLAIN)
    matcher.fill_allowed([word], 0, [], bits)
    mask = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(mask).tolist()) == ours.stop_tokens


def test_a_template_ends_answers_with_its_token(ours):
    template = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
        "<|reserved_special_token_7|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    chat = TemplateFormat(ours, {"default": template})
    assert chat.traits.stop_ids == {ours.special_tokens["<|reserved_special_token_7|>"]}
    ids = chat.encode([user("zylph<|eot_id|>")])
    assert ours.decode(ids).startswith("<|start_header_id|>user<|end_header_id|>zylph<|eot_id|>")
    assert ours.special_tokens["<|eot_id|>"] not in ids


def test_a_model_answers_as_in_transformers(folder):
    llama = Llama.build(str(folder), None, 128, 4, device="cpu", dtype="fp32", verbose=False)
    prompt = llama.tokenizer.encode(" zylph s", bos=True, eos=False)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0].tolist()
    engine = llama.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = engine.run([engine.prepare("", prompt, params)])
    assert list(output.outputs[0].token_ids) == ids[len(prompt) :]


def test_a_gguf_file_of_llama_cpp(ours, theirs, folder, tmp_path):
    """llama.cpp's converter writes all tokens by id, and the merges of the tokenizer.json."""
    vocab = {token_id: token for token, token_id in theirs.get_vocab().items()}
    added = {token.id for token in ours.added_tokens.values()}
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [x if isinstance(x, str) else " ".join(x) for x in content["model"]["merges"]]
    kinds = gguf.TokenType
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [vocab[i] for i in range(len(vocab))],
        "tokenizer.ggml.token_type": [
            kinds.CONTROL if i in added else kinds.NORMAL for i in range(len(vocab))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ours.bos_id,
        "tokenizer.ggml.eos_token_id": ours.eos_id,
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, PARAMS | {"vocab_size": len(vocab)}, metadata=metadata)
    read = load_tokenizer(find(path))
    assert (read.ranks, read.added_tokens) == (ours.ranks, ours.added_tokens)


def test_a_conversion_keeps_the_vocabulary(ours, folder, tmp_path):
    """To GGUF and back to a tokenizer.json that gives tokenizers the same ids."""
    convert(folder, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    convert(folder, tmp_path / "meta")
    for output in ("model.gguf", "back", "meta"):
        same = load_tokenizer(find(tmp_path / output))
        for name in ("ranks", "special_tokens", "added_tokens", "stop_tokens", "n_words", "bos_id"):
            assert getattr(same, name) == getattr(ours, name), (output, name)
    back = tokenizers.Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    assert {x: back.token_to_id(x) for x in ours.special_tokens} == ours.special_tokens
    rng = random.Random(3)
    for _ in range(200):
        text = random_text(rng, list(ours.added_tokens)[:20])
        ids = back.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text, **PLAIN, allowed_special="all")


def test_a_word_that_merges_do_not_make_is_named(tmp_path):
    """tokenizers gives such a word only to a text that is the word, and tiktoken inside of others.

    A word that is also an added token, but that merges make, is still a word.
    """
    make_tokenizer(tmp_path, "meta")
    path = tmp_path / "tokenizer.json"
    extend(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append({"id": content["model"]["vocab"]["Ġzylph"], "content": "Ġzylph"})
    path.write_text(json.dumps(content), encoding="utf-8")
    ours = Tokenizer(path)
    assert ours.ranks[b" zylph"] == ours.added_tokens["Ġzylph"].id
    last = content["model"]["merges"].pop()
    path.write_text(json.dumps(content), encoding="utf-8")
    first, second = map(repr, last.split())
    with pytest.raises(ValueError, match=f"its merges do not join {first} and {second} to its"):
        Tokenizer(path)
