"""Read the flags of `llama plan`, and print its report.

In: checked flags. Out: text or JSON on standard output, and an exit code.
"""

import argparse
import itertools
import json
from dataclasses import replace

import torch

from llama.cli.plan.layouts import Plan, find_options
from llama.cli.plan.models import Model
from llama.cli.plan.report import as_json, as_text
from llama.cli.ranks import global_rank
from llama.common.checks import FieldError
from llama.common.device import dtype_name, pick_dtype
from llama.loading.sizes import USUAL_SEQ_LEN
from llama.model.cost import DEVICES
from llama.ops.kv_cache import pick_kv_format
from llama.weights.choice import QUANTIZED

_CPU = torch.device("cpu")


def plan(options: argparse.Namespace) -> int:
    """Print the layouts that fit, the one to use, its speed by batch, and the command."""
    if global_rank() != 0:
        return 0
    asked = read_options(options)
    choices = find_options(asked)
    if not choices:
        raise ValueError(_does_not_fit(asked))
    report = as_json(asked, choices)
    print(json.dumps(report, indent=2) if options.json else "\n".join(as_text(asked, report)))
    return 0


def read_options(options: argparse.Namespace) -> Plan:
    """Return what the flags ask for.

    Raises:
        ValueError: A value is not possible.
    """
    device = DEVICES[options.gpu]
    is_gpu = options.gpu != "cpu"
    if not is_gpu and options.gpus > 1:
        raise ValueError(
            f"--gpus {options.gpus} with --gpu cpu: the cores of a machine count as one device, "
            "so leave out --gpus, or give --machines"
        )
    if options.memory_gb is not None:
        device = replace(device, memory=options.memory_gb * 1e9)
    model = Model.named(options.shape)
    dtype = pick_dtype(options.dtype, _CPU)  # not of the GPU, which is elsewhere
    quantize = _quantize_of(options.quantize, dtype)
    longest = model.args.longest_context
    if options.context is not None and options.context > longest:
        raise ValueError(
            f"--context {options.context} is beyond this model's limit of {longest} tokens: give "
            "that or less"
        )
    return Plan(
        model=model,
        device=device,
        is_gpu=is_gpu,
        machines=options.machines,
        per_machine=options.gpus,
        context=options.context or min(longest, USUAL_SEQ_LEN),
        batch=options.batch,
        dtype=dtype,
        quantize=quantize,
        kv_format=pick_kv_format(options.kv_cache_dtype, _CPU),
    )


def _quantize_of(name: str | None, dtype: torch.dtype) -> str | None:
    """Return the format of `--quantize`, whatever the kernels of this machine can do.

    Raises:
        ValueError: There is no such format, or not for this type.
    """
    if name is None:
        return None
    if name not in QUANTIZED:
        raise FieldError.of("quantize", f"={name!r}: give one of {', '.join(QUANTIZED)}")
    if dtype not in QUANTIZED[name].dtypes:
        raise ValueError(
            f"quantize={name!r} is for dtype='bf16', not {dtype_name(dtype)}: leave dtype out"
        )
    return name


def _does_not_fit(asked: Plan) -> str:
    """Return the message for devices that hold no sequence, with a number that would."""
    kind = next(name for name, device in DEVICES.items() if device.title == asked.device.title)
    found = "not even 16 machines do"
    per_machines = (1, 2, 4, 8) if asked.is_gpu else (1,)
    for machines, per_machine in itertools.product((1, 2, 4, 8, 16), per_machines):
        is_larger = machines * per_machine > asked.num_devices
        larger = replace(asked, machines=machines, per_machine=per_machine)
        if is_larger and find_options(larger):
            found = f"--machines {machines} --gpus {per_machine} would do"
            break
    return (
        f"{asked.model.name} in {asked.format_name} and one sequence of {asked.context} tokens "
        f"do not fit into {asked.machines} x {asked.per_machine} {kind} of "
        f"{asked.device.memory / 1e9:.0f} GB: {found}; a smaller --context, or --quantize, needs "
        "less"
    )
