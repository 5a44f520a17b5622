"""Reasoning through the real routes, with the official clients and a model that follows a script.

The checkpoint is a tiny random model with the tokens of DeepSeek-R1-Distill-Llama; the engine and
the app are real.
"""

import asyncio
import json
from typing import Any

import openai
import pytest

from helpers.chat_templates import R1
from helpers.fine_tunes import make_model
from helpers.reasoning import QUESTION, ReasoningServer, joined
from llama import Llama
from llama.cli.chat import engine_session
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.reasoning import ReasoningMarks, find_marks

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'


@pytest.fixture(scope="module")
def llama(reasoning_llama) -> Llama:
    return reasoning_llama


@pytest.fixture
def server(reasoning_over_both_ports) -> ReasoningServer:
    return reasoning_over_both_ports


@pytest.fixture
def local(reasoning_server) -> ReasoningServer:
    """The server for tests that see its format, or start no process of a template."""
    return reasoning_server


def test_the_marks_are_those_of_the_tokenizer(llama):
    special = llama.tokenizer.special_tokens
    marks = ReasoningMarks(start_id=special["<think>"], end_id=special["</think>"])
    assert find_marks(llama.tokenizer) == marks
    assert find_marks(llama.tokenizer, parser="none") is None


def test_reasoning_is_apart_from_the_content(server):
    server.says("I look at\n\nZürich 🌧.\n</think>\n\nIt rains.")
    assert server.parts() == [("I look at\n\nZürich 🌧.", "It rains.", "stop")]
    whole, _ = server.chat()
    reasoning_ids = server.ids_of("I look at\n\nZürich 🌧.\n</think>")
    details = whole.usage.completion_tokens_details
    assert details.reasoning_tokens == len(reasoning_ids)
    assert (
        server.parts(n=2, temperature=0.5) == [("I look at\n\nZürich 🌧.", "It rains.", "stop")] * 2
    )
    (hidden,) = server.parts(extra_body={"include_reasoning": False})
    assert hidden == ("", "It rains.", "stop")


def test_an_answer_may_open_its_reasoning_itself(local):
    local.format.is_open = False
    local.says("<think>\nHm.</think>Yes.")
    assert local.parts() == [("Hm.", "Yes.", "stop")]
    local.says("Yes. <think>Hm.</think>")
    assert local.parts() == [("", "Yes. <think>Hm.</think>", "stop")]
    local.says("Yes.")
    whole, _ = local.chat()
    assert local.parts() == [("", "Yes.", "stop")]
    assert "reasoning_content" not in whole.choices[0].message.to_dict()
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_answer_is_the_same_wherever_it_ends(server):
    """Reasoning that has not ended is all of the answer."""
    text = "a </think", "> é🌧 b\n", "</think>", "\n\nIt is."
    ids = [*server.llama.tokenizer.encode(text[0] + text[1], bos=False, eos=False)]
    mark = len(ids)
    ids += server.ids_of(text[2]) + server.ids_of(text[3])
    stop = server.ids_of("<|eot_id|>")
    server.script.ids = [*ids, *stop]
    for n in range(1, len(ids) + 1):
        (found,) = server.parts(max_tokens=n)
        reason = "length"
        if n <= mark:
            whole = server.llama.tokenizer.decode(ids[:n]).strip()
            assert found == (whole, "", reason)
        else:
            content = server.llama.tokenizer.decode(ids[mark + 1 : n]).lstrip()
            assert found == ("a </think> é🌧 b", content, reason)
    (found,) = server.parts()
    assert found == ("a </think> é🌧 b", "It is.", "stop")


def test_stop_strings_are_looked_for_in_the_content(server):
    server.says("a\n\nb STOP c</think>\n\nx\n\ny")
    assert server.parts(stop=["\n\n", "STOP"]) == [("a\n\nb STOP c", "x", "stop")]
    server.script.ids = server.ids_of("a b<|eot_id|>")
    assert server.parts() == [("a b", "", "stop")]


def test_logprobs_are_those_of_all_tokens(local, llama):
    """The model's own answers: the end mark is a token that they have."""
    with local.random_model():
        body: Any = {"logprobs": True, "temperature": 0, "max_tokens": 12}
        local.format.reasoning = None
        plain, _ = local.chat(**body)
        tokens = plain.choices[0].logprobs.content
        ids = llama.llm_engine.prepare("", local.format.encode(QUESTION), _greedy(12))
        (output,) = llama.llm_engine.run([ids])
        answer = output.outputs[0].token_ids
        local.format.reasoning = ReasoningMarks(
            start_id=llama.tokenizer.special_tokens["<think>"], end_id=answer[4]
        )
        whole, chunks = local.chat(**body)
        assert whole.choices[0].logprobs.content == tokens
        streamed = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
        assert [entry for each in streamed for entry in each.content] == tokens
        assert whole.choices[0].message.reasoning_content
        assert whole.usage.completion_tokens_details.reasoning_tokens == answer.index(answer[4]) + 1


def _greedy(max_tokens: int) -> Any:
    from llama import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, skip_special_tokens=True)


def test_calls_are_read_in_the_content_alone(server):
    server.says(f"I could write {CALL}.</think>\n{CALL}")
    (choice,) = server.chat(tools=[WEATHER])[0].choices
    assert choice.message.reasoning_content == f"I could write {CALL}."
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Zürich 🌧"}
    assert server.parts(tools=[WEATHER])[0][1:] == (None, "tool_calls")


def test_marks_that_are_plain_text(local):
    local.format.reasoning = ReasoningMarks()
    local.format.is_open = False
    tokenizer = local.llama.tokenizer
    text = "<think>Hm</think> Yes"
    local.script.ids = tokenizer.encode(text, bos=False, eos=False) + local.ids_of("<|eot_id|>")
    assert local.parts() == [("Hm", "Yes", "stop")]
    assert local.parts(reasoning_effort="none") == [("Hm", "Yes", "stop")]
    with pytest.raises(openai.BadRequestError, match="plain text, so its reasoning has no budget"):
        local.parts(extra_body={"thinking_budget_tokens": 3})


def asked(server: ReasoningServer, **body: Any) -> tuple[PromptOptions, Any]:
    """Return the options of the prompt, and the reasoning rule of the request."""
    rules = []
    prepare = server.llama.llm_engine.prepare

    def noted(name: str, prompt: Any, params: Any, **options: Any) -> Any:
        rules.append(params.reasoning)
        return prepare(name, prompt, params, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.llama.llm_engine, "prepare", noted)
        server.chat(**body)
    return server.format.seen, rules[0]


def test_fields_that_switch_and_bound_the_reasoning(local):
    """Their effect on the engine has tests of its own; a template gets what the options say."""
    local.script.ids = local.ids_of("</think>" + "a" * 30 + "<|eot_id|>")
    seen, rule = asked(local)
    assert (seen.enable_thinking, seen.reasoning_effort, rule.budget) == (None, None, None)
    seen, rule = asked(local, reasoning_effort="none")
    assert (seen.enable_thinking, rule.budget) == (False, 0)
    seen, rule = asked(local, reasoning_effort="low")
    assert (seen.enable_thinking, seen.reasoning_effort, rule.budget) == (None, "low", None)
    for name in ("thinking_token_budget", "thinking_budget_tokens"):
        assert asked(local, extra_body={name: 7})[1].budget == 7
        assert asked(local, extra_body={name: -1})[1].budget is None
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    seen, rule = asked(local, extra_body=switch)
    assert (seen.enable_thinking, dict(seen.template_kwargs), rule.budget) == (False, {}, 0)
    seen, _ = asked(local, extra_body={"chat_template_kwargs": {"date_string": "1 Jan 2025"}})
    assert dict(seen.template_kwargs) == {"date_string": "1 Jan 2025"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"x": 1}}, "has no variable 'x'"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs must be an object whose values"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object whose values"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "enable_thinking must be true or false"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
    ({"thinking_token_budget": 1, "thinking_budget_tokens": 1}, "are the same: give one"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_wrong_field_is_named(server, fields, message):
    server.says("</think>x")
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.chat(extra_body=fields)
    assert caught.value.param in fields


def test_budgets_end_the_reasoning_of_the_real_model(server, llama):
    with server.random_model():
        for budget in (0, 1, 5):
            body: Any = {"max_tokens": budget + 4, "temperature": 0, "seed": 1}
            whole, _ = server.chat(**body, extra_body={"thinking_token_budget": budget})
            assert whole.usage.completion_tokens_details.reasoning_tokens <= budget + 1
            assert whole.choices[0].message.content
        whole, _ = server.chat(max_tokens=4, temperature=0, reasoning_effort="none")
        assert whole.usage.completion_tokens_details.reasoning_tokens == 1
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        (found,) = server.parts(
            max_tokens=200, temperature=0, response_format=form,
            extra_body={"thinking_token_budget": 6, "logit_bias": {}},
        )  # fmt: skip
        assert found[1].startswith("{")


def test_messages_may_have_reasoning_under_either_name(local):
    local.says("</think>x")
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "a", name: "hm"}
        local.chat(messages=[*QUESTION, said, *QUESTION])
        assert local.format.messages[1].reasoning_text == "hm"
    ids = local.format.encode([*QUESTION, said, *QUESTION])
    del said["reasoning"]
    assert ids == local.format.encode([*QUESTION, said, *QUESTION])


def test_the_server_may_use_vllm_s_name(server):
    server.says("Hm</think>x")

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        common: Any = {"model": "tiny", "messages": QUESTION}
        whole = await client.chat.completions.create(**common)
        stream = await client.chat.completions.create(**common, stream=True)
        return whole, [chunk async for chunk in stream]

    whole, chunks = server.call(ask, reasoning_field="reasoning")
    message = whole.choices[0].message.to_dict()
    assert message == {"role": "assistant", "reasoning": "Hm", "content": "x"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert joined(deltas, "reasoning") == "Hm"
    assert joined(deltas, "reasoning_content") == ""


def test_meta_s_api(local):
    local.says("Hm é</think>\n\nYes.")
    (answer,) = local.llama.chat_completion([QUESTION], max_gen_len=50)
    assert answer["generation"] == {
        "role": "assistant", "reasoning_content": "Hm é", "content": "Yes."
    }  # fmt: skip
    deltas = list(local.llama.stream_chat([QUESTION], max_gen_len=50))
    assert "".join(delta.reasoning for delta in deltas) == "Hm é"
    assert "".join(delta.text for delta in deltas) == "Yes."
    assert deltas[-1].finish_reason == "stop"
    dialog = [*QUESTION, answer["generation"], *QUESTION]
    assert local.llama.chat_completion([dialog], max_gen_len=50)
    local.llama.chat_completion(
        [QUESTION], max_gen_len=50, chat_template_kwargs={"enable_thinking": True},
        thinking_token_budget=40,
    )  # fmt: skip
    assert (local.format.seen.enable_thinking, local.format.seen.thinking_budget) == (True, 40)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        local.llama.chat_completion([QUESTION], thinking_token_budget=-2)
    prompts = ["How is it?"]
    (text,) = local.llama.text_completion(prompts, max_gen_len=50)
    assert text["generation"] == "Hm é</think>\n\nYes."


def test_llama_chat_has_the_reasoning_apart(local, monkeypatch):
    local.says("Hm é</think>\n\nYes. END No.")
    local.format.stop_strings = (" END",)
    taken: list[Any] = []

    def talk(answers: Any, conversation: Any, terminal: Any) -> None:
        taken.extend(answers(conversation.handle("How is it?")))

    monkeypatch.setattr(engine_session, "talk", talk)
    engine_session.chat_on_engine(local.llama)
    assert "".join(part.new_reasoning for part in taken) == "Hm é"
    assert "".join(part.new_text for part in taken) == "Yes."
    assert taken[-1].finish_reason == "stop"


def test_several_requests_at_once(local):
    local.says("Hm</think>x")

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        common: Any = {"model": "tiny", "messages": QUESTION}
        asks = (client.chat.completions.create(**common) for _ in range(8))
        return await asyncio.gather(*asks)

    for answer in local.call(ask):
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm", "x")


def test_a_model_with_its_own_template_end_to_end(tmp_path):
    """The prompt of R1's template opens the reasoning; nothing is set by hand."""
    folder = make_model(tmp_path / "r1", "r1")
    (folder / "chat_template.jinja").write_text(R1)
    with Llama.build(str(folder), max_seq_len=512, max_batch_size=4, device="cpu") as llama:
        assert llama.dialog_format.describe().endswith(
            "; reasoning between <think> and </think> (tokens)"
        )
        body: Any = {"max_gen_len": 40, "temperature": 0.0, "thinking_token_budget": 5}
        (answer,) = llama.chat_completion([QUESTION], **body)
        ids = llama.dialog_format.encode(QUESTION)
        assert llama.tokenizer.decode(ids).endswith("<｜Assistant｜><think>\n")
        plain = llama.generate([ids], max_gen_len=5, temperature=0.0)[0][0]
        reasoning = llama.tokenizer.decode(plain).strip()
        assert answer["generation"]["reasoning_content"] == reasoning
        assert answer["generation"]["content"]
        off: Any = {"max_gen_len": 9, "chat_template_kwargs": {"enable_thinking": False}}
        (answer,) = llama.chat_completion([QUESTION], **off)
        assert "reasoning_content" not in answer["generation"]
    build: Any = {"max_seq_len": 512, "max_batch_size": 4, "device": "cpu"}
    with Llama.build(str(folder), reasoning_parser="none", **build) as llama:
        assert llama.dialog_format.reasoning is None
    with pytest.raises(ValueError, match="reasoning_parser='x' must be one of auto, deepseek_r1"):
        Llama.build(str(folder), reasoning_parser="x", **build)


def test_marks_in_a_template_are_text_where_the_tokenizer_has_no_such_tokens(demo):
    assert find_marks(demo.tokenizer, R1) == ReasoningMarks()
    assert find_marks(demo.tokenizer, "{{ messages }}") is None
    assert find_marks(demo.tokenizer, parser="deepseek_r1") == ReasoningMarks()
    assert demo.dialog_format.reasoning is None
