"""The cost of generating tokens: bytes to read, operations to do, and the seconds that they take.

In: the sizes of a model, how it is stored, a device of a table, and how ranks divide the model.
Out: bytes, operations and seconds. Everything is arithmetic: nothing is measured, no file is read,
and no such device is needed. `llama plan` and the benchmark use it.

The rooflines are those of one step (Williams et al., 2009). `Deployment.cost` is about the steady
state of a server: every token of an answer pays its share of its prompt, of reading the weights,
and of the communication between ranks. docs/guides/plan.md has the equations, and compares them
with published figures.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from llama.model.args import ModelArgs
from llama.model.shares import RankShare, distinct_ranks
from llama.ranks.placement import WHOLE, Placement
from llama.weights.choice import bytes_of, lm_head_format

_STATE_BYTES = 2  # bytes of an element that ranks exchange


@dataclass(frozen=True)
class Device:
    """A kind of device: a GPU, or the CPU of one machine.

    Attributes:
        title: Its name.
        memory: Bytes of memory.
        datasheet: Bytes per second of its memory by the datasheet.
        bandwidth: Bytes per second that a copy reaches.
        flops: FLOP per second of large matrix products, by the bits of an element.
        sum_latency: Seconds of a small sum over the devices of one machine.
        bus: Bytes per second that each device sends in a large sum over those.
        link_latency: Seconds that another machine adds to a sum or a message.
        link: Bytes per second from each device to other machines.
        step_overhead: Seconds that the host needs for a step.
        efficiency: The share of the model's tokens per second that engines reach.
        overlaps: Whether products hide the reading of weights, or the reverse. Where they do not,
            their times add up.
    """

    title: str
    memory: float
    datasheet: float
    bandwidth: float
    flops: dict[int, float]
    sum_latency: float = 8e-6
    bus: float = 350e9
    link_latency: float = 30e-6
    link: float = 50e9
    step_overhead: float = 0.0
    efficiency: float = 0.83
    overlaps: bool = False


# The rates of h100, h200 and b200 come from published measurements; docs/guides/plan.md names them.
# Those of a100 and 4090 are estimates: 80 to 90 % of their datasheets.
DEVICES = {
    "h100": Device("H100", 80e9, 3.35e12, 3.0e12, {16: 7.9e14, 8: 1.422e15}),
    "h200": Device("H200", 141e9, 4.8e12, 4.3e12, {16: 7.9e14, 8: 1.422e15}),
    "b200": Device("B200", 180e9, 8.0e12, 7.2e12, {16: 1.6e15, 8: 2.9e15, 4: 5.2e15}),
    "a100": Device("A100", 80e9, 2.04e12, 1.8e12, {16: 2.5e14}, sum_latency=12e-6, bus=230e9),
    "4090": Device(  # without NVLink: sums cross PCIe
        "RTX 4090", 24e9, 1.01e12, 0.92e12, {16: 1.4e14}, sum_latency=30e-6, bus=12e9
    ),
    "cpu": Device(  # two cores of an AMD EPYC (Zen 4), as in scripts/bench/results
        "CPU of 2 cores",
        64e9,
        34e9,
        34e9,
        {16: 4.4e11},
        link_latency=1.4e-3,
        link=1.2e9,
        step_overhead=1e-3,
        efficiency=0.88,
        overlaps=True,
    ),
}


def weight_shapes(args: ModelArgs, placement: Placement = WHOLE) -> dict[str, tuple[int, int]]:
    """Return (N, K) of each different matrix of a rank, as matrices are fused at load."""
    share = RankShare.of(args, placement)
    n_heads = len(share.heads)
    return {
        "wqkv": ((n_heads + 2 * len(share.kv_heads)) * args.head_dim, args.dim),
        "wo": (args.dim, n_heads * args.head_dim),
        "w13": (2 * len(share.ffn), args.dim),
        "w2": (args.dim, len(share.ffn)),
        "output": (len(share.vocab), args.dim),
    }


def block_matrix_size(args: ModelArgs, placement: Placement = WHOLE) -> int:
    """Return the number of elements in the matrices of one layer."""
    shapes = weight_shapes(args, placement)
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "output")


def _matrix_bytes(name: str, shape: tuple[int, int], itemsize: int, quantize: str | None) -> int:
    """Return the bytes of a matrix of `weight_shapes` in a format of `quantize=`."""
    weight_format = lm_head_format(quantize) if name == "output" else quantize
    if weight_format is None:
        return itemsize * math.prod(shape)
    return bytes_of(shape, torch.bfloat16, weight_format)


def decode_bytes(
    args: ModelArgs,
    itemsize: int,
    contexts: list[int],
    *,
    quantize: str | None = None,
    file_bytes: int = 0,
) -> int:
    """Return the bytes that one step must read.

    These are all weights once, one embedding row per sequence, and the keys and values of each
    sequence's context.

    Args:
        args: The model's sizes.
        itemsize: Bytes of an element that is not quantized.
        contexts: Tokens of each sequence.
        quantize: The format of the quantized matrices.
        file_bytes: The size of a file whose weights are read in the formats of the file; it
            replaces the computed size of the weights.
    """
    matrices = 0
    for name, shape in weight_shapes(args).items():
        count = 1 if name == "output" else args.n_layers
        matrices += count * _matrix_bytes(name, shape, itemsize, quantize)
    norms = (2 * args.n_layers + 1) * args.dim
    embedding = len(contexts) * args.dim
    cache = sum(contexts) * kv_elements(args)
    weights = file_bytes or matrices + itemsize * (norms + embedding)
    return weights + itemsize * cache


def kv_elements(args: ModelArgs, placement: Placement = WHOLE) -> int:
    """Return the elements of the keys and values of one token, over all layers."""
    n_kv_heads = len(RankShare.of(args, placement).kv_heads)
    return 2 * args.n_layers * n_kv_heads * args.head_dim


def prefill_flop(args: ModelArgs, tokens: int, prompts: int = 1) -> int:
    """Return two operations per parameter and token; lm_head counts once per prompt.

    Attention is counted by attention_flop().
    """
    layers = args.n_layers * block_matrix_size(args)
    return 2 * tokens * layers + 2 * prompts * args.vocab_size * args.dim


def attention_flop(args: ModelArgs, tokens: int) -> int:
    """Return the operations of attention over one prompt.

    They are four per element of a query and visible token. For the 1B shape that is 2 % of all
    operations at 512 tokens, and 12 % at 4,096.
    """
    return 2 * tokens * (tokens + 1) * args.n_layers * args.n_heads * args.head_dim


def step_roofline(
    args: ModelArgs,
    itemsize: int,
    contexts: list[int],
    bandwidth: float,
    flops: float,
    **storage: Any,
) -> float:
    """Return the seconds of one decode step at the roofline.

    They are the longer of reading its bytes at `bandwidth` bytes per second and doing its
    operations at `flops` FLOP/s.
    """
    reading = decode_bytes(args, itemsize, contexts, **storage) / bandwidth
    return max(reading, prefill_flop(args, len(contexts), len(contexts)) / flops)


def offline_roofline(
    args: ModelArgs,
    itemsize: int,
    lengths: list[tuple[int, int]],
    bandwidth: float,
    flops: float,
    **storage: Any,
) -> float:
    """Return the seconds of all prompts at `flops` FLOP/s, then of one step per token.

    All requests that are not finished share the batch of a step.
    """
    seconds = prefill_flop(args, sum(p for p, _ in lengths), len(lengths)) / flops
    for done in range(1, max(answer for _, answer in lengths)):
        contexts = [prompt + done for prompt, answer in lengths if answer > done]
        seconds += step_roofline(args, itemsize, contexts, bandwidth, flops, **storage)
    return seconds


@dataclass(frozen=True)
class Storage:
    """How a model is stored and multiplied.

    Attributes:
        layer_width: Bytes per element of the matrices of the layers.
        head_width: Bytes per element of the lm_head.
        kv_width: Bytes per element of the KV cache.
        bits: Bits of an element in a matrix product, a key of `Device.flops`.
    """

    layer_width: float
    head_width: float
    kv_width: float
    bits: int = 16

    @classmethod
    def of(cls, args: ModelArgs, itemsize: int, quantize: str | None, kv_width: float) -> "Storage":
        """Return how this runtime stores a model.

        Products of quantized weights are computed in 16 bits.

        Args:
            args: The model's sizes.
            itemsize: Bytes of an element that is not quantized.
            quantize: The format of the quantized matrices.
            kv_width: Bytes per element of the KV cache.
        """
        shapes = weight_shapes(args)
        head = shapes.pop("output")
        layer_bytes = sum(_matrix_bytes(*item, itemsize, quantize) for item in shapes.items())
        head_bytes = _matrix_bytes("output", head, itemsize, quantize)
        return cls(layer_bytes / block_matrix_size(args), head_bytes / math.prod(head), kv_width)


@dataclass(frozen=True)
class Layout:
    """How ranks divide one model, and how many copies of it run.

    Attributes:
        tensor: Ranks that share each layer (tensor parallelism).
        pipeline: Stages that divide the layers.
        replicas: Copies of the model.
        per_machine: Devices of each machine.
    """

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    per_machine: int = 8

    @property
    def ranks(self) -> int:
        """Return the number of devices in use."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def group_machines(self) -> int:
        """Return the number of machines that share each layer."""
        return max(1, self.tensor // self.per_machine)

    @property
    def spans_machines(self) -> bool:
        """Return whether the stages of one model are on several machines."""
        return self.tensor * self.pipeline > self.per_machine

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x {self.replicas}"


@dataclass(frozen=True)
class Requests:
    """The tokens of each prompt and of each answer."""

    prompt_len: int
    answer_len: int

    @property
    def mean_context(self) -> float:
        """Return the tokens that the KV cache has of a running sequence, on average."""
        return self.prompt_len + self.answer_len / 2


@dataclass(frozen=True)
class Cost:
    """Seconds of one replica per token of an answer, by cause.

    Attributes:
        products: Matrix products and attention, of the token and of its share of the prompt.
        weights: Reading the weights, as far as it is not hidden behind products.
        kv_cache: Reading keys and values.
        communication: Sums over ranks, and messages between stages.
        host: What the host does for each step.
    """

    products: float
    weights: float
    kv_cache: float
    communication: float
    host: float

    @property
    def total(self) -> float:
        """Return the seconds per token of an answer."""
        return self.products + self.weights + self.kv_cache + self.communication + self.host


@dataclass(frozen=True)
class Deployment:
    """A model on devices.

    Attributes:
        args: The model's sizes.
        storage: How it is stored and multiplied.
        device: The kind of each device.
        layout: How the devices divide it.
        step_tokens: The largest number of tokens of a step. The default is that of the engines
            whose figures docs/guides/plan.md compares.
    """

    args: ModelArgs
    storage: Storage
    device: Device
    layout: Layout
    step_tokens: int = 8192

    def cost(self, requests: Requests, sequences: float) -> Cost:
        """Return the cost of a token, on the rank of a group that has the largest share.

        The layers and the lm_head are taken to be divided evenly among stages.

        Args:
            requests: The lengths of prompts and answers.
            sequences: Sequences that run at once in one replica.
        """
        ranks = distinct_ranks(self.args, Placement(size=self.layout.tensor))
        costs = [self._cost_of(rank, requests, sequences) for rank in ranks]
        return max(costs, key=lambda cost: cost.total)

    def _cost_of(self, placement: Placement, requests: Requests, sequences: float) -> Cost:
        """Return the cost of a token on one rank of a group."""
        args = self.args
        stages = self.layout.pipeline
        prompts = (
            requests.prompt_len / requests.answer_len
        )  # tokens of a prompt per token of its answer
        layer_elements = args.n_layers * block_matrix_size(args, placement) / stages
        head_elements = math.prod(weight_shapes(args, placement)["output"]) / stages
        n_heads = len(RankShare.of(args, placement).heads)
        attention = 4 * n_heads * args.head_dim * args.n_layers / stages  # per token of context
        flop = (prompts + 1) * 2 * layer_elements
        flop += (1 + 1 / requests.answer_len) * 2 * head_elements
        flop += prompts * attention * requests.prompt_len / 2
        read = layer_elements * self.storage.layer_width
        read += head_elements * self.storage.head_width
        kv_bytes = kv_elements(args, placement) / stages * self.storage.kv_width

        busy = min(stages, sequences)  # stages that work at once
        rows = sequences / busy
        products = flop / self.device.flops[self.storage.bits]
        weights = read / (self.device.bandwidth * rows)
        if self.device.overlaps:
            weights = max(weights - products, 0.0)
        kv_cache = requests.mean_context * kv_bytes / self.device.bandwidth
        steps = max(1, rows * (1 + prompts) / self.step_tokens) / rows  # per token of an answer
        communication = self._communication(1 + prompts, steps)
        host = steps * self.device.step_overhead
        wait = stages / busy
        parts = (products, weights, kv_cache, communication, host)
        return Cost(*(part * wait for part in parts))

    def _communication(self, tokens: float, steps: float) -> float:
        """Return the seconds of sums and messages of one stage, per token of an answer.

        Args:
            tokens: Tokens that are computed per token of an answer, those of prompts among them.
            steps: Steps per token of an answer.
        """
        device = self.device
        layout = self.layout
        num_bytes = tokens * self.args.dim * _STATE_BYTES
        machines = layout.group_machines
        local = layout.tensor // machines
        seconds = 0.0
        if layout.tensor > 1:
            latency = device.sum_latency + (device.link_latency if machines > 1 else 0)
            per_byte = 2 * (local - 1) / local / device.bus
            per_byte += 2 * (machines - 1) / machines / (local * device.link)
            sums = 2 * self.args.n_layers / layout.pipeline
            seconds += sums * (steps * latency + num_bytes * per_byte)
        if layout.pipeline > 1:
            latency = device.link_latency if layout.spans_machines else device.sum_latency
            rate = device.link if layout.spans_machines else device.bus
            seconds += steps * latency + num_bytes / rate
        return seconds
