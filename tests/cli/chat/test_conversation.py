"""A chat without a terminal: every command on the state alone, turns of input, and piped input."""

import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo_model.corpus import facts
from helpers.launch import REPO, environment, run_program
from helpers.prompts import FRANCE, JAPAN, STORY, replies, user
from llama import Llama, Message
from llama.cli import main
from llama.cli.chat.conversation import (
    COMMANDS,
    SETTINGS,
    Conversation,
    DialogEncoder,
    Turn,
)
from llama.cli.chat.engine_session import chat_on_engine as chat
from llama.cli.chat.session import Part, talk
from llama.cli.chat.stats import TurnStats
from llama.cli.chat.terminal import Terminal, read_turn
from llama.prompts import ToolFormat, encode_chat
from llama.ranks.parallel import Parallel
from llama.requests.request import Usage
from llama.sampling_params import SamplingParams

STATS = TurnStats(0.5, 2.5, Usage(prompt_tokens=30, completion_tokens=21, cached_tokens=16))


def encoder(llama: Llama, tool_format: ToolFormat = ToolFormat.NONE) -> DialogEncoder:
    return functools.partial(encode_chat, llama.tokenizer, tool_format=tool_format)


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture
def conversation(shared_llama) -> Conversation:
    return Conversation(encoder(shared_llama), 128, temperature=0.6, seed=7)


def test_names_of_special_tokens_stay_text_which_is_said_once(conversation, shared_llama):
    turn = conversation.handle("What is <|eot_id|>?")
    assert turn.note == "<|eot_id|> stays text: no text becomes a special token"
    assert turn.dialog == (user("What is <|eot_id|>?"),)
    ids = conversation.prompt(turn)
    assert ids.count(shared_llama.tokenizer.special_tokens["<|eot_id|>"]) == 1, "the turn's own"
    assert conversation.handle("And <|eom_id|>?").note == ""
    assert Conversation(None, 128).handle("<|eot_id|>").note == "", "a server may be another one"


def answered(conversation: Conversation, *texts: str) -> Conversation:
    """Ask each text with a scripted model, whose answer is the text in capitals."""
    for text in texts:
        conversation.commit(conversation.handle(text), text.upper(), STATS)
    return conversation


def test_a_question_changes_nothing_until_its_answer_is_kept(conversation):
    turn = conversation.handle("  one\n")
    assert turn == Turn(dialog=(user("one"),))
    assert conversation.messages == []
    conversation.commit(turn, "ONE", STATS)
    assert conversation.handle("two").dialog == (user("one"), assistant("ONE"), user("two"))
    assert conversation.messages == [user("one"), assistant("ONE")]
    assert conversation.handle("   ") == Turn()


def test_system_is_set_replaced_and_shown(shared_llama):
    conversation = Conversation(encoder(shared_llama), 128, system="Be brief.")
    answered(conversation, "one")
    assert conversation.handle("/system").note == "Be brief."
    conversation.handle("/system Be kind.\nAnd brief.")
    system = {"role": "system", "content": "Be kind.\nAnd brief."}
    assert conversation.messages == [system, user("one"), assistant("ONE")]
    assert conversation.handle("two").dialog[0] == system


def test_clear_leaves_the_system_message(conversation):
    conversation.handle("/system Be brief.")
    answered(conversation, "one", "two")
    assert "except the system message" in conversation.handle("/clear").note
    assert [message["role"] for message in conversation.messages] == ["system"]
    assert "write /clear" in conversation.handle("/clear some").note
    conversation.handle("/clear all")
    assert conversation.messages == []
    assert conversation.handle("/system").note == "there is no system message"


def test_undo_and_retry(conversation):
    answered(conversation, "one", "two")
    again = conversation.handle("/retry")
    assert again.dialog == (user("one"), assistant("ONE"), user("two"))
    assert len(conversation.messages) == 4, "until there is another answer, the old one stays"
    assert conversation.sampling(again.attempt).seed != conversation.sampling().seed
    conversation.commit(again, "Two", STATS)
    assert conversation.messages[-1] == assistant("Two")
    assert conversation.handle("/retry").attempt == 2
    assert conversation.handle("/undo").note == "removed: two"
    assert conversation.messages == [user("one"), assistant("ONE")]
    conversation.handle("/undo")
    for command in ("/undo", "/retry"):
        assert conversation.handle(command).note == "error: no question has been asked yet"


def test_save_and_load(conversation, shared_llama, tmp_path):
    file = tmp_path / "my talk.json"
    assert "nothing to save" in conversation.handle(f"/save {file}").note
    answered(conversation, "été")
    conversation.handle(f"/save {file}")
    assert json.loads(file.read_text()) == [user("été"), assistant("ÉTÉ")]
    assert "été" in file.read_text() and len(file.read_text().splitlines()) > 4, "for people"
    answered(conversation, "two")
    assert "4 messages written" in conversation.handle(f"/save {file}").note, "our own file"
    other = Conversation(encoder(shared_llama), 128)
    answered(other, "another")
    assert "exists already" in other.handle(f"/save {file}").note
    assert len(json.loads(file.read_text())) == 4
    assert "4 messages read" in other.handle(f"/load {file}").note
    assert other.messages == conversation.messages
    other.handle("/undo")
    assert "2 messages written" in other.handle(f"/save {file}").note
    assert [path.name for path in tmp_path.iterdir()] == ["my talk.json"]


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[" * 100_000, '["a"]', '[{"role": "x", "content": "a"}]', "\xff"],
)
def test_what_is_no_dialog_is_not_loaded(content, conversation, tmp_path):
    answered(conversation, "one")
    before = list(conversation.messages)
    file = tmp_path / "other.json"
    file.write_bytes(content.encode("latin-1"))
    assert "does not hold a JSON list of messages" in conversation.handle(f"/load {file}").note
    assert "exists already" in conversation.handle(f"/save {file}").note
    for missing in (tmp_path, tmp_path / "none", "/dev/zero"):
        assert "is not a file" in conversation.handle(f"/load {missing}").note
    assert "error: " in conversation.handle(f"/save {tmp_path}/no/folder/x.json").note
    assert conversation.messages == before


def test_set(conversation):
    assert conversation.handle("/set temperature 0").note == "temperature 0"
    assert conversation.handle('/set stop ["a", "b"]').note == 'stop ["a", "b"]'
    conversation.handle("/set max_gen_len 12")
    chosen: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["a", "b"],
        "max_tokens": 12,
    }
    assert conversation.sampling() == SamplingParams(**chosen)
    conversation.handle("/set max_gen_len none")
    conversation.handle("/set stop none")
    assert conversation.sampling() == SamplingParams(**{**chosen, "stop": (), "max_tokens": None})
    shown = conversation.handle("/set").note.splitlines()
    assert [line.split()[0] for line in shown] == list(SETTINGS)
    assert {"temperature 0.0", "stop none", "max_gen_len none", "seed 7"} <= set(shown)
    conversation.handle("/set seed none")
    assert conversation.sampling().seed != conversation.sampling().seed, "a new one each time"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature -1", "temperature=-1 must be"),
        ("temperature nan", "temperature='nan' must be"),
        ("temperature NaN", "temperature=nan must be"),
        ("max_gen_len -1", "max_gen_len=-1 must be"),
        ("seed -1", "seed=-1 must be"),
        ("seed x", "seed='x' must be"),
        ("top_p", "/set top_p needs a value: write /set top_p VALUE"),
        ("warmth 1", "there is no setting warmth: the settings are temperature"),
        ("min_p " + "[" * 100_000, "min_p="),
    ],
)
def test_a_bad_setting_changes_nothing(text, message, conversation):
    before = conversation.sampling()
    assert message in conversation.handle(f"/set {text}").note
    assert conversation.sampling() == before


def test_stats_and_figures(conversation, shared_llama):
    assert conversation.handle("/stats").note == "context 0 of 128 tokens | turns 0"
    answered(conversation, "one", "two")
    context, last, total = conversation.handle("/stats").note.splitlines()
    ids = shared_llama.formatter.encode_dialog_prompt(conversation.messages)
    header = shared_llama.formatter.encode_header(assistant(""))
    assert context == f"context {len(ids) - len(header)} of 128 tokens | turns 2"
    figures = "first token 500 ms | 10.0 tokens/s | context 51 of 128 tokens, 16 from cache"
    assert last == f"last answer: {figures}"
    assert total == "all answers: 2, 42 tokens in 5.0 s"


def test_commands_never_reach_the_model(conversation):
    answered(conversation, "one")
    for text in ("/nope", "/", "/ ", "/help me", "/save", "/undo 2", "/tmp/file", "/Bye"):
        turn = conversation.handle(text)
        assert turn.note and not turn.dialog and not turn.leave, text
    assert conversation.handle("/nope x").note.startswith("there is no command /nope: /help")
    assert conversation.handle("//help me").dialog[-1] == user("/help me")
    assert all(f"/{name} " in conversation.handle("/help").note for name in COMMANDS)
    assert conversation.handle("/bye") == Turn(leave=True)


@pytest.mark.parametrize(
    ("lines", "turns"),
    [
        (["one", "two"], ["one", "two"]),
        (["one\\", " two\\", "three", "four"], ["one\n two\nthree", "four"]),
        (['"""', "a", "", "b\\", '"""', "c"], ["a\n\nb\\", "c"]),
        (['"""', "/help", '"""', "/help"], ["//help", "/help"]),
        (['"""', "the end comes first"], ["the end comes first"]),
        (["one\\"], ["one"]),
        (["pasted\ntext"], ["pasted\ntext"]),
        (['"""\npasted\n"""', "b"], ["pasted", "b"]),
        (['say """', '"""x"""'], ['say """', '"""x"""']),
    ],
)
def test_turns_of_several_lines(lines, turns):
    left = list(lines)

    def read_line(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    assert [read_turn(read_line) for _ in turns] == turns
    with pytest.raises(EOFError):
        read_turn(read_line)


CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "How is it in Bern?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_a_plain_dialog_has_the_ids_of_the_chat_format(shared_llama, conversation, tmp_path):
    """A plain dialog has the ids of the chat format.

    Meta's `ChatFormat` is the oracle, for dialogs with every role of Meta's own messages.
    """
    dialog: list[Any] = [
        {"role": "system", "content": " Be brief.\n"},
        user("été <|eot_id|>"),
        assistant("ÉTÉ"),
        {"role": "ipython", "content": ' {"a": 1} '},
        {"role": "tool", "content": "two"},
        assistant(""),
    ]
    (tmp_path / "dialog").write_text(json.dumps(dialog))
    for text in ("", "/load " + str(tmp_path / "dialog")):
        conversation.handle(text)
        turn = conversation.handle("one")
        wanted = shared_llama.formatter.encode_dialog_prompt(turn.dialog)
        conversation.window.context = 2 * len(wanted) + 1
        assert conversation.prompt(turn) == wanted
    assert len(turn.dialog) == len(dialog) + 1


@pytest.mark.parametrize("tool_format", [ToolFormat.LLAMA_3_1, ToolFormat.LLAMA_3_2])
def test_a_dialog_with_tool_calls_is_continued(shared_llama, tmp_path, tool_format):
    """A dialog with tool calls is continued.

    Its ids are those of `encode_chat`, and each command supports such messages.
    """
    file = tmp_path / "calls.json"
    file.write_text(json.dumps(CALLS))
    conversation = Conversation(encoder(shared_llama, tool_format), 4096)
    assert conversation.handle(f"/load {file}").note == f"5 messages read from {file}"
    turn = conversation.handle("And tomorrow?")
    wanted = encode_chat(
        shared_llama.tokenizer, [*CALLS, user("And tomorrow?")], tool_format=tool_format
    )
    assert conversation.prompt(turn) == wanted
    assert "weather" in shared_llama.tokenizer.decode(wanted), "the call is in the prompt"
    assert conversation.handle("/stats").note.endswith("turns 1")
    assert conversation.handle("/system").note == "You are brief."
    answered(conversation, "And tomorrow?")
    assert "7 messages written" in conversation.handle(f"/save {file}").note
    assert json.loads(file.read_text())[:5] == CALLS
    conversation.handle("/undo")
    assert conversation.messages == CALLS
    assert conversation.handle("/undo").note == "removed: How is it in Bern?"


def test_tool_calls_are_not_loaded_for_a_model_without_tools(conversation, tmp_path):
    (tmp_path / "calls.json").write_text(json.dumps(CALLS))
    note = conversation.handle(f"/load {tmp_path / 'calls.json'}").note
    assert "cannot be continued with this model: message 2: tool_calls" in note
    assert conversation.messages == []


def test_a_question_that_leaves_no_space_names_the_remedy(conversation, shared_llama):
    encode = encoder(shared_llama)
    turn = conversation.handle("x" * 200)
    with pytest.raises(
        ValueError, match=r"the context of 128 tokens: shorten it, .* --max_seq_len"
    ):
        conversation.prompt(turn)
    ids = encode(turn.dialog)
    conversation.window.context = len(ids) + 1
    assert conversation.prompt(turn) == ids


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_full_context_leaves_out_the_oldest_turns(shared_llama, system):
    """A full context leaves out the oldest turns of the prompt, and of nothing else.

    The system message and the question are always sent. Turns are left out many at a time, so that
    most prompts begin as the one before.
    """
    encode = encoder(shared_llama)
    conversation = Conversation(encode, 256, system=system)
    beginnings = []
    for i in range(20):
        turn = conversation.handle(f"question {i}")
        ids = conversation.prompt(turn)
        sent = [*turn.dialog]
        first = 0 if system is None else 1
        del sent[first : first + 2 * conversation.window.num_left_out]
        assert ids == encode(sent) and sent[-1] == user(f"question {i}")
        assert len(ids) <= 192 and (
            len(ids) <= 128 or conversation.window.num_left_out in beginnings
        )
        assert (conversation.window.num_left_out > 0) == (len(encode(turn.dialog)) > 192)
        beginnings.append(conversation.window.num_left_out)
        conversation.commit(turn, f"answer {i}", STATS)
    assert beginnings == sorted(beginnings) and 2 <= len(set(beginnings)) <= 10
    assert len(conversation.messages) == 40 + (system is not None), "/save writes all turns"
    left_out = conversation.window.num_left_out
    assert f"turns 20 | oldest turns left out: {left_out}" in conversation.handle("/stats").note
    used = re.match(r"context (\d+) of 256", conversation.handle("/stats").note)
    assert used and int(used[1]) < 192
    for _ in range(18):
        conversation.handle("/undo")
    turn = conversation.handle("again")
    assert conversation.prompt(turn) == encode(turn.dialog), "there is space again"


def test_the_length_of_answers_is_left_free(shared_llama):
    """max_gen_len is left free where it is more than a quarter, up to half of the context."""
    conversation = Conversation(encoder(shared_llama), 256, max_gen_len=100)
    for text in "abcdefghijkl":
        turn = conversation.handle(text * 5)
        assert len(conversation.prompt(turn)) <= 156
        conversation.commit(turn, text * 5, STATS)
    conversation.handle("/set max_gen_len 5000")
    assert len(conversation.prompt(conversation.handle("one"))) <= 128


def test_chat_refuses_several_groups(shared_llama):
    class Groups:
        model = type("M", (), {"parallel": Parallel(data_size=2)})

    with pytest.raises(ValueError, match="one conversation, and there are 2 model-parallel groups"):
        chat(Groups())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature=-1 must be"):
        chat(shared_llama, temperature=-1)


Piped = Callable[..., tuple[list[str], str]]


@pytest.fixture
def piped(demo, monkeypatch, capsys) -> Piped:
    """A function piped(text, **settings) that runs a chat with the demo model.

    It returns the lines on stdout, and stderr.
    """

    def run(text: str, **settings) -> tuple[list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        chat(demo, **settings)
        found = capsys.readouterr()
        return found.out.splitlines(), found.err

    return run


def test_answers_are_those_of_chat_completion(demo, piped):
    """Answers are those of chat_completion, with the earlier turns as context and in the cache."""
    out, err = piped(f"{FRANCE}\n{JAPAN}\n", temperature=0.0)
    assert out == replies(demo, FRANCE, JAPAN)
    first, second = err.splitlines()
    assert "tokens/s" in first and "tokens/s" in second
    used = len(demo.formatter.encode_dialog_prompt([user(FRANCE)]))
    used += len(demo.tokenizer.encode(out[0], bos=False, eos=False))
    assert f"context {used} of 512 tokens" in first
    cached = re.search(r"(\d+) from cache", second)
    assert cached and used - 17 <= int(cached[1]) < used, "all pages that the first turn filled"


def test_a_saved_dialog_with_tool_calls_goes_on_in_the_terminal(
    make_checkpoint, monkeypatch, capsys, tmp_path
):
    """A saved dialog with tool calls continues in the terminal as in chat_completion."""
    folder = make_checkpoint(use_scaled_rope=True)[0]
    llama = Llama.build(str(folder), None, 1024, 1, device="cpu", dtype="fp32")
    assert llama.dialog_format.has_tools
    file = tmp_path / "calls.json"
    file.write_text(json.dumps(CALLS))
    saved = tmp_path / "saved.json"
    text = f"/load {file}\nAnd tomorrow?\n/save {saved}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    chat(llama, temperature=0.0, max_gen_len=12)
    assert "error" not in capsys.readouterr().err
    dialog = [*CALLS, user("And tomorrow?")]
    (wanted,) = llama.chat_completion([dialog], temperature=0.0, max_gen_len=12)
    messages = json.loads(saved.read_text())
    assert messages == [*dialog, assistant(wanted["generation"]["content"])]


def test_a_question_too_long_is_not_kept_and_the_chat_goes_on(demo, piped):
    out, err = piped(f"{'cat ' * 600}\n{FRANCE}\n/stats\n", temperature=0.0)
    assert out == replies(demo, FRANCE)
    assert "the context of 512 tokens: shorten it" in err and "The question was not kept." in err
    assert "turns 1" in err


def test_an_error_in_an_answer_is_not_the_end(demo, piped, monkeypatch):
    start, calls = demo.engine.runner.start, []

    def fail_once(scheduled):
        calls.append(scheduled)
        if len(calls) == 3:
            raise ValueError("no token to choose")
        return start(scheduled)

    monkeypatch.setattr(demo.engine.runner, "start", fail_once)
    out, err = piped(f"{STORY}\n{FRANCE}\n/stats\n", temperature=0.0)
    assert out[-1].endswith(replies(demo, FRANCE)[0])
    assert "error: no token to choose. The question was not kept." in err and "turns 1" in err


def test_a_full_context_says_so(demo, piped):
    long = "cat " * 450
    _, err = piped(f"/set min_tokens 99\n{long}\n{FRANCE}\n/undo\n/set min_tokens 0\n{FRANCE}\n")
    assert "cut because the context is full | " in err and "context 512 of 512" in err
    assert err.count("oldest turns left out: 1 | ") == 2 and err.count("tokens/s") == 3
    _, err = piped(f"{STORY}\n", max_gen_len=5)
    assert "cut at max_gen_len" in err


def test_a_chat_goes_on_when_its_context_is_full(demo, piped):
    """A chat goes on when its context is full, and says how many turns it leaves out."""
    out, err = piped(f"{FRANCE}\n" * 25, temperature=0.0)
    assert err.count("tokens/s") == 25 and out[0] == replies(demo, FRANCE)[0]
    assert "error" not in err and "oldest turns left out: " in err


def test_the_demo_model_answers_rightly_in_a_long_chat(monkeypatch, capsys):
    """The demo model answers rightly in a long chat, in which it also tells stories.

    It was trained on chats as long as its context; the oldest turns are left out beyond that.
    """
    known = facts()[::30][:24]
    asked = [fact.questions[0] for fact in known]
    asked[4::5] = [STORY] * len(asked[4::5])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in asked)))
    assert main(["chat", "--temperature", "0", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    answers = shown.out.splitlines()
    assert len(answers) == len(asked) and "oldest turns left out: " in shown.err
    right = [
        answer == fact.answer
        for answer, fact, text in zip(answers, known, asked, strict=True)
        if text != STORY
    ]
    assert sum(right) >= 0.9 * len(right)


def test_retry_gives_another_answer_and_the_chat_is_reproducible(piped):
    settings = {"temperature": 1.0, "seed": 5, "max_gen_len": 30}
    once, _ = piped(f"{STORY}\n", **settings)
    twice, _ = piped(f"{STORY}\n/retry\n", **settings)
    assert twice[: len(once)] == once and twice[len(once) :] != once
    undone, _ = piped(f"{STORY}\n/retry\n/undo\n{STORY}\n", **settings)
    assert undone == twice + once


@pytest.mark.slow
def test_piped_into_the_script_on_two_ranks(demo):
    """Input is piped into the script on two ranks.

    stdout has the answers and nothing else; figures and the messages of Llama.build are on stderr;
    the exit code is 0 at the end of input.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        str(REPO / "scripts" / "chat.py"),
        "--temperature", "0", "--dtype", "fp32", "--device", "cpu", "--system", "42",
    ]  # fmt: skip
    text = f'/system\n/clear all\n{FRANCE}\n"""\nAnd of\nJapan?\n"""\n/nope\n/bye\nnever asked\n'
    done = run_program(command, input=text, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == replies(demo, FRANCE, "And of\nJapan?")
    assert done.stderr.count("tokens/s") == 2 and done.stderr.count("Loaded in") == 1
    assert "\n42\n" in done.stderr and "there is no command /nope" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr


THOUGHT = (Part(new_reasoning="first\n"), Part(new_reasoning="then\x1b[2J"), Part("ok", "stop"))


def run_scripted(monkeypatch, *parts: Part, screen: bool) -> Conversation:
    """Run a chat whose model sends these parts; the user asks a question and types /think."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n/think\n"))
    conversation = Conversation(None, None)
    terminal = Terminal()
    terminal.screen = screen
    terminal._notes = sys.stdout if screen else sys.stderr
    talk(lambda turn: (part for part in parts), conversation, terminal)
    return conversation


def test_a_pipe_gets_the_answer_without_the_reasoning(monkeypatch, capsys):
    conversation = run_scripted(monkeypatch, *THOUGHT, screen=False)
    shown = capsys.readouterr()
    assert shown.out == "ok\n" and "first\nthen\ufffd[2J" in shown.err
    assert conversation.messages == [user("q"), assistant("ok")]


def test_reasoning_is_folded_on_a_screen(monkeypatch, capsys):
    """Reasoning is one line, which a note replaces when the answer begins."""
    run_scripted(monkeypatch, *THOUGHT, screen=True)
    lines = capsys.readouterr().out.split("\n")
    rewritten = "\r\x1b[Kfirst\r\x1b[Kfirst then\ufffd[2J\r\x1b[Kthought before the answer: "
    assert lines[1] == rewritten + "/think shows it" and lines[2] == "ok"
    assert lines[4:6] == ["first", "then\ufffd[2J"], "what /think shows"
    with_error = [Part(new_reasoning="so"), Part(finish_reason="stop")]
    run_scripted(monkeypatch, *with_error, screen=True)
    assert "\r\x1b[Kthought before the answer" in capsys.readouterr().out


def test_think_without_reasoning_says_so(conversation):
    answered(conversation, "one")
    assert conversation.handle("/think").note == "there was no reasoning before the last answer"


def test_an_answer_cannot_steer_the_terminal(capsys):
    terminal = Terminal()
    terminal.write("\x1b[2Jin a pipe it is data\n")
    terminal.screen = True
    terminal.write("a\x1b]0;title\x07b\rc\t\x9bd\n")
    assert capsys.readouterr().out == (
        "\x1b[2Jin a pipe it is data\na\ufffd]0;title\ufffdb\ufffdc\t\ufffdd\n"
    )


def test_a_reader_that_leaves_is_no_traceback():
    """A reader that leaves causes no traceback, as in `chat.py | head -1`."""
    script = Path(REPO, "scripts", "chat.py")
    process = subprocess.Popen(
        [sys.executable, script, "--device", "cpu"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(f"{FRANCE}\n".encode())
    process.stdin.close()
    errors = process.stderr.read().decode()
    assert process.wait(60) == 0 and "Traceback" not in errors and "Broken pipe" not in errors
