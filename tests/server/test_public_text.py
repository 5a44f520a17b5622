"""A system prompt that is no secret: tenants share the pages wholly inside it, and no others."""

import datetime
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from helpers.adapters import PREFIX, write_adapter
from helpers.chat_templates import LLAMA_3_2
from helpers.launch import DEMO, PROGRAMS, environment
from helpers.server import run_server
from helpers.services import service_of
from llama import Llama
from llama.cli import main
from llama.cli.flags import UsageError
from llama.cli.public_text import read_public_text
from llama.prompts.dialog_format import MissingFormat
from llama.prompts.template_format import TemplateFormat
from llama.requests.public_text import PublicText
from llama.server.app import make_app

TEXT = " ".join(["You tell stories to children about a cat who lived in a big house."] * 3)
QUESTION = "Tell me of the cat, of the house, and of all that the cat found in the house."
USER = [{"role": "user", "content": QUESTION}]
_CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')

# Each way in which a prompt begins with the text: its path, and a body.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": f"{TEXT} {QUESTION}"}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": TEXT}, *USER]},
    ),
    "response": ("/v1/responses", {"instructions": TEXT, "input": QUESTION}),
    "message": ("/v1/messages", {"system": TEXT, "messages": USER}),
}


def num_cached(client: Any, way: str, key: str, **fields: Any) -> int:
    """Return how many tokens of a prompt were in the cache."""
    path, body = WAYS[way]
    limit = "max_output_tokens" if way == "response" else "max_tokens"
    headers = {"Authorization": f"Bearer {key}"}
    answer = client.post(path, json={**body, limit: 1, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(_CACHED.findall(answer.text)[-1])


def num_public(llama: Llama, way: str) -> int:
    """Return the tokens of the pages wholly inside what the text alone decides."""
    tokenizer = llama.tokenizer
    if way == "completion":
        texts = (f"{TEXT} {QUESTION}", f"{TEXT} x")
        ids = [tokenizer.encode(text, bos=True, eos=False) for text in texts]
    else:
        chats = ([{"role": "user", "content": text}] for text in (QUESTION, "x"))
        system = {"role": "system", "content": TEXT}
        ids = [llama.dialog_format.encode([system, *chat]) for chat in chats]
    count = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert count % 16, "the text should end within a page"
    return count // 16 * 16


@pytest.fixture
def llama(demo) -> Llama:
    """Return an engine with an empty cache."""
    return Llama(demo.model, demo.tokenizer)


@pytest.fixture
def client(llama) -> Iterator[TestClient]:
    """Return a client of a server whose keys "a" and "b" share the text."""
    service = service_of(public_text=TEXT)
    with TestClient(make_app(service, api_keys=["a", "b"], loopback=False)) as opened:
        service.start(llama)
        yield opened
        service.close()


@pytest.mark.parametrize("way", WAYS)
def test_keys_share_the_pages_of_the_text_and_no_others(llama, client, way):
    """The first page beyond is not found by another key or salt, even where its text is equal."""
    public = num_public(llama, way)
    tenants = [("a", None), ("b", None), ("a", "x"), ("b", "x")]
    found = [num_cached(client, way, key, cache_salt=salt) for key, salt in tenants]
    assert found == [0, public, public, public] and public >= 48
    for key, salt in tenants:
        assert num_cached(client, way, key, cache_salt=salt) >= public + 16


def test_another_text_is_not_shared(client):
    """A prompt that leaves the text at its beginning shares what comes before."""
    for first, most in (("You", 0), (TEXT[:150] + "nothing else. ", 48)):
        body = {"prompt": first + QUESTION * 2}
        assert num_cached(client, "completion", "a", **body) <= most
        assert num_cached(client, "completion", "b", **body) <= most
        assert num_cached(client, "completion", "b", **body) >= 32


def test_adapters_have_public_pages_of_their_own(llama, client, tmp_path):
    """Keys share the pages of the text under each adapter, and not those of another one."""
    draw = torch.Generator().manual_seed(0)
    name = f"{PREFIX}model.layers.0.self_attn.v_proj.lora_"
    sizes = {"A": (4, 256), "B": (128, 4)}
    tensors = {
        f"{name}{side}.weight": torch.randn(size, generator=draw) for side, size in sizes.items()
    }
    write_adapter(tmp_path, tensors, r=4, target_modules=["v_proj"])
    llama.load_adapter("adapter", str(tmp_path))
    public = num_public(llama, "chat")
    asked = [("demo", "a"), ("adapter", "a"), ("demo", "b"), ("adapter", "b")]
    found = [num_cached(client, "chat", key, model=model) for model, key in asked]
    assert found == [0, 0, public, public]


def test_a_template_may_write_the_date(demo, monkeypatch):
    """What prompts begin with is made again on the next day."""
    dialog_format = TemplateFormat(demo.tokenizer, {"default": LLAMA_3_2})
    chat = [{"role": "system", "content": TEXT}, *USER]
    public = PublicText(TEXT, demo.tokenizer, dialog_format)
    today = dialog_format.encode(chat)
    wanted = public.count(today)
    assert wanted > 60
    yesterday = PublicText(TEXT, demo.tokenizer, dialog_format)
    yesterday._made = (datetime.date(2026, 1, 1), [[1], [2]])
    assert yesterday.count(today) == wanted == yesterday.num_tokens


def test_a_model_without_chats_shares_completed_texts(demo):
    public = PublicText(TEXT, demo.tokenizer, MissingFormat(demo.tokenizer))
    ids = demo.tokenizer.encode(TEXT, bos=True, eos=False)
    assert public.count(ids) == len(ids) == public.num_tokens


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"\xff", "UTF-8"),
        (b" \n", "is empty"),
        (b"word " * 600, "tokens, and the context 512"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, problem):
    """The error names the file, before the server listens and weights are read."""
    file = tmp_path / "prompt"
    if content is not None:
        file.write_bytes(content)
    options = Namespace(
        shared_prefix=str(file), ckpt_dir=str(DEMO), tokenizer_path=None, max_seq_len=None
    )
    with pytest.raises(UsageError, match=f"--shared_prefix {file}.*{problem}"):
        read_public_text(options)
    options.shared_prefix = None
    assert read_public_text(options) == ""


def test_the_command_reads_the_file_first(tmp_path, capsys):
    assert main(["serve", str(DEMO), "--shared_prefix", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--shared_prefix {tmp_path}" in error and "listening" not in error


@pytest.mark.slow
@pytest.mark.dist
def test_keys_share_the_text_over_ranks_api_processes_and_restarts(demo, tmp_path):
    """Another key finds the pages of the text, also on disk after a restart, and no others."""
    keys, file, root = tmp_path / "keys", tmp_path / "prompt", tmp_path / "kv"
    keys.write_text("a\nb\nc\n")
    file.write_text(TEXT)
    flags = (
        str(DEMO), "--api_key_file", str(keys), "--shared_prefix", str(file),
        "--api_processes", "1", "--kv_cache_dir", str(root),
    )  # fmt: skip
    how: dict[str, Any] = {
        "launcher": ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        "program": (str(PROGRAMS / "kv_server.py"),),
        "env": environment(),
    }
    public = num_public(demo, "chat")
    with run_server(*flags, **how) as server, httpx.Client(base_url=server.url, timeout=60) as web:
        assert num_cached(web, "chat", "a") == 0
        assert num_cached(web, "chat", "b") == public
        server.process.terminate()
        server.process.wait(60)
    with run_server(*flags, **how) as server, httpx.Client(base_url=server.url, timeout=60) as web:
        assert num_cached(web, "chat", "c") == public
        assert num_cached(web, "chat", "b") >= public + 16
