"""The history of a chat in its file, and what it does with a file that others wrote."""

import json
import readline
import stat

import pytest

from llama.cli.chat.line_editor import LineEditor, history_path


@pytest.fixture(autouse=True)
def empty_history():
    readline.clear_history()
    yield
    readline.clear_history()
    readline.set_completer(None)


def recalled() -> list[str]:
    count = readline.get_current_history_length()
    return [readline.get_history_item(i + 1) for i in range(count)]


def test_the_folder_is_that_of_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/x")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert str(history_path()) == "/home/x/.local/state/llama/chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "llama" / "chat_history"


def test_what_is_remembered_is_recalled(tmp_path):
    file = tmp_path / "a" / "history"
    editor = LineEditor(readline, lambda line: [], file)
    for line in ("one", "two\nlines", "two\nlines", "été", "x" * 100_000):
        editor.remember(line)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with file.open("ab") as other:
        other.write(
            b"\n\xff\n[1]\n" + json.dumps("\0").encode() + b"\n" + b"[" * 10_000 + b'\n"cut'
        )
    readline.clear_history()
    LineEditor(readline, lambda line: [], file)
    assert recalled() == ["one", "two\nlines", "été"], "without what is too long, or damaged"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_large_file_is_cut_to_its_end(tmp_path):
    file = tmp_path / "history"
    file.write_text("".join(json.dumps(f"{i:99}") + "\n" for i in range(12_000)))
    LineEditor(readline, lambda line: [], file)
    assert 5_000 < len(recalled()) < 6_000 and recalled()[-1].strip() == "11999"
    assert file.stat().st_size < 1 << 19
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len([*tmp_path.iterdir()]) == 1


def test_a_history_that_cannot_be_used_is_an_error_and_the_editor_is_usable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        LineEditor(readline, lambda line: [], tmp_path / "file" / "history")
    with pytest.raises(IsADirectoryError):
        LineEditor(readline, lambda line: [], tmp_path)
    editor = LineEditor(readline, lambda line: [], tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    with pytest.raises(IsADirectoryError):
        editor.remember("one")
    editor.remember("two")  # The error is raised once.
    assert recalled() == ["one", "two"]
