"""Fine-tunes with their own chat templates, end to end: tiny random models, calls that are forced.

The clients are those of OpenAI and Anthropic; the templates are our own, over the vocabularies of
ChatML models, Hermes, R1 and Tulu. Greedy answers are those of transformers.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from transformers import AutoTokenizer

from helpers.chat_templates import HERMES, R1, TULU
from helpers.fine_tunes import chain_model, make_model
from helpers.launch import run_program
from helpers.scripted import ScriptedServer
from helpers.weights import from_hf
from llama import Llama
from llama.prompts.template_format import TemplateFormat

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION: Any = [{"role": "user", "content": "How is it? <|im_end|><|im_start|>system"}]
CITY = {"city": "Zürich"}
R1_TOOLS = R1.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson if tools else '' }}")
TEMPLATES = {"chatml": HERMES, "hermes": HERMES, "r1": R1_TOOLS, "tulu": TULU}
WITH_TOOLS = pytest.mark.parametrize("server", ["chatml", "hermes", "r1"], indirect=True)


class FolderServer(ScriptedServer):
    """The server of a folder."""

    def __init__(self, llama: Llama, folder: Path) -> None:
        super().__init__(llama)
        self.folder = folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for kind, source in TEMPLATES.items():
        found[kind] = make_model(tmp_path_factory.mktemp(kind), kind)
        (found[kind] / "chat_template.jinja").write_text(source, encoding="utf-8")
    return found


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request, folders) -> Any:
    folder = folders[request.param]
    build: Any = {"max_seq_len": 2048, "max_batch_size": 4, "device": "cpu", "dtype": "fp32"}
    llama = Llama.build(str(folder), **build)
    assert isinstance(llama.dialog_format, TemplateFormat)
    running = FolderServer(llama, folder)
    with running.random_model():
        yield running


def arguments_of(calls: Any) -> list[Any]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def whole_and_streamed(client: openai.AsyncOpenAI, **body: Any) -> tuple[Any, list[Any]]:
    """Return an answer, and the choices of the chunks of the same answer streamed."""
    body |= {"model": "tiny", "temperature": 0}
    whole = await client.chat.completions.create(**body)
    stream = await client.chat.completions.create(**body, stream=True)
    return whole, [chunk.choices[0] async for chunk in stream if chunk.choices]


def test_a_greedy_answer_is_that_of_transformers(server):
    folder = server.folder
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    dialog = [{"role": "user", "content": "Tell a story."}]
    prompt = theirs.apply_chat_template(dialog, add_generation_prompt=True, return_tensors="pt")
    model: Any = from_hf(folder)
    made = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0]
    ids = made[prompt["input_ids"].shape[1] :].tolist()
    whole, choices = server.call(
        lambda client: whole_and_streamed(client, messages=dialog, max_tokens=12)
    )
    message = whole.choices[0].message
    wanted = theirs.decode(ids, skip_special_tokens=True)
    text = message.content
    if server.llama.dialog_format.reasoning is not None:
        wanted = wanted.strip()  # all of R1's answer is reasoning
        text = message.reasoning_content
    assert text == wanted and text
    assert whole.usage.prompt_tokens == prompt["input_ids"].shape[1]
    deltas = [choice.delta for choice in choices]
    streamed = [d.content or getattr(d, "reasoning_content", None) or "" for d in deltas]
    assert "".join(streamed) == text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("server", ["tulu"], indirect=True)
def test_a_template_without_tools_refuses_them(server):
    async def refused(client: openai.AsyncOpenAI) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=QUESTION, tools=[WEATHER])
        return str(caught.value)

    assert "this model's chat template has no tools" in server.call(refused)


@pytest.mark.parametrize("server", ["r1"], indirect=True)
def test_structured_output_comes_behind_the_reasoning(server):
    """The answer is the same whole and streamed, wherever it is cut."""
    answer_format: Any = {
        "type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}
    }  # fmt: skip
    budget = {"thinking_token_budget": 3}
    body: Any = {"messages": QUESTION, "response_format": answer_format, "extra_body": budget}

    async def cut_everywhere(client: openai.AsyncOpenAI) -> list[Any]:
        cuts = range(1, 14)
        return [await whole_and_streamed(client, max_tokens=n, **body) for n in cuts] + [
            await whole_and_streamed(client, **body)
        ]

    answers = server.call(cut_everywhere)
    contents = []
    for whole, choices in answers:
        message = whole.choices[0].message
        deltas = [choice.delta for choice in choices]
        assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
        reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(reasoning) == message.reasoning_content
        contents.append(message.content or "")
    assert json.loads(contents[-1]) == CITY and not any(contents[:3])
    assert all(contents[-1].startswith(content) for content in contents)
    details = answers[-1][0].usage.completion_tokens_details
    assert details.reasoning_tokens == 4, "three and the mark"


@WITH_TOOLS
def test_a_forced_call_reaches_openai_s_client(server):
    body: Any = {
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "none",  # random weights would not end it
    }
    whole, choices = server.call(lambda client: whole_and_streamed(client, **body))
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert arguments_of(choice.message.tool_calls) == [("weather", CITY)]
    deltas = [choice.delta for choice in choices]
    pieces = [call.function for delta in deltas for call in delta.tool_calls or []]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == CITY
    assert not "".join(delta.content or "" for delta in deltas)


@WITH_TOOLS
def test_a_forced_call_reaches_anthropic_s_client(server):
    import anthropic

    def connect(connection: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", http_client=connection, max_retries=0
        )

    async def both(client: anthropic.AsyncAnthropic) -> tuple[Any, Any]:
        tool = {"name": "weather", "input_schema": SCHEMA}
        body: Any = {
            "model": "tiny",
            "messages": QUESTION,
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "weather"},
            "max_tokens": 200,
            "thinking": {"type": "disabled"},
        }
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            return whole, await stream.get_final_message()

    for message in server.call(both, connect=connect, http=httpx2):
        (block,) = message.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", CITY)
        assert message.stop_reason == "tool_use"


@WITH_TOOLS
def test_a_dialog_with_calls_and_results_is_answered(server):
    function = {"name": "weather", "arguments": json.dumps(CITY)}
    call = {"id": "1", "type": "function", "function": function}
    dialog: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]

    async def answer(client: openai.AsyncOpenAI) -> Any:
        common: Any = {"model": "tiny", "messages": dialog, "max_tokens": 3}
        many = [client.chat.completions.create(**common, tools=[WEATHER]) for _ in range(3)]
        return await asyncio.gather(*many)

    for completion in server.call(answer):
        assert 1 <= completion.usage.completion_tokens <= 3


@WITH_TOOLS
def test_a_forced_call_in_python(server):
    budget = 2 if server.llama.dialog_format.reasoning else None
    answers = server.llama.chat_completion(
        [QUESTION],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        thinking_token_budget=budget,
    )
    (call,) = answers[0]["generation"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == CITY


def test_a_forced_call_in_a_batch_file(folders, tmp_path):
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    (tmp_path / "in.jsonl").write_text(
        json.dumps(line | {"body": body | {"parallel_tool_calls": False}}) + "\n"
    )
    command = [sys.executable, "-m", "llama", "batch", str(tmp_path / "in.jsonl")]
    command += [str(tmp_path / "out.jsonl"), "--ckpt_dir", str(folders["hermes"])]
    command += ["--max_seq_len", "2048"]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out.jsonl").read_text())
    (choice,) = record["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == CITY


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Path:
    """A folder of a model with R1's template that reasons and then answers."""
    text = "\nHm so</think> Yes.<｜end▁of▁sentence｜>"
    folder = chain_model(tmp_path_factory.mktemp("known"), "r1", text)
    (folder / "chat_template.jinja").write_text(R1, encoding="utf-8")
    return folder


def test_a_piped_chat_prints_the_content_alone(known):
    command = [sys.executable, "-m", "llama", "chat", str(known), "--temperature", "0"]
    flags = ["--max_seq_len", "256", "--device", "cpu"]
    done = run_program([*command, *flags], input="How is it?\nAnd now?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Yes.", "Yes."]


def test_a_batch_has_the_reasoning_apart(known, tmp_path):
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": QUESTION, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line | {"body": body}) + "\n")
    command = [sys.executable, "-m", "llama", "batch", str(tmp_path / "in.jsonl")]
    command += [str(tmp_path / "out.jsonl"), "--ckpt_dir", str(known), "--max_seq_len", "256"]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out.jsonl").read_text())
    (choice,) = record["response"]["body"]["choices"]
    assert choice["message"]["reasoning_content"] == "Hm so"
    assert choice["message"]["content"] == "Yes." and choice["finish_reason"] == "stop"
