"""Images in requests of clients, chats, batch files and vLLM's API, and files that are refused.

The model is a tiny Llama 3.2 Vision with random weights. What each client gets is compared with
the answer of the Python API to the same image.
"""

import base64
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from PIL import Image

from helpers import vision
from helpers.chat_templates import LLAMA_3_2_VISION
from helpers.fastchat import written
from helpers.launch import run_program
from helpers.server import run_server
from helpers.services import service_of
from helpers.vision import IMAGE_ID, picture
from helpers.web import web
from llama import Llama
from llama.checkpoint.write.convert import convert
from llama.cli.batch.job import run_batch
from llama.cli.batch.server_job import run_server_batch
from llama.compat import fastchat
from llama.compat.fastchat import FastChatWorker, conversation_template, prompt_ids
from llama.compat.vllm.vllm_engines import LLM, EngineFrontend
from llama.compat.vllm.vllm_params import SamplingParams as VllmParams
from llama.prompts import picture_process
from llama.prompts.chat import ChatOptions
from llama.prompts.dialog_format import MetaFormat
from llama.prompts.messages import read_messages
from llama.prompts.pictures import PictureReader
from llama.prompts.template_format import DEFAULT, TemplateFormat
from llama.sampling_params import SamplingParams
from llama.server import images
from llama.server.fetch import fetch
from llama.server.limits import Limits
from llama.server.process import Server
from llama.tokenizer import Tokenizer

QUESTION = "What is this?"
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def saved(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64_of(data)}"


PNG = saved(picture(60, 40))
IMAGE_URL: Any = {"type": "image_url", "image_url": {"url": url_of(PNG)}}
TEXT: Any = {"type": "text", "text": QUESTION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    with vision.metas_modules() as module:
        state = vision.MetasVision(module).state()
    return vision.write_metas(tmp_path_factory.mktemp("vision"), state)


@pytest.fixture(scope="module")
def llama(folder) -> Iterator[Llama]:
    with Llama.build(str(folder), None, 256, 4, device="cpu", dtype="fp32", verbose=False) as built:
        yield built


@contextmanager
def served(llama: Llama, limits: Limits | None = None, **options: Any) -> Iterator[str]:
    """Serve a model in this process; the value is the server's URL."""
    service = service_of(limits=limits)
    server = Server(service, host="127.0.0.1", port=0, api_keys=[], **options)
    server.start()
    service.start(llama)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        service.close()
        server.stop()


@pytest.fixture(scope="module")
def own_url(llama) -> Iterator[str]:
    with served(llama) as url:
        yield url


@pytest.fixture(scope="module", params=["one process", "API processes"])
def url(request, folder, own_url) -> Iterator[str]:
    """A server of one process, and one whose APIs are in two others."""
    if request.param == "one process":
        yield own_url
        return
    flags = ("--max_seq_len", "256", "--max_batch_size", "4", "--dtype", "fp32")
    with run_server("--ckpt_dir", str(folder), *flags, "--api_processes", "2") as running:
        yield running.url


def without_special(text: str) -> str:
    """Return a text without the names of special tokens, which servers leave out."""
    return re.sub(r"<\|[^|]*\|>", "", text)


@pytest.fixture(scope="module")
def expected(llama) -> str:
    """The Python API's answer to an image and a question."""
    part = {"type": "image", "image": PNG}
    dialog: Any = [{"role": "user", "content": [part, TEXT]}]
    (found,) = llama.chat_completion([dialog], temperature=0.0, max_gen_len=6)
    return without_special(found["generation"]["content"])


def of_openais_chat(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": [IMAGE_URL, TEXT]}]
    found = client.chat.completions.create(model="demo", messages=messages, **SAMPLING)
    assert found.usage is not None and found.usage.prompt_tokens < 100
    parts = client.chat.completions.create(model="demo", messages=messages, stream=True, **SAMPLING)
    content = found.choices[0].message.content or ""
    assert "".join(part.choices[0].delta.content or "" for part in parts) == content
    return content


def of_openais_responses(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parts: Any = [
        {"type": "input_image", "image_url": url_of(PNG), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    given: Any = [{"role": "user", "content": parts}]
    found = client.responses.create(
        model="demo", input=given, temperature=0, max_output_tokens=6, store=False
    )
    return found.output_text


def of_anthropics_messages(url: str) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}]
    greedy = {"temperature": 0}
    found = client.messages.create(model="demo", messages=messages, max_tokens=6, extra_body=greedy)
    counted = client.messages.count_tokens(model="demo", messages=messages)
    cached = found.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == found.usage.input_tokens + cached
    (block,) = found.content
    return block.text if block.type == "text" else ""


def of_ollamas_chat(url: str) -> str:
    message = {"role": "user", "content": QUESTION, "images": [PNG]}
    options = {"temperature": 0, "num_predict": 6}
    found = ollama.Client(url).chat("demo", [message], options=options)
    return found.message.content or ""


def of_ollamas_generate(url: str) -> str:
    options = {"temperature": 0, "num_predict": 6}
    found = ollama.Client(url).generate("demo", QUESTION, images=[PNG], options=options)
    return found.response or ""


@pytest.mark.parametrize(
    "ask",
    [
        of_openais_chat,
        of_openais_responses,
        of_anthropics_messages,
        of_ollamas_chat,
        of_ollamas_generate,
    ],
)
def test_clients_get_the_answer_of_the_python_api(url, expected, ask):
    assert ask(url) == expected


def chat(url: str, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    body = {"messages": messages, **SAMPLING, **fields}
    return web.post(f"{url}/v1/chat/completions", json=body)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def test_an_image_is_one_token(own_url):
    """/tokenize and usage count it so; it needs no file that can be read."""
    ids = web.post(
        f"{own_url}/tokenize",
        json={"messages": [{"role": "user", "content": [IMAGE_URL, TEXT]}]},
    ).json()["tokens"]
    assert ids.count(IMAGE_ID) == 1
    text = web.post(f"{own_url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert f"<|image|>{QUESTION}" in text
    usage = chat(own_url, IMAGE_URL).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)


def test_any_number_of_images_is_decoded(llama):
    """A past fault: each one was a level of recursion."""
    ids = [IMAGE_ID, llama.tokenizer.bos_id] * 5000
    assert llama.tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert llama.tokenizer.decode(ids).count("<|image|>") == 5000


def test_an_image_of_low_detail_is_one_tile(llama, own_url, expected):
    """It is the answer to the picture in one tile; a URL may also stand alone."""
    part = {"type": "image", "image": PNG}
    prompt: Any = next(
        llama._prompts.dialogs([[{"role": "user", "content": [part, TEXT]}]], ChatOptions())
    )
    small = PictureReader(28, 1).read(PNG)
    assert len(small.pixels) == 1 and len(prompt.pictures[0].pixels) == 4
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    request = llama.llm_engine.prepare("", prompt.ids, params, pictures=[small])
    (wanted,) = llama.run_prompts([request])
    low = {"type": "image_url", "image_url": {"url": url_of(PNG), "detail": "low"}}
    found = chat(own_url, low, logprobs=True).json()["choices"][0]
    logprobs = [token["logprob"] for token in found["logprobs"]["content"]]
    expected_ones = [scores[x] for x, scores in zip(
        wanted.outputs[0].token_ids, wanted.outputs[0].logprobs, strict=True)]  # fmt: skip
    assert logprobs == pytest.approx(expected_ones[: len(logprobs)], abs=1e-5)
    assert content(chat(own_url, {"type": "image_url", "image_url": url_of(PNG)})) == expected


def test_metrics_count_images(own_url):
    def counts() -> dict[str, float]:
        text = web.get(f"{own_url}/metrics").text
        names = ("images_encoded_total", "images_found_total", "image_read_seconds_count")
        return {name: float(re.findall(rf"^llama:{name} (\S+)$", text, re.M)[0]) for name in names}

    before = counts()
    image = {"type": "image_url", "image_url": {"url": url_of(saved(picture(30, 30, seed=77)))}}
    for _ in range(2):
        content(chat(own_url, image))
    found = {name: value - before[name] for name, value in counts().items()}
    assert found["images_encoded_total"] == 1 and found["images_found_total"] >= 1
    assert found["image_read_seconds_count"] == 2


def gray(width: int, height: int, kind: str, **more: Any) -> bytes:
    return saved(Image.new("L", (width, height)), kind, **more)


def many_scans() -> bytes:
    """Return a JPEG of 64 x 64 pixels whose scans are repeated."""
    data = saved(Image.new("L", (64, 64)), "JPEG", progressive=True)
    first = data.index(b"\xff\xda")
    return data[:first] + data[first:-2] * 30 + data[-2:]


def lying() -> bytes:
    """Return the picture of the other tests as a photo that its EXIF orientation turns."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    return saved(picture(60, 40).transpose(Image.Transpose.ROTATE_90), exif=exif)


def animated(kind: str, **options: Any) -> bytes:
    """Return an animation whose first frame is the picture of the other tests."""
    later = [picture(60, 40, i) for i in range(1, 40)]
    return saved(picture(60, 40), kind, save_all=True, append_images=later, **options)


HOSTILE: list[tuple[Any, str]] = [
    ("https://example.org/a.png", "fetches no images, as --image_hosts names no host"),
    ("file:///etc/passwd", "a URL must be a data: URL"),
    ("/etc/passwd", "no image in PNG, JPEG, WebP or GIF|not base64"),
    ("data:image/png,abc", ";base64 before its comma"),
    (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no image in PNG, JPEG, WebP or GIF"),
    (url_of(saved(picture(8, 8), "TIFF")), "no image in PNG, JPEG, WebP or GIF"),
    (url_of(PNG[:300]), "truncated or damaged"),
    (url_of(saved(picture(64, 64), "JPEG")[:900]), "truncated or damaged"),
    (url_of(animated("WEBP", lossless=True)[:3000]), "truncated or damaged|no image in PNG"),
    (url_of(gray(40_000, 1, "PNG")), "40000 x 1 pixels"),
    (url_of(gray(30_000, 30_000, "GIF")), "too many pixels: at most 64 megapixels"),
    (url_of(gray(9000, 9000, "PNG")), "9000 x 9000 pixels"),
    (url_of(many_scans()), "more than 100 scans"),
    (url_of(b"\x89PNG\r\n\x1a\n" + b"\0" * (20 << 20)), "more than 20 MiB"),
    ("", "no image in PNG"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "problem"), HOSTILE)
def test_what_is_no_image_is_refused(own_url, expected, source, problem):
    """The status is 400, and the message names the place; the next request is answered."""
    refused = chat(own_url, TEXT, {"type": "image_url", "image_url": {"url": source}})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["message"].startswith("messages[0].content[1]: ") and error["param"] == "messages"
    assert re.search(problem, error["message"])
    assert content(chat(own_url, IMAGE_URL)) == expected


@pytest.mark.parametrize("count", [17, 1000])
def test_too_many_images_are_refused(own_url, expected, count):
    refused = chat(own_url, *[IMAGE_URL] * count)
    assert refused.status_code == 400
    problem = f"{count} images, and this server reads at most 16"
    assert problem in refused.json()["error"]["message"]
    assert content(chat(own_url, IMAGE_URL)) == expected


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lying(), id="EXIF orientation"),
        pytest.param(animated("PNG"), id="APNG"),
        pytest.param(animated("WEBP", lossless=True, exact=True), id="WebP"),
    ],
)
def test_photos_are_upright_and_animations_are_their_first_frame(own_url, expected, data):
    """How a file stores its pixels makes no difference."""
    for source in (data, PNG):
        part = {"type": "image_url", "image_url": {"url": url_of(source)}}
        assert content(chat(own_url, part)) == expected


def test_images_of_hosts_that_are_allowed_are_fetched(llama, monkeypatch, expected):
    """No address of this machine can be reached, and no other host."""
    image = {"type": "image_url", "image_url": {"url": "http://images.org/a.png"}}
    inside = {"type": "image_url", "image_url": {"url": "http://localhost:9/a.png"}}

    async def fetched(url: str, hosts: frozenset[str]) -> bytes:
        return PNG if "images.org" in url else await fetch(url, hosts)

    monkeypatch.setattr(images, "fetch", fetched)
    with served(llama, Limits(image_hosts="images.org,localhost:9")) as url:
        assert content(chat(url, image)) == expected
        refused = chat(url, inside)
        assert refused.status_code == 400 and "address that is not public" in refused.text


def test_a_process_that_exceeds_a_limit_is_replaced(llama, monkeypatch, expected):
    """The request gets 400, and the next one is answered by a new process."""
    monkeypatch.setattr(picture_process, "_MEMORY_MB", 64)
    part = {"type": "image_url", "image_url": {"url": url_of(gray(8000, 8000, "PNG"))}}
    with served(llama) as url:
        refused = chat(url, part)
        assert refused.status_code == 400 and "64 MiB of memory" in refused.text
        assert content(chat(url, IMAGE_URL)) == expected
    monkeypatch.undo()
    monkeypatch.setattr(picture_process, "_CPU_S", 0.3)
    with served(llama) as url:
        refused = chat(url, part, part, part)
        assert refused.status_code == 400 and "0.3 s of processor time" in refused.text
        assert content(chat(url, IMAGE_URL)) == expected


RESULT = {"role": "tool", "tool_call_id": "a", "content": [IMAGE_URL]}
CALLED = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
CALL = {"role": "assistant", "tool_calls": [CALLED]}


def test_images_elsewhere_are_refused(llama, own_url):
    """Images in results of tools are, unless the server is lenient, and so are those of answers."""
    asked: Any = {"role": "user", "content": QUESTION}
    body = {"messages": [asked, CALL, RESULT], **SAMPLING}
    refused = web.post(f"{own_url}/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "messages[2].content[0] is an image, and images are read in" in refused.text
    ollamas = {"role": "assistant", "content": "x", "images": [base64_of(PNG)]}
    refused = web.post(f"{own_url}/api/chat", json={"messages": [asked, ollamas, asked]})
    assert refused.status_code == 400 and "messages[1].images are read in" in refused.text
    raw = {"prompt": "x", "raw": True, "images": [base64_of(PNG)]}
    refused = web.post(f"{own_url}/api/generate", json=raw)
    assert refused.status_code == 400 and "images cannot be used with raw" in refused.text
    with served(llama, lenient=True) as url:
        found = web.post(f"{url}/v1/chat/completions", json=body)
        assert found.headers["X-Ignored-Fields"] == "messages[2].content[0]"
        both = {"role": "user", "content": [IMAGE_URL, TEXT]}
        later = {"messages": [asked, {"role": "assistant", "content": "x"}, both], **SAMPLING}
        found = web.post(f"{url}/v1/chat/completions", json=later)
        assert found.status_code == 200 and "X-Ignored-Fields" not in found.headers


def test_bodies_with_images_may_be_large(llama, own_url):
    """The limit is 32 MiB where a model reads images, in each of many processes, too."""
    data = PNG + b"\0" * (9 << 20)  # decoders read no further than the end of the image
    part = {"type": "image_url", "image_url": {"url": url_of(data)}}
    content(chat(own_url, part))
    with served(llama, Limits(max_image_body_bytes=1 << 20)) as url:
        assert chat(url, part).status_code == 413
    with served(llama, num_processes=8) as url:
        content(chat(url, part))


def test_what_images_take_is_limited(llama, own_url):
    """Pixels of requests that are answered count as parts of their answers."""
    with served(llama, Limits(max_answer_mb=1)) as url:
        part = {"type": "image_url", "image_url": {"url": url_of(PNG + b"\0" * (5 << 20))}}
        refused = chat(url, part)
        assert refused.status_code == 503 and "too many large answers" in refused.text
        content(chat(url, IMAGE_URL))


FLAGS = ("--max_seq_len", "256", "--dtype", "fp32", "--temperature", "0", "--max_gen_len", "6")


def test_llama_chat_sends_an_image_with_the_next_question(folder, expected, tmp_path):
    """With /undo it is removed, as its question is."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    done = run_program(
        [sys.executable, "-m", "llama", "chat", str(folder), *FLAGS],
        input=f"/image {path}\n{QUESTION}\n/image {tmp_path}\n/undo\n{QUESTION}\n",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = map(without_special, done.stdout.splitlines())
    assert first == expected
    assert second != expected, "the image has been removed with its question"
    assert "is sent with the next question" in done.stderr and "is no image" in done.stderr
    assert f"removed: {QUESTION}" in done.stderr


def test_batch_files_have_images_as_data_urls(folder, llama, expected, tmp_path):
    messages = [{"role": "user", "content": [IMAGE_URL, TEXT]}]
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]
    lines = [{"messages": messages, **SAMPLING}, {"messages": bad, **SAMPLING}]
    given, found = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_batch(llama, str(given), str(found), SamplingParams(), model="m")
    first, second = sorted(map(json.loads, found.read_text().splitlines()), key=lambda x: x["id"])
    body = first["response"]["body"]
    assert without_special(body["choices"][0]["message"]["content"]) == expected
    assert "messages[0].content[0]: a data: URL" in json.dumps(second)


def test_batch_files_name_images_in_a_folder(folder, llama, expected, tmp_path):
    """The engine and a server answer; what lies elsewhere is an error of its line."""
    files = tmp_path / "images"
    (files / "more").mkdir(parents=True)
    (files / "more" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (files / "link.png").symlink_to(tmp_path / "secret.png")
    (files / "large.png").write_bytes(PNG + b"\0" * (20 << 20))
    named = [
        "more/a.png", "../secret.png", str(tmp_path / "secret.png"), "link.png", "b.png", "more",
        "large.png", "\0.png", "https://example.org/a.png",
    ]  # fmt: skip
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": name}}, TEXT]}], **SAMPLING}
        for name in named
    ]  # fmt: skip
    parts = [
        {"type": "input_image", "image_url": "more/a.png"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked = {"input": [{"role": "user", "content": parts}], "temperature": 0, "store": False}
    body = asked | {"max_output_tokens": 6}
    lines.append({"method": "POST", "url": "/v1/responses", "body": body})
    lines.append({"messages": 3, **SAMPLING})
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(llama) as url:
        found = [tmp_path / "engine", tmp_path / "server"]
        run_batch(llama, str(given), str(found[0]), SamplingParams(), images=files, model="m")
        run_server_batch(url, str(given), str(found[1]), SamplingParams(), images=files)
    for path in found:
        records = sorted(map(json.loads, path.read_text().splitlines()), key=lambda x: x["id"])
        first, *refused, fetched, last, wrong = records
        choice = first["response"]["body"]["choices"][0]
        assert without_special(choice["message"]["content"]) == expected
        content = last["response"]["body"]["output"][0]["content"]
        assert without_special(content[0]["text"]) == expected
        for name, record in zip(named[1:], refused, strict=False):
            assert record["error"]["message"].startswith("messages[0].content[0]: "), name
        assert [record["error"]["message"].count("is no file in") for record in refused] == [
            1, 1, 1, 1, 1, 0, 0
        ]  # fmt: skip
        assert "fetche" in fetched["error"]["message"] and "messages" in wrong["error"]["message"]


def fastchats_routes(service: Any, _: int) -> Any:
    return FastChatWorker(service, "http://controller", "http://worker", 45).router()


def test_fastchats_worker_reads_images(llama, expected, monkeypatch):
    """FastChat writes a mark for each image, and sends data: URLs or base64 beside the prompt."""
    cards: list[Any] = []

    def post(_: str, body: Any) -> dict[str, bool]:
        cards.append(body)
        return {"exist": True}

    monkeypatch.setattr(fastchat, "_post", post)
    conv = conversation_template(llama.dialog_format)

    def ask(url: str, images: Any, num_marks: int = 1) -> dict[str, Any]:
        prompt = written([{"role": "user", "content": (QUESTION, [None] * num_marks)}], conv)
        params = {"prompt": prompt, "images": images, "temperature": 0, "max_new_tokens": 6}
        sent = params | {"echo": False}
        return web.post(f"{url}/worker_generate", json=sent).json()

    with served(llama, host_routes=fastchats_routes) as url:
        for image in (url_of(PNG), base64_of(PNG)):
            report = ask(url, [image])
            assert report["text"] == expected, report
        prompt = written([{"role": "user", "content": (QUESTION, [None])}], conv)
        counted = web.post(f"{url}/count_token", json={"prompt": prompt}).json()["count"]
        assert counted == report["usage"]["prompt_tokens"]
        two = ask(url, [url_of(PNG)] * 2, num_marks=2)
        assert two["error_code"] == 0 and two["usage"]["prompt_tokens"] == counted + 1
        bad: list[tuple[Any, int, str]] = [
            (["https://example.org/a.png"], 1, r"params.images\[0\]: .*fetches no images"),
            ([url_of(PNG[:300])], 1, r"params.images\[0\]: .*truncated"),
            ([url_of(PNG)] * 1000, 1, "1000 images, and this server reads at most 16"),
            ([url_of(PNG)], 2, "1 images, and 2 tokens that stand for one"),
            (url_of(PNG), 1, "must be a list"),
            ([7], 1, "must be a list"),
        ]
        for images, num_marks, problem in bad:
            refused = ask(url, images, num_marks)
            assert refused["error_code"] == 40302 and re.search(problem, refused["text"])
            assert ask(url, [url_of(PNG)])["text"] == expected
        assert ask(url, None)["error_code"] == 0, "without images the mark is a text"
    assert [card["multimodal"] for card in cards] == [True]


def test_fastchats_marks_are_images_of_a_chat_template(folder, tmp_path):
    """A prompt that lists the messages of a dialog has the ids of its images, too."""
    convert(folder, tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": LLAMA_3_2_VISION}
    path.write_text(json.dumps(config))
    (tmp_path / "hf" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer(tmp_path / "hf" / "tokenizer.json", vocab_size=IMAGE_ID)
    tokenizer.image_id = IMAGE_ID
    template = TemplateFormat(tokenizer, {DEFAULT: LLAMA_3_2_VISION})
    dialogs: list[Any] = [
        [{"role": "user", "content": ("And this?", ["a", "b"])}],
        [
            {"role": "user", "content": ("", ["a"])},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": ("What colour?", [])},
        ],
    ]
    for dialog_format in (template, MetaFormat(tokenizer)):
        conv = conversation_template(dialog_format)
        for dialog in dialogs:
            asked = [
                {**message, "content": [
                    *[{"type": "image_url", "image_url": "x"} for _ in message["content"][1]],
                    {"type": "text", "text": message["content"][0]},
                ]} if isinstance(message["content"], tuple) else message
                for message in dialog
            ]  # fmt: skip
            ids = dialog_format.encode(read_messages(asked, takes_images=True))
            assert prompt_ids(written(dialog, conv), dialog_format, has_images=True) == ids


def test_vllms_prompts_have_images(llama):
    """Pillow's images alongside a prompt, and OpenAI's in a dialog."""
    vllm = LLM.__new__(LLM)
    EngineFrontend.__init__(vllm, llama)
    vllm.names = map(str, itertools.count())
    params = VllmParams(temperature=0.0, max_tokens=6)
    image = picture(60, 40)
    prompt = {"prompt": "Look: <|image|> What?", "multi_modal_data": {"image": image}}
    (wanted,) = llama.text_completion([["Look: ", image, " What?"]], 0.0, max_gen_len=6)
    (found,) = vllm.generate(prompt, params, use_tqdm=False)
    assert found.prompt_token_ids.count(IMAGE_ID) == 1
    assert llama.tokenizer.decode(found.outputs[0].token_ids) == wanted["generation"]
    dialog: Any = [{"role": "user", "content": [IMAGE_URL, TEXT]}]
    (wanted,) = llama.chat_completion([dialog], temperature=0.0, max_gen_len=6)
    (found,) = vllm.chat(dialog, params, use_tqdm=False)
    assert llama.tokenizer.decode(found.outputs[0].token_ids) == wanted["generation"]["content"]
    with pytest.raises(ValueError, match="has 2 images, and 1 tokens that stand for one"):
        vllm.generate({**prompt, "multi_modal_data": {"image": [image, image]}}, params)
