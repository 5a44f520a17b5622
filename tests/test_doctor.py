"""`llama doctor`: each problem that it detects, and what fits.

tests/test_cli.py has its output for a single process.
"""

import os
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.checkpoints import change_params, write_byte_tokenizer
from helpers.launch import DEMO
from helpers.prompts import user
from helpers.weights import change_json, hf_model
from llama.checkpoint.find import find
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.write.convert import convert
from llama.cli import doctor, main
from llama.cli.doctor import (
    Fact,
    _checkpoint,
    _device,
    _fits,
    environment_facts,
    thread_facts,
)
from llama.kernels.cpu import native
from llama.loading.files import Files
from llama.loading.memory import estimate_memory
from llama.loading.sizes import Memory, choose_sizes, step_bytes
from llama.model.plan import LayerPlan
from llama.ranks.placement import Placement
from llama.storage.downloads import AGAIN
from llama.tokenizer import ChatFormat, Tokenizer
from llama.weights.choice import QUANTIZED

TWO_MACHINES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
CPU = torch.device("cpu")


def problems(*facts: Fact) -> dict[str, str]:
    return {fact.name: fact.text for fact in facts if fact.problem}


@pytest.fixture(autouse=True)
def healthy(monkeypatch) -> None:
    """A machine without problems, whatever the one that runs the tests is like."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.7", 0))])
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)


def test_a_machine_without_problems_is_told_of_none():
    for variables in ({}, TWO_MACHINES, {"GLOO_SOCKET_IFNAME": "eth0"}):
        facts = list(environment_facts(variables))
        assert not problems(*facts) and {"shm", "host"} <= {f.name for f in facts}
    assert not problems(*thread_facts({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "2"}, 8))


def test_a_shared_memory_that_is_too_small(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 << 20))
    found = problems(*environment_facts({}))
    assert found.keys() == {"shm"}
    assert "has 10 MiB free" in found["shm"] and "--shm-size" in found["shm"]


def test_a_name_that_other_machines_cannot_use(monkeypatch):
    """A host name that other machines cannot use is reported.

    Debian's installer writes 127.0.1.1 for the host's name: gloo would then listen there.
    """
    resolved: list[list] = [[(0, 0, 0, "", ("127.0.1.1", 0))]]

    def resolve(*_: object) -> list:
        if not resolved[0]:
            raise socket.gaierror(-2, "Name or service not known")
        return resolved[0]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "no other machine can reach" in problems(*environment_facts(TWO_MACHINES))["host"]
    assert not problems(*environment_facts({**TWO_MACHINES, "GLOO_SOCKET_IFNAME": "eth0"}))
    resolved[0] = []
    assert "does not resolve" in problems(*environment_facts(TWO_MACHINES))["host"]
    assert not problems(*environment_facts({})), "one machine needs no name"
    found = problems(*environment_facts({"GLOO_SOCKET_IFNAME": "eth0,ib0"}))
    assert "names no interface of this machine, which has lo, eth0: name the" in found["interface"]


@pytest.mark.parametrize(
    ("cores", "variables", "name", "told"),
    [
        (1, {}, "cores", "one core of 8"),
        (2, {"LOCAL_WORLD_SIZE": "4"}, "cores", "4 ranks share 2 cores"),
        (8, {"OMP_NUM_THREADS": "many"}, "threads", "'many' must be a whole number"),
        (
            8,
            {"OMP_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "2"},
            "threads",
            "unset it, or set it to 4",
        ),
    ],
)
def test_cores_and_threads_that_do_not_fit(cores, variables, name, told):
    found = problems(*thread_facts(variables, cores))
    assert found.keys() == {name} and told in found[name]


def test_the_tokens_that_fit_are_those_that_build_takes():
    found = find(DEMO)
    for ranks in (1, 2):
        plan = LayerPlan.of(found.params, Placement(size=ranks))
        for quantize in (None, "int8"):
            files = Files(found, torch.bfloat16, quantize, Placement(size=ranks), CPU)
            memory = estimate_memory(files, 1 << 30, 32)
            assert memory == Memory(
                1 << 30,
                weights=bytes_of(
                    found, Placement(size=ranks), torch.bfloat16, quantize, torch.device("cpu")
                ),
                reserve=step_bytes(found.params, plan, torch.bfloat16, 32),
                per_token=plan.kv_bytes_per_token(torch.bfloat16),
            )
            _, num_pages = choose_sizes(memory, 16, 2**20, None, longest=512)
            assert memory.kv_tokens == num_pages * 16 > 0


@pytest.mark.parametrize(
    ("device", "hip", "text"),
    [("mps", None, "quantize, kv_cache_dtype and ranks are not supported"),
     ("cuda", "7.0", "ROCm 7.0: the kernels compile for gfx90a, gfx942")],
)  # fmt: skip
def test_gpus_other_than_nvidia_s_are_described(monkeypatch, device, hip, text):
    """What an Apple or an AMD GPU supports is reported, and that none has run this yet."""
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr("llama.cli.doctor.unsupported_reason", lambda device: None)
    (support,) = [x.text for x in _device(torch.device(device)) if x.name == "support"]
    assert text in support and "no such GPU has run this project" in support


@pytest.mark.parametrize(("version", "text"), [((2, 28, 9), "without CUDA graphs"), (None, "")])
def test_the_versions_that_matter_on_a_gpu_are_reported(monkeypatch, version, text):
    """The versions that have run are named, and what NCCL before 2.30.4 costs."""
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(doctor, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(doctor, "nccl_version", lambda: version)
    found = {x.name: x.text for x in _device(torch.device("cuda"))}
    assert "torch 2.11.0 and Triton 3.6.0 on NVIDIA H100" in found["versions"]
    assert f"here is torch {torch.__version__}" in found["versions"]
    assert ("nccl" in found) == bool(version) and text in found.get("nccl", "")


def test_what_fits(make_checkpoint, monkeypatch):
    """The memory of one rank is reported, and a number of ranks that is more than the heads."""
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 30)
    folder = make_checkpoint()[0]
    found = find(folder)  # 4 heads over 2 key-value heads
    for ranks in (1, 4):
        rows = [fact.text for fact in _fits(found, CPU, Placement(size=ranks))]
        assert [row.split()[0] for row in rows] == ["bf16", *QUANTIZED]
        assert all("KV cache" in row for row in rows)
    facts = list(_checkpoint(str(folder), CPU, Placement(size=3)))
    shares = [fact.text for fact in facts if fact.name == "share"]
    assert [text.partition(", key")[0] for text in shares] == [
        "rank 0: heads 1", "rank 1: heads 1", "rank 2: heads 2",
    ]  # fmt: skip
    refused = problems(*_checkpoint(str(folder), CPU, Placement(size=8)))
    assert "8 is more than n_heads=4" in refused["fits"]
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 20)
    assert "do not fit into" in problems(*_fits(found, CPU))["fits"]


def stages_of(capfd, *flags: str) -> tuple[dict[str, str], list[str], str]:
    """Return the problems of the demo model with these flags, the stages and the line of bf16."""
    main(["doctor", str(DEMO), *flags])
    lines = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
    found = {name: text for name, text in lines if text.startswith("PROBLEM: ")}
    texts = [text for name, text in lines if name == "stage"]
    (bf16,) = [text for _, text in lines if text.startswith("bf16  ")] or [""]
    return found, texts, bf16


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch, tmp_path, capfd):
    """The command says why torch cannot use it, and goes on with the rest of the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("llama.common.device._ROOT", tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 1
    lines = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    told = "PROBLEM: this machine has an NVIDIA GPU, but torch cannot use it: torch "
    assert lines["device"].startswith(told) and "was built without CUDA" in lines["device"]
    assert {"cpu", "shm", "host"} <= lines.keys()
    main(["doctor", "--device", "cpu"])
    assert "NVIDIA" not in capfd.readouterr().out


def test_what_the_stages_of_a_pipeline_hold(monkeypatch, capfd):
    """Layers, ends and memory of each stage, on a machine like this; the least tokens count."""
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 28)
    _, texts, bf16 = stages_of(capfd, "--pipeline_parallel_size", "3", "--pipeline_layers", "1,1,2")
    held = [
        re.fullmatch(r"(.*); bf16 .* GiB per rank, KV cache ([0-9,]+) tokens", x) for x in texts
    ]
    assert [x and x[1] for x in held] == [
        "0: layers 0 to 0, token embedding", "1: layers 1 to 1", "2: layers 2 to 3, lm_head",
    ]  # fmt: skip
    tokens = [int(x[2].replace(",", "")) for x in held if x]
    assert max(tokens[:2]) > 1.5 * tokens[2] and f" {tokens[2]:,} tokens" in bf16
    monkeypatch.setattr("llama.common.device.free_bytes", lambda _: 1 << 20)
    _, texts, _ = stages_of(capfd, "--pipeline_parallel_size", "2")
    assert len(texts) == 2 and all("which does not fit into 0.0 GiB" in text for text in texts)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--pipeline_parallel_size 99", "=99 is more than the 4 layers of this model"),
        ("--pipeline_parallel_size 2 --pipeline_layers 2,3", "=2,3 must have a number for each"),
        ("--pipeline_parallel_size 2 --shares 2,1", "shares=2,1 has 2 numbers"),
        ("--ffn_shares 2,1", "ffn_shares=2,1 has 2 numbers"),
    ],
)
def test_stages_that_cannot_be_are_problems(flags, told, capfd):
    found, *_ = stages_of(capfd, *flags.split())
    assert any(told in text for text in found.values()), found


def test_a_checkpoint_whose_chats_work():
    facts = {fact.name: fact.text for fact in _checkpoint(str(DEMO), CPU)}
    assert facts["tokenizer"] == f"{DEMO / 'tokenizer.model'}: 2048 tokens"
    assert facts["chat"].startswith("Meta's chat format")
    ids = ChatFormat(Tokenizer(DEMO / "tokenizer.model")).encode_dialog_prompt([user("Hello")])
    assert facts["chat"].endswith(f"; 'Hello' is a prompt of {len(ids)} tokens")


@pytest.mark.parametrize(
    ("name", "content", "fact", "message"),
    [
        ("tokenizer.model", None, "tokenizer", "no tokenizer: looked for"),
        ("tokenizer.model", b"not base64\n", "tokenizer", "line 1: expected a base64"),
        ("tokenizer.model", b"IQ== 0\n", "tokenizer", "255 of the 256 single-byte"),
        ("params.json", {"vocab_size": 1024}, "tokenizer", "has 2048 tokens, but the model has"),
        ("chat_template.jinja", b"caf\xe9", "chat", "jinja is not UTF-8 at byte 4"),
        ("tokenizer_config.json", b"{", "chat", "tokenizer_config.json .* is not JSON"),
    ],
)  # fmt: skip
def test_a_tokenizer_or_template_that_cannot_load_is_a_problem(
    tmp_path, capfd, name, content, fact, message
):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, dict):
        change_params(folder, **content)
    else:
        (folder / name).write_bytes(content)
    facts = list(_checkpoint(str(folder), CPU))
    found = problems(*facts)
    others = {"weights"} if name == "params.json" else set()
    assert found.keys() == {fact} | others and re.search(message, found[fact])
    assert {"checkpoint", "model", "fits"} <= {x.name for x in facts}, "the rest is reported"
    assert main(["doctor", str(folder), "--device", "cpu"]) == 1
    assert re.search(f"{fact} +PROBLEM: .*{message}", capfd.readouterr().out)


@pytest.mark.parametrize("keeps", [0.999, 0.4])
@pytest.mark.parametrize("layout", ["hf", "hf in parts", "meta"])
def test_weights_that_are_cut_short_are_a_problem(tmp_path, capfd, layout, keeps):
    """The header says how many bytes there must be; no tensor is read."""
    folder = tmp_path / "model"
    if layout == "meta":
        shutil.copytree(DEMO, folder)
    else:
        parts: dict[str, Any] = {"max_shard_size": "60KB"} if layout == "hf in parts" else {}
        hf_model(vocab_size=512).save_pretrained(folder, **parts)
        write_byte_tokenizer(folder)
    assert "weights" not in problems(*_checkpoint(str(folder), CPU))
    path = sorted([*folder.glob("*.safetensors"), *folder.glob("*.pth")])[-1]
    os.truncate(path, int(path.stat().st_size * keeps))
    found = problems(*_checkpoint(str(folder), CPU))
    (text,) = (found[name] for name in ("checkpoint", "weights") if name in found)
    assert str(path) in text and "cut short" in text and text.endswith(AGAIN)
    assert main(["doctor", str(folder), "--device", "cpu"]) == 1
    assert path.name in capfd.readouterr().out


def test_a_base_model_without_a_template_is_no_problem(tmp_path, monkeypatch):
    """Files of Hugging Face's layout without a chat template are those of a base model."""

    def refuse(*_: object) -> None:
        raise ValueError("the files hold no chat template")

    convert(DEMO, tmp_path / "hf")
    (tmp_path / "hf" / "original" / "tokenizer.model").unlink()
    monkeypatch.setattr(doctor, "find_dialog_format", refuse)
    assert problems(*_checkpoint(str(tmp_path / "hf"), CPU)).keys() == {"chat"}
    change_json(tmp_path / "hf" / "tokenizer_config.json", chat_template=None)
    facts = list(_checkpoint(str(tmp_path / "hf"), CPU))
    assert not problems(*facts)
    assert Fact("chat", "the files hold no chat template") in facts


def test_the_instruction_sets_of_the_table_are_reported(monkeypatch):
    """An ARM CPU is known by what Linux says of it; its kernels were never timed."""
    features = "processor : 0\nFeatures : fp asimd crc32 atomics asimdrdm asimddp\n"
    with monkeypatch.context() as other:
        other.setattr("sys.platform", "linux")
        other.setattr("platform.machine", lambda: "aarch64")
        with other.context() as reading:
            reading.setattr(Path, "read_text", lambda _: features)
            flags = native.cpu_flags.__wrapped__()
        other.setattr(native, "cpu_flags", lambda: flags)
        other.setattr(native, "kernels", lambda: SimpleNamespace(_name="kernels.neon.so"))
        facts = {fact.name: fact.text for fact in doctor._cpu()}
    assert facts["cpu"] == "aarch64 with neon_dotprod, neon"
    assert "kernels.neon.so; on ARM" in facts["kernels"]
