"""`ClientTokenizer(llama.tokenizer)` renders dialogs with the template of the model's files.

The oracle is transformers' `apply_chat_template` for the same files.
"""

from pathlib import Path
from typing import Any

import pytest
import transformers

from helpers.chat_templates import CHATML, HERMES, LLAMA_3_1, TEMPLATES, TULU
from helpers.fine_tunes import make_model
from llama import Llama
from llama.compat.client_tokenizer import ClientTokenizer

# The kind of the tokenizer, its template, and whether that writes a begin token.
FILES: dict[str, tuple[str, str, bool]] = {
    "chatml": ("chatml", CHATML, False),
    "hermes": ("hermes", HERMES, True),
    "tulu": ("tulu", TULU, False),
    "joined": ("meta", TEMPLATES["joined"], False),
    "r1": ("r1", TEMPLATES["r1"], True),
    "dated": ("meta", LLAMA_3_1, True),
}
DIALOGS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Où est Zürich? 🌧\n"},
        {"role": "assistant", "content": "Là."},
        {"role": "user", "content": "And <|nothing|>?"},
    ],
]


def built(folder: Path) -> Llama:
    return Llama.build(str(folder), max_seq_len=256, max_batch_size=1, device="cpu", verbose=False)


def with_template(folder: Path, name: str) -> tuple[ClientTokenizer, Any]:
    """Return a client's tokenizer of a model with this template, and transformers' own."""
    kind, template, _ = FILES[name]
    make_model(folder, kind)
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return ClientTokenizer(built(folder).tokenizer), theirs


@pytest.mark.parametrize("name", FILES)
def test_texts_and_ids_are_those_of_transformers(tmp_path, name):
    client, theirs = with_template(tmp_path / "model", name)
    for dialog in DIALOGS:
        for has_header in (True, False):
            options: Any = {"add_generation_prompt": has_header}
            wanted = theirs.apply_chat_template(dialog, tokenize=False, **options)
            assert client.apply_chat_template(dialog, tokenize=False, **options) == wanted
            ids = theirs.apply_chat_template(dialog, return_dict=False, **options)
            assert client.apply_chat_template(dialog, **options) == ids
            assert client.encode(wanted, add_special_tokens=False) == ids
            assert wanted.startswith(client.bos_token) == FILES[name][2]


@pytest.mark.parametrize("name", ["chatml", "r1"])
def test_a_message_with_the_name_of_a_special_token_has_no_text(tmp_path, name):
    client, _ = with_template(tmp_path / "model", name)
    for token in ("<|eot_id|>", client.eos_token):
        dialog = [{"role": "user", "content": f"Hi {token}"}]
        assert client.apply_chat_template(dialog)
        with pytest.raises(ValueError, match="the name of a special token"):
            client.apply_chat_template(dialog, tokenize=False)


def test_a_model_without_a_template_says_so(tmp_path):
    """Meta's format would be silently wrong."""
    client = ClientTokenizer(built(make_model(tmp_path / "model", "chatml")).tokenizer)
    for tokenize in (True, False):
        with pytest.raises(ValueError, match="no chat template"):
            client.apply_chat_template(DIALOGS[0], tokenize=tokenize)
