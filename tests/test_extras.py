"""The command that a message names to install an extra: never PyPI's project of the same name."""

import importlib.util
import json
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from helpers.launch import REPO
from llama.cli import main
from llama.common import extras

WHEEL = "file:///downloads/llama_runtime-0.5.0-py3-none-any.whl"


@pytest.fixture
def none_missing(monkeypatch) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda extra: True)


def installed_from(monkeypatch, tmp_path: Path, record: dict[str, Any] | None) -> None:
    """Let the package look as if pip had installed it with this record of where it came from."""

    class Installed(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            assert filename == "direct_url.json"
            return None if record is None else json.dumps(record)

        def locate_file(self, path: Any) -> Any:
            raise AssertionError

    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())


def test_in_a_checkout_the_command_names_the_checkout(none_missing):
    words = shlex.split(extras.install_hint("client"))
    assert words == [
        "pip", "install", "-c", str(REPO / "constraints.txt"), "-e", f"{REPO}[client]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"url": WHEEL, "archive_info": {}}, WHEEL),
        ({"url": "https://a.example/llama.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
         "git+https://a.example/llama.git@c0ffee"),
        (None, "file:///FOLDER/WHEEL"),
    ],
)  # fmt: skip
def test_elsewhere_the_command_names_what_pip_installed(
    none_missing, monkeypatch, tmp_path, record, source
):
    installed_from(monkeypatch, tmp_path, record)
    words = shlex.split(extras.install_hint("serve"))
    assert words == ["pip", "install", f"llama-runtime[serve] @ {source}"]


def test_all_missing_extras_are_named_at_once(monkeypatch, capfd):
    for name in ("httpx2", "fastapi", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["download", "ORG/NAME"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "llama download needs huggingface_hub" in said
    assert "[download]' (also missing: serve, client; the extra all installs everything)" in said


def test_the_extra_all_has_each_of_these_extras():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    assert optional["all"] == [f"llama-runtime[{','.join(sorted(extras._MODULES))}]"]
    for extra, module in extras._MODULES.items():
        package = {"PIL": "pillow"}.get(module, module)
        assert any(text.startswith(package) for text in optional[extra])
        assert importlib.util.find_spec(module) is not None


def test_no_message_names_the_project_of_pypi():
    """No program, message or page tells a user to install the project `llama` of PyPI."""
    command = ["git", "grep", "-nE", r"pip install '?llama\b", "--", "llama", "scripts", "docs"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("docs/CHANGELOG")]
    assert not lines
