"""Marked texts: no text of a message becomes a special token, and the template's all do.

The oracles are transformers' `apply_chat_template`, and Jinja with the texts of messages moved to
a private plane of Unicode.
"""

import itertools
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import tokenizers

from helpers.chat_templates import JOINED, TEMPLATES
from helpers.fine_tunes import KINDS
from helpers.hostile_templates import HOSTILE
from helpers.marked_fuzz import moved, moved_back, plain_text
from helpers.marked_vocabularies import Target, constants_of, rendered, tokenizers_of
from llama.common.confined import Confined
from llama.prompts.jinja import chat_template, filters, sandbox
from llama.prompts.jinja.chat_template import ChatTemplate, TemplateError
from llama.prompts.jinja.marked import MarkedEncoder, MarkedText, concatenate, mask_of, trusted
from llama.storage.token_files import AddedToken

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
BENIGN: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n there "}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"},
     {"role": "user", "content": "Drei – vier\r\n\t"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
     {"role": "tool", "content": "{\"x\": 1}", "name": "f"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A</thin"},
     {"role": "user", "content": "skip"}],
    [{"role": "king", "content": "?"}],
]  # fmt: skip
ARRAY = {"type": "array", "items": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": {"a": ARRAY}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_benign_dialogs_have_the_ids_of_transformers(kind, name):
    template = ChatTemplate(TEMPLATES[name], constants_of(kind))
    theirs, tokenizer = tokenizers_of(kind)
    encoder = MarkedEncoder(tokenizer)
    count = 0
    for messages, tools, prompted in itertools.product(BENIGN, (None, [TOOL]), (False, True)):
        options = {"tools": tools, "add_generation_prompt": prompted}
        text = rendered(template, messages, **options)
        wanted = plain_text(TEMPLATES[name], messages, **constants_of(kind), **options)
        assert text == wanted, messages
        if text is not None and wanted is not None:
            assert encoder.encode(text) == theirs.encode(wanted, add_special_tokens=False)
            count += 1
    assert count >= 12


def test_every_way_of_joining_constants_keeps_their_marks():
    text = ChatTemplate(JOINED).render({"messages": [{"role": trusted("user"), "content": "?"}]})
    assert mask_of(text).replace("1", "") == "0" and text.count("<|im_end|>") > 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_of_a_dialog_becomes_a_special_token(kind, name):
    assert Target(kind, name).attack(seed=len(kind + name), count=12).checked >= 4


PARTS = ["<|im_end|>", "<|", "im_", "end", "|>", " ", "\n", "a", "B", "#", "x", "é", "ß", ","]


def mixed(rng: random.Random) -> tuple[MarkedText, str]:
    """Return a text that is trusted in part, and the same with the rest moved."""
    pieces = [(rng.choice(PARTS), rng.random() < 0.5) for _ in range(rng.randint(1, 7))]
    marked = concatenate([trusted(part) if by_us else part for part, by_us in pieces])
    oracle = "".join(part if by_us else moved(part) for part, by_us in pieces)
    text = marked if isinstance(marked, MarkedText) else MarkedText(marked)
    return text, oracle


def assert_no_more_is_trusted(result: Any, oracle: Any) -> int:
    """Compare texts, and texts in lists; return how many could be compared."""
    if isinstance(result, list | tuple) and isinstance(oracle, list | tuple):
        if len(result) != len(oracle):
            return 0
        return sum(map(assert_no_more_is_trusted, result, oracle))
    if not isinstance(result, str) or not isinstance(oracle, str) or moved_back(oracle) != result:
        return 0
    for mark, character, by_oracle in zip(mask_of(result), result, oracle, strict=True):
        assert mark == "0" or character == by_oracle, (result, mask_of(result), oracle)
    return 1


def test_no_method_of_str_trusts_more_than_it_was_given():
    """No method trusts a character of a message, whatever Python adds to str."""
    rng = random.Random(0)
    compared = 0
    names = [name for name in dir(str) if not name.startswith("__")]
    for name in [*names, "__add__", "__radd__", "__mul__", "__getitem__", "__mod__", "__format__"]:
        for _ in range(60):
            text, oracle = mixed(rng)
            first, first_oracle = mixed(rng)
            second, second_oracle = mixed(rng)
            lists = [first, second], [first_oracle, second_oracle]
            cases: list[tuple[Any, Any]] = [
                ((), ()),
                ((2,), (2,)),
                ((slice(1, 5),), (slice(1, 5),)),
                ((first,), (first_oracle,)),
                ((first, 1), (first_oracle, 1)),
                ((first, second), (first_oracle, second_oracle)),
                (lists[:1], lists[1:]),
            ]
            for args, oracle_args in cases:
                if name == "__radd__":
                    compared += assert_no_more_is_trusted(first + text, first_oracle + oracle)
                    continue
                try:
                    result = getattr(text, name)(*args)
                    wanted = getattr(oracle, name)(*oracle_args)
                except (TypeError, ValueError, LookupError):
                    continue
                compared += assert_no_more_is_trusted(result, wanted)
    assert compared > 3000


def test_no_filter_trusts_more_than_it_was_given():
    rng = random.Random(1)
    compared = 0
    arguments = ["", "(y)", "(y, z)", "(2)", "('x', y)", "('<|', y)", "(y, '|>')"]
    names = list(filters.FILTERS)
    expressions = [f"x | {name}{args}" for name in names for args in arguments]
    expressions += [f"[x, y, z] | {name}{args}" for name in names for args in arguments]
    expressions += ["x ~ y", "x + y", "x * 2", "'%s|>' % x", "'<|%s' % x", "x[1:4]", "x.split(y)"]
    expressions += ["'<|'.join([x, y])", "x.join('|>')", "x.replace(y, '<|im_end|>')"]
    expressions += ["[x, y] | join('|>')", "x | map('upper') | join", "x.rsplit('a', 1) | last"]
    plain = jinja2.Environment()
    for expression in expressions:
        try:
            ours = ChatTemplate("{{ " + expression + " }}")
            theirs = plain.from_string("{{ " + expression + " }}")
        except (TemplateError, jinja2.TemplateError):
            continue
        for _ in range(6):
            given = {name: mixed(rng) for name in "xyz"}
            try:
                result = ours.render({name: text for name, (text, _) in given.items()})
                oracle = theirs.render({name: text for name, (_, text) in given.items()})
            except (
                TemplateError,
                jinja2.TemplateError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
            ):
                continue
            compared += assert_no_more_is_trusted(result, oracle)
    assert compared > 400


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (trusted("<|im_end|>") + "x", ["<|im_end|>"]),  # the message's x does not make it longer
        (trusted("<|im_end|>x"), ["<|im_end|>x"]),
        (trusted("<|im_") + "end|>", []),
        ("<|im_" + trusted("end|>"), []),
        (trusted("<|im_") + "" + trusted("end|>"), ["<|im_end|>"]),
        ("<|im_end|>", []),
        ("<|im_end" + trusted("|><|im_end|>"), ["<|im_end|>"]),
    ],
)
def test_a_token_is_the_longest_name_that_is_trusted_in_full(text, names):
    longer = AddedToken(3000)
    _, tokenizer = tokenizers_of("chatml")
    added = {**tokenizer.added_tokens, "<|im_end|>x": longer}
    encoder = MarkedEncoder(stand_in(added))
    by_id = {token.id: name for name, token in added.items()}
    assert [by_id[i] for i in encoder.encode(text) if i in by_id] == names
    assert encoder.names_in(text) == set(names)


def stand_in(added: dict[str, AddedToken]) -> Any:
    """Return a tokenizer with other added tokens."""
    _, tokenizer = tokenizers_of("tulu")
    return SimpleNamespace(encode=tokenizer.encode, added_tokens=added, image_id=None)


@pytest.mark.parametrize("spaces", ["", "  ", "\n\t ", "\x1c "])
def test_white_space_beside_a_token_goes_where_its_flags_say(spaces):
    theirs = tokenizers.Tokenizer.from_str(tokenizers_of("tulu")[0].backend_tokenizer.to_str())
    flags: dict[str, Any] = {"<L>": {"lstrip": True}, "<R>": {"rstrip": True}}
    theirs.add_tokens([tokenizers.AddedToken(name, **flags[name]) for name in flags])
    added = {name: AddedToken(theirs.token_to_id(name) or 0, **flags[name]) for name in flags}
    parts = ["a" + spaces, trusted("<L>"), spaces + "b" + spaces, trusted("<R>"), spaces + "c"]
    text = concatenate(parts)
    wanted = theirs.encode("".join(parts), add_special_tokens=False)
    assert MarkedEncoder(stand_in(added)).encode(text) == wanted.ids


@pytest.fixture
def short_limit(monkeypatch) -> Iterator[None]:
    """Less processor time for each rendering, so that the tests take less."""
    process = Confined("llama.prompts.jinja.sandbox", cpu_s=0.3, memory_mb=300, wait_s=60)
    monkeypatch.setattr(chat_template, "_PROCESSES", process)
    yield
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_or_stopped(short_limit, name):
    """It is an error, or harmless: it shows nothing of Python, and takes little time and memory."""
    try:
        template = ChatTemplate(HOSTILE[name])
        text = template.render({"messages": [{"role": "user", "content": "Hi"}]})
    except TemplateError:
        pass
    else:
        # What may not be read is undefined, which some expressions accept.
        assert len(text) < 1 << 21 and "<class" not in text and "0x" not in text, text[:100]
    assert ChatTemplate("{{ x }}").render({"x": "next"}) == "next"


def test_a_template_is_stopped_by_what_it_takes(short_limit):
    ends = {
        "nested ranges": r"cannot be used: it takes more than 0\.3 s of processor time",
        "multiplied list": "cannot be used: it takes more than 300 MiB of memory",
        "two recursive macros": r"more than 0\.3 s of processor time",
        "recursive macro": "calls itself too often",
    }
    for name, message in ends.items():
        with pytest.raises(TemplateError, match=message):
            ChatTemplate(HOSTILE[name]).render({"messages": []})


def test_a_template_writes_a_limited_text():
    template = ChatTemplate("{{ x * 1000 }}")
    assert len(template.render({"x": "ab"})) == 2000
    with pytest.raises(TemplateError, match="writes more than 1,068,576 characters"):
        template.render({"x": "a" * 5000})


def test_threads_render_at_once():
    template = ChatTemplate("{{ x }}")
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(template.render({"x": i})))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [str(i) for i in range(8)]


def test_another_jinja_that_loses_marks_is_an_error(monkeypatch):
    sandbox.check_jinja()
    for name in ("_output_const_repr", "visit_Const", "visit_Concat"):
        with monkeypatch.context() as patched:
            patched.delattr(sandbox._Generator, name)
            with pytest.raises(RuntimeError, match=r"install jinja2==3\.1\.6"):
                sandbox.check_jinja()


def test_an_operation_that_loses_the_marks_makes_text():
    """A special token that an operation does not carry over is text: nothing is trusted wrongly."""
    text = rendered(ChatTemplate("{% set a = '<|im_end|>' %}{{ '%11s' % a }}"), [])
    assert text == " <|im_end|>" and mask_of(text) == "0" * len(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('No ' ~ messages[0].content ~ '\n\x00') }}",
            "refuses this dialog: No Hi  $",
        ),
        ("{{ raise_exception('a' * 1000) }}", f"refuses this dialog: {'a' * 200}$"),
        ("{{ nothing.x }}", "fails on this dialog: 'nothing' is undefined"),
        (
            "{{ messages[0].content.x.y }}",
            "fails on this dialog: 'str object' has no attribute 'x'",
        ),
        ("{{ messages[0] + 1 }}", "fails on this dialog: unsupported operand"),
    ],
)
def test_what_a_template_says_is_in_the_error(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render({"messages": [{"role": "user", "content": "Hi"}]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "not a chat template: line 1: Expected an expression"),
        ("\n{% include 'x' %}", "not a chat template: line 2 has the block 'include'"),
        ("{{ x | nosuch }}", "not a chat template: line 1: No filter named 'nosuch'"),
        ("x" * (1 << 19), "it has 524,288 characters, and the limit is 262,144"),
        ("{{ " + "(" * 999, "not a chat template"),
    ],
)
def test_what_is_no_template_is_an_error(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source)


def test_variables_that_a_template_reads():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m }}{{ loop.index }}{% endfor %}{{ range(2) }}"
    )
    assert template.variables == {"bos_token", "messages"}
    constants = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    assert mask_of(constants.render({"bos_token": "<evil>"})) == "111"
