"""A converted folder in transformers: the ids are Meta's, and the answers are ours.

The oracles are llama-models' Tokenizer and ChatFormat with the real Llama 3 vocabulary, and the
demo model's answers in this package.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jinja2 import TemplateError
from llama_models.datatypes import RawMessage
from llama_models.llama3 import chat_format, tokenizer

from helpers.checkpoints import write_meta
from helpers.launch import DEMO
from helpers.prompts import FRANCE, user
from helpers.weights import PARAMS, shapes_of
from llama.checkpoint.find import find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.convert import convert
from llama.tokenizer import ChatFormat, Dialog

MODEL_PATH = Path(tokenizer.__file__).with_name("tokenizer.model")
TEXTS = [
    "", " ", "Hello, world!", "I'll we'RE it's 'S ain'T", "1 12 123 1234567 3.14 ４２",
    "\t\n \r\n  x", "def f(x):\n    return {'a': x ** 2}  # 平方\n", "人工智能正在改变世界。",
    "こんにちは、世界", "한국어 텍스트", "שלום مرحبا नमस्ते ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "naïve café e\u0301",
    "\x00\x85\u200b\ufeff\u202e", "a" * 200, "https://x.y/z?a=1&b=2#c", "<|no|>",
    " việc ngoài даже",  # tokens that no sequence of merges makes
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eom_id|>",
    "<|begin_of_text|> <|python_tag|><|reserved_special_token_7|><|finetune_right_pad_id|>",
]  # fmt: skip
# Alphabets of few characters, so that the same neighbours can be merged in several ways.
ALPHABETS = ["ab", "  a\n", "\t \n", "=-", "aA'sS", "0123 ", "çé ", "的是 ", "xyx", "/*\\ ", "<>|_"]
DIALOGS: list[Dialog] = [
    [user("Hi")],
    [{"role": "system", "content": " \n Answer briefly.\t"}, user("  What is\n\n2 + 2? ")],
    [user("a"), {"role": "assistant", "content": "b"}, user(""), user(" ")],
    [user("run"), {"role": "ipython", "content": "{}"}, {"role": "tool", "content": "\x1f42\x85"}],
    [{"role": "assistant", "content": "ｆirst 👍🏽"}, user("'s\u3000"), user("…and 'again'")],
]


@pytest.fixture(scope="module")
def oracle() -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer(MODEL_PATH)


@pytest.fixture(scope="module")
def metas(tmp_path_factory) -> Path:
    """Llama 3.1's vocabulary, converted with a minimal model."""
    params = PARAMS | {
        "dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 128256,
        "use_scaled_rope": True,
    }  # fmt: skip
    state = {name: torch.zeros(shape) for name, shape in shapes_of(params).items()}
    folder = tmp_path_factory.mktemp("metas")
    convert(write_meta(folder / "in", params, state, tokenizer=MODEL_PATH), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def metas_tokenizer(metas) -> Any:
    return transformers.AutoTokenizer.from_pretrained(metas)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "hf"
    convert(DEMO, folder)
    return folder


def test_auto_tokenizer_gives_metas_ids(metas_tokenizer, oracle):
    rng = random.Random(0)
    letters = (rng.choice(ALPHABETS) for _ in range(5000))
    mixed = ["".join(rng.choices(chosen, k=rng.randint(1, 40))) for chosen in letters]
    texts = TEXTS + mixed + [" ".join(rng.sample(TEXTS, 3)) for _ in range(200)]
    found = metas_tokenizer(texts).input_ids
    for text, ids in zip(texts, found, strict=True):
        assert ids == oracle.encode(text, bos=True, eos=False, allowed_special="all"), repr(text)
    assert metas_tokenizer.decode(metas_tokenizer(" a , b .\n").input_ids[1:]) == " a , b .\n"


def test_special_tokens_are_metas(metas, metas_tokenizer, oracle):
    names = oracle.special_tokens
    assert metas_tokenizer.convert_tokens_to_ids(list(names)) == list(names.values())
    assert metas_tokenizer.all_special_ids and len(metas_tokenizer) == 128256
    assert metas_tokenizer.decode([128006, 9906, 128009], skip_special_tokens=True) == "Hello"
    roles = (metas_tokenizer.bos_token, metas_tokenizer.eos_token, metas_tokenizer.pad_token)
    assert roles == ("<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>")
    assert metas_tokenizer.model_max_length == 131072
    for config in (
        transformers.AutoConfig.from_pretrained(metas),
        transformers.GenerationConfig.from_pretrained(metas),
    ):
        assert config.eos_token_id == [128001, 128008, 128009]
        assert (config.bos_token_id, config.pad_token_id) == (128000, 128004)


@pytest.mark.parametrize("dialog", DIALOGS)
def test_the_chat_template_is_chat_format(metas_tokenizer, oracle, dialog):
    formatted = chat_format.ChatFormat(oracle)
    meta_role = {"ipython": "tool"}  # llama-models' name for the role
    messages = [
        RawMessage(role=meta_role.get(m["role"], m["role"]), content=m["content"].strip())
        for m in dialog
    ]
    expected = formatted.encode_dialog_prompt(messages).tokens
    found = metas_tokenizer.apply_chat_template(dialog, add_generation_prompt=True)
    assert found["input_ids"] == expected
    header = len(formatted._encode_header("assistant"))
    assert metas_tokenizer.apply_chat_template(dialog)["input_ids"] == expected[:-header]


@pytest.mark.parametrize(
    ("message", "settings", "why"),
    [
        ({"role": "king", "content": "a"}, {}, "Unknown role: king"),
        ({"role": "assistant", "content": None}, {}, "content must be a text"),
        ({"role": "user", "content": "", "tool_calls": [{}]}, {}, "need the role assistant"),
        (
            {"role": "system", "content": "a"},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "a first message of the user",
        ),
    ],
)
def test_the_chat_template_refuses_what_it_would_lose(metas_tokenizer, message, settings, why):
    with pytest.raises(TemplateError, match=why):
        metas_tokenizer.apply_chat_template([message], **settings)


def test_the_demo_answers_in_transformers_as_here(converted, demo):
    """The demo model gives the same answers in transformers.

    It stops by itself: `generate` gets the stop tokens from the folder alone.
    """
    theirs: Any = transformers.AutoTokenizer.from_pretrained(converted)
    names = demo.tokenizer.special_tokens
    assert theirs.convert_tokens_to_ids(list(names)) == list(names.values())
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    prompt = ChatFormat(demo.tokenizer).encode_dialog_prompt([user(FRANCE)])
    chat = theirs.apply_chat_template(
        [user(FRANCE)], add_generation_prompt=True, return_tensors="pt"
    )
    assert chat["input_ids"][0].tolist() == prompt
    ids = model.generate(**chat, do_sample=False, max_new_tokens=50)[0].tolist()
    assert ids[-1] == demo.tokenizer.eot_id
    (answer,) = demo.chat_completion([[user(FRANCE)]], temperature=0.0)
    assert theirs.decode(ids[len(prompt) : -1]) == answer["generation"]["content"]
    # A batch needs a padding token.
    prompts = ["Once upon a time", "The opposite of hot is"]
    batch = theirs(prompts, return_tensors="pt", padding=True, padding_side="left")
    texts = theirs.batch_decode(
        model.generate(**batch, do_sample=False, max_new_tokens=8), skip_special_tokens=True
    )
    ours = demo.text_completion(prompts, temperature=0.0, max_gen_len=8)
    expected = [p + o["generation"] for p, o in zip(prompts, ours, strict=True)]
    assert texts == expected


def test_a_converted_folder_has_the_tokenizer_that_it_came_from(converted, demo, tmp_path):
    found = find(converted)
    theirs = load_tokenizer(found)
    assert theirs.special_tokens == demo.tokenizer.special_tokens
    text = "Once upon a time, 1234 naïve ducks 👍🏽"
    plain: dict[str, Any] = {"bos": True, "eos": True}
    assert theirs.encode(text, **plain) == demo.tokenizer.encode(text, **plain)
    convert(converted, tmp_path / "back")
    source, back = DEMO / "tokenizer.model", tmp_path / "back" / "tokenizer.model"
    assert back.read_bytes() == source.read_bytes()


def test_a_tokenizer_json_is_kept_as_it_is(converted, tmp_path):
    (tmp_path / "meta").mkdir()
    for name in ("consolidated.00.pth", "params.json"):
        (tmp_path / "meta" / name).symlink_to(DEMO / name)
    own = json.dumps(json.loads((converted / "tokenizer.json").read_text()))
    (tmp_path / "meta" / "tokenizer.json").write_text(own)
    convert(tmp_path / "meta", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == own
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (converted / name).read_bytes()


def test_a_tokenizer_of_another_model_is_refused_before_writing(meta, tmp_path):
    (meta / "tokenizer.model").write_bytes((DEMO / "tokenizer.model").read_bytes())
    with pytest.raises(
        ValueError, match=r"tokenizer\.model has 2048 tokens, but .* vocab_size=128"
    ):
        convert(meta, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
