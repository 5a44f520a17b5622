"""`llama download` against a hub on loopback: the files, where they are found, and failures.

huggingface_hub fetches the files and reports where its cache is.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from helpers.hub import COMMIT, Hub, run_hub
from helpers.launch import DEMO, environment
from helpers.launch import REPO as REPO_FOLDER
from helpers.waiting import wait_until
from llama.checkpoint.find import find
from llama.checkpoint.write.convert import convert
from llama.cli import main
from llama.compat.vllm import EngineArgs
from llama.storage.hub import hub_cache, model_folder

NAME = "Llama-3.2-1B-Instruct"
REPO = f"meta-llama/{NAME}"
META = {f"original/{path.name}": path.read_bytes() for path in DEMO.iterdir()}
COMPLETE = ["--prompt", "Once upon a time", "--temperature", "0", "--max_gen_len", "8"]
COMPLETE += ["--max_seq_len", "64", "--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """Return the files of one of Meta's repositories: both layouts, and files that no program
    needs.
    """
    folder = tmp_path_factory.mktemp("hub") / "hf"
    convert(DEMO, folder)
    found = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    found["generation_config.json"] = b'{"temperature": 0.6}'
    found["additional_chat_templates/tool_use.jinja"] = b"tools"
    return found | META | {"README.md": b"#", "original/orig_params.json": b"{}", "a.gguf": b"GGUF"}


@pytest.fixture
def hub(files, tmp_path, monkeypatch) -> Iterator[Hub]:
    for name in (
        *(name for name in os.environ if name.startswith(("HF_", "LLAMA_"))),
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    # the library reads the variable at import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with run_hub(Hub(REPO, files)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running
    for number, handler in before.items():
        signal.signal(number, handler)


def here(repo: str = REPO) -> set[str]:
    folder = hub_cache() / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT
    return {str(path.relative_to(folder)) for path in folder.rglob("*.*")}


def test_a_model_comes_once_and_every_command_finds_it_by_its_name(hub, files, capfd, monkeypatch):
    assert main(["complete", NAME, *COMPLETE]) == 2
    assert f"{NAME} does not exist: give the folder" in (said := capfd.readouterr().err)
    assert "or fetch a model: llama download NAME" in said
    assert main(["download", NAME]) == 0
    unwanted = {"README.md", "a.gguf", "original/params.json", "original/orig_params.json",
                "original/consolidated.00.pth"}  # fmt: skip
    assert here() == files.keys() - unwanted
    folder, following = capfd.readouterr().out.splitlines()
    assert Path(folder) == model_folder(REPO) and following == f"next: llama chat {NAME}"
    assert {name for name, _ in hub.sent} == here() and len(hub.sent) == len(here())
    assert main(["download", REPO]) == 0 and len(hub.sent) == len(here()), "it came twice"
    monkeypatch.delenv("HF_ENDPOINT")  # nothing below contacts a hub
    texts = []
    for name in (NAME, REPO, str(DEMO)):
        capfd.readouterr()
        assert main(["complete", name, *COMPLETE]) == 0
        texts.append(capfd.readouterr().out)
    assert texts == [texts[0]] * 3 and len(texts[0]) > 8
    assert find(NAME).tokenizer_path().name == "tokenizer.json"
    assert EngineArgs(REPO).default_params().temperature == 0.6


def test_metas_layout_where_it_is_alone(hub):
    hub.files = META
    assert main(["download", NAME]) == 0 and here() == META.keys()
    assert find(NAME).layout == "meta"


def test_metas_layout_where_another_program_has_fetched_it(hub):
    pth = "original/consolidated.00.pth"
    huggingface_hub.snapshot_download(
        REPO, allow_patterns=pth, cache_dir=hub_cache(), endpoint=hub.url
    )
    assert main(["download", NAME]) == 0
    assert here() >= {pth, "original/params.json"} and "model.safetensors" not in here()
    assert find(NAME).layout == "meta" and len(hub.sent) == len(here())


def test_a_gguf_file_and_all_of_its_parts(hub, capfd):
    parts = [f"q8/m-{i:05d}-of-00002.gguf" for i in (1, 2)]
    hub.files = dict.fromkeys(("m-Q4_K_M.gguf", "m-Q8_0.gguf", *parts), b"GGUF")
    for words, message in (
        ([], r"original/\*\.pth; give --file, one of m-Q4_K_M\.gguf, m-Q8_0\.gguf, q8/m-00001"),
        (["--file", "m-Q4.gguf"], r"it has no m-Q4\.gguf; give --file, one of m-Q4_K_M\.gguf, m-Q"),
    ):
        assert main(["download", NAME, *words]) == 1
        assert re.search(message, capfd.readouterr().err)
    assert main(["download", NAME, "--file", "m-Q4_K_M.gguf"]) == 0 and here() == {"m-Q4_K_M.gguf"}
    assert main(["verify", NAME]) == 1  # the file has four bytes, but it was found
    assert "m-Q4_K_M.gguf" in capfd.readouterr().err
    assert main(["download", NAME, "--file", parts[1]]) == 0
    path, following = capfd.readouterr().out.splitlines()
    assert path == str(model_folder(NAME) / parts[0]) and following == f"next: llama chat {path}"
    assert here() == {"m-Q4_K_M.gguf", *parts}


def test_a_cut_connection_goes_on_where_it_was(hub, files, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 20)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.cut = {"model.safetensors": 5_000_000}
    assert main(["download", NAME]) == 0
    asked = [first for name, first in hub.sent if name == "model.safetensors"]
    assert asked == [0, 4 << 20]
    assert (model_folder(NAME) / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "replaced", "flipped", "flipped before a cut"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_the_hub_did_not_list_is_removed(hub, files, monkeypatch, capfd, damage, name):
    """A file that differs from the hub's listing is an error, and is fetched again next time.

    The library accepts it, as the length that the server announces fits what it sends. A file that
    is resumed after a cut keeps its wrong beginning.
    """
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 20)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    whole = files[name]
    middle = len(whole) // 2
    flipped = whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]
    sent = {"cut": whole[:middle], "replaced": bytes(len(whole))}.get(damage, flipped)
    hub.sent_instead = {name: sent}
    if damage == "flipped before a cut":
        hub.cut = {name: middle}
    assert main(["download", NAME]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert f"{name} ({len(sent):,} bytes) " in error and "download it again" in error
    kind = "SHA-256" if name.endswith("s") else "git's SHA-1"
    rule = f"hub lists ({len(whole):,} bytes)" if damage == "cut" else f"has {kind} "
    assert rule in error
    assert name not in here() and not [*hub_cache().rglob("*.incomplete")]
    hub.sent_instead = {}
    hub.sent.clear()
    assert main(["download", NAME]) == 0 and hub.sent == [(name, 0)]
    assert (model_folder(NAME) / name).read_bytes() == whole


def test_a_file_in_the_cache_that_was_cut_is_fetched_again(hub, files, capfd):
    """A file in the cache that is shorter than listed is fetched again.

    `llama verify` hashes files that the cache names after their SHA-256, the tokenizer too.
    """
    assert main(["download", NAME]) == 0
    assert main(["verify", NAME]) == 0
    lines = capfd.readouterr().out.splitlines()
    for name in ("model.safetensors", "tokenizer.json"):
        (line,) = [line for line in lines if line.startswith(Path(name).name)]
        assert "SHA-256 matches" in line
        blob = (model_folder(NAME) / name).resolve()
        blob.write_bytes(files[name][:-1] + bytes([files[name][-1] ^ 1]))
        assert main(["verify", NAME]) == 1
        assert (
            f"{name} (" in (said := capfd.readouterr().err) and "its name in the cache says" in said
        )
        blob.write_bytes(files[name][:-1])
        hub.sent.clear()
        assert main(["download", NAME]) == 0 and hub.sent == [(name, 0)]
    assert main(["verify", NAME]) == 0


def test_half_a_download_is_told_and_completed(hub, capfd):
    assert main(["download", NAME]) == 0
    (model_folder(NAME) / "model.safetensors").resolve().unlink()
    (model_folder(NAME) / "model.safetensors").unlink()
    hub.sent.clear()
    assert main(["verify", NAME]) == 1
    assert "holds no weights" in (said := capfd.readouterr().err) and "llama download NAME" in said
    assert main(["download", NAME]) == 0 and hub.sent == [("model.safetensors", 0)]
    assert main(["verify", NAME]) == 0


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ([NAME], {"token": "hf_a"}, rf"accept its licence at http://\S+/{REPO} and set HF_TOKEN"),
        ([NAME], {"HF_TOKEN": "hf_b"}, "Invalid credentials in Authorization header; then: llama"),
        (["Llama3.2-1b-instruct"], {}, rf"no such model, .* HF_TOKEN: did you mean {NAME}\?; then"),
        (["other/model"], {}, r"http://\S+ has no such.*; Meta's models are Meta-Llama-3-8.*3\.3"),
        ([NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"},
         rf"{REPO} is not downloaded: http://127\.0\.0\.1:9 cannot be reached \(.*refused\): "
         r"connect this machine to a network, .* HF_ENDPOINT to .*, or copy \S+ from .*; th"),
        ([NAME], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids downloads: unset it, or copy /"),
        ([NAME], {"HF_HUB_CACHE": "/proc/none"}, "is not downloaded: .* '/proc/none'; then: llama"),
        ([NAME], {"WORLD_SIZE": "2"}, "one process downloads for all ranks: start it without tor"),
        ([], {}, "NAME is missing"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_what_to_type(
    hub, monkeypatch, capfd, words, environ, message
):
    hub.token = environ.pop("token", environ.get("HF_TOKEN") and "hf_a")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    offline = "HF_HUB_OFFLINE" in environ
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    assert main(["download", *words]) in (1, 2)
    out, err = capfd.readouterr()
    last = err.splitlines()[-1]  # the lines before it are the library's progress bar
    assert re.search(message, last), last
    assert not out and last.startswith("error: ")


def test_no_room_no_weights_no_package(hub, monkeypatch, capfd):
    huge = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: huge)
    assert main(["download", NAME]) == 1
    assert (
        "where 1,000 are free: delete something there, or set HF_HUB_CACHE"
        in capfd.readouterr().err
    )
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert main(["download", NAME]) == 1
    assert "it has no model*.safetensors or original/*.pth; then" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["download", NAME]) == 2
    assert f"-e '{REPO_FOLDER}[download]'" in capfd.readouterr().err
    assert not hub.sent


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("commit", ["relative", "absolute", "", "..", COMMIT[:39], COMMIT + "\n"])
def test_a_lying_hub_changes_no_file_outside_of_the_cache(
    hub, files, tmp_path_factory, capfd, commit, is_later
):
    """What a hub calls a commit is no path, the first time and when the library asks again."""
    mine = tmp_path_factory.mktemp("mine")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (mine / name).write_text("mine")
    snapshots = hub_cache() / f"models--{REPO.replace('/', '--')}" / "snapshots"
    given = {"relative": os.path.relpath(mine, snapshots), "absolute": str(mine)}.get(
        commit, commit
    )
    if is_later:
        hub.commit_of_main = given
    else:
        hub.commit = given
    assert main(["download", NAME]) == 1
    assert "is not downloaded" in capfd.readouterr().err.splitlines()[-1]
    assert {path.name: path.read_text() for path in mine.iterdir()} == dict.fromkeys(
        ("config.json", "model.safetensors", "tokenizer.json"), "mine"
    )
    hub.commit = hub.commit_of_main = COMMIT
    assert main(["download", NAME]) == 0


@pytest.mark.parametrize("place", ["ETag", "X-Linked-ETag", "X-Repo-Commit", "tree"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_names_of_a_lying_hub_are_no_paths(hub, tmp_path_factory, capfd, place, is_absolute):
    """What a hub calls a hash or a commit of a file leads nowhere outside of the cache."""
    mine = tmp_path_factory.mktemp("mine")
    (mine / "config.json").write_text("mine")
    folder = hub_cache() / f"models--{REPO.replace('/', '--')}" / "blobs"
    target = mine if place == "X-Repo-Commit" else mine / "new"
    value = str(target) if is_absolute else os.path.relpath(target, folder)
    if place == "tree":  # of a file that Xet would fetch
        lfs = {"oid": value, "size": 5, "pointerSize": 134}
        hub.more_of_tree = {"lfs": lfs, "xetHash": "0" * 64}
    else:
        hub.header = (place, f'"{value}"' if "ETag" in place else value)
    assert main(["download", NAME]) == 1
    assert "gives a file the hash" in capfd.readouterr().err.splitlines()[-1]
    assert [path.name for path in mine.iterdir()] == ["config.json"]
    assert (mine / "config.json").read_text() == "mine"
    hub.header = ("", "")
    hub.more_of_tree = {}
    assert main(["download", NAME]) == 0


def test_a_cache_that_names_no_commit_is_no_path(hub):
    assert main(["download", NAME]) == 0
    reference = hub_cache() / f"models--{REPO.replace('/', '--')}" / "refs" / "main"
    for text in ("/etc", "../../..", COMMIT.upper()):
        reference.write_text(text)
        with pytest.raises(ValueError, match="not 40 hexadecimal digits"):
            model_folder(NAME)


@pytest.mark.parametrize("escape", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m"])
def test_escapes_of_a_hub_are_not_printed(hub, capfd, monkeypatch, escape):
    hub.files = {f"m{escape}.gguf": b"GGUF"}
    assert main(["download", NAME]) == 1
    hub.token = "hf_a"
    monkeypatch.setenv("HF_TOKEN", "hf_b")
    hub.message = f"no{escape}entry"
    assert main(["download", NAME]) == 1
    said = capfd.readouterr().err
    assert "give --file, one of m" in said and "entry" in said
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_at_once_and_the_next_download_leaves_no_part(hub, files, number):
    """A signal ends the download at once, and the next download leaves no partial file.

    The library's threads would go on for hours, or leave gigabytes of partial files, which no other
    process resumes. After SIGKILL they remain until the file has been downloaded.
    """
    hub.stalled = {"model.safetensors": 5_000_000}
    process = subprocess.Popen(
        [sys.executable, "-m", "llama", "download", NAME], env=environment(), stderr=subprocess.PIPE
    )
    parts = hub_cache() / f"models--meta-llama--{NAME}" / "blobs"
    wait_until(lambda: ("model.safetensors", 0) in hub.sent and list(parts.glob("*.incomplete")))
    process.send_signal(number)
    process.communicate(timeout=20)
    is_killed = number == signal.SIGKILL
    assert process.returncode == (-9 if is_killed else 128 + number)
    assert any(parts.glob("*.incomplete")) == is_killed
    hub.stalled = {}
    assert main(["download", NAME]) == 0 and not list(parts.glob("*.incomplete"))
    assert (model_folder(NAME) / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize(
    "given",
    [{}, {"XDG_CACHE_HOME": "/x"}, {"HF_HOME": "~/h"}, {"HF_HOME": "/h", "HF_HUB_CACHE": "~/c"}],
    ids=str,
)
def test_the_cache_is_where_other_programs_look(given, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    theirs = runpy.run_path(huggingface_hub.constants.__file__)["HF_HUB_CACHE"]
    assert str(hub_cache()) == theirs
