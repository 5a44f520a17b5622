"""Reasoning and content of one answer, however its text is cut into pieces.

The oracle is a regular expression on the whole text.
"""

import random
import re

import pytest

from llama import Llama, SamplingParams
from llama.common.checks import FieldError
from llama.requests.reasoning_text import ReasoningReader, reads_reasoning, reasoning_is_open
from llama.sampling_params import ReasoningRule

START = 1001
END = 1002
NAMES = {START: "<think>", END: "</think>"}
TEXT_RULE = ReasoningRule(start_text="<think>", end_text="</think>")
TOKEN_RULE = ReasoningRule(start_id=START, end_id=END)

Parts = tuple[str, str]


def expected(text: str, *, is_open: bool, end: str) -> Parts:
    """Return reasoning and content of a whole text; `end` is a pattern of the end mark."""
    start = r"\s*(?:<think>)?" if is_open else r"\s*<think>"
    match = re.match(rf"{start}\s*(.*?)\s*(?:{end}\s*(.*)|\Z)", text, re.DOTALL)
    if match is None:
        return "", text
    return match[1], match[2] or ""


def read(rule: ReasoningRule, pieces: list[str | int], *, is_open: bool) -> Parts:
    """Return what a reader makes of pieces of text and of marks."""
    reader = ReasoningReader(rule, is_open=is_open)
    content = ""
    for piece in pieces:
        if isinstance(piece, str):
            content += reader.push(piece)
        elif reader.is_mark(piece):
            reader.pass_mark(piece)
        else:
            content += reader.push(NAMES[piece])
    content += reader.flush()
    return "".join(reader.pieces), content


def cuts(text: str) -> list[list[str]]:
    """Return a text cut at each position, in characters, and whole."""
    halves = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    return [*halves, list(text), [text]]


TEXTS = [
    "<think>I think.</think>It is.",
    " \n<think>\n\nI  think.\n\n</think>\n\n It is. \n",
    "<think></think>x",
    "<think>\n</think>\n",
    "<think>never ended </thi",
    "<think>never ended </think",
    "<think>  ",
    "No reasoning. <think>x</think>",
    "<thin air",
    "<think>a < b </ c </think> d </think> e",
    "   ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_marks_that_are_text_are_found_wherever_the_text_is_cut(text):
    wanted = expected(text, is_open=False, end="</think>")
    if wanted[0] == "" and not text.lstrip().startswith("<think>"):
        wanted = ("", text)
    for pieces in cuts(text):
        assert read(TEXT_RULE, [*pieces], is_open=False) == wanted, pieces


@pytest.mark.parametrize("text", [" a</think>b", "\n</think>\n\nb", "a </thi", "</think>", "a\n"])
def test_an_answer_may_begin_inside_of_the_reasoning(text):
    wanted = expected(text, is_open=True, end="</think>")
    for pieces in cuts(text):
        assert read(TEXT_RULE, [*pieces], is_open=True) == wanted, pieces


def test_marks_that_are_tokens_are_found_by_their_ids_alone():
    """The text of a mark ends nothing, and a mark after the reasoning is content."""
    reasoning = "the tag </think> ends it"
    for pieces in cuts(f" {reasoning}\n"):
        tokens: list[str | int] = [START, *pieces, END, "\n", "x ", END, START]
        assert read(TOKEN_RULE, tokens, is_open=False) == (reasoning, "x </think><think>")
        assert read(TOKEN_RULE, [*pieces, END], is_open=True) == (reasoning, "")
    assert read(TOKEN_RULE, ["\n", START, "a"], is_open=False) == ("a", "")
    assert read(TOKEN_RULE, [START, "\n", "a", START, "b", END], is_open=True)[0] == "a<think>b"
    assert read(TOKEN_RULE, ["<think>a", END, "b"], is_open=False) == ("", "<think>a</think>b")


def test_random_texts_are_split_as_the_whole_text_is():
    choose = random.Random(7)
    parts = ["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é"]
    for _ in range(2000):
        text = "".join(choose.choices(parts, k=choose.randrange(9)))
        is_open = choose.random() < 0.5
        text = text.lstrip() if is_open else "<think>" + text
        if is_open and text.startswith("<think>"):
            continue  # only a token is recognized as a repeated mark
        at = sorted(choose.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
        assert read(TEXT_RULE, [*pieces], is_open=is_open) == expected(
            text, is_open=is_open, end="</think>"
        ), pieces


def test_the_prompt_says_whether_an_answer_begins_with_reasoning(demo):
    encode = demo.tokenizer.encode
    for text, wanted in (
        ("a<think>\n", True),
        ("<think>", True),
        ("<think> a", False),
        ("", False),
    ):
        ids = encode(text, bos=True, eos=False)
        assert reasoning_is_open(ids, TEXT_RULE, demo.tokenizer) is wanted, text


def test_a_rule_has_marks_of_one_kind():
    for wrong in ({}, {"end_text": "x"}, {"start_id": 1}, {"end_id": 1, "end_text": "x",
                  "start_text": "y"}):  # fmt: skip
        with pytest.raises(FieldError, match=r"reasoning\.end_id must be given, or else both"):
            ReasoningRule(**wrong)
    with pytest.raises(FieldError, match=r"reasoning\.budget needs an end mark that is a token"):
        ReasoningRule(start_text="x", end_text="y", budget=3)


def test_a_format_and_marks_of_text_exclude_each_other():
    """The format of an answer begins with its first token, where no token ends the reasoning."""
    params = SamplingParams(reasoning=TEXT_RULE, structured_output={"regex": "a+"})
    assert not reads_reasoning(params)
    assert not params.constrains_reasoning
    assert reads_reasoning(SamplingParams(reasoning=TEXT_RULE))
    assert not reads_reasoning(SamplingParams())


def test_the_outputs_have_reasoning_apart_from_the_text(demo: Llama):
    """The scripted ids of test_reasoning.py do the rest; here the model's own ids are used."""
    tokenizer = demo.tokenizer
    ids = tokenizer.encode("Once upon a time", bos=True, eos=False)
    plain = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    (whole,) = demo.llm_engine.run([demo.llm_engine.prepare("", ids, plain)])
    tokens = whole.outputs[0].token_ids
    end_id = tokens[5]
    assert end_id not in tokens[:5]
    start_id = tokenizer.special_tokens["<|reserved_special_token_9|>"]
    rule = ReasoningRule(start_id=ids[-1], end_id=end_id)
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, reasoning=rule)
    outputs = list(demo.llm_engine.stream([demo.llm_engine.prepare("", ids, params)]))
    answer = outputs[-1].outputs[0]
    assert answer.token_ids == tokens
    assert answer.logprobs == whole.outputs[0].logprobs
    assert answer.reasoning == tokenizer.decode(tokens[:5]).strip()
    assert answer.text == tokenizer.decode(tokens[6:]).lstrip()
    assert "".join(x.outputs[0].new_reasoning for x in outputs) == answer.reasoning
    assert "".join(x.outputs[0].new_text for x in outputs) == answer.text
    assert outputs[-1].usage.reasoning_tokens == answer.num_reasoning_tokens == 6
    assert outputs[-1].has_reasoning
    closed = SamplingParams(
        max_tokens=12, temperature=0.0, reasoning=ReasoningRule(start_id=start_id, end_id=end_id)
    )
    (output,) = demo.llm_engine.run([demo.llm_engine.prepare("", ids, closed)])
    assert (output.outputs[0].reasoning, output.outputs[0].text) == ("", whole.outputs[0].text)
    assert output.usage.reasoning_tokens == 0
