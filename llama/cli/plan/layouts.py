"""The layouts in which a model fits into devices, and the speed to expect of each.

In: a `Plan`, which is a model, devices and requests. Out: an `Option` for each layout that fits.
Bytes are those that a build would compute (`llama.loading.sizes`); times come from
`llama.model.cost`. No such device is needed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from llama.checkpoint.memory import bytes_of_params
from llama.checkpoint.table import num_elements, rank_shapes
from llama.cli.plan.models import Model
from llama.common.device import dtype_name
from llama.loading.sizes import (
    CUDA_RESERVE,
    LARGE_GPU,
    Memory,
    default_batch_size,
    default_budget,
    step_bytes,
)
from llama.model.cost import (
    Cost,
    Deployment,
    Device,
    Layout,
    Requests,
    Storage,
    kv_elements,
)
from llama.model.plan import LayerPlan
from llama.model.shares import distinct_ranks
from llama.model.stage_layers import stage_layers
from llama.ops.kv_cache import KVFormat
from llama.ranks.placement import Placement

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Plan:
    """A model, the devices that there are, and the requests that they will get.

    Attributes:
        model: The model.
        device: The kind of the devices.
        is_gpu: Whether they are GPUs.
        machines: Number of machines.
        per_machine: Devices of each machine.
        context: Tokens of a prompt and its answer together.
        batch: Sequences that run at once on all devices; None: as many as fit.
        dtype: The type of what is not quantized.
        quantize: The format of quantized matrices.
        kv_format: The format of the KV cache.
    """

    model: Model
    device: Device
    is_gpu: bool
    machines: int
    per_machine: int
    context: int
    batch: int | None
    dtype: torch.dtype
    quantize: str | None
    kv_format: KVFormat

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all machines."""
        return self.machines * self.per_machine

    @property
    def requests(self) -> Requests:
        """Return requests whose prompt takes half of the context, and their answer the rest."""
        half = max(1, self.context // 2)
        return Requests(self.context - half, half)

    @property
    def torch_device(self) -> torch.device:
        """Return the device of PyTorch that stands for the kind; there may be none here."""
        return _CUDA if self.is_gpu else _CPU

    @property
    def format_name(self) -> str:
        """Return the name of the format of the weights."""
        if self.quantize is not None:
            return self.quantize
        if self.model.file_width is not None:
            return self.model.file_type or "the format of its files"
        return dtype_name(self.dtype)

    def weight_bytes(self, placement: Placement) -> int:
        """Return the bytes of the weights of a rank."""
        args = self.model.args
        if self.model.file_width is not None and self.quantize is None:
            return int(self.model.file_width * num_elements(rank_shapes(args, placement)))
        return bytes_of_params(args, placement, self.dtype, self.quantize)

    def step_tokens(self, placement: Placement) -> int:
        """Return the maximum number of tokens of a step, as a build chooses it for a rank."""
        args = self.model.args
        batch_size = default_batch_size(self.torch_device)
        is_large = self.is_gpu and self.device.memory >= LARGE_GPU
        needs = functools.partial(self.memory, placement)
        return default_budget(args, batch_size, placement.stages, is_large, needs)

    def memory(self, placement: Placement, step_tokens: int) -> Memory:
        """Return what a rank needs of its device's memory, with so many tokens in a step."""
        args = self.model.args
        layers = LayerPlan.of(args, placement, self.kv_format)
        batch_size = default_batch_size(self.torch_device)
        reserve = step_bytes(args, layers, self.dtype, batch_size, step_tokens)
        return Memory(
            free=int(self.device.memory),
            weights=self.weight_bytes(placement),
            reserve=reserve + (CUDA_RESERVE if self.is_gpu else 0),
            per_token=layers.kv_bytes_per_token(self.dtype),
        )

    def storage(self) -> Storage:
        """Return how the model is stored and multiplied."""
        args = self.model.args
        kv_bytes = LayerPlan.of(args, kv_format=self.kv_format).kv_bytes_per_token(self.dtype)
        kv_width = kv_bytes / kv_elements(args)
        if self.model.file_width is not None and self.quantize is None:
            return Storage(self.model.file_width, self.model.file_width, kv_width)
        return Storage.of(args, self.dtype.itemsize, self.quantize, kv_width)

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts of these devices that have whole groups on each machine.

        Of many stages, and of groups on many machines, only some numbers are tried.
        """
        sizes = [*range(1, self.per_machine + 1)]
        sizes += [self.per_machine * count for count in _some(self.machines) if count > 1]
        for tensor in sizes:
            if tensor <= self.per_machine:
                groups = self.per_machine // tensor * self.machines
            else:
                groups = self.num_devices // tensor
            for stages in _some(min(groups, self.model.args.n_layers)):
                yield Layout(tensor, stages, groups // stages, self.per_machine)


def _some(limit: int) -> list[int]:
    """Return the numbers up to 8, the powers of two above, and the limit itself."""
    counts = [*range(1, 9), 16, 32, 64, 128]
    return sorted({limit, *(count for count in counts if count < limit)})


@dataclass(frozen=True)
class Option:
    """One layout, and what it makes of the devices.

    Attributes:
        layout: The layout.
        step_tokens: The maximum number of tokens of a step.
        weight_bytes: Bytes of the weights on the rank that has most of them.
        kv_tokens: Tokens that the KV cache of one replica holds.
        sequences: Sequences that run at once in one replica.
        tokens_per_s: Tokens of answers per second, of all replicas together.
    """

    layout: Layout
    step_tokens: int
    weight_bytes: int
    kv_tokens: int
    sequences: int
    tokens_per_s: float


def ranks_by_machine(layout: Layout) -> list[int]:
    """Return the ranks of a copy of the model on each machine that it needs.

    A stage is on one machine where its ranks fit into one, and machines have as many stages.
    """
    if layout.tensor > layout.per_machine:
        machines = layout.tensor * layout.pipeline // layout.per_machine
        return [layout.per_machine] * machines
    machines = -(-layout.pipeline // (layout.per_machine // layout.tensor))
    stages, more = divmod(layout.pipeline, machines)
    return [layout.tensor * (stages + (i < more)) for i in range(machines)]


def find_options(asked: Plan) -> list[Option]:
    """Return the layouts in which the model and one sequence fit, the fastest first."""
    options = []
    for layout in asked.layouts():
        try:
            option = option_for(asked, layout)
        except ValueError:  # more ranks than heads
            continue
        if option is not None:
            options.append(option)
    return sorted(options, key=lambda option: (-option.tokens_per_s, option.layout.ranks))


def option_for(asked: Plan, layout: Layout) -> Option | None:
    """Return what a layout makes of the devices; None if not one sequence fits.

    Raises:
        ValueError: The model cannot be divided like this.
    """
    args = asked.model.args
    stages = layout.pipeline
    args.check_ranks(layout.tensor)
    batch = -(-asked.batch // layout.replicas) if asked.batch is not None else None
    rows = max(1, (batch or default_batch_size(asked.torch_device)) // stages)
    counts = stage_layers(args, asked.storage(), stages, rows, is_gpu=asked.is_gpu)
    placements = [  # The first stages have most layers, the first and the last have the ends.
        replace(rank, stage=stage, stages=stages, layer_counts=counts)
        for stage in sorted({0, min(1, stages - 1), stages - 1})
        for rank in distinct_ranks(args, Placement(size=layout.tensor))
    ]
    step_tokens = min(map(asked.step_tokens, placements))
    memories = [asked.memory(placement, step_tokens) for placement in placements]
    kv_tokens = min(memory.kv_tokens for memory in memories)
    sequences = min(kv_tokens // asked.context, default_batch_size(asked.torch_device))
    if batch is not None:
        sequences = min(kv_tokens // asked.context, batch)
    if sequences == 0:
        return None
    running = sequences * layout.replicas
    if asked.batch is not None:
        running = min(running, asked.batch)
    return Option(
        layout=layout,
        step_tokens=step_tokens,
        weight_bytes=max(memory.weights for memory in memories),
        kv_tokens=kv_tokens,
        sequences=sequences,
        tokens_per_s=speed_of(asked, layout, sequences, step_tokens) * running / sequences,
    )


def cost_of(asked: Plan, layout: Layout, sequences: int, step_tokens: int) -> Cost:
    """Return the cost of a token while so many sequences run in one replica."""
    deployment = Deployment(asked.model.args, asked.storage(), asked.device, layout, step_tokens)
    return deployment.cost(asked.requests, sequences)


def speed_of(asked: Plan, layout: Layout, sequences: int, step_tokens: int) -> float:
    """Return the tokens per second of one replica."""
    return asked.device.efficiency / cost_of(asked, layout, sequences, step_tokens).total
