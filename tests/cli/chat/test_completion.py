"""What Tab completes, line by line."""

import pytest

from llama.cli.chat.completion import complete
from llama.cli.chat.conversation import COMMANDS, SETTINGS


def test_commands_are_completed():
    names = [line.strip() for line in complete("/")]
    assert names == sorted(f"/{name}" for name in COMMANDS)
    assert complete("/s") == ["/save ", "/set ", "/stats", "/system "]
    assert complete("/stats") == ["/stats"], "it takes no argument, hence no blank"
    for line in ("", "s", "//s", "a /s", " /s", "/x", "/x y", "/undo ", "/system a"):
        assert complete(line) == [], line


def test_arguments_are_completed():
    assert complete("/set top_") == ["/set top_k ", "/set top_p "]
    assert len(complete("/set ")) == len(SETTINGS)
    assert complete("/set seed 1") == []
    assert complete("/clear ") == complete("/clear a") == ["/clear all"]


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_names_of_files_are_completed(command, tmp_path, monkeypatch):
    for name in ("talk.json", "my talk.json", ".hidden", "été", "new\nline"):
        (tmp_path / name).touch()
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "one").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert complete(f"{command} t") == [f"{command} talk.json", f"{command} talks/"]
    assert complete(f"{command} talks/") == [f"{command} talks/one"]
    assert complete(f"{command} my ta") == [f"{command} my talk.json"]
    assert complete(f"{command} .h") == [f"{command} .hidden"]
    names = ["my talk.json", "talk.json", "talks/", "été"]
    assert complete(f"{command} ") == [f"{command} {name}" for name in names]
    assert complete(f"{command} ~/é") == [f"{command} ~/été"]
    assert complete(f"{command} {tmp_path}/tal") == [
        f"{command} {tmp_path}/talk.json",
        f"{command} {tmp_path}/talks/",
    ]
    assert complete(f"{command} nowhere/") == []
