"""Tokenizers of fine-tunes against the package `tokenizers`, and their models end to end."""

import json
import logging
import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from helpers.fine_tunes import KINDS, bpe_of, make_model, make_tokenizer, names_of, ranks_of
from helpers.gguf_files import PARAMS, write_gguf
from helpers.launch import DEMO
from helpers.prompts import user
from helpers.server import run_server
from helpers.web import web
from helpers.weights import scaled_rope
from llama import Llama
from llama.checkpoint.find import find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.convert import convert, pack
from llama.kernels.cpu import native
from llama.prompts import encode_chat
from llama.tokenizer import ChatFormat, Tokenizer

PLAIN: dict[str, Any] = {"bos": False, "eos": False}
N = len(ranks_of())
PIECES = [
    "a",
    "the ",
    " é",
    "한국",
    "\n\n",
    "1234",
    "👍🏽",
    "<|",
    "|>",
    "im_end",
    "think",
    "\x85",
    "  ",
]


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {k: v for k, v in (content | changes).items() if v is not None}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def random_text(rng: random.Random, names: list[str]) -> str:
    any_character = [chr(rng.choice([*range(0x2000), *range(0xE000, 0x11000)])) for _ in range(4)]
    return "".join(rng.choices([*PIECES, *names, *any_character], k=rng.randint(0, 12)))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_tokenizers(tmp_path, kind):
    """Texts with names of added tokens have the same ids, whole and between the names."""
    make_tokenizer(tmp_path, kind)
    ours = Tokenizer(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = list(ours.added_tokens)
    assert {name: theirs.token_to_id(name) for name in names} == {
        name: token.id for name, token in ours.added_tokens.items()
    }
    marks = {ours.added_tokens[x].id for x in names if x.strip("</>") in ("think", "tool_call")}
    rng = random.Random(1)
    for _ in range(300):
        text = random_text(rng, names)
        expected = theirs.encode(text).ids
        assert ours.encode(text, **PLAIN, allowed_special=set(names)) == expected, repr(text)
        assert ours.decode(expected) == text
        between = ours.encode(text, **PLAIN)
        assert max(between, default=0) < len(ours.ranks) == N, "contents match no added token"
        assert ours.decode(between) == text
        unmarked = [i for i in expected if i not in marks]
        assert ours.decode(unmarked, skip_special_tokens=True) == theirs.decode(unmarked)
    for mark in marks:
        assert ours.decode([mark], skip_special_tokens=True) == ours.decode(mark)


@pytest.mark.parametrize(
    ("kind", "bos", "eos", "stops", "rows"),
    [
        ("meta", 0, 1, {1, 8, 9}, 256),
        ("r1", 0, 1, {1, 8, 9}, 256),
        ("chatml", 0, 256, {1, 8, 9, 256}, 258),
        ("hermes", 0, 40, {1, 8, 9, 40}, 256),
        ("tulu", 0, 1, {1, 8, 9}, 264),
    ],
)
def test_roles_and_stops_are_those_of_the_files(tmp_path, kind, bos, eos, stops, rows):
    assert make_tokenizer(tmp_path, kind) == N + rows
    ours = Tokenizer(tmp_path / "tokenizer.json", vocab_size=N + rows)
    assert (ours.bos_id - N, ours.eos_id - N, ours.n_words - N) == (bos, eos, rows)
    assert {i - N for i in ours.stop_tokens} == stops
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == ours.bos_id
    assert theirs.eos_token_id == ours.roles["eos_token"]
    assert theirs.pad_token_id == ours.roles.get("pad_token")


def test_rows_without_a_token_have_fillers_and_names_beyond_the_rows_are_left_out(tmp_path, caplog):
    make_tokenizer(tmp_path, "tulu")
    path = tmp_path / "tokenizer.json"
    padded = Tokenizer(path, vocab_size=N + 320)
    assert padded.n_words == padded.model.n_vocab == N + 320
    assert padded.decode([N + 300, 65]) == f"<|unused_{N + 300}|>" + padded.decode(65)
    assert padded.decode([N + 300], skip_special_tokens=True) == ""
    assert f"<|unused_{N + 300}|>" not in padded.added_tokens
    assert not caplog.records
    cut = Tokenizer(path, vocab_size=N + 256)
    assert "<pad>" not in cut.special_tokens and cut.n_words == N + 256
    (record,) = caplog.records
    assert f"'<pad>' has the id {N + 256}, but the model has {N + 256} rows" in record.message
    assert record.name.startswith("llama") and record.levelno == logging.WARNING
    for wrong in (N - 1, N + 256 + 5000):
        with pytest.raises(ValueError, match=f"but the model has vocab_size={wrong}: they do not"):
            Tokenizer(path, vocab_size=wrong)


def test_ids_may_have_gaps_and_names_may_be_listed_twice(tmp_path):
    make_tokenizer(tmp_path, "chatml")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    added = content["added_tokens"]
    added[257]["id"] = N + 270
    added[20]["content"] = added[21]["content"]
    word = next(name for name, rank in content["model"]["vocab"].items() if rank == 300)
    added.append({"id": 300, "content": word, "lstrip": True})  # also a token of BPE
    vocab = content["model"]["vocab"] | {"<|im_start|>": N + 270, "<|im_end|>": N + 256}
    content["model"]["vocab"] = vocab
    path.write_text(json.dumps(content), encoding="utf-8")
    ours = Tokenizer(path)
    assert ours.n_words == N + 271 and len(ours.ranks) == N
    assert ours.added_tokens["<|im_start|>"].id == N + 270
    assert ours.added_tokens[word].id == 300 and ours.added_tokens[word].lstrip
    assert ours.decode([N + 20]) == added[21]["content"]
    assert ours.decode([N + 21, N + 260]) == f"<|unused_{N + 21}|><|unused_{N + 260}|>"
    assert max(ours.encode("<|im_start|><|im_end|>", **PLAIN)) < N


SIDE_TOKENS: dict[str, dict[str, Any]] = {
    "a decoder": {"added_tokens_decoder": {N + 256: {"content": "<new>", "special": True}}},
    "a decoder with a gap": {
        "added_tokens_decoder": {
            N + 300: {"content": "<later>", "special": False},
            N + 270: {"content": "<new>", "special": True, "lstrip": True},
        }
    },
    "another name of an id": {
        "added_tokens_decoder": {N + 20: {"content": "<new>", "special": False}}
    },
    "other flags": {
        "added_tokens_decoder": {
            N + 9: {"content": "<|eot_id|>", "special": True, "lstrip": True, "rstrip": True}
        }
    },
    "added_tokens.json": {"<new>": N + 256, "<later>": N + 257},
    "added_tokens.json with a used id": {"<new>": N + 20, "<later>": N + 256},
    "a list of special tokens": {"additional_special_tokens": ["<new>", "<|eot_id|>"]},
    "extra tokens": {"extra_special_tokens": ["<later>", "<new>"]},
}


@pytest.mark.parametrize("case", SIDE_TOKENS)
def test_tokens_of_files_beside_the_tokenizer_are_those_of_transformers(tmp_path, case):
    """added_tokens_decoder, added_tokens.json and the lists of special tokens add tokens."""
    make_tokenizer(tmp_path, "meta")
    listed = SIDE_TOKENS[case]
    is_older = case.startswith("added_tokens.json")
    if is_older:
        (tmp_path / "added_tokens.json").write_text(json.dumps(listed))
    else:
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        decoder = listed.get("added_tokens_decoder", {})
        whole = {str(i): flags | entry for i, entry in decoder.items()}
        changes = {"added_tokens_decoder": whole} if decoder else listed
        change(tmp_path / "tokenizer_config.json", **changes)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path / "tokenizer.json")
    assert {name: token.id for name, token in ours.added_tokens.items()} == theirs.get_added_vocab()
    text = "a <new> b <later>  <|eot_id|> <new>c"
    expected = theirs.encode(text, add_special_tokens=False)
    for name, token in ours.added_tokens.items():
        expected_token = theirs.added_tokens_decoder[token.id]
        assert token.lstrip == expected_token.lstrip, name
        assert token.rstrip == expected_token.rstrip, name
    if not any(token.lstrip or token.rstrip for token in ours.added_tokens.values()):
        assert ours.encode(text, **PLAIN, allowed_special=set(ours.added_tokens)) == expected
    decoded = ours.decode(expected, skip_special_tokens=True)
    assert decoded == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"x": {"content": "<new>"}}},
        {"added_tokens_decoder": {"1": "<new>"}},
        {"added_tokens_decoder": ["<new>"]},
        {"additional_special_tokens": [3]},
    ],
)
def test_a_damaged_list_of_tokens_is_named(tmp_path, changes):
    make_tokenizer(tmp_path, "meta")
    change(tmp_path / "tokenizer_config.json", **changes)
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json: its added tokens cannot be read"
    ):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_token_that_ends_answers_is_a_special_one(tmp_path, caplog):
    """Ids of ordinary text are logged, such as the 2 of a configuration that nobody has set."""
    make_tokenizer(tmp_path, "chatml")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    change(tmp_path / "generation_config.json", eos_token_id=[N + 257, N + 999])
    change(tmp_path / "tokenizer_config.json", eos_token="<eos>", bos_token="<s>")
    ours = Tokenizer(tmp_path / "tokenizer.json")
    assert (ours.bos_id, ours.eos_id) == (N, N + 257)
    assert ours.stop_tokens == {N + 1, N + 8, N + 9, N + 257}
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3 and all("no special token of this model" in x for x in messages)
    assert [x.partition(" is ")[2].partition(",")[0] for x in messages] == [
        "'<eos>'",
        str(N + 999),
        "2",
    ]
    ours.add_stop_tokens([N + 256])
    assert N + 256 in ours.stop_tokens
    with pytest.raises(ValueError, match=r"tokens \[65\] are ordinary text"):
        ours.add_stop_tokens([N + 256, 65])
    change(tmp_path / "generation_config.json", eos_token_id="2")
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be an id or"):
        Tokenizer(tmp_path / "tokenizer.json")
    change(tmp_path / "generation_config.json", eos_token_id=None)
    change(tmp_path / "tokenizer_config.json", eos_token=7)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: eos_token must be a name, not"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_without_its_configuration_r1_has_no_bos(tmp_path):
    make_tokenizer(tmp_path, "r1")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"which token is the bos_token: put the .*tokenizer_con"):
        Tokenizer(tmp_path / "tokenizer.json")


SENTENCEPIECE = {"type": "BPE", "byte_fallback": True, "vocab": {"▁the": 0}, "merges": []}
GPT_2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"model": SENTENCEPIECE}, r"Llama 2 \(SentencePiece\)"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "BERT"),
        ({"model": {"type": "Own", "vocab": {"a": 0}}}, r"another family \(model.type 'Own'\)"),
        ({"pre_tokenizer": GPT_2}, "GPT-2"),
        (bpe_of(ranks_of(), QWEN_2), "Qwen 2"),
        (bpe_of(ranks_of(), r"\w+|\W"), r"another family \(it splits texts by another pattern\)"),
        ({"pre_tokenizer": None}, "another family .*"),
        ({"normalizer": {"type": "NFC"}}, r"another family \(it changes texts by 'NFC'\)"),
    ],
)
def test_another_family_is_refused_by_its_name(tmp_path, changes, family):
    make_tokenizer(tmp_path, "meta")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=rf"tokenizer\.json is the tokenizer of {family}: this"):
        Tokenizer(path)


def test_merges_in_another_order_are_another_vocabulary(tmp_path):
    make_tokenizer(tmp_path, "meta")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = [merge.split(" ") for merge in content["model"]["merges"]]
    path.write_text(json.dumps(content))
    Tokenizer(path)
    content["model"]["merges"].reverse()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its merges are not in the order of ids"):
        Tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_completes_text(tmp_path, kind):
    """A tiny random model gives transformers' text."""
    folder = make_model(tmp_path, kind)
    llama = Llama.build(str(folder), None, 128, 4, device="cpu", dtype="fp32", verbose=False)
    tokenizer = llama.tokenizer
    prompt = tokenizer.encode("the cat", bos=True, eos=False)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0].tolist()
    written = [tokenizer.decode(i) for i in ids[len(prompt) :] if i not in tokenizer.stop_tokens]
    (answer,) = llama.text_completion(["the cat"], temperature=0.0, max_gen_len=8, logprobs=True)
    assert answer["tokens"] == written


def test_the_server_completes_text_of_a_fine_tune(tmp_path):
    """Completions, answers in a format and /tokenizer_info have the tokens of the files."""
    folder = make_model(tmp_path, "chatml")
    body = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with run_server(str(folder), "--max_seq_len", "128", "--dtype", "fp32") as server:
        answer = web.post(f"{server.url}/v1/completions", json=body).json()
        choice = {"prompt": "the cat", "guided_choice": ["yes", "no"]}
        chosen = web.post(f"{server.url}/v1/completions", json=choice).json()["choices"][0]
        info = web.get(f"{server.url}/tokenizer_info").json()
    assert answer["usage"]["completion_tokens"] == 4
    assert chosen["text"] in ("yes", "no") and chosen["finish_reason"] == "stop"
    assert (info["bos_token"], info["eos_token"]) == ("<|begin_of_text|>", "<|im_end|>")
    start = {"content": "<|im_start|>", "special": False}
    assert info["added_tokens_decoder"][str(N + 257)] == start


@pytest.mark.parametrize("kind", ["r1", "chatml", "tulu"])
def test_a_conversion_keeps_the_vocabulary(tmp_path, kind):
    """GGUF, Meta's layout, packed weights and the way back have the same names, flags and ids."""
    folder = make_model(tmp_path / "hf", kind)
    convert(folder, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    convert(folder, tmp_path / "meta")
    outputs = ["model.gguf", "back", "meta"]
    if native.kernels() is not None:
        pack(folder, tmp_path / "packed")
        outputs.append("packed")
    ours = load_tokenizer(find(folder))
    for output in outputs:
        same = load_tokenizer(find(tmp_path / output))
        for name in ("special_tokens", "added_tokens", "hidden_ids", "stop_tokens", "n_words"):
            assert getattr(same, name) == getattr(ours, name), (output, name)
        assert ours.roles.items() <= same.roles.items()
        assert (same.bos_id, same.eos_id) == (ours.bos_id, ours.eos_id)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    names = list(ours.added_tokens)
    assert theirs.convert_tokens_to_ids(names) == [x.id for x in ours.added_tokens.values()]
    assert theirs("the cat").input_ids == ours.encode("the cat", bos=True, eos=False)


def test_a_gguf_file_names_its_tokens_by_their_types(tmp_path):
    """llama.cpp's converter names unused rows [PADn], and tokens that are shown by another type."""
    make_tokenizer(tmp_path, "chatml")
    ours = Tokenizer(tmp_path / "tokenizer.json")
    bpe = bpe_of(ranks_of())["model"]
    names = [name for name, i in ours.special_tokens.items()]
    types = [3] * 258
    types[257] = 4
    unused = [f"[PAD{N + i}]" for i in range(258, 264)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smaug-bpe",
        "tokenizer.ggml.tokens": [*bpe["vocab"], *names, *unused],
        "tokenizer.ggml.token_type": [1] * N + types + [5] * 6,
        "tokenizer.ggml.merges": bpe["merges"],
        "tokenizer.ggml.bos_token_id": N,
        "tokenizer.ggml.eos_token_id": N + 1,
        "tokenizer.ggml.eot_token_id": N + 256,
    }
    write_gguf(tmp_path / "model.gguf", PARAMS | {"vocab_size": N + 264}, metadata=metadata)
    theirs = load_tokenizer(find(tmp_path / "model.gguf"))
    assert theirs.added_tokens == ours.added_tokens
    assert theirs.hidden_ids - ours.hidden_ids == set(range(N + 258, N + 264))
    assert theirs.special_tokens[f"<|unused_{N + 260}|>"] == N + 260
    assert theirs.stop_tokens == {N + 1, N + 8, N + 9, N + 256}
    assert (theirs.bos_id, theirs.eos_id) == (N, N + 1)


def test_metas_tokenizer_model_is_kept_where_it_has_the_same_tokens(tmp_path):
    """A re-upload's copy of Meta's tokenizer.model does not name what the fine-tune changed."""
    for kind in ("meta", "r1"):
        folder = make_model(tmp_path / kind, kind, **scaled_rope(8.0))
        (folder / "original").mkdir()
        shutil.copyfile(DEMO / "tokenizer.model", folder / "original" / "tokenizer.model")
        assert load_tokenizer(find(folder)).decode(N) == names_of(kind)[0]
        convert(folder, tmp_path / f"{kind}_out")
    assert find(tmp_path / "meta_out").tokenizer_path().name == "tokenizer.model"
    assert find(tmp_path / "r1_out").tokenizer_path().name == "tokenizer.json"
    (tmp_path / "r1" / "tokenizer.json").unlink()
    old = load_tokenizer(find(tmp_path / "r1"))
    assert old.decode(N) == "<|begin_of_text|>"


def test_a_dialog_in_metas_format_needs_its_tokens(tmp_path):
    make_tokenizer(tmp_path, "chatml")
    path = tmp_path / "tokenizer.json"
    content = path.read_text(encoding="utf-8")
    for name in ("<|start_header_id|>", "<|eot_id|>"):
        path.write_text(content.replace(name, "<|other|>"), encoding="utf-8")
        tokenizer = Tokenizer(path)
        assert (tokenizer.eot_id is None) == (name == "<|eot_id|>")
        for encode in (ChatFormat(tokenizer).encode_dialog_prompt, partial(encode_chat, tokenizer)):
            with pytest.raises(ValueError, match=rf"this tokenizer has no {re.escape(name)}: "):
                encode([user("Hi")])
