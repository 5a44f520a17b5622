"""Chat templates of model files as formats of dialogs: ids are those of transformers."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_templates import (
    CHATML,
    HERMES,
    LLAMA,
    LLAMA_3_1,
    LLAMA_3_2,
    R1,
    TEMPLATES,
    TULU,
)
from helpers.fine_tunes import KINDS, make_model
from helpers.marked_vocabularies import tokenizers_of
from llama import Llama
from llama.checkpoint.find import find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.common.checks import FieldError
from llama.loading.dialog_format import find_dialog_format
from llama.prompts.dialog_format import MetaFormat, MissingFormat, PromptOptions
from llama.prompts.parser import CallArguments, CallStart
from llama.prompts.template import jinja_template
from llama.prompts.template_format import TemplateFormat, choose_format
from llama.prompts.tools import ToolFormat, Tools

UNPROMPTED = PromptOptions(add_generation_prompt=False)
CONTINUED = PromptOptions(add_generation_prompt=False, continue_final_message=True)


@functools.cache
def format_of(kind: str, source: str) -> TemplateFormat:
    return TemplateFormat(tokenizers_of(kind)[1], {"default": source})


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é", None]}}}
DIALOGS: list[list[dict[str, Any]]] = [
    [user("Hello.")],
    [{"role": "system", "content": " Be brief. "}, user("Hi\n")],
    [user("One"), assistant("Two"), user("Three"), assistant("Four")],
    [user("One"), assistant("<think>\nWell.\n</think>\n\nTwo"), user("Three")],
    [user("One"), assistant("Well. </think> Two"), user("Three")],
    [user("?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "1"}, user("And?")],
    [user("?"), assistant("I look.", tool_calls=[CALL, CALL]), {"role": "tool", "content": "1"}],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chatml", "r1", "hermes", "llama", "tulu"])
def test_ids_are_those_of_transformers(kind, name):
    source = TEMPLATES[name]
    theirs, _ = tokenizers_of(kind)
    ours = format_of(kind, source)
    count = 0
    for dialog in DIALOGS:
        has_calls = any("tool_calls" in message for message in dialog)
        if has_calls and ours.traits.call_style is None:
            continue
        for tools in (None, [TOOL]) if ours.has_tools else (None,):
            for options in (PromptOptions(), UNPROMPTED):
                prompted = options.add_generation_prompt
                wanted = theirs.apply_chat_template(
                    dialog, tools, chat_template=source, add_generation_prompt=prompted
                )
                assert ours.encode(dialog, tools, options) == wanted["input_ids"], dialog
                count += 1
    assert count >= 10


@pytest.mark.parametrize("content", ["Once upon", "Once upon a ", "Once\n"])
@pytest.mark.parametrize("name", ["chatml", "r1", "llama"])
def test_the_last_message_is_left_open_as_in_transformers(name, content):
    theirs, _ = tokenizers_of("hermes")
    dialog = [user("Tell."), assistant(content)]
    wanted = theirs.apply_chat_template(
        dialog, chat_template=TEMPLATES[name], continue_final_message=True
    )
    assert (
        format_of("hermes", TEMPLATES[name]).encode(dialog, None, CONTINUED) == wanted["input_ids"]
    )


def test_an_open_message_keeps_its_space_where_that_is_asked_for():
    options = PromptOptions(False, True, keeps_space=True)
    ours = format_of("meta", LLAMA)
    ids = ours.encode([user("Tell."), assistant("Once  ")], None, options)
    stripped = ours.encode([user("Tell."), assistant("Once  ")], None, CONTINUED)
    assert ours.tokenizer.decode(stripped).endswith("Once") and ids[: len(stripped)] == stripped


def test_roles_parts_and_results_are_given_as_templates_know_them():
    ours = format_of("hermes", HERMES)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = {"role": "ipython", "content": {"x": [True, "é"]}}
    dialog = [{"role": "developer", "content": parts}, user(parts), assistant("c"), result]
    plain = [
        {"role": "system", "content": "a\nb"},
        user("a\nb"),
        assistant("c"),
        {"role": "tool", "content": '{"x": [true, "é"]}'},
    ]
    assert ours.encode(dialog) == ours.encode(plain)


REASONING = """{% for m in messages %}{{ m.reasoning_content or m.thinking or '-' }}{{ m.content }}\
{% endfor %}"""


def test_a_template_gets_the_reasoning_of_earlier_answers():
    ours = format_of("tulu", REASONING)
    for name in ("reasoning_content", "reasoning"):
        ids = ours.encode([user("a"), assistant("b", **{name: "Hm."})])
        assert ours.tokenizer.decode(ids) == "-aHm.b"


SWITCHES = "{{ enable_thinking }}, {{ thinking }}, {{ reasoning_effort | default('-') }}"


def test_a_template_gets_the_switch_and_the_effort_of_reasoning_if_it_reads_them():
    ours = format_of("tulu", SWITCHES)
    options = PromptOptions(enable_thinking=False, reasoning_effort="low", thinking_budget=3)
    assert ours.tokenizer.decode(ours.encode([user("a")], None, options)) == "False, False, low"
    assert ours.tokenizer.decode(ours.encode([user("a")])) == ", , -"
    both = PromptOptions(enable_thinking=False, template_kwargs={"thinking": "x"})
    assert ours.tokenizer.decode(ours.encode([user("a")], None, both)) == "False, x, -"
    other = format_of("tulu", TULU)
    assert other.encode([user("a")], None, options) == other.encode([user("a")])


@pytest.mark.parametrize(
    ("kind", "source", "ids", "strings"),
    [
        ("chatml", CHATML, ["<|im_end|>"], ()),
        ("meta", CHATML, [], ("<|im_end|>",)),
        ("r1", R1, ["<｜end▁of▁sentence｜>"], ()),
        ("tulu", TULU, ["<|end_of_text|>"], ()),
        ("meta", LLAMA, ["<|eot_id|>"], ()),
        ("meta", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [], ()),
        ("meta", "{{ messages[0].content }}", [], ()),
    ],
)
def test_what_stands_behind_an_answer_ends_answers(kind, source, ids, strings):
    ours = format_of(kind, source)
    names = ours.tokenizer.special_tokens
    assert ours.traits.stop_ids == {names[name] for name in ids}
    assert ours.stop_strings == strings


@pytest.mark.parametrize(
    ("kind", "source", "parts"),
    [
        ("hermes", HERMES, ["begins with <|begin_of_text|>", "with <|im_end|>", "shows tools"]),
        ("chatml", CHATML, ["no begin-of-sequence token", "has no tools"]),
        ("tulu", TULU, ["roles are plain text: contents can imitate them"]),
        ("tulu", "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", [
            "<|begin_of_text|> 2 times", "no mark", "no header for an answer"]),
    ],
)  # fmt: skip
def test_one_line_describes_a_format(kind, source, parts):
    line = format_of(kind, source).describe()
    assert "\n" not in line and all(part in line for part in parts), line


TEXT_CALLS = """{% for m in messages %}{% if m.tool_calls is defined %}{% if m.content is none %}\
{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endif %}\
{% else %}{{ m.content }}{% endif %}{% endfor %}"""
NEVER_NONE = """{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% endif %}\
{% for c in m.tool_calls or [] %}{{ c.function.name }}{# #}{{ c.function.arguments | tojson }}\
{% endfor %}{% endfor %}"""
ABSENT = """{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% else %}\
{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (TEXT_CALLS, '?f{"a": [1, "é", null]}'),
        (ABSENT, '?{"name": "f", "arguments": {"a": [1, "é", null]}}'),
        (NEVER_NONE, '?f{"a": [1, "é", null]}'),
        ("{{ messages[-1] | tojson }}", None),
    ],
)
def test_calls_are_given_as_the_template_renders_them(source, text):
    ours = format_of("tulu", source)
    ids = ours.encode([user("?"), assistant(None, tool_calls=[CALL])])
    if text is not None:
        assert ours.tokenizer.decode(ids) == text


@pytest.mark.parametrize(("kind", "source"), [("hermes", HERMES), ("r1", R1)])
def test_a_template_s_own_calls_are_read_from_an_answer(kind, source):
    """What the template writes for a call is an answer with this call to the parser."""
    ours = format_of(kind, source)
    tools = Tools.of([TOOL])
    functions = [{"name": "f", "arguments": {"a": value}} for value in (1, "é")]
    calls = [{"type": "function", "function": function} for function in functions]
    written = ours.tokenizer.decode(
        ours.encode([user("?"), assistant("", tool_calls=calls)], None, UNPROMPTED)
    )
    answer = written.partition("?")[2].partition("assistant" if kind == "hermes" else "｜>")[2]
    parser = ours.call_parser(tools)
    events = [*parser.push(answer), *parser.flush()]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    assert next(event.name for event in events if isinstance(event, CallStart)) == "f"
    assert "".join(arguments).startswith('{"a": 1}')
    assert "start:" in ours.call_grammar(tools)


def test_a_template_without_calls_forces_none():
    ours = format_of("chatml", CHATML)
    assert ours.call_format is None
    with pytest.raises(ValueError, match="does not show how calls are written"):
        ours.call_grammar(Tools.of([TOOL]))


def chosen(source: str, tool_format: ToolFormat = ToolFormat.LLAMA_3_1) -> Any:
    meta = MetaFormat(tokenizers_of("meta")[1], tool_format)
    return choose_format({"default": source}, meta)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_meta_s_format_is_chosen_for_the_templates_that_write_it(tool_format):
    assert isinstance(chosen(jinja_template(tool_format), tool_format), MetaFormat)


@pytest.mark.parametrize("tool_format", ToolFormat)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"<|end_header_id|>\\n\\n"', '"<|end_header_id|>\\n"'),
        ('~ "<|eot_id|>" }}\n    {%- endif %}', '~ "<|eot_id|> " }}\n    {%- endif %}'),
        ("{{- bos_token }}", ""),
        ('{{- header("assistant") }}\n{%- endif %}', '{{- header("model") }}\n{%- endif %}'),
        ("text_of(content).strip() }}", "text_of(content) ~ '.' }}"),
    ],
)
def test_meta_s_format_is_not_chosen_where_a_turn_differs(tool_format, old, new):
    source = jinja_template(tool_format)
    assert old in source
    assert isinstance(chosen(source.replace(old, new), tool_format), TemplateFormat)


def test_meta_s_format_is_not_chosen_where_tools_are_shown_otherwise():
    source = jinja_template(ToolFormat.LLAMA_3_1)
    changed = source.replace("Given the following functions", "Given these functions")
    assert isinstance(chosen(changed), TemplateFormat)
    assert isinstance(chosen(source, ToolFormat.NONE), TemplateFormat)


# Templates that write nearly what Meta's format is; those of 3.0 always wrote the last header.
NO_DATES = jinja_template(ToolFormat.LLAMA_3_1)
NEAR_META = {
    "dates of Llama 3.1": LLAMA_3_1,
    "today's date of Llama 3.2": LLAMA_3_2,
    "always a header": NO_DATES.replace("{%- if add_generation_prompt %}", "{%- if true %}"),
    "a default system turn": NO_DATES.replace(
        "{{- bos_token }}",
        "{{- bos_token }}{%- if messages[0].role != 'system' %}"
        "{{- header('system') ~ 'Be brief.<|eot_id|>' }}{%- endif %}",
    ),
    "white space is kept": NO_DATES.replace(
        "{{- text_of(content).strip() }}", "{{- text_of(content) }}"
    ),
    "results under another name": NO_DATES.replace('header("ipython")', 'header("tool")'),
    "llama 3.0": LLAMA,
}


@pytest.mark.parametrize("name", NEAR_META)
@pytest.mark.parametrize("tool_format", ToolFormat)
def test_a_template_near_meta_s_format_decides(name, tool_format):
    """Whichever format is chosen, its ids are those of transformers, dates included."""
    theirs, _ = tokenizers_of("meta")
    source = NEAR_META[name]
    ours = chosen(source, tool_format)
    count = 0
    for dialog in DIALOGS[: 5 if name == "llama 3.0" else 6]:  # it shows no calls
        for tools in (None, [TOOL]) if ours.has_tools else (None,):
            for date in ("26 Jul 2024", "1 Mar 2025", None):
                if date and (isinstance(ours, MetaFormat) or "date_string" not in source):
                    continue
                kwargs = {} if date is None else {"date_string": date}
                wanted = theirs.apply_chat_template(
                    dialog, tools, chat_template=source, add_generation_prompt=True, **kwargs
                )
                options = PromptOptions(template_kwargs=kwargs)
                assert ours.encode(dialog, tools, options) == wanted["input_ids"], dialog
                count += 1
    assert count >= 5
    assert isinstance(ours, TemplateFormat)


@pytest.mark.parametrize("source", [LLAMA_3_1, LLAMA_3_2])
def test_a_template_with_dates_keeps_meta_s_tools_and_calls(source):
    """Built-in tools and several calls of one message, which are split as Meta's format does."""
    theirs, _ = tokenizers_of("meta")
    ours = chosen(source, ToolFormat.LLAMA_3_2)
    search = {"function": {"name": "brave_search", "arguments": {"query": "x"}}}
    result = {"role": "tool", "content": "1"}
    dialog = [user("?"), assistant("", tool_calls=[search]), result]
    wanted = theirs.apply_chat_template(
        dialog, chat_template=source, builtin_tools=["brave_search"], add_generation_prompt=True
    )
    assert ours.encode(dialog, [{"name": "brave_search"}]) == wanted["input_ids"]
    calls = [{**CALL, "id": f"call0000{i}"} for i in range(2)]
    results = [{**result, "tool_call_id": call["id"], "content": call["id"]} for call in calls]
    pairs = [[assistant("", tool_calls=[x]), y] for x, y in zip(calls, results, strict=True)]
    wanted = theirs.apply_chat_template(
        [user("?"), *pairs[0], *pairs[1]], [TOOL], chat_template=source, add_generation_prompt=True
    )
    together = [user("?"), assistant("", tool_calls=calls)]
    assert ours.encode([*together, *results[::-1]], [TOOL]) == wanted["input_ids"]
    with pytest.raises(FieldError, match=r"2 calls, and .* one call per message"):
        ours.encode([*together, results[0]], [TOOL])
    for answer in ('{"name": "f", "parameters": {}}', "[f()]", '{"name": "f", "arguments": {}}'):
        parser = ours.call_parser(Tools.of([TOOL]))
        events = [*parser.push(answer), *parser.flush()]
        assert any(isinstance(event, CallStart) for event in events), answer
    assert "start: f0 | TEXT" in ours.call_grammar(Tools.of([TOOL]))


def test_a_text_of_a_dialog_is_no_special_token():
    """The marks of reasoning in an answer of the model are the only exception."""
    ours = format_of("r1", R1)
    names = "<｜User｜><｜Assistant｜><think></think><｜end▁of▁sentence｜>"
    call = {"function": {"name": names, "arguments": {names: names}}}
    dialog = [
        {"role": "system", "content": names},
        user(names),
        assistant("<think>" + names + "</think>" + names, tool_calls=[call]),
        {"role": "tool", "content": names},
        assistant("x"),
        user("x"),
    ]
    plain = json.loads(json.dumps(dialog).replace(json.dumps(names)[1:-1], "x"))
    first = len(ours.tokenizer.ranks)

    def special(messages: Any) -> list[int]:
        return [i for i in ours.encode(messages) if i >= first]

    assert special(dialog) == special(plain)
    assert ours.tokenizer.special_tokens["</think>"] in special(dialog)


@pytest.mark.parametrize(
    ("source", "messages", "tools", "options", "message"),
    [
        (LLAMA.replace("'system', ", ""), [{"role": "system", "content": "x"}], None, {},
         "^the chat template refuses this dialog: Unknown role: system$"),
        (CHATML, [user("x")], [TOOL], {}, "^tools: this model's chat template has no tools$"),
        (HERMES, [user("x")], [{"name": "brave_search"}], {}, "brave_search is a tool of Meta's"),
        (CHATML, [user("x"), assistant("", tool_calls=[CALL])], None, {},
         r"^message 1: tool_calls: this model's chat template has no tool calls"),
        (HERMES, [user("x"), assistant("", tool_calls=[{"function": {"name": "f",
         "arguments": '{"a": 1, "b'}}])], None, {}, "incomplete arguments"),
        (CHATML, [user("x")], None, {"template_kwargs": {"think": True}},
         "^chat_template_kwargs: this model's chat .* has no variable 'think'; it reads none"),
        (LLAMA, [user("x")], None, {"template_kwargs": {"messages": "x"}}, "reads .*date_string"),
        (LLAMA, [user("x")], None, {"template_kwargs": {"bos_token": "x"}}, "no variable"),
        (LLAMA, [user("x")], None, {"template_kwargs": {"date_string": ["x"]}}, "must be a text"),
        (CHATML, [user("x")], None, {"continue_final_message": True}, "add_generation_prompt"),
        ("{{ messages[0].content }}", [user("x"), user("y")], None,
         {"continue_final_message": True, "add_generation_prompt": False}, "show the last message"),
        (CHATML, [{"role": "king", "content": "x"}], None, {}, "message 0"),
    ],
)  # fmt: skip
def test_an_error_names_the_message_or_the_option(source, messages, tools, options, message):
    ours = format_of("hermes", source)
    with pytest.raises(ValueError, match=message):
        ours.encode(messages, tools, PromptOptions(**options))


def test_a_variable_of_the_template_may_be_given():
    ours = format_of("meta", "{{ messages[0].content }}{{ name }}{{ flag }}")
    options = PromptOptions(template_kwargs={"name": "<|eot_id|>", "flag": False})
    ids = ours.encode([user("x")], None, options)
    assert max(ids) < len(ours.tokenizer.ranks)
    assert ours.tokenizer.decode(ids) == "x<|eot_id|>False"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"default": "{{ functions.x }}"}, "'functions' is undefined: give another one: --chat_t"),
        ({"default": "{% if %}"}, "not a chat template: line 1"),
        ({"default": "{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2},
         "more than 2 s of processor time: give another"),
        ({"tool_use": CHATML}, "no chat template named 'default' .found: 'tool_use'"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        TemplateFormat(tokenizers_of("meta")[1], sources)


def test_tools_have_a_template_of_their_own():
    sources = {"default": CHATML, "tool_use": HERMES, "rag": "{% no template %}"}
    ours = TemplateFormat(tokenizers_of("hermes")[1], sources)
    dialog = DIALOGS[0]
    assert ours.encode(dialog) == format_of("hermes", CHATML).encode(dialog)
    assert ours.encode(dialog, [TOOL]) == format_of("hermes", HERMES).encode(dialog, [TOOL])
    assert ours.encode(dialog, [FUNCTION]) == ours.encode(dialog, [TOOL])


def test_a_token_that_the_marks_lose_is_logged(caplog):
    source = "{% set a = '<|eot_id|>' %}{{ '%20s' % a }}{{ messages[0].content }}"
    TemplateFormat(tokenizers_of("meta")[1], {"default": source})
    assert "the chat template writes <|eot_id|> in a way" in caplog.text


def write_template(folder: Path, content: Mapping[str, str]) -> None:
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_a_folder_s_template_is_its_format(tmp_path):
    """A ChatML model answers chats, and the end of its turns is a token that ends an answer."""
    folder = make_model(tmp_path / "model", "chatml")
    checkpoint = find(folder)
    tokenizer = load_tokenizer(checkpoint)
    assert isinstance(find_dialog_format(checkpoint, tokenizer), MissingFormat)
    write_template(folder, {"chat_template.jinja": CHATML})
    dialog_format = find_dialog_format(checkpoint, tokenizer)
    assert isinstance(dialog_format, TemplateFormat)
    assert tokenizer.special_tokens["<|im_end|>"] in tokenizer.stop_tokens
    model = Llama.build(str(folder), max_seq_len=128, max_batch_size=1, device="cpu")
    (answer,) = model.chat_completion([[user("Hi")]], max_gen_len=4, temperature=0.0)
    ids = dialog_format.encode([user("Hi")])
    (expected,) = model.generate([ids], max_gen_len=4, temperature=0.0)[0]
    assert answer["generation"]["content"] == model.tokenizer.decode(expected).strip()


@pytest.mark.parametrize(
    ("name", "answer", "line"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "<tool_call>",
        ),
        ("pythonic", "[f(a=1)]", "calls as in llama3.2"),
        ("none", "[f(a=1)]", "shows tools"),
        ("auto", '{"name": "f", "parameters": {"a": 1}}', "shows tools"),
    ],
)
def test_a_format_of_calls_may_be_named(name, answer, line):
    """A template that shows tools and no calls gets a format by name; "none" reads none."""
    source = "{{ tools | tojson }}{{ messages[0].content }}"
    ours = TemplateFormat(tokenizers_of("hermes")[1], {"default": source}, name)
    tools = Tools.of([TOOL])
    parser = ours.call_parser(tools)
    events = [*parser.push(answer), *parser.flush()]
    assert any(isinstance(event, CallStart) for event in events) == (name != "none")
    assert line in ours.describe()
    if name in ("hermes", "pythonic"):
        assert "start:" in ours.call_grammar(tools)
    else:
        with pytest.raises(FieldError, match="--tool_call_parser NAME"):
            ours.call_grammar(tools)


def test_a_format_of_calls_that_is_named_replaces_meta_s():
    source = jinja_template(ToolFormat.LLAMA_3_1)
    meta = MetaFormat(tokenizers_of("meta")[1])
    assert isinstance(choose_format({"default": source}, meta, "hermes"), TemplateFormat)
    with pytest.raises(FieldError, match="tool_call_parser='mistral' must be one of auto, hermes"):
        choose_format({"default": source}, meta, "mistral")
