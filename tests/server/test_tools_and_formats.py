"""Tools together with a format of the answer: in each API, the answer is a call, or has the format.

The makers' own clients ask a model of random weights, which writes whatever its grammar allows.
"""

import asyncio
from dataclasses import replace
from typing import Any, Literal

import anthropic
import httpx
import httpx2
import numpy as np
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from helpers.scripted import ScriptedServer, openai_client
from llama.prompts import ToolFormat
from llama.prompts.call_format import KNOWN_FORMATS, CallFormat
from llama.prompts.chat import chat_params
from llama.prompts.dialog_format import MetaFormat, PromptOptions
from llama.prompts.tools import Tools
from llama.requests.grammar import GrammarCompiler
from llama.sampling_params import SamplingParams, StructuredOutput
from llama.tokenizer import Tokenizer

SEEDS = range(24)
HOT = 2.0  # both kinds of answers come
QUESTION: Any = [{"role": "user", "content": "How is it in Bern?"}]


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["calm", "wild"]


class Look(BaseModel):
    """Looks out of the window."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Oslo"]


ARGUMENTS: Any = Look.model_json_schema()
LOOSE: Any = {"type": "function", "function": {"name": "Look", "parameters": ARGUMENTS}}
FORMAT: Any = Mood.model_json_schema()
JSON_FORMAT: Any = {"type": "json_schema", "name": "mood", "schema": FORMAT, "strict": True}


@pytest.fixture(scope="module")
def server(llama_for_tools) -> ScriptedServer:
    return ScriptedServer(llama_for_tools)


async def chat(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, Any]:
    answer = await client.chat.completions.parse(
        model="tiny",
        messages=QUESTION,
        seed=seed,
        temperature=HOT,
        tools=[openai.pydantic_function_tool(Look)],
        response_format=Mood,
    )
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    return choice.message.parsed, [call.function.parsed_arguments for call in calls]


async def loose_chat(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, Any]:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        seed=seed,
        temperature=HOT,
        tools=[LOOSE],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": FORMAT}},
    )
    (choice,) = answer.choices
    calls: Any = choice.message.tool_calls or []
    content = choice.message.content
    return content and Mood.model_validate_json(content), [
        Look.model_validate_json(call.function.arguments) for call in calls
    ]


async def response(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, Any]:
    answer = await client.responses.create(
        model="tiny",
        input="How is it in Bern?",
        tools=[{"type": "function", "name": "Look", "parameters": ARGUMENTS, "strict": False}],
        text={"format": JSON_FORMAT},
        extra_body={"seed": seed, "temperature": HOT},
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    text = answer.output_text
    return text and Mood.model_validate_json(text), [
        Look.model_validate_json(call.arguments) for call in calls
    ]


async def message(client: anthropic.AsyncAnthropic, seed: int) -> tuple[Any, Any]:
    answer = await client.messages.create(
        model="tiny",
        max_tokens=1500,
        messages=QUESTION,
        tools=[{"name": "Look", "input_schema": ARGUMENTS}],
        output_config={"format": {"type": "json_schema", "schema": FORMAT}},
        extra_body={"seed": seed, "temperature": HOT},
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    text = "".join(block.text for block in answer.content if block.type == "text")
    return text and Mood.model_validate_json(text), [
        Look.model_validate(call.input) for call in calls
    ]


async def ollama_chat(client: ollama.AsyncClient, seed: int) -> tuple[Any, Any]:
    answer = await client.chat(
        "tiny",
        QUESTION,
        tools=[LOOSE],
        format=FORMAT,
        options={"seed": seed, "temperature": HOT, "top_k": 0, "top_p": 1.0, "num_predict": 200},
    )
    # The client leaves additionalProperties out, so that a call has any number of them.
    if answer.done_reason == "length":
        return "", ["cut off"]
    calls = answer.message.tool_calls or []
    content = answer.message.content
    return content and Mood.model_validate_json(content), [call.function.name for call in calls]


def anthropic_client(connection: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://localhost", api_key="none", http_client=connection, max_retries=0
    )


def ollama_client(connection: Any) -> ollama.AsyncClient:
    client = ollama.AsyncClient(host="http://localhost")
    client._client = connection
    connection.base_url = "http://localhost"
    return client


@pytest.mark.parametrize(
    ("ask", "connect", "http"),
    [
        (chat, openai_client, httpx),
        (loose_chat, openai_client, httpx),
        (response, openai_client, httpx),
        (message, anthropic_client, httpx2),
        (ollama_chat, ollama_client, httpx),
    ],
)
@pytest.mark.parametrize("tool_format", [ToolFormat.LLAMA_3_1, ToolFormat.LLAMA_3_2])
def test_an_answer_is_a_call_or_has_the_format(server, ask, connect, http, tool_format):
    async def all_seeds(client: Any) -> list[tuple[Any, Any]]:
        return await asyncio.gather(*(ask(client, seed) for seed in SEEDS))

    with server.random_model():
        answers = server.call(all_seeds, tool_format, connect=connect, http=http)
    assert all(isinstance(content, Mood) != bool(calls) for content, calls in answers)
    assert {bool(calls) for _, calls in answers} == {True, False}


def test_content_that_has_the_text_of_a_call_is_content(server):
    """The format is known, so that a call within the content is none."""
    text = '{"log": [{"name": "Look", "parameters": {"city": "Bern"}}]}'
    server.says(text)

    async def ask(client: openai.AsyncOpenAI) -> Any:
        log = {"type": "object", "properties": {"log": {"type": "array"}}}
        formatted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": log}}
        return await client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[LOOSE], response_format=formatted
        )

    (choice,) = server.call(ask).choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)


NAMED: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
JSON_CALL = '{"name": "Look", "parameters": {"city": "Bern"}}'
# Answers that begin as a call does, in formats of every kind.
ANSWERS: list[tuple[StructuredOutput, list[str], list[str]]] = [
    (
        StructuredOutput(json=NAMED),
        ['{"name": "Looking"}', '{"name":"Look"}', '{"name": "Look", "parameters": 3}'],
        ['{"mood": 3}', '["a"]', "Hello"],
    ),
    (StructuredOutput(json_object=True), ['{"name": 3}', '{ "a": []}', "{}"], ["[]", "A"]),
    (StructuredOutput(regex=r"\{\"n[a-z]*\": 3\}|\[x\]"), ['{"nose": 3}', "[x]"], ['{"o": 3}']),
    (StructuredOutput(choice=['{"name', "[Look", "{"]), ['{"name', "[Look"], ["[L!", "x"]),
    (StructuredOutput(grammar='start: "{" start "}" | "[L]"'), ["{{[L]}}", "[L]"], ["{}"]),
]


def accepted(matcher: Any, text: str, tokenizer: Any) -> bool:
    """Return whether a text may be written to its end, with all of it given as a draft, too."""
    ids = [*tokenizer.encode(text, bos=False, eos=False), tokenizer.eot_id]
    num_ids = tokenizer.n_words or 0
    bits = np.zeros((len(ids), -(-num_ids // 32)), np.int32)
    one_by_one = []
    for count in range(len(ids)):
        matcher.fill_allowed(ids[:count], 0, ids[count:-1], bits[: len(ids) - count])
        rows = bits[: len(ids) - count]
        allowed = [
            bool(row[t // 32] >> t % 32 & 1) for row, t in zip(rows, ids[count:], strict=True)
        ]
        one_by_one.append(allowed[0])
        if count == 0:
            drafted = allowed
    assert all(drafted) == all(one_by_one)
    return all(one_by_one)


class TemplateLike(MetaFormat):
    """A format whose calls are those of a chat template."""

    def __init__(self, tokenizer: Tokenizer, call_format: CallFormat) -> None:
        super().__init__(tokenizer)
        self._call_format = call_format

    def call_grammar(self, tools: Tools) -> str:
        return self._call_format.grammar(tools, self.tokenizer.special_tokens)


@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS)
@pytest.mark.parametrize("tool_format", ["llama3.1", "llama3.2", *KNOWN_FORMATS])
def test_every_format_goes_with_every_notation_of_calls(
    llama_for_tools, tool_format, answer, good, bad
):
    tokenizer = llama_for_tools.tokenizer
    if tool_format in KNOWN_FORMATS:
        call_format = KNOWN_FORMATS[tool_format]
        call = call_format.open + call_format.before + "Look" + call_format.between
        call += '{"city": "Bern"}' + call_format.after + call_format.close
        dialog_format: MetaFormat = TemplateLike(tokenizer, call_format)
    else:
        call = JSON_CALL if tool_format == "llama3.1" else '[Look(city="Bern")]'
        dialog_format = MetaFormat(tokenizer, ToolFormat(tool_format))
    tools = replace(Tools.of([LOOSE]), has_format=True)
    params = chat_params(
        SamplingParams(structured_output=answer), tools, dialog_format, PromptOptions()
    )
    compiler = GrammarCompiler(tokenizer)

    def is_accepted(text: str) -> bool:
        assert isinstance(params.structured_output, StructuredOutput)
        matcher = compiler.matcher(params.structured_output)
        return accepted(matcher, text, tokenizer)

    assert [is_accepted(text) for text in [call, *good]] == [True] * (1 + len(good))
    assert not any(map(is_accepted, bad))
