"""`llama plan`: the cost model against published figures, layouts, bytes, commands, errors."""

import json
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.flags import read
from helpers.gguf_files import MIXED, PARAMS, write_gguf
from helpers.launch import DEMO, REPO
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.memory import bytes_of
from llama.cli import COMMANDS, main
from llama.cli.flags import GPU_NAMES, SHAPE_NAMES
from llama.cli.plan.command import read_options
from llama.cli.plan.layouts import Option, Plan, find_options, ranks_by_machine
from llama.cli.plan.report import summary
from llama.loading.files import Files
from llama.loading.memory import usual_memory
from llama.model.args import ModelArgs
from llama.model.cost import (
    DEVICES,
    Cost,
    Deployment,
    Layout,
    Requests,
    Storage,
    block_matrix_size,
    kv_elements,
)
from llama.model.shapes import NAMES, SHAPES
from llama.ranks.placement import Placement
from llama.weights.choice import QUANTIZED

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

# TensorRT-LLM 1.0, performance overview: model, device and number; tokens of prompts and answers;
# published tokens per second. Then what the model gives: sequences; microseconds of products,
# weights, KV cache and communication; tokens per second.
PUBLISHED = [
    ("405b fp8", "8 h100", 128, 128, 3627, 1024, (142, 16, 2, 85), 4088),
    ("405b fp8", "8 h100", 128, 2048, 4340, 572, (75, 29, 12, 47), 6083),
    ("405b fp8", "8 h100", 1000, 1000, 2919, 439, (142, 38, 16, 87), 3530),
    ("405b fp8", "8 h100", 2048, 128, 453, 312, (1213, 54, 23, 708), 501),
    ("405b fp8", "8 h100", 20000, 2000, 345, 31, (850, 540, 225, 519), 469),
    ("405b fp8", "8 h200", 128, 2048, 5348, 1024, (75, 11, 9, 46), 7075),
    ("405b fp8", "8 h200", 1000, 1000, 3330, 1024, (142, 11, 11, 85), 4013),
    ("405b fp8", "8 h200", 2048, 2048, 2948, 768, (142, 15, 23, 85), 3761),
    ("405b fp8", "8 h200", 5000, 500, 650, 449, (795, 26, 39, 459), 758),
    ("405b fp4", "4 b200", 1000, 1000, 5209, 1024, (78, 7, 13, 73), 5859),
    ("70b fp8", "1 h200", 128, 2048, 4336, 298, (104, 54, 44, 0), 4953),
    ("70b fp8", "1 h200", 1000, 1000, 2909, 229, (195, 71, 57, 0), 3099),
    ("70b fp8", "1 h200", 20000, 2000, 283, 16, (1245, 1010, 800, 0), 327),
    ("70b fp8", "2 h100", 1000, 1000, 4205, 298, (97, 39, 41, 19), 5097),
]


def modelled(model: str, devices: str, prompt: int, answer: int) -> tuple[int, Cost]:
    """Return the sequences that fit, at most 1,024, and the cost of a token."""
    shape, _, weight_format = model.partition(" ")
    count, _, name = devices.partition(" ")
    args = ModelArgs(**SHAPES[shape])
    bits = int(weight_format.removeprefix("fp"))
    storage = Storage(bits / 8, bits / 8, 1, bits)
    device = DEVICES[name]
    elements = args.n_layers * block_matrix_size(args) + 2 * args.vocab_size * args.dim
    requests = Requests(prompt, answer)
    free = 0.9 * int(count) * device.memory - bits / 8 * elements
    sequences = min(1024, int(free / (kv_elements(args) * requests.mean_context)))
    deployment = Deployment(args, storage, device, Layout(tensor=int(count)))
    return sequences, deployment.cost(requests, sequences)


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_model_gives_the_figures_of_the_published_rows(row):
    model, devices, prompt, answer, _, sequences, parts, tokens_per_s = row
    fitting, cost = modelled(model, devices, prompt, answer)
    assert fitting == sequences
    found = (cost.products, cost.weights, cost.kv_cache, cost.communication)
    for seconds, microseconds in zip(found, parts, strict=True):
        assert seconds * 1e6 == pytest.approx(microseconds, rel=0.01, abs=0.5)
    assert 1 / cost.total == pytest.approx(tokens_per_s, rel=0.01)


def test_the_log_compares_them_with_what_was_published():
    page = (REPO / "scripts/bench/results/LOG.md").read_text()
    ratios = []
    for model, devices, prompt, answer, published, *_ in PUBLISHED:
        sequences, cost = modelled(model, devices, prompt, answer)
        ratios.append(published * cost.total)
        shape, weight_format = model.upper().split()
        line = (
            f"| {shape} {weight_format} | {devices.upper().replace(' ', ' x ')} | "
            f"{prompt:,} / {answer:,} | {sequences:,} | {1 / cost.total:,.0f} | {published:,} | "
            f"{ratios[-1]:.2f} |"
        )
        assert line in page, line
    assert statistics.median(ratios) == pytest.approx(DEVICES["h100"].efficiency, abs=0.02)
    device = DEVICES["cpu"]
    ratios = []
    for sequences, context, measured in ((1, 512, 11.5), (8, 512, 114.1), (32, 64, 155.7)):
        deployment = Deployment(ModelArgs(**SHAPES["1b"]), Storage(2, 2, 2), device, Layout())
        cost = deployment.cost(Requests(0, 2 * context), sequences)
        ratios.append(measured * cost.total)
        line = f"| {sequences} x {context} | {1 / cost.total:.1f} | {measured} | {ratios[-1]:.2f} |"
        assert line in page, line
    assert statistics.median(ratios) == pytest.approx(device.efficiency, abs=0.02)


def test_one_sequence_on_two_machines():
    """One sequence of the 405B takes 26.5 ms with 16 ranks a layer, and 35.8 ms in two stages."""
    args = ModelArgs(**SHAPES["405b"])
    storage = Storage(2, 2, 2)
    for layout, ms in ((Layout(16), 26.5), (Layout(8, 2), 35.8)):
        cost = Deployment(args, storage, DEVICES["h100"], layout).cost(Requests(1, 10**6), 1)
        assert 1e3 * (cost.weights + cost.communication) == pytest.approx(ms, rel=0.01)


def test_a_stage_waits_while_it_has_no_sequence():
    """A pipeline gives two sequences twice the speed of one, and as much of each."""
    deployment = Deployment(
        ModelArgs(**SHAPES["8b"]), Storage(2, 2, 2), DEVICES["h100"], Layout(1, 2)
    )
    requests = Requests(100, 100)
    one, two = (deployment.cost(requests, count).total for count in (1, 2))
    assert one == pytest.approx(2 * two)


def plan_of(line: str) -> Plan:
    return read_options(read("llama plan", COMMANDS["plan"], shlex.split(line), {}))


def names(options: list[Option]) -> list[str]:
    return [str(option.layout) for option in options]


def test_layouts_of_the_largest_models():
    """The 405B runs in stages across machines; the context decides about the 70B."""
    options = find_options(plan_of("405b --gpu h100 --gpus 8 --machines 2 --context 4096"))
    assert names(options)[0] == "TP8 x PP2 x 1"
    for context, layout in ((1024, "TP4 x PP1 x 2"), (8192, "TP8 x PP1 x 1")):
        options = find_options(plan_of(f"70b --gpu h100 --gpus 8 --context {context}"))
        assert names(options)[0] == layout
        assert all(option.sequences for option in options)
    assert {str(option.layout) for option in options} >= {
        "TP3 x PP1 x 2",
        "TP5 x PP1 x 1",
        "TP6 x PP1 x 1",
        "TP7 x PP1 x 1",
    }
    assert find_options(plan_of("405b --gpu h200 --gpus 8"))[0].layout == Layout(8)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(8, 2), [8, 8]),
        (Layout(4, 3), [8, 4]),
        (Layout(2, 6), [6, 6]),
        (Layout(16, 2), [8, 8, 8, 8]),
        (Layout(2, 2), [4]),
    ],
)
def test_stages_are_not_divided_between_machines(layout, ranks):
    assert ranks_by_machine(layout) == ranks


def test_many_devices_have_few_layouts():
    """A plan for a cluster answers soon: some numbers of stages and machines stand for all."""
    layouts = list(plan_of("405b --gpu h100 --gpus 8 --machines 64").layouts())
    assert len(layouts) < 200 and Layout(8, 64, 1) in layouts
    assert {layout.tensor for layout in layouts} >= {3, 8, 16, 512}
    assert {layout.pipeline for layout in layouts} >= {1, 2, 3, 16, 126}
    assert all(layout.ranks <= 512 for layout in layouts)


def test_one_sequence_is_fastest_on_all_devices():
    (best, *_) = find_options(plan_of("8b --gpu h100 --gpus 8 --batch 1"))
    assert best.layout == Layout(8)
    many = find_options(plan_of("8b --gpu h100 --gpus 8 --batch 2048 --context 512"))
    assert many[0].layout == Layout(2, 1, 4) and many[0].sequences == 512
    assert many[0].tokens_per_s > 8 * best.tokens_per_s


@pytest.mark.parametrize("size", [1, 2])
def test_bytes_are_those_of_a_build(size, monkeypatch):
    """Weights, and the tokens of the KV cache alongside them, are what loading computes.

    A step has as many tokens as a build on a GPU of 80 GB gives it.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    placement = Placement(size=size)
    params = {**SHAPES["1b"], "n_layers": 2}
    small = Checkpoint(Path(), ModelArgs(**params), [], "meta")
    for checkpoint in (find(DEMO), small):
        for quantize in (None, *QUANTIZED):
            asked = plan_of(f"1b --gpu h100 {f'--quantize {quantize}' if quantize else ''}")
            asked = replace(asked, model=replace(asked.model, args=checkpoint.params))
            expected = bytes_of(checkpoint, placement, torch.bfloat16, quantize, CPU)
            assert asked.weight_bytes(placement) == expected
            files = Files(checkpoint, torch.bfloat16, quantize, placement, CUDA)
            memory = usual_memory(files, 80 * 10**9, 256)
            assert asked.step_tokens(placement) == 8192
            assert asked.memory(placement, 8192) == memory


def test_the_tokens_of_a_step_are_those_of_a_build():
    """The larger default is for GPUs of 80 GB, and for all stages together."""
    found = {
        line: [option.step_tokens for option in find_options(plan_of(line))]
        for line in ("8b --gpu 4090", "8b --gpu h100", "8b --gpu cpu")
    }
    assert found["8b --gpu 4090"] == found["8b --gpu cpu"] == [2048]
    assert found["8b --gpu h100"] == [8192]
    (best, *_) = find_options(plan_of("405b --gpu h100 --gpus 8 --machines 2"))
    assert (best.layout.pipeline, best.step_tokens) == (2, 4096)


def test_a_quantized_file_is_as_wide_as_it_is(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    write_gguf(path, PARAMS, MIXED)
    assert main(["plan", str(path), "--gpu", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weight_bytes"] == pytest.approx(path.stat().st_size, rel=0.01)
    assert report["command"].startswith(f"llama serve {path} ")
    assert plan_of(f"{path} --gpu cpu --dtype bf16 --quantize fp8").format_name == "fp8"


def test_a_model_is_known_by_its_sizes_alone(tmp_path):
    """A params.json or a config.json will do, as will a folder that has one and no weights."""
    (tmp_path / "params.json").write_bytes((Path(DEMO) / "params.json").read_bytes())
    args = find(DEMO).params
    for name in (tmp_path, tmp_path / "params.json"):
        assert (
            replace(plan_of(f"{name} --gpu 4090").model.args, tied_output=args.tied_output) == args
        )
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert plan_of(f"{file} --gpu 4090").model.args.dim == 64
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match=r"config\.json is that of a quantized model"):
        plan_of(f"{file} --gpu 4090")


def test_the_flags_have_the_names_of_the_tables():
    assert tuple(DEVICES) == GPU_NAMES
    assert NAMES == SHAPE_NAMES


def report_of(line: str, capsys: Any) -> tuple[dict[str, Any], str]:
    """Return the JSON of a plan, and its text."""
    assert main(["plan", *line.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["plan", *line.split()]) == 0
    return report, capsys.readouterr().out


def test_the_report(capsys):
    """The report has the same figures as text and as JSON, and a command that is understood."""
    report, text = report_of("70b --gpu h100 --gpus 8 --context 1024", capsys)
    assert report["fastest"] == "TP4 x PP1 x 2"
    flags = "--ranks 4 --replicas 2 --max_seq_len 1024 --max_batch_size 256"
    assert report["command"] == f"llama serve DIR {flags}"
    assert report["command"] in text and "in all" not in text
    values = read("llama", COMMANDS["serve"], shlex.split(report["command"])[2:], {})
    assert (values.ranks, values.replicas, values.max_seq_len) == (4, 2, 1024)
    best = report["layouts"][0]
    assert f"{best['tokens_per_s']:,.0f}" in text and f"{best['kv_tokens_per_replica']:,}" in text
    assert report["steps"][-1]["tokens_per_s"] == pytest.approx(best["tokens_per_s"], abs=0.1)
    for step in report["steps"]:
        assert sum(step["share"].values()) == pytest.approx(1, abs=0.01)
    report, text = report_of("405b --gpu h100 --gpus 8 --machines 2 --context 4096", capsys)
    assert report["fastest"] == "TP8 x PP2 x 1"
    assert report["command"].startswith("torchrun --nnodes 2 --nproc_per_node 8 --node_rank N ")
    assert " serve DIR --pipeline_parallel_size 2 " in report["command"]
    assert "the last ones" not in text
    report, text = report_of("70b --gpu h100 --gpus 3", capsys)
    assert report["fastest"] == "TP3 x PP1 x 1"
    assert report["command"].startswith("llama serve DIR --ranks 3 ")
    report, text = report_of(
        "8b --gpu 4090 --machines 2 --kv_cache_dtype int8 --dtype fp16", capsys
    )
    assert report["command"].endswith("--dtype fp16 --kv_cache_dtype int8")
    assert report["kv_bytes_per_token"] == 32 * 2 * 8 * (128 + 2)
    report, text = report_of("8b --gpu h100 --gpus 8 --machines 2", capsys)
    assert report["fastest"] == "TP4 x PP1 x 4" and " --ranks 4 --replicas 2 " in report["command"]
    assert "4 in all: give this command on each machine" in text
    report, text = report_of("8b --gpu 4090 --memory_gb 14 --machines 2", capsys)
    assert report["fastest"] == "TP2 x PP1 x 1"
    assert report["command"].startswith("torchrun --nnodes 2 --nproc_per_node 1 ")
    assert "each with 14 GB" in text and "between machines 50 GB/s" in text


@pytest.mark.parametrize(
    ("line", "named", "code"),
    [
        ("8b --gpu h300", "--gpu: 'h300' is not one of 'h100', 'h200'", 2),
        ("8b", "--gpu is missing", 2),
        ("--gpu h100", "MODEL is missing", 2),
        ("9b --gpu h100", "9b is neither a file nor a folder nor one of 1b, 3b, 8b", 1),
        ("8b --gpu h100 --context 200000", "beyond this model's limit of 131072 tokens", 1),
        ("8b --gpu cpu --gpus 2", "count as one device", 1),
        ("8b --gpu h100 --gpus 0", "--gpus: 0 is not in the range 1<=x<=16", 2),
        ("8b --gpu h100 --quantize int3", "quantize='int3': give one of int8, fp8, int4", 2),
        ("8b --gpu h100 --quantize int4 --dtype fp16", "is for dtype='bf16', not fp16", 1),
        ("70b --gpu h100", "--machines 1 --gpus 2 would do", 1),
        ("405b --gpu 4090 --context 100000", "do not fit into 1 x 1 4090 of 24 GB", 1),
    ],
)
def test_what_cannot_be_planned_is_named(line, named, code, capsys):
    assert main(["plan", *line.split()]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error and error.count("\n") == 1


def test_a_line_about_this_machine(monkeypatch):
    """The line of `llama doctor` is about this machine's device, if the table has it."""
    checkpoint = find(DEMO)
    line = summary(checkpoint, CPU, 2**30, 2)
    assert line is not None
    assert re.fullmatch(
        r"bf16 on CPU of 2 cores, modelled: [\d,]+ tokens/s for one sequence, [\d,]+ for 32 of "
        r"\d+ tokens; llama plan --gpu cpu shows more",
        line,
    )
    assert summary(checkpoint, CPU, 2**20, 1) is None, "it does not fit"
    for title, name in (("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", "RTX 4090")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, title=title: title)
        assert f"bf16 on {name}, modelled" in str(summary(checkpoint, CUDA, 20 << 30, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    assert summary(checkpoint, CUDA, 20 << 30, 1) is None
