"""The bodies of the table of bad requests: for each route, its faults.

A fault is (the wrong fields, `param` of the error or None, words of its message). The other fields
are the good ones of `bad_requests.py`; a value of None removes a good field. `param` is None for
Anthropic's routes, whose errors have no such field: there the message names the field.
"""

from typing import Any

Faults = list[tuple[dict[str, Any], str | None, str]]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"x": schema}}
    return schema


TURNS: Any = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
# Sixty alternative objects that share no property name, so that no small grammar exists.
BOMB = {
    "anyOf": [
        {"type": "object", "properties": {f"{name}{i}": {"type": "string"} for name in "abcdefghij"
                                          for i in range(k, k + 20)}}
        for k in range(60)
    ]
}  # fmt: skip
FIELD = "structured_outputs"


def json_case(schema: Any) -> dict[str, Any]:
    return {FIELD: {"json": schema}}


IN_COMPLETIONS: Faults = [
    ({"unknown": 1}, "unknown", "'unknown' cannot be used in a completion request"),
    ({"topK": 1}, "topK", "'topK' cannot be used"),
    ({"b\u0001é\ud800": 1}, "b\u0001é\ud800", "cannot be used"),
    ({"a" * 100_000: 1}, "a" * 500, "cannot be used"),
    ({f"x{i}": 1 for i in range(5000)}, "x0", "'x0', 'x1', 'x10'"),
    ({"suffix": "y"}, "suffix", "suffix must be ''"),
    ({"messages": TURNS}, "messages", "'messages'"),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice", "'tool_choice', 'tools' cannot be"),
    ({"top_logprobs": 2}, "top_logprobs", "'top_logprobs' cannot be used"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "'prompt_logprobs' cannot be used"),
    ({"continue_final_message": True}, "continue_final_message", "cannot be used"),
    ({"prompt": None}, "prompt", "prompt is needed"),
    ({"prompt": 7}, "prompt", "a list of token ids"),
    ({"prompt": {"a": 1}}, "prompt", "got {'a': 1}"),
    ({"prompt": []}, "prompt", "a list of at least one"),
    ({"prompt": ["x", 1]}, "prompt", "prompt[1] must be a string, got a number"),
    ({"prompt": [[1], "x"]}, "prompt", "prompt[1] must be a list, got a string"),
    ({"prompt": [[]]}, "prompt", "prompt[0] must be a list of at least one"),
    ({"prompt": [2048]}, "prompt", "prompt 0 holds 2048: token ids are 0 to 2047"),
    ({"prompt": [[1], [-1]]}, "prompt", "prompt[1][0]=-1 must be at least 0"),
    ({"prompt": [1, True]}, "prompt", "prompt[1]=True must be a whole number"),
    ({"prompt": [1.0]}, "prompt", "prompt[0]=1.0 must be a whole number"),
    ({"prompt": [1, "x"]}, "prompt", "prompt[1]='x' must be a whole number"),
    ({"prompt": "x" * 3000}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": [7] * 513}, "prompt", "However, prompt has 513 tokens: the prompt is too long"),
    ({"prompt": ["x"] * 257}, "prompt", "prompt has 257 entries: this server takes at most 256"),
    ({"prompt": ["x"] * 2049}, "prompt", "it must have at most 2048"),
    ({"max_tokens": 512}, "max_tokens", "are more than the context of 512 tokens"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens=-1 must be a whole number from 0"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens='5' must be a whole number"),
    ({"max_tokens": True}, "max_tokens", "max_tokens=True must be a whole number"),
    ({"max_completion_tokens": 1}, "max_tokens", "are the same: give one"),
    ({"min_tokens": 3}, "min_tokens", "min_tokens=3 must be a whole number from 0 to 2"),
    ({"temperature": -1}, "temperature", "temperature=-1 must be a number from 0 to 100"),
    ({"temperature": 1e9}, "temperature", "from 0 to 100"),
    ({"temperature": [1]}, "temperature", "must be a number"),
    ({"top_p": 1.01}, "top_p", "from 0 to 1"),
    ({"top_k": -2}, "top_k", "top_k=-2"),
    ({"min_p": "0"}, "min_p", "min_p='0'"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": False}, "frequency_penalty", "must be a number"),
    ({"seed": -(2**63) - 1}, "seed", "must be at least -9223372036854775808"),
    ({"seed": 2**63}, "seed", "must be at most 9223372036854775807"),
    ({"n": 65}, "n", "n=65"),
    ({"n": 0}, "n", "n=0"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of=2 must be a whole number from 3 to 64"),
    ({"logprobs": True}, "logprobs", "logprobs=True must be a whole number"),
    ({"logprobs": 101}, "logprobs", "from 0 to 100"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias must be an object, got a list"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias.a: keys must be token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"2048": 1}}, "logit_bias", "this vocabulary has ids from 0 to 2047"),
    ({"logit_bias": {"7": 101}}, "logit_bias", "logit_bias.7=101 must be"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"stop": "y" * 5000}, "stop", "must have 1 to 256 characters, not 5000"),
    ({"stop": [""]}, "stop", "stop[0]"),
    ({"stop": ["a", 7]}, "stop", "stop[1]=7 must be a string"),
    ({"stop": {"a": 1}}, "stop", "stop={'a': 1} must be a string"),
    ({"stop": ["a"] * 33}, "stop", "it must have at most 32"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "stop_token_ids has the token id 2048"),
    ({"stop_token_ids": 7}, "stop_token_ids", "must be a list"),
    ({"bad_words": ["a"] * 257}, "bad_words", "it must have at most 256"),
    ({"cache_salt": "x" * 513}, "cache_salt", "must have 1 to 512 characters, not 513"),
    ({"ignore_eos": 1}, "ignore_eos", "ignore_eos must be true or false, got a"),
    ({"echo": "yes"}, "echo", "echo must be true or false, got a string"),
    ({"stream": 0}, "stream", "stream must be true or false, got a number"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options", "stream_options: 'a' cannot"),
    ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
    ({"model": 3}, "model", "model must be a string, got a number"),
    ({"user": {}}, "user", "user must be a string"),
]  # fmt: skip

OF_STRUCTURED_OUTPUTS: Faults = [
    ({"response_format": "json"}, "response_format", "response_format must have the type text"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "an object with a schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format",
     "response_format.json_schema.schema=3 must be a JSON schema"),
    ({FIELD: 1}, FIELD, "structured_outputs must be an object"),
    ({FIELD: {}}, FIELD, "got none"),
    ({FIELD: {"regexp": "a"}}, FIELD, "structured_outputs: 'regexp' cannot"),
    ({FIELD: {"regex": "a", "choice": ["b"]}}, FIELD, "structured_outputs must have one of"),
    ({FIELD: {"regex": "a"}, "response_format": {"type": "text"}}, "response_format", "both given"),
    ({FIELD: {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "ignore_eos and min_tokens cannot"),
    ({FIELD: {"regex": "["}}, FIELD, "regex parse error: unclosed character class"),
    ({FIELD: {"regex": "(?=a)b"}}, FIELD, "look-around"),
    ({FIELD: {"regex": r"(a)\1"}}, FIELD, "backreferences are not supported"),
    ({FIELD: {"regex": r"[^\s\S]"}}, FIELD, "there is no text that it allows"),
    ({FIELD: {"regex": "(a{1000}){1000}"}}, FIELD, "lexer error: too many"),
    ({FIELD: {"regex": "a" * 100_001}}, FIELD, "1 to 100000 characters"),
    ({FIELD: {"regex": "\ud800"}}, FIELD, "surrogates not allowed"),
    ({FIELD: {"choice": "yes"}}, FIELD, "structured_outputs.choice must be a list"),
    ({FIELD: {"choice": []}}, FIELD, "1 to 1024 entries"),
    ({FIELD: {"choice": ["a"] * 1025}}, FIELD, "1 to 1024 entries"),
    ({FIELD: {"grammar": "start: other"}}, FIELD, "unknown name"),
    ({FIELD: {"grammar": "start: ("}}, FIELD, "structured_outputs.grammar cannot be used"),
    ({FIELD: {"grammar": 'start: "a" start'}}, FIELD, "structured_outputs.grammar cannot be used"),
    (json_case("{"), FIELD, "structured_outputs.json is not JSON"),
    (json_case(False), FIELD, "the schema false allows no answer"),
    (json_case({"type": "banana"}), FIELD, "Invalid type: banana"),
    (json_case({"not": {}}), FIELD, "Unimplemented keys"),
    (json_case({"enum": []}), FIELD, "Unsatisfiable schema"),
    (json_case({"type": "string", "pattern": "("}), FIELD, "regex parse error: unclosed group"),
    (json_case({"minimum": 5, "maximum": 1, "type": "integer"}), FIELD, "greater than maximum"),
    (json_case({"type": "array", "minItems": -1}), FIELD, "'minItems'"),
    (json_case({"$ref": "http://127.0.0.1/x"}), FIELD, "does not fetch"),
    (json_case({"$ref": "file:///etc/hostname"}), FIELD, "does not fetch"),
    (json_case({"$ref": "#/nowhere"}), FIELD, "does not exist"),
    (json_case({"$ref": "#"}), FIELD, "there is no text that it allows"),
    (json_case(nested(200)), FIELD, "structured_outputs.json cannot be used"),
    (json_case(BOMB), FIELD, "structured_outputs.json"),
]  # fmt: skip

IN_A_CHAT: Faults = [
    ({"prompt": "x"}, "prompt", "'prompt' cannot be used in a chat request"),
    ({"echo": True}, "echo", "echo must be False"),
    ({"messages": None}, "messages", "messages is needed"),
    ({"messages": "Hello"}, "messages", "messages must be a list, got a string"),
    ({"messages": []}, "messages", "messages must be a list of at least one"),
    ({"messages": [7]}, "messages", "messages[0] must be an object"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", "role must be one of 'system',"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages", "role must be one of"),
    ({"messages": [{"content": "x"}]}, "messages", "role is needed"),
    ({"messages": [*TURNS, {"role": "user"}]}, "messages", "messages[1].content is needed"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages", "messages[0].content must"),
    ({"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages", "['audio']"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages", "messages[0].content[0] is an image, and the model reads text alone"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
     "messages", "parts of type text"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", "text"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages", "parts of type text"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages",
     "maximum context length is 512 tokens"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": {}}]}]}, "messages", "need the"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages", "a list of calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages",
     "a tool call must be"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": NaN}'}}]}]}, "messages", "number"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{]"}}]}]}, "messages", "arguments as a dict"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '"{"'}}]}]}, "messages", "got a string"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 20_000}}]}]}, "messages", "RecursionError"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": nested(50)}}]}]}, "messages", "more than 64 deep"),
    ({"logprobs": 2}, "logprobs", "logprobs must be true or false, got a"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "must be a whole number"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs", "top_logprobs=101"),
    ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens", "from 0 to"),
    ({"max_tokens": None, "max_completion_tokens": 512}, "max_completion_tokens", "512 tokens"),
    ({"prediction": "x"}, "prediction", "must be an object"),
    ({"prediction": {"type": "content"}}, "prediction", "prediction.content is needed"),
    ({"continue_final_message": True}, "continue_final_message", "needs add_generation_prompt"),
    ({"add_generation_prompt": 0}, "add_generation_prompt", "must be true or false"),
    (json_case({"$ref": "https://json-schema.org/x"}), FIELD, "does not fetch"),
]  # fmt: skip

WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "weather"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def strict(schema: Any) -> dict[str, Any]:
    return tool(strict=True, parameters={"properties": {"a": schema}})


OF_TOOLS: Faults = [
    ({"tools": 1}, "tools", "tools must be a list"),
    ({"tools": [1]}, "tools", "tools[0] must be an object"),
    ({"tools": [{"type": "custom"}]}, "tools", "tools[0].type must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is needed"),
    ({"tools": [{**WEATHER, "cache_control": {}}]}, "tools", "tools[0]: 'cache_control'"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1] has the name 'weather' of an earlier tool"),
    ({"tools": [WEATHER] * 129}, "tools", "it must have at most 128"),
    (tool(name="a b"), "tools", "tools[0].function.name must be 1 to 128"),
    (tool(name=None), "tools", "tools[0].function.name"),
    (tool(x=1), "tools", "tools[0].function: 'x' cannot be used"),
    (tool(description=7), "tools", "tools[0].function.description must be a string, got a number"),
    (tool(strict="yes"), "tools", "tools[0].function.strict must be true or false, got a string"),
    (tool(parameters=[]), "tools", "tools[0].function.parameters must be an object, got a list"),
    (tool(parameters={"type": "string"}), "tools", "parameters.type must be 'object'"),
    (tool(parameters={"properties": []}), "tools", "parameters.properties must be an object"),
    (tool(parameters={"required": "a"}), "tools", "parameters.required must be a list"),
    (tool(parameters=nested(400)), "tools", "nested more than 64 deep"),
    (strict({"$ref": "http://example.com/a.json"}), "tools", "does not fetch"),
    (strict({"type": "banana"}), "tools", "Invalid type: banana"),
    (strict({"pattern": "("}), "tools", "cannot be used"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools to call"),
    ({"tools": [], "tool_choice": FORCED}, "tool_choice", "is not among the tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not among"),
    ({"tool_choice": {**FORCED, "more": 1}}, "tool_choice", "must be {'type': 'function'"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto', 'required'"),
    ({"tool_choice": ["auto"]}, "tool_choice", "'none', 'auto', 'required'"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    ({"messages": [{"role": "system", "content": "x"}]}, "tools", "a first message of the user"),
]  # fmt: skip

OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
IN_RESPONSES: Faults = [
    ({"input": None}, "input", "input is needed"),
    ({"input": []}, "input", "input must be a list of at least one"),
    ({"input": [7]}, "input", "input[0] must be an object"),
    ({"input": "x" * 3000}, "input", "maximum context length is 512 tokens"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
    ({"input": [{"role": "user"}]}, "input", "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input", "input[0].content must be a list of"),
    ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input", "input[0]: 'y' cannot"),
    ({"input": [{"role": "user", "content": "x", "id": 7}]}, "input", "input[0].id"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one message"),
    ({"input": [{"type": "item_reference"}]}, "input", "got {'type': 'item_reference'}"),
    ({"input": [{"type": ["message"]}]}, "input", "got {'type': ['message']}"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
     "input[0].content[0] is an image, and the model reads text alone"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "'input_file'"),
    ({"input": [OUTPUT]}, "input", "input[0].call_id names no function_call"),
    ({"input": [{**OUTPUT, "call_id": None}]}, "input", "input[0].call_id names no function"),
    ({"input": [{**CALLED, "arguments": {}}]}, "input", "input[0].arguments"),
    ({"instructions": 7}, "instructions", "instructions must be a string"),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens=-1"),
    ({"temperature": "1"}, "temperature", "temperature='1'"),
    ({"top_p": 2}, "top_p", "top_p=2"),
    ({"stream": 1}, "stream", "stream must be"),
    ({"store": True}, "store", "no stored state"),
    ({"background": True}, "background", "no stored state"),
    ({"previous_response_id": "x"}, "previous_response_id", "no stored state"),
    ({"conversation": "x"}, "conversation", "no stored state"),
    ({"truncation": "auto"}, "truncation", "truncation must be 'disabled'"),
    ({"reasoning": "high"}, "reasoning", "reasoning must be an object"),
    ({"include": ["file_search_call.results"]}, "include", "include[0] must be"),
    ({"top_logprobs": 21}, "top_logprobs", "must be at most 20"),
    ({"max_tool_calls": 3}, "max_tool_calls", "'max_tool_calls' cannot be used"),
    ({"max_tokens": 3}, "max_tokens", "'max_tokens' cannot be used"),
    ({"maxTokens": 3}, "maxTokens", "'maxTokens' cannot be used"),
    ({"metadata": 1}, "metadata", "metadata must be an object"),
    ({"user": 1}, "user", "user must be a string"),
    ({"text": {"verbosity": 1}}, "text", "text.verbosity"),
    ({"text": {"\u0001" * 5000: 1}}, "text", "text: '\\x01"),
    ({"text": {"format": {"type": "x"}}}, "text", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "text",
     "text.format.schema cannot be used"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
    ({"tools": [{"type": "function", "name": "f g"}]}, "tools", "tools[0].name"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name"),
    ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
]  # fmt: skip


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


BLOCK = {"type": "text", "text": "x"}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
INPUT = {"name": "weather", "input_schema": SCHEMA}
IN_MESSAGES: Faults = [
    ({"max_tokens": None}, None, "max_tokens is needed"),
    ({"max_tokens": "5"}, None, "max_tokens='5'"),
    ({"messages": None}, None, "messages is needed"),
    ({"messages": []}, None, "messages must be a list of at least one"),
    ({"messages": [7]}, None, "messages[0] must be an object"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, None, "prompt is too long: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, None, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, None, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, None, "messages[0]: 'name'"),
    (user(BLOCK, {"type": "image", "source": {}}), None,
     "messages[0].content[1] is an image, and the model reads text alone"),
    (user({"type": "tool_result", "tool_use_id": "b", "content": [{"type": "image"}]}), None,
     "messages[0].content[0].content[0] is an image"),
    (user(BLOCK, {"type": "document"}), None, "messages[0].content[1].type must"),
    (user({"type": "text"}), None, "messages[0].content[0].text"),
    (user({**BLOCK, "other": 1}), None, "messages[0].content[0]: 'other'"),
    (user({**BLOCK, "cache_control": 1}), None, "messages[0].content[0].cache_control"),
    (user({"type": "tool_result", "tool_use_id": "b"}), None, "messages[0].content[0].tool_use_id"),
    (user({"type": "tool_result"}), None, "tool_use_id is needed"),
    ({"messages": [*TURNS, USED]}, None, "messages[1]: the results of its tool_use"),
    ({"messages": [*TURNS, {"role": "assistant", "content": "x "}]}, None,
     "messages[1]: the begin"),
    ({"system": 7}, None, "system must be"),
    ({"system": [{"type": "image"}]}, None, "system[0] is an image"),
    ({"system": [{"type": "document"}]}, None, "system[0]"),
    ({"temperature": -1}, None, "temperature=-1"),
    ({"top_p": 2}, None, "top_p=2"),
    ({"top_k": 1.5}, None, "top_k=1.5"),
    ({"stop_sequences": "x"}, None, "stop_sequences must be a list"),
    ({"stop_sequences": [""]}, None, "stop_sequences[0]"),
    ({"stream": 1}, None, "stream must be"),
    ({"thinking": True}, None, "thinking must be an object"),
    ({"metadata": 1}, None, "metadata must be"),
    ({"service_tier": "flex"}, None, "service_tier must be"),
    ({"container": "x"}, None, "'container'"),
    ({"n": 2}, None, "n=2 must be at most 1"),
    ({"output_config": {"effort": 2}}, None, "output_config.effort"),
    ({"context_management": []}, None, "context_management must be an object"),
    (user({"type": "thinking", "thinking": "x"}), None, ", got 'thinking'"),
    ({"output_config": {"\u0001" * 5000: 1}}, None, "output_config: '\\x01"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, None,
     "output_config.format.schema cannot be used"),
    ({"output_config": {"format": {"type": "text"}}}, None, "output_config.format.type must be"),
    ({"tools": 1}, None, "tools must be a list"),
    ({"tools": [{"name": "f"}]}, None, "tools[0].input_schema is needed"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, None, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, None, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, None, "tools[0].type"),
    ({"tools": [INPUT], "tool_choice": {"type": "f"}}, None, "tool_choice.type"),
    ({"tools": [INPUT], "tool_choice": {"type": "tool"}}, None, "tool_choice.name is needed"),
    ({"tools": [INPUT], "tool_choice": {"type": "tool", "name": "g"}}, None, "tool_choice names"),
    ({"tool_choice": {"type": "any"}}, None, "there are no tools to call"),
    ({"tool_choice": "auto"}, None, "tool_choice must be an object"),
]  # fmt: skip
IN_A_COUNT: Faults = [
    ({"max_tokens": 1}, None, "'max_tokens' cannot be used"),
    ({"messages": [{"role": "king", "content": "x"}]}, None, "messages[0].role"),
]  # fmt: skip

OF_A_TEXT: Faults = [
    ({}, "prompt", "prompt is needed"),
    ({"prompt": ["x"]}, "prompt", "got a list"),
    ({"prompt": "x", "Other": 7}, "Other", "'Other' cannot be used in /tokenize"),
    ({"prompt": "x", "messages": TURNS}, "prompt", "'prompt' cannot be used"),
    ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "must be true or false"),
    ({"messages": []}, "messages", "messages must be a list of at least one"),
    ({"messages": TURNS, "continue_final_message": 1}, "continue_final_message", "true or false"),
    ({"messages": TURNS, "continue_final_message": True}, "continue_final_message", "add_gener"),
    ({"messages": TURNS, "tools": 7}, "tools", "tools must be a list"),
]  # fmt: skip
IN_EMBEDDINGS: Faults = [
    ({"input": None}, "input", "input is needed"),
    ({"input": []}, "input", "a list of at least one"),
    ({"input": ["x", [1]]}, "input", "input[1] must be a string, got a list"),
    ({"input": [[]]}, "input", "input[0] must be a list of at least one"),
    ({"input": [2048]}, "input", "token ids are 0 to 2047"),
    ({"input": "x" * 3000}, "input", "maximum context length is 512 tokens"),
    ({"encoding_format": "int8"}, "encoding_format", "encoding_format must be 'float' or 'base64'"),
    ({"dimensions": 0}, "dimensions", "dimensions=0 must be"),
    ({"dimensions": 257}, "dimensions", "dimensions=257 must be a whole number from 1 to 256"),
    ({"pooling": None}, "pooling", "pooling is not given"),
    ({"pooling": "max"}, "pooling", "pooling must be"),
    ({"prompt_name": "query"}, "prompt_name", "this model has these prompts: none"),
    ({"prompt": "x", "prompt_name": "query"}, "prompt", "both given"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens=-2"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "=0 must be a whole number from 1"),
    ({"messages": TURNS}, "messages", "'messages' cannot be used in /v1/embeddings"),
]  # fmt: skip
OF_IDS: Faults = [
    ({}, "tokens", "tokens is needed"),
    ({"tokens": "x"}, "tokens", "tokens must be a list"),
    ({"tokens": [1.0]}, "tokens", "tokens[0]=1.0 must be"),
    ({"tokens": [-1]}, "tokens", "tokens[0]=-1 must be at least 0"),
    ({"tokens": [2048]}, "tokens", "id 2048"),
    ({"tokens": [1], "text": "x"}, "text", "'text' cannot be used"),
]  # fmt: skip
