"""How much fits into a device's memory: weights, KV cache and the workspace of a step.

In: bytes and the sizes of a model. Out: max_seq_len and the pages of the KV cache, or one clear
error. Everything here is arithmetic: no file is read and no tensor is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llama.common.checks import FieldError
from llama.engine.core import PAGE_SIZE, step_tokens
from llama.model.args import ModelArgs, VisionArgs
from llama.model.plan import LayerPlan

MEMORY_FRACTION = 0.9  # the share of free memory that is used; the allocator's slack is the rest
USUAL_SEQ_LEN = 8192  # the KV cache is sized for sequences of this length if the user gives none
LARGE_GPU = 80 * 10**9  # bytes of memory from which a GPU counts as one of 80 GB
LARGE_TOKEN_BUDGET = 8192  # tokens per step there: all rows read the weights once
CUDA_RESERVE = 3 << 29  # bytes: modules of cuBLAS, buffers of nccl, graphs
_KV_CACHE_LEFT = 0.9  # the share of the KV cache that the larger default of a step must leave
_MIN_SEQ_LEN = 256  # below this, max_seq_len is not reduced further; it is a multiple of this
_SCORED_ROWS = 256  # rows of logits that a step can hold, whatever the batch size
_LOGITS_COPIES = 4  # logits as computed, counted, adjusted and sampled
_LOGITS_BYTES = 4  # float32
_MPS_TENSOR_BYTES = 2**32 - 1


@dataclass(frozen=True)
class Memory:
    """The bytes that one rank needs of its device's memory.

    Attributes:
        free: Bytes that are free.
        weights: Bytes of the weights.
        reserve: Bytes that a step needs besides weights and KV cache.
        per_token: Bytes of the keys and values of one token.
        max_tokens: The tokens of the largest KV cache that the device can hold in one tensor; None
            without such a limit.
        rank: The rank, where errors should name it.
    """

    free: int
    weights: int
    reserve: int
    per_token: int
    max_tokens: int | None = None
    rank: int | None = None

    def as_integers(self) -> list[int]:
        """Return the fields but for the rank, as whole numbers that ranks exchange."""
        no_limit = -1
        max_tokens = no_limit if self.max_tokens is None else self.max_tokens
        return [self.free, self.weights, self.reserve, self.per_token, max_tokens]

    @classmethod
    def of_integers(cls, values: Sequence[int]) -> "Memory":
        """Return what another rank sent as `as_integers`."""
        free, weights, reserve, per_token, max_tokens = values
        return cls(free, weights, reserve, per_token, None if max_tokens < 0 else max_tokens)

    @classmethod
    def of_all(cls, models: "Sequence[Memory]") -> "Memory":
        """Add up models that run in turn and have the same tokens in their caches."""
        limits = [model.max_tokens for model in models if model.max_tokens is not None]
        return cls(
            free=models[0].free,
            weights=sum(model.weights for model in models),
            reserve=max(model.reserve for model in models),
            per_token=sum(model.per_token for model in models),
            max_tokens=min(limits, default=None),
        )

    @classmethod
    def tightest(cls, ranks: "Sequence[Memory]", kv_bytes: int | None) -> int:
        """Return the rank on which the smallest KV cache fits; all ranks have as many tokens.

        Args:
            ranks: What each rank needs.
            kv_bytes: The bytes of the KV cache as the user asked for them; None: as many as fit.
        """

        def fitting(rank: int) -> tuple[bool, int]:
            memory = ranks[rank]
            if kv_bytes is None:
                return True, memory.kv_tokens
            return kv_bytes <= memory.kv_bytes, kv_bytes // memory.per_token

        return min(range(len(ranks)), key=fitting)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that are left for the KV cache; 0 if not even the weights fit."""
        usable = min(int(self.free * MEMORY_FRACTION), self.free - self.reserve)
        kv_bytes = max(usable - self.weights, 0)
        if self.max_tokens is None:
            return kv_bytes
        return min(kv_bytes, self.max_tokens * self.per_token)

    @property
    def kv_tokens(self) -> int:
        """Return the tokens of the whole pages that fit."""
        return self.kv_bytes // (self.per_token * PAGE_SIZE) * PAGE_SIZE


def max_cache_tokens(device: torch.device, per_token: int) -> int | None:
    """Return how many tokens of `per_token` bytes a tensor can hold; None without a limit.

    Apple's GPUs fail with tensors of 4 GiB and more (pytorch #149325).
    """
    return _MPS_TENSOR_BYTES // per_token if device.type == "mps" else None


def pages_for(num_tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


def default_batch_size(device: torch.device) -> int:
    """Return max_batch_size if the user gives none."""
    return 256 if device.type == "cuda" else 32


def default_budget(
    params: ModelArgs, batch_size: int, stages: int, is_large: bool, needs: Callable[[int], Memory]
) -> int:
    """Return the maximum number of tokens of a step if the user gives none.

    The larger default of a large GPU must leave most of the KV cache that the smaller one leaves.

    Args:
        params: The model's sizes.
        batch_size: The sequences that run at once.
        stages: The stages of a pipeline.
        is_large: Whether the device is a GPU of 80 GB or more.
        needs: Returns what a rank needs with so many tokens in a step.
    """
    usual = step_tokens(params, batch_size, stages)
    if not is_large:
        return usual
    large = step_tokens(params, batch_size, stages, LARGE_TOKEN_BUDGET)
    if large > usual and needs(large).kv_bytes < _KV_CACHE_LEFT * needs(usual).kv_bytes:
        return usual
    return large


def is_large_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU of 80 GB or more."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[1] >= LARGE_GPU


def step_bytes(
    params: ModelArgs,
    plan: LayerPlan,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int | None = None,
) -> int:
    """Return what the largest step needs on one rank besides weights and KV cache.

    This is what the layers hold of each token, and the logits of sequences or scored rows.

    Args:
        params: The model's sizes.
        plan: The layers of the rank.
        dtype: The dtype of the model.
        batch_size: The sequences that run at once.
        tokens: The maximum number of tokens of a step; None: the default of a small device.
    """
    tokens = tokens or step_tokens(params, batch_size)
    layer_bytes = tokens * plan.elements_per_token() * dtype.itemsize
    rows = max(batch_size, _SCORED_ROWS)
    if params.vision is not None:
        layer_bytes += _encoder_elements(params.vision, params.dim) * dtype.itemsize
    return layer_bytes + _LOGITS_COPIES * _LOGITS_BYTES * rows * params.vocab_size


def _encoder_elements(args: VisionArgs, dim: int) -> int:
    """Return the elements that encoding the largest image needs at once.

    These are, for each token, the features and the result, a block's heads with their padded
    copies, and its feed-forward columns, twice.
    """
    num_tokens = (args.max_tiles + 1) * args.tokens_per_tile
    return num_tokens * (args.features_dim + dim + 12 * args.width + 2 * args.ffn_dim)


def image_pages(params: ModelArgs, plan: LayerPlan) -> int:
    """Return how many pages of the KV cache the largest image takes; 0 for a model of text."""
    if params.vision is None:
        return 0
    num_tokens = params.vision.max_tiles * params.vision.tokens_per_tile
    return -(-num_tokens // (plan.image_ratio * PAGE_SIZE))


def choose_sizes(
    memory: Memory,
    seq_len: int | None,
    batch_size: int,
    kv_bytes: int | None,
    longest: int,
    num_further: int = 0,
) -> tuple[int, int]:
    """Choose max_seq_len and the number of pages of the KV cache.

    Args:
        memory: What the rank needs.
        seq_len: max_seq_len as the user asked for it; None: the model's context, or as much of it
            as fits. The cache then holds that once, or `batch_size` times USUAL_SEQ_LEN.
        batch_size: max_batch_size.
        kv_bytes: The bytes of the KV cache as the user asked for them; None: as many as fit.
        longest: The limit of the model.
        num_further: The pages that a sequence may have besides those of its tokens:
            `image_pages`.

    Raises:
        ValueError: Not one sequence of max_seq_len fits.
    """
    if kv_bytes is not None and kv_bytes > memory.kv_bytes:
        raise FieldError.of(
            "kv_cache_memory_bytes",
            f"={kv_bytes} is more than the {memory.kv_bytes} bytes that are "
            f"free next to the weights{_on_rank(memory)}: ask for that or less",
        )
    num_pages = (kv_bytes or memory.kv_bytes) // (memory.per_token * PAGE_SIZE)
    if seq_len is None:
        num_free = num_pages - num_further
        fitting = num_free * PAGE_SIZE // _MIN_SEQ_LEN * _MIN_SEQ_LEN
        chosen = min(longest, max(fitting, _MIN_SEQ_LEN))
        wanted = max(batch_size * pages_for(min(chosen, USUAL_SEQ_LEN)), pages_for(chosen))
    else:
        chosen = seq_len
        wanted = batch_size * pages_for(chosen)
    if pages_for(chosen) + num_further > num_pages:
        raise ValueError(_does_not_fit(memory, chosen, num_pages, kv_bytes, num_further))
    return chosen, min(num_pages, wanted + num_further)


def _does_not_fit(
    memory: Memory, seq_len: int, num_pages: int, kv_bytes: int | None, num_further: int
) -> str:
    """Return an error that says what is missing, and what would fit."""
    needed = (pages_for(seq_len) + num_further) * PAGE_SIZE * memory.per_token
    fitting_seq_len = (num_pages - num_further) * PAGE_SIZE // 64 * 64
    if fitting_seq_len > 0:
        remedy = f"max_seq_len={fitting_seq_len} would fit"
    elif kv_bytes:
        remedy = f"kv_cache_memory_bytes={needed} would fit"
    else:
        remedy = "use more ranks, a smaller dtype or max_batch_size, or a device with more memory"
    device = "each rank's device"
    if memory.rank is not None:
        device = f"the device of rank {memory.rank}, which limits all others"
    asked = f" and kv_cache_memory_bytes={kv_bytes} asked for" if kv_bytes else ""
    with_image = ""
    if num_further:
        with_image = " and an image"
        remedy += "; images=False leaves out what reads images"
    return (
        f"the weights take {_gib(memory.weights)}, a step {_gib(memory.reserve)}, and the KV cache "
        f"of one sequence of max_seq_len={seq_len}{with_image} takes {_gib(needed)}, but "
        f"{_gib(memory.free)} are free on {device}{asked}: {remedy}"
    )


def _on_rank(memory: Memory) -> str:
    return "" if memory.rank is None else f" on rank {memory.rank}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
