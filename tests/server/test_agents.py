"""Requests of coding agents: Claude Code 2.1.197, Codex CLI 0.169 and opencode 1.18.

Each field is as they sent it in a turn with a tool, its result and the answer; the texts are not
theirs. The real app and the makers' own clients are used, with a model that follows a script. The
prompt must be that of the same chat with functions.
"""

import json
from typing import Any

import httpx2
import openai
import pytest

from helpers.scripted import ScriptedServer
from llama.prompts import encode_chat

ASKED = "Please count the files"
SCHEMA: Any = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command"}},
    "required": ["command"],
    "additionalProperties": False,
}
HINT = {"type": "ephemeral"}
CALLED = {"command": "ls | wc -l"}


def chat_tool(name: str, parameters: Any, description: str = "Runs it.") -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def called(name: str, arguments: Any, result: str) -> list[dict[str, Any]]:
    """Return a call and its result, as messages of a chat."""
    call = {"id": "a", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": result},
    ]


@pytest.fixture(scope="module")
def scripted(llama_for_tools) -> ScriptedServer:
    return ScriptedServer(llama_for_tools)


CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "system": [
        {"type": "text", "text": "x-header: version=1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {**HINT, "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Today</reminder>"},
                {"type": "text", "text": ASKED, "cache_control": HINT},
            ],
        },
        {"role": "system", "content": "Agents: none."},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs it.", "input_schema": SCHEMA},
        {"name": "Fetch", "description": "Gets it.", "input_schema": SCHEMA, "defer_loading": True},
    ],
    "metadata": {"user_id": '{"device_id":"1","account_uuid":"","session_id":"2"}'},
    "max_tokens": 32000,
    "thinking": {"budget_tokens": 31999, "type": "enabled"},
    "context_management": {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": "all"},
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3},
             "trigger": {"type": "input_tokens", "value": 100_000}},
        ]
    },
    "output_config": {"effort": "low"},
    "betas": ["claude-code-20250219", "context-management-2025-06-27"],
}  # fmt: skip


@pytest.mark.parametrize("found", ["3", [{"type": "tool_reference", "tool_name": "Fetch"}]])
def test_a_turn_of_claude_code(scripted, found):
    """A turn of Claude Code gives the prompt of the chat.

    `found` is what the tool returned: text, or a tool that a search has found.
    """
    import anthropic

    def connect(connection: Any) -> Any:
        return anthropic.AsyncAnthropic(
            base_url="http://localhost", auth_token="none", http_client=connection, max_retries=0
        )

    async def turn(client: Any) -> list[Any]:
        messages, answers = list(CLAUDE_CODE["messages"]), []
        for text in ('I look. {"name": "Bash", "parameters": {"command": "ls | wc -l"}}', "Three."):
            scripted.says(text)
            body = {**CLAUDE_CODE, "messages": messages}
            async with client.beta.messages.stream(**body) as stream:
                answers.append(await stream.get_final_message())
            said = answers[-1].to_dict()["content"]
            ids = [block["id"] for block in said if block["type"] == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": ids[0] if ids else "", "content": found}
            messages += [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, *said]},
                {"role": "user", "content": [{**result, "is_error": False, "cache_control": HINT}]},
            ]
        return answers

    first, second = scripted.call(turn, connect=connect, http=httpx2)
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.content[1].name, first.content[1].input) == ("Bash", CALLED)
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "Three."
    chat = [
        {"role": "system", "content": "x-header: version=1;\nYou are an agent."},
        {"role": "user", "content": f"<reminder>Today</reminder>\n{ASKED}"},
        {"role": "system", "content": "Agents: none."},
        *called("Bash", CALLED, "3" if found == "3" else "Fetch"),
    ]
    chat[3]["content"] = "I look. "
    tools = [chat_tool("Bash", SCHEMA), chat_tool("Fetch", SCHEMA, "Gets it.")]
    usage = second.usage
    wanted = len(encode_chat(scripted.llama.tokenizer, chat, tools))
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted


PATCH = "*** Begin Patch\n+hello\n*** End Patch"
GRAMMAR = 'start: "*** Begin Patch" /(.|\\n)*/'
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TARGET = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec", "description": "Runs it.", "strict": False,
     "parameters": SCHEMA},
    {"type": "namespace", "name": "agents", "description": "Tools for agents.", "tools": [
        {"type": "function", "name": "close", "description": "Closes it.", "strict": False,
         "defer_loading": True, "parameters": TARGET}]},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
    {"type": "local_shell"},
]  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "gpt-5.5",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a203dd",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"turn_id": "1", "x-codex-window-id": "1:0"}},
}
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
    },
    "required": ["command"],
}
SHOWN = [  # the tools shown to the model
    chat_tool("exec", SCHEMA),
    chat_tool("agents.close", TARGET, "Closes it."),
    chat_tool("apply_patch", INPUT, f"Edits files.\n{GRAMMAR}"),
    chat_tool("local_shell", SHELL, "Run a program with its arguments on the user's machine."),
]
# The call that the model writes, its item, and the events that carry its input.
CALLS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("exec", CALLED,
     {"type": "function_call", "name": "exec", "arguments": '{"command": "ls | wc -l"}'},
     ["function_call_arguments.delta", "function_call_arguments.done"]),
    ("agents.close", {"target": "x"},
     {"type": "function_call", "name": "close", "namespace": "agents",
      "arguments": '{"target": "x"}'},
     ["function_call_arguments.delta", "function_call_arguments.done"]),
    ("apply_patch", {"input": PATCH},
     {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
     ["custom_tool_call_input.delta", "custom_tool_call_input.done"]),
    ("local_shell", {"command": ["ls", "-l"]},
     {"type": "local_shell_call",
      "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}}, []),
]  # fmt: skip


@pytest.mark.parametrize("added", [False, True])  # the tools come as an item of the input
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_turn_of_codex(scripted, number, added):
    """A turn of Codex gives the prompt of the chat, with the first tool and the called one."""
    name, arguments, item, events = CALLS[number]
    tools = [CODEX_TOOLS[i] for i in sorted({0, number})]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED}]}
    developer = {"type": "message", "id": "msg_1", "role": "developer", "content": [
        {"type": "input_text", "text": "You are an agent."},
        {"type": "input_text", "text": "Be short."}]}  # fmt: skip
    head: list[Any] = [developer, user]
    if added:
        head.insert(0, {"type": "additional_tools", "id": "at_1", "role": "developer",
                        "tools": tools})  # fmt: skip
    fields = {**CODEX, "tools": [] if added else tools}
    written = json.dumps({"name": name, "parameters": arguments})

    async def turn(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        scripted.says(written)
        stream = await client.responses.create(**fields, input=head, stream=True)
        seen = [event async for event in stream]
        (done,) = [each.item for each in seen if each.type == "response.output_item.done"]
        dialog = [
            *head,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
            done.to_dict(),
            {
                "type": f"{item['type']}_output",
                "id": "out_1",
                "call_id": done.call_id,
                "output": "3",
            },
        ]
        scripted.says("Three.")
        return seen, await client.responses.create(**fields, input=dialog)

    seen, second = scripted.call(turn)
    names = [each.type.removeprefix("response.") for each in seen]
    given = [each for each in dict.fromkeys(names) if "arguments" in each or "_input" in each]
    assert given == events
    (done,) = seen[-1].response.output
    assert {key: done.to_dict()[key] for key in item} == item
    assert type(done).__name__ in ("ResponseFunctionToolCall", "ResponseCustomToolCallItem",
                                   "ResponseCustomToolCall", "LocalShellCall")  # fmt: skip
    if events:
        key = "input" if item["type"] == "custom_tool_call" else "arguments"
        deltas = "".join(each.delta for each in seen if each.type == f"response.{events[0]}")
        assert deltas == item[key]
    assert second.output_text == "Three."
    chat = [
        {"role": "system", "content": "You are an agent.\nBe short."},
        {"role": "user", "content": ASKED},
        *called(name, arguments, "3"),
    ]
    shown = [SHOWN[i] for i in sorted({0, number})]
    ids = encode_chat(scripted.llama.tokenizer, chat, shown)
    assert second.usage.input_tokens == len(ids)


def test_a_turn_of_opencode(scripted):
    fields: Any = {"model": "tiny", "max_tokens": 300, "tool_choice": "auto"}
    fields |= {"tools": [chat_tool("bash", SCHEMA)], "stream_options": {"include_usage": True}}
    dialog: list[Any] = [{"role": "system", "content": "x"}, {"role": "user", "content": ASKED}]

    async def turn(client: openai.AsyncOpenAI) -> list[Any]:
        scripted.says(json.dumps({"name": "bash", "parameters": CALLED}))
        async with client.chat.completions.stream(**fields, messages=dialog) as stream:
            first = await stream.get_final_completion()
        (call,) = first.choices[0].message.tool_calls or []
        function = {"name": call.function.name, "arguments": call.function.arguments}
        messages = [
            *dialog,
            {"role": "assistant", "content": "", "reasoning_content": "Hm",
             "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": "3\n"},
        ]  # fmt: skip
        scripted.says("Three.")
        async with client.chat.completions.stream(**fields, messages=messages) as stream:
            return [first, await stream.get_final_completion()]

    first, second = scripted.call(turn)
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "Three."
    chat = [*dialog, *called("bash", CALLED, "3\n")]
    ids = encode_chat(scripted.llama.tokenizer, chat, fields["tools"])
    assert second.usage.prompt_tokens == len(ids)


def test_what_only_a_vendor_can_do_is_an_error(scripted):
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"tools\[4\].type must be one of"):
            tools: Any = [*CODEX_TOOLS, {"type": "web_search", "external_web_access": True}]
            await client.responses.create(**{**CODEX, "tools": tools}, input="x")

    scripted.call(ask)
