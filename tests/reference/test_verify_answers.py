"""`llama verify --answers`: what it compares, what it accepts, and what it finds."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import shard_of
from helpers.launch import DEMO, environment
from llama.checkpoint.write.convert import convert
from llama.cli import main
from llama.cli.verify_answers import Answers, compare

LINE = re.compile(
    r"(.*): the engine and the reference (agree|DISAGREE): (\d+) of (\d+) greedy ids differ, and "
    r"(\d+) log-probabilities by at most (\S+) \(bound (\S+)\)(.*)\n"
)


def verify(capsys, *arguments: str | Path) -> tuple[int, re.Match[str]]:
    code = main(["verify", *map(str, arguments), "--answers", "--device", "cpu"])
    out, err = capsys.readouterr()
    match = LINE.fullmatch(out)
    assert match, (out, err)
    return code, match


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory) -> Path:
    """The demo model in two shards, divided by Meta's rules."""
    folder = tmp_path_factory.mktemp("two") / "shards"
    shutil.copytree(DEMO, folder)
    state = torch.load(DEMO / "consolidated.00.pth", weights_only=True)
    params = {"n_heads": 8, "n_kv_heads": 4}
    for rank in range(2):
        shard = {name: shard_of(name, whole, params, rank, 2) for name, whole in state.items()}
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
    return folder


def test_the_demo_model_agrees(capsys):
    code, line = verify(capsys, DEMO)
    assert code == 0 and line[2] == "agree" and line[3] == "0"
    assert int(line[4]) > 80 and int(line[5]) > 300
    assert 0 < float(line[6]) < 1e-4 and float(line[7]) == 1e-3


@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["ranks", "torchrun"])
def test_two_ranks_agree(launcher, two_shards):
    """Each of two ranks reads its own shard; one line is printed for all."""
    command = ["-m", "llama", "verify", str(two_shards), "--answers", "--device", "cpu"]
    if launcher == "ranks":
        command += ["--ranks", "2"]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [*torchrun, *command]
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    line = LINE.fullmatch(done.stdout)
    assert line and line[2] == "agree" and line[8].endswith("2 rank(s)"), done.stdout


@pytest.mark.parametrize("layout", ["hf", "two shards", "gguf"])
def test_other_layouts_agree(layout, two_shards, capsys, tmp_path):
    """The reference gets Meta's tensors of any layout; a quantized file is dequantized for both."""
    folder = two_shards
    if layout == "hf":
        convert(DEMO, folder := tmp_path / "hf")
    elif layout == "gguf":
        convert(DEMO, folder := tmp_path / "demo-q8_0.gguf", quantize="q8_0")
    code, line = verify(capsys, folder)
    assert code == 0 and float(line[6]) < 1e-4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 256},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_a_model_that_the_reference_cannot_run_is_refused(scaling, capsys, tmp_path):
    """The reference is Meta's model: a parameter that it does not know is no disagreement."""
    convert(DEMO, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    path.write_text(json.dumps(config))
    assert main(["verify", str(tmp_path / "hf"), "--answers", "--device", "cpu"]) == 1
    assert re.search(r"rope_\w+=\S+ is not in Meta's model", capsys.readouterr().err)


def test_a_conversion_is_compared_with_its_original(capsys, tmp_path):
    """Hugging Face's order of rows is another, and so is its reader; the answers are the same."""
    convert(DEMO, tmp_path / "hf")
    code, line = verify(capsys, tmp_path / "hf", "--original", DEMO)
    assert code == 0 and float(line[6]) < 1e-4
    assert line[8].startswith(f" of {DEMO}")


@pytest.mark.parametrize(
    "name", ["layers.1.feed_forward.w2.weight", "layers.3.attention.wq.weight", "norm.weight"]
)
def test_one_weight_that_is_changed_by_a_percent_is_found(name, capsys, tmp_path):
    """The engine's copy has one tensor times 1.01: of all tensors, the first changes answers least.

    The reference reads the original.
    """
    shutil.copytree(DEMO, tmp_path / "copy")
    path = tmp_path / "copy" / "consolidated.00.pth"
    state = torch.load(path, weights_only=True)
    state[name] = state[name] * 1.01
    torch.save(state, path)
    code, line = verify(capsys, tmp_path / "copy", "--original", DEMO)
    assert code == 1 and line[2] == "DISAGREE"
    assert float(line[6]) > 5e-3


def test_flags_of_answers_need_answers(capsys):
    assert main(["verify", str(DEMO), "--original", str(DEMO)]) == 2
    assert "--original is for a comparison of answers: add --answers" in capsys.readouterr().err


PROMPT = [256, 65]


def compared(own: list[int], own_scores: list[float], gap: float = 0.0):
    """Compare with the answer [70, 71] of the reference; its second id is less probable by gap."""
    wanted = Answers([[*PROMPT, 70, 71]], [[0.0, -1.0, -2.0, -0.5]])
    found = Answers([[*PROMPT, *own]], [[0.0, *own_scores]])
    scores = {71: -0.5 - gap, 72: -0.5, 300: -0.5}
    return compare([PROMPT], wanted, found, {300}, lambda _, token: scores[token], 0.01)


def test_scores_are_compared_up_to_the_bound():
    equal = compared([70, 71], [-1.0, -2.009, -0.5])
    assert equal.agrees and equal.num_ids == 2 and equal.num_scores == 3
    assert equal.largest == pytest.approx(0.009)
    assert not compared([70, 71], [-1.0, -2.02, -0.5]).agrees
    assert not compared([70, 71], [-1.02, -2.0, -0.5]).agrees, "a score of the prompt"
    assert not compared([70, 71], [-1.0, math.nan, -0.5]).agrees


@pytest.mark.parametrize("own", [[70, 72], [70]], ids=["another id", "a stop token"])
def test_another_id_is_right_where_both_are_about_as_probable(own):
    scores = [-1.0, -2.0, -0.5][: len(own) + 1]
    tie = compared(own, scores, gap=0.009)
    assert tie.agrees and (tie.num_ids, tie.num_wrong, tie.num_scores) == (2, 0, 2)
    wrong = compared(own, scores, gap=0.02)
    assert not wrong.agrees and wrong.num_wrong == 1
