"""FastChat itself: its controller and OpenAI server, our worker, and OpenAI's client.

All are separate processes on loopback. FastChat is installed in an environment of its own, which
FASTCHAT_PYTHON names (docs/guides/hosts.md); without it these tests are skipped.
"""

import base64
import concurrent.futures
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import vision
from helpers.fastchat import DIALOGS, FINE_TUNES, HOSTILE, format_of
from helpers.fine_tunes import chain_model
from helpers.launch import DEMO, PROGRAMS, environment
from helpers.ports import reserved_port
from helpers.waiting import wait_until
from llama import Llama
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.fastchat import as_trained, conversation_template, prompt_ids
from llama.prompts.chat import ChatOptions
from llama.prompts.template_format import TemplateFormat
from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Tokenizer

PYTHON = os.environ.get("FASTCHAT_PYTHON", "")
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not PYTHON, reason="FASTCHAT_PYTHON names no Python with FastChat"),
]
LIMIT_S = 60.0
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


class Process:
    """A Python module as a process, with its output in a file."""

    def __init__(self, folder: Path, module: str, *words: str) -> None:
        self.output = folder / f"{time.monotonic_ns()}.txt"
        variables = {"LOGDIR": str(folder), "FASTCHAT_WORKER_HEART_BEAT_INTERVAL": "1"}
        python = PYTHON if module.startswith("fastchat.") else sys.executable
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [python, "-m", module, *words],
                cwd=folder, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text()

    def wait_until(self, is_so: Callable[[], object]) -> None:
        def is_so_while_it_runs() -> object:
            assert self.process.poll() is None, self.text()
            return is_so()

        wait_until(is_so_while_it_runs, f"see {self.output}")

    def wait_for(self, pattern: str) -> str:
        self.wait_until(lambda: re.search(pattern, self.text()))
        return re.findall(pattern, self.text())[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[Process]:
    process = Process(folder, *words)
    try:
        yield process
    finally:
        process.kill()


def post(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        return json.load(response)


def answers(url: str, **body: Any) -> bool:
    with contextlib.suppress(OSError):
        return post(url, **body) is not None
    return False


@contextlib.contextmanager
def controller_at(folder: Path, port: int) -> Iterator[str]:
    words = ["fastchat.serve.controller", "--host", "127.0.0.1", "--port", str(port)]
    with running(folder, *words) as controller:
        url = f"http://127.0.0.1:{port}"
        controller.wait_until(lambda: answers(f"{url}/list_models"))
        yield url


def worker(folder: Path, controller: str, model: Path = DEMO):
    ours = ["llama", "serve", str(model), "--port", "0", "--dtype", "fp32", "--max_seq_len", "512"]
    return running(folder, *ours, "--fastchat_controller", controller)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fastchat")


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory) -> Path:
    """A folder of a model with R1's template, whose greedy answer is known."""
    text = "\nHm so</think> Yes.<｜end▁of▁sentence｜>"
    found = chain_model(tmp_path_factory.mktemp("fine_tune") / "known", "r1", text)
    (found / "chat_template.jinja").write_text(FINE_TUNES["r1"], encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory) -> Path:
    """A folder of a tiny Llama 3.2 Vision."""
    with vision.metas_modules() as module:
        state = vision.MetasVision(module).state()
    return vision.write_metas(tmp_path_factory.mktemp("vision") / "seeing", state)


@pytest.fixture(scope="module")
def worker_url(folder, fine_tune, vision_model) -> Iterator[tuple[str, str]]:
    """The addresses of the API server and of the worker of the demo model."""
    with (
        reserved_port() as port,
        reserved_port() as controller_port,
        controller_at(folder, controller_port) as controller,
        worker(folder, controller, fine_tune) as other,
        worker(folder, controller, vision_model) as seeing,
        worker(folder, controller) as ours,
        running(
            folder, "fastchat.serve.openai_api_server", "--controller-address", controller,
            "--host", "127.0.0.1", "--port", str(port),
        ) as server,
    ):  # fmt: skip
        url = ours.wait_for(r"listening on (\S+);")
        for each in (ours, other, seeing):
            each.wait_for(r"(registered) with")
        listed = post(f"{controller}/list_multimodal_models")["models"]
        assert listed == ["seeing"]
        check = {"model": "demo", "prompt": "a", "max_tokens": 1}
        at = f"http://127.0.0.1:{port}"
        server.wait_until(lambda: answers(f"{at}/api/v1/token_check", prompts=[check]))
        yield at, url


@pytest.fixture(scope="module")
def client(worker_url):
    import openai

    return openai.OpenAI(
        base_url=f"{worker_url[0]}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    )


def test_models_and_token_check(client, worker_url, demo):
    assert [model.id for model in client.models.list()] == ["demo", "known", "seeing"]
    item = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}
    (found,) = post(f"{worker_url[0]}/api/v1/token_check", prompts=[item])["prompts"]
    count = len(demo.tokenizer.encode(item["prompt"], bos=True, eos=False))
    assert found == {"fits": True, "tokenCount": count, "contextLength": 512}


def fastchats_prompts(fields: dict[str, Any], dialogs: list[Any]) -> dict[str, Any]:
    command = [PYTHON, str(PROGRAMS / "fastchat_prompts.py")]
    job = json.dumps({"fields": fields, "dialogs": dialogs})
    done = subprocess.run(
        command, input=job, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", FINE_TUNES)
def test_fastchats_prompts_are_those_of_a_chat_template(tmp_path, kind):
    dialog_format = format_of(tmp_path, kind)
    dialogs: list[Any] = [*DIALOGS, HOSTILE]
    found = fastchats_prompts(conversation_template(dialog_format), dialogs)
    for prompt, dialog in zip(found["worker"], dialogs, strict=True):
        assert prompt_ids(prompt, dialog_format) == dialog_format.encode(dialog)


def test_fastchats_prompts_are_the_chat_format(demo):
    """FastChat's prompts are the chat format.

    Its API server fills in a conversation; LLAMA3 is the style that its main branch has of its own.
    """
    found = fastchats_prompts(conversation_template(demo.dialog_format), DIALOGS)
    assert len(found["worker"]) == len(DIALOGS) and found.get("LLAMA3", DIALOGS)
    for prompts in found.values():
        dialogs: list[Any] = DIALOGS
        for prompt, dialog in zip(prompts, dialogs, strict=True):
            ids = ClientTokenizer(demo.tokenizer).encode(as_trained(prompt))
            assert ids == ChatFormat(demo.tokenizer).encode_dialog_prompt(dialog)


@pytest.mark.parametrize("dialog", DIALOGS)
def test_chat_is_chat_completion(client, demo, dialog):
    made = client.chat.completions.create(
        model="demo", messages=dialog, temperature=0, max_tokens=40
    )
    text = demo.chat_completion([dialog], temperature=0, max_gen_len=40)[0]["generation"]["content"]
    assert made.choices[0].message.content == text
    assert made.usage.prompt_tokens == len(ChatFormat(demo.tokenizer).encode_dialog_prompt(dialog))


@pytest.mark.parametrize("dialog", DIALOGS)
def test_a_fine_tune_answers_in_its_own_format(client, fine_tune, dialog):
    made = client.chat.completions.create(
        model="known", messages=dialog, temperature=0, max_tokens=20
    )
    assert made.choices[0].message.content == "Hm so</think> Yes."
    tokenizer = Tokenizer(fine_tune / "tokenizer.json")
    dialog_format = TemplateFormat(tokenizer, {"default": FINE_TUNES["r1"]})
    assert made.usage.prompt_tokens == len(dialog_format.encode(dialog))


def test_messages_in_parts(client):
    """Messages in parts are accepted, but not an image where the model reads text alone."""
    import openai

    text = {"type": "text", "text": FRANCE[0]["content"]}
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    given = {"model": "demo", "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(messages=FRANCE, **given)
    parts = client.chat.completions.create(messages=[{"role": "user", "content": [text]}], **given)
    assert parts.choices[0].message.content == whole.choices[0].message.content
    assert parts.usage == whole.usage
    with pytest.raises(openai.BadRequestError, match="images"):
        client.chat.completions.create(
            messages=[{"role": "user", "content": [text, image]}], **given
        )


def test_images_are_read(client, vision_model):
    """FastChat sends those of a dialog beside its prompt; the server fetches none by default."""
    import openai

    file = io.BytesIO()
    vision.picture(60, 40).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    text: Any = {"type": "text", "text": "What is this?"}
    asked: list[Any] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "What colour?"},
    ]
    given: Any = {"model": "seeing", "temperature": 0, "max_tokens": 6}
    with Llama.build(str(vision_model), None, 512, 1, device="cpu", dtype="fp32") as llama:
        for dialog in (asked[:1], asked):
            made = client.chat.completions.create(messages=dialog, **given)
            prompt: Any = next(llama._prompts.dialogs([dialog], ChatOptions()))
            params = SamplingParams(temperature=0.0, max_tokens=6, skip_special_tokens=True)
            request = llama.llm_engine.prepare("", prompt.ids, params, pictures=prompt.pictures)
            expected = llama.run_prompts([request])[0].outputs[0].text
            assert made.choices[0].message.content == expected
            chunks = list(client.chat.completions.create(messages=dialog, stream=True, **given))
            texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert "".join(texts) == expected.replace("\ufffd", "")  # FastChat leaves it out
    there: Any = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="fetches no images"):
        client.chat.completions.create(
            messages=[{"role": "user", "content": [there, text]}], **given
        )


def test_chat_streams(client, demo):
    chunks = list(
        client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, stream=True)
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    answer = demo.chat_completion([FRANCE], temperature=0)[0]["generation"]["content"]
    assert "".join(texts) == answer and sum(map(bool, texts)) > 2
    assert (texts[-1], chunks[-1].choices[0].finish_reason) == ("", "stop")
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}


def test_several_answers_are_samples(client):
    made = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=2, n=6, max_tokens=30
    )
    assert len({choice.message.content for choice in made.choices}) > 1


def test_completions(client, demo):
    ask = client.completions.create
    given = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    text = demo.text_completion(["Once upon a time"], 0, max_gen_len=12)[0]["generation"]
    assert ask(**given).choices[0].text == text
    assert ask(**given, echo=True).choices[0].text == "Once upon a time" + text
    assert ask(**given, stop=[text[5:8]]).choices[0].text == text[:5]
    assert [choice.text for choice in ask(**given, n=2).choices] == [text, text]
    made = ask(**given, echo=True, logprobs=1).choices[0]
    assert "".join(made.logprobs.tokens) == "<|begin_of_text|>" + made.text
    own = demo.text_completion(["Once upon a time"], 0, max_gen_len=12, logprobs=True)[0]
    assert made.logprobs.token_logprobs[-12:] == pytest.approx(own["logprobs"], abs=1e-4)
    sampled = given | {"temperature": 1.0}
    best = ask(**sampled, best_of=3)
    assert len(best.choices) == 1 and best.usage.completion_tokens > 12
    streamed = [chunk.choices[0].text for chunk in ask(**given, stream=True)]
    assert "".join(streamed) == text and len(streamed) > 3


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("temperature", {"temperature": 5}),
        ("presence_penalty=3", {"presence_penalty": 3}),
        ("maximum context length", {"messages": [{"role": "user", "content": "a b " * 600}]}),
    ],
)
def test_what_cannot_be_done_is_a_clear_error(client, named, changes):
    import openai

    given = {"model": "demo", "messages": FRANCE, "max_tokens": 8, **changes}
    with pytest.raises(openai.BadRequestError, match=named) as found:
        client.chat.completions.create(**given)
    assert found.value.status_code == 400
    with pytest.raises(openai.APIError, match=named):
        list(client.chat.completions.create(**given, stream=True))


def test_embeddings_are_refused(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="does not compute embeddings"):
        client.embeddings.create(model="demo", input="Once upon a time")


def test_eight_streams_at_once(client, demo):
    dialogs = [[{"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(8)]

    def streamed(dialog) -> str:
        chunks = client.chat.completions.create(
            model="demo", messages=dialog, temperature=0, max_tokens=40, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(streamed, dialogs))
    alone = demo.chat_completion(dialogs, temperature=0, max_gen_len=40)
    assert found == [answer["generation"]["content"] for answer in alone]


def test_a_client_that_leaves_frees_the_engine(client, worker_url):
    """A client that leaves frees the engine.

    Its request has more sequences than run at once, and would otherwise outlast the request after
    it.
    """
    chunks = client.chat.completions.create(
        model="demo", messages=FRANCE, max_tokens=400, n=3, stream=True
    )
    next(chunks)
    chunks.close()
    params = {"prompt": "Once upon a time", "max_new_tokens": 400, "n": 64, "temperature": 1.0}
    kind = {"Content-Type": "application/json"}
    connection = urllib.request.Request(
        f"{worker_url[1]}/worker_generate_stream", json.dumps(params).encode(), kind
    )
    with urllib.request.urlopen(connection, timeout=LIMIT_S) as response:
        assert response.read(1)
        assert post(f"{worker_url[1]}/worker_get_status")["queue_length"] >= 1
    report = post(f"{worker_url[1]}/worker_generate", prompt="a", max_new_tokens=2)
    assert report["error_code"] == 0
    assert post(f"{worker_url[1]}/worker_get_status")["queue_length"] == 0


def test_a_controller_that_starts_again_knows_the_worker(folder):
    with reserved_port() as port, worker(folder, f"http://127.0.0.1:{port}") as ours:
        ours.wait_for("(no answer) from the controller")  # the worker is there first
        for _ in range(2):
            with controller_at(folder, port) as url:
                ours.wait_until(lambda url=url: "demo" in post(f"{url}/list_models")["models"])
        ours.process.send_signal(signal.SIGTERM)
        assert ours.process.wait(LIMIT_S) == 0, ours.text()
