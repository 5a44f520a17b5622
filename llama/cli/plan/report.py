"""The report of `llama plan`: layouts, speed by batch, and the command to use.

In: a `Plan` and its `Option`s. Out: an object for JSON, and lines of text.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from llama.checkpoint.find import Checkpoint
from llama.cli.plan.layouts import (
    Option,
    Plan,
    cost_of,
    option_for,
    ranks_by_machine,
    speed_of,
)
from llama.cli.plan.models import Model
from llama.common.device import dtype_name
from llama.engine.core import PAGE_SIZE
from llama.loading.sizes import USUAL_SEQ_LEN, image_pages
from llama.model.args import ModelArgs
from llama.model.cost import DEVICES, Layout
from llama.model.plan import LayerPlan
from llama.ops.kv_cache import pick_kv_format
from llama.ranks.placement import Placement

_GIB = 2**30
_NUM_SHOWN = 8  # layouts of a report in text
_PARTS = ("products", "weights", "kv_cache", "communication", "host")


def images_text(args: ModelArgs) -> str:
    """Return the sizes of images of a vision model, and what one takes of the KV cache."""
    vision = args.vision
    assert vision is not None
    num_tokens = image_pages(args, LayerPlan.of(args)) * PAGE_SIZE
    side = vision.chunk_size
    return (
        f"up to {vision.max_tiles} tiles of {side} x {side} pixels; the largest takes the KV cache "
        f"of {num_tokens:,} tokens"
    )


def as_json(asked: Plan, options: list[Option]) -> dict[str, Any]:
    """Return the report as JSON has it."""
    best = options[0]
    args = asked.model.args
    return {
        "model": asked.model.name,
        "device": asked.device.title,
        "devices": asked.num_devices,
        "context": asked.context,
        "kv_bytes_per_token": LayerPlan.of(args, kv_format=asked.kv_format).kv_bytes_per_token(
            asked.dtype
        ),
        "weight_bytes": asked.weight_bytes(Placement()),
        "efficiency": asked.device.efficiency,
        "layouts": [_layout_report(option) for option in options],
        "fastest": str(best.layout),
        "steps": [_step_report(asked, best, count) for count in _counts(best.sequences)],
        "command": _command(asked, best),
        "replicas_by_command": _replicas_by_command(best.layout),
    }


def _layout_report(option: Option) -> dict[str, Any]:
    layout = option.layout
    return {
        "layout": str(layout),
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "replicas": layout.replicas,
        "devices": layout.ranks,
        "ranks_by_machine": ranks_by_machine(layout),
        "weight_bytes_per_rank": option.weight_bytes,
        "kv_tokens_per_replica": option.kv_tokens,
        "sequences_per_replica": option.sequences,
        "tokens_per_s": round(option.tokens_per_s, 1),
    }


def _counts(sequences: int) -> list[int]:
    """Return the numbers of sequences of which a report shows the speed."""
    return [*(count for count in (1, 4, 16, 64) if count < sequences), sequences]


def _step_report(asked: Plan, option: Option, sequences: int) -> dict[str, Any]:
    """Return the speed of all replicas with so many sequences each, and the share of each part."""
    cost = cost_of(asked, option.layout, sequences, option.step_tokens)
    seconds = cost.total / asked.device.efficiency
    return {
        "sequences_per_replica": sequences,
        "tokens_per_s": round(option.layout.replicas / seconds, 1),
        "ms_per_token": round(sequences * seconds * 1e3, 2),
        "share": {name: round(x / cost.total, 3) for name, x in asdict(cost).items()},
    }


def _replicas_by_command(layout: Layout) -> int:
    """Return the number of replicas that one command starts, which are those of a machine."""
    by_machine = ranks_by_machine(layout)
    if len(by_machine) > 1:
        return 1
    return min(layout.replicas, layout.per_machine // by_machine[0])


def _command(asked: Plan, option: Option) -> str:
    """Return the command that starts the replicas of a machine, or one on several machines."""
    layout = option.layout
    flags = [f"--max_seq_len {asked.context}", f"--max_batch_size {option.sequences}"]
    if asked.dtype is not torch.bfloat16:
        flags.append(f"--dtype {dtype_name(asked.dtype)}")
    if asked.quantize is not None:
        flags.append(f"--quantize {asked.quantize}")
    if asked.kv_format.name is not None:
        flags.append(f"--kv_cache_dtype {asked.kv_format.name}")
    if not asked.is_gpu:
        flags.append("--device cpu")
    folder = asked.model.name if asked.model.has_files else "DIR"
    num_ranks = layout.tensor * layout.pipeline
    num_replicas = _replicas_by_command(layout)
    by_machine = ranks_by_machine(layout)
    if layout.pipeline > 1:
        flags.insert(0, f"--pipeline_parallel_size {layout.pipeline}")
    if len(by_machine) > 1:
        launcher = (
            f"torchrun --nnodes {len(by_machine)} --nproc_per_node {by_machine[0]} "
            "--node_rank N --master_addr host-0 --master_port 29500 -m llama"
        )
        return " ".join([launcher, "serve", folder, *flags])
    if num_replicas > 1:
        flags.insert(0, f"--replicas {num_replicas}")
    if num_ranks > 1:
        flags.insert(0, f"--ranks {num_ranks}")
    return " ".join(["llama serve", folder, *flags])


def as_text(asked: Plan, report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report."""
    args = asked.model.args
    device = asked.device
    yield (
        f"model      {asked.model.name}: dim {args.dim}, {args.n_layers} layers, {args.n_heads} "
        f"heads over {args.kv_heads} key-value heads"
    )
    yield (
        f"           weights {report['weight_bytes'] / _GIB:.2f} GiB in {asked.format_name}, KV "
        f"cache {report['kv_bytes_per_token']:,} B per token"
    )
    if args.vision is not None:
        yield f"images     {images_text(args)}; the speeds are those of text"
    yield (
        f"devices    {asked.machines} x {asked.per_machine} {device.title}, each with "
        f"{device.memory / 1e9:.0f} GB, {device.bandwidth / 1e9:,.0f} GB/s and "
        f"{device.flops[16] / 1e12:.3g} TFLOP/s"
    )
    if asked.machines > 1:
        yield (
            f"           between machines {device.link / 1e9:.3g} GB/s from each device, and "
            f"{device.link_latency * 1e6:.0f} us"
        )
    yield (
        f"requests   prompts of {asked.requests.prompt_len} tokens and answers of "
        f"{asked.requests.answer_len}"
    )
    yield f"speed      modelled, times {device.efficiency}: the share that the best engines reach"
    yield ""
    yield "TP x PP x replicas  GiB per rank   KV tokens  sequences  tokens/s"
    for each in report["layouts"][:_NUM_SHOWN]:
        yield _layout_line(each)
    num_others = len(report["layouts"]) - _NUM_SHOWN
    if num_others > 0:
        yield f"and {num_others} slower layouts, which --json lists"
    yield ""
    yield f"{report['fastest']}, by the sequences of each replica; tokens/s of all replicas:"
    yield "sequences  tokens/s  ms per token  products  weights  KV cache  communication  host"
    for step in report["steps"]:
        shares = [step["share"][name] for name in _PARTS]
        yield (
            f"{step['sequences_per_replica']:9}  {step['tokens_per_s']:8,.0f}  "
            f"{step['ms_per_token']:12.1f}  "
            + "  ".join(f"{x:{n}.0%}" for x, n in zip(shares, (8, 7, 8, 13, 4), strict=True))
        )
    yield ""
    yield from _advice(report)


def _layout_line(layout: dict[str, Any]) -> str:
    return (
        f"{layout['layout']:18}  {layout['weight_bytes_per_rank'] / _GIB:12.1f}  "
        f"{layout['kv_tokens_per_replica']:10,}  {layout['sequences_per_replica']:9}  "
        f"{layout['tokens_per_s']:8,.0f}"
    )


def _advice(report: dict[str, Any]) -> Iterator[str]:
    """Yield the command to use, and what it does not say."""
    yield f"command    {report['command']}"
    used = report["layouts"][0]
    num_last = used["ranks_by_machine"][-1]
    if num_last != used["ranks_by_machine"][0]:
        yield f"machines   the last ones start {num_last} ranks each: --nproc_per_node {num_last}"
    if used["replicas"] > report["replicas_by_command"]:
        where = "for each" if len(used["ranks_by_machine"]) > 1 else "on each machine"
        yield (
            f"replicas   {used['replicas']} in all: give this command {where}, with --host and a "
            "key, and put HAProxy before them (torchrun_examples/haproxy_machines.cfg)"
        )


def summary(checkpoint: Checkpoint, device: torch.device, free: int, num_ranks: int) -> str | None:
    """Return one line about a model on the devices of this machine.

    Args:
        checkpoint: The model.
        device: The device of this process.
        free: Bytes that are free for a rank.
        num_ranks: The number of ranks that share the model.

    Returns:
        The line; None if the device is not in the table, or the model does not fit.
    """
    name: str | None = device.type
    if device.type == "cuda":
        title = torch.cuda.get_device_name(device).lower()
        name = next((key for key in DEVICES if key in title), None)
    if name is None or name not in DEVICES:
        return None
    is_gpu = device.type == "cuda"
    per_machine = num_ranks if is_gpu else 1
    args = checkpoint.params
    asked = Plan(
        model=Model.of(str(checkpoint.weights_path), checkpoint),
        device=replace(DEVICES[name], memory=free if is_gpu else free * num_ranks),
        is_gpu=is_gpu,
        machines=1,
        per_machine=per_machine,
        context=min(args.longest_context, USUAL_SEQ_LEN),
        batch=None,
        dtype=torch.bfloat16,
        quantize=None,
        kv_format=pick_kv_format(None, device),
    )
    option = option_for(asked, Layout(per_machine, per_machine=per_machine))
    if option is None:
        return None
    return (
        f"{asked.format_name} on {DEVICES[name].title}, modelled: "
        f"{speed_of(asked, option.layout, 1, option.step_tokens):,.0f} tokens/s for one sequence, "
        f"{option.tokens_per_s:,.0f} for {option.sequences} of {asked.context} tokens; "
        f"llama plan --gpu {name} shows more"
    )
