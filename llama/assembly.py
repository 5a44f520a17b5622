"""The engine of a loaded model, put together: the only file that knows the core and all options.

In: a model on its device, and its `EngineOptions`. Out: an `EngineCore` with its runner, its KV
cache, and the hooks of the options. `llama.Llama` calls it; a program that wants another engine can
make one of the same parts.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from llama.common.openmp import SpinController
from llama.engine.core import EngineCore, step_tokens
from llama.engine.hooks import StepHook, Stepper
from llama.engine.pages import PagePool
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.model.transformer import Transformer
from llama.options.adapters import AdapterStore, NumberedAdapters
from llama.options.engine_options import EngineOptions
from llama.options.graphs.kv_cache import Allocated, allocate
from llama.options.images import ImageStore
from llama.options.openmp import ShortSpins
from llama.options.page_store import PageStore
from llama.options.speculation.draft_model import ModelDrafter
from llama.options.speculation.hook import kind_of, speculate
from llama.options.stages import FailedFormats, Pipeline, StageRunner, StageStepper
from llama.storage.kv_disk import default_bytes
from llama.storage.kv_folder import KVFolder
from llama.storage.kv_segments import Part
from llama.storage.kv_writer import KVWriter

# New tokens of a text in a pass of a draft model; there are two where all drafts were right.
_DRAFT_QUERIES = 2
# The tokens of prompts that a step of a pipeline has at least, on a CPU and on other devices. With
# fewer, reading the weights would take longer than the products.
_MIN_PROMPT_TOKENS_CPU = 32
_MIN_PROMPT_TOKENS = 512
_CAPTURED_BYTES = 256 << 20  # the hidden states that requests capture in one step on a GPU


@dataclass(frozen=True)
class Assembled:
    """A core, and the options that its users call.

    Attributes:
        core: The core.
        adapters: The LoRA adapters that its sequences can choose.
        pages: The KV pages on disk, if there are any.
        images: The images of its sequences; None for a model of text.
    """

    core: EngineCore
    adapters: AdapterStore
    pages: PageStore | None = None
    images: ImageStore | None = None


def assemble(model: Transformer, options: EngineOptions) -> Assembled:
    """Return the engine core of a loaded model, with its options."""
    params = model.params
    placement = model.parallel.placement
    page_size = options.page_size
    num_pages = options.num_pages or params.max_batch_size * -(-params.max_seq_len // page_size)
    budget = options.token_budget or step_tokens(params, params.max_batch_size, placement.stages)

    max_captured = _max_captured(model)
    captured_bytes = 0
    if max_captured is not None:  # the rows of other sequences are kept with those of a capture
        num_states = min(max_captured, budget) + params.max_batch_size
        captured_bytes = num_states * _state_bytes(model)

    def allocated(
        each: Transformer, max_queries: int, adapters: NumberedAdapters | None
    ) -> Allocated:
        return allocate(
            each,
            num_pages,
            page_size,
            recorder=options.recorder_for(each),
            reserve=options.reserve,
            # Steps that verify drafts have more rows than sequences.
            recorded_rows=max(params.max_batch_size, 64) if options.speculate else None,
            max_queries=max_queries,
            adapters=adapters,
            step_tokens=budget,
            captured_bytes=captured_bytes,
        )

    hooks: list[StepHook] = []
    draft_runner = None
    if options.draft_model is not None:
        memory = allocated(options.draft_model, _DRAFT_QUERIES, None)
        draft_runner = _runner(options.draft_model, memory, [], options.async_scheduling)
    num_queries = 1 + options.speculate_tokens if options.speculate else 1
    numbered = NumberedAdapters.of(model)
    memory = allocated(model, num_queries, numbered)
    runner = _runner(model, memory, hooks, options.async_scheduling)
    scheduler = _scheduler(model, runner.num_pages, page_size, budget, max_captured)
    pages = _page_store(runner, scheduler, options)
    if pages is not None:
        hooks.append(pages)
        scheduler.pool.tier = pages
    spin = SpinController.for_this_process()
    if spin is not None:
        hooks.append(ShortSpins(spin))
    adapters = AdapterStore(model, scheduler, memory.reserve, numbered)
    hooks.append(adapters)
    images = None
    if params.vision is not None:
        images = ImageStore(model, scheduler, runner.kv_cache.shape[2])
        hooks.append(images)
    stepper: Stepper | None = None
    if isinstance(runner, StageRunner):
        stepper = StageStepper(Pipeline(runner))
        hooks.append(FailedFormats(model.vocab_size))
    core = EngineCore(runner, scheduler, stepper, hooks)
    if draft_runner is not None:
        speculate(core, ModelDrafter(options.speculate_tokens, draft_runner, scheduler))
    elif (kind := kind_of(options.speculate)) is not None:
        speculate(core, kind.make(options, core))
    return Assembled(core, adapters, pages, images)


def _page_store(
    runner: ModelRunner, scheduler: Scheduler, options: EngineOptions
) -> PageStore | None:
    """Return the KV pages on disk, where a folder is given.

    Raises:
        OSError: The folder cannot be made or read, or other users can enter it.
    """
    if options.kv_cache_dir is None or options.page_identity is None:
        return None
    root = Path(options.kv_cache_dir).expanduser().absolute()
    plan = runner.model.plan
    heads = plan.share.kv_heads
    num_layers, _, _, *slots = runner.kv_cache.shape
    page_bytes = num_layers * 2 * math.prod(slots) * runner.kv_cache.itemsize
    part = Part(
        plan.share.layers.start, num_layers, heads.start, len(heads), page_bytes // len(heads)
    )
    is_exact = options.kv_cache_reuse == "exact"
    folder = KVFolder(root, options.page_identity, part, is_exact=is_exact)
    max_bytes = options.kv_cache_disk_bytes or default_bytes(root)
    writer = KVWriter(folder, max_bytes, num_writers=runner.model.parallel.world_size)
    return PageStore(folder, writer, runner, scheduler)


def _state_bytes(model: Transformer) -> int:
    """Return the bytes of all hidden states of a token."""
    weight = model.norm.weight
    return (model.params.n_layers + 2) * model.params.dim * weight.itemsize


def _max_captured(model: Transformer) -> int | None:
    """Return how many tokens of a step may have their states captured; None without a limit."""
    if model.norm.weight.device.type != "cuda":
        return None
    return max(1, _CAPTURED_BYTES // _state_bytes(model))


def _scheduler(
    model: Transformer,
    num_pages: int,
    page_size: int,
    token_budget: int,
    max_captured: int | None,
) -> Scheduler:
    """Return the scheduler of a model whose KV cache has so many pages."""
    is_on_cpu = model.norm.weight.is_cpu
    return Scheduler(
        PagePool(num_pages, page_size),
        max_batch_size=model.params.max_batch_size,
        token_budget=token_budget,
        num_stages=model.parallel.placement.stages,
        min_prompt_tokens=_MIN_PROMPT_TOKENS_CPU if is_on_cpu else _MIN_PROMPT_TOKENS,
        has_whole_prompts=not model.params.is_causal,
        max_captured=max_captured,
    )


def _runner(
    model: Transformer,
    memory: Allocated,
    hooks: list[StepHook],
    async_scheduling: bool | None = None,
) -> ModelRunner:
    """Return the runner of a model, or of a stage of one, over the memory allocated for it."""
    runner_class = StageRunner if model.parallel.placement.stages > 1 else ModelRunner
    return runner_class(
        model,
        memory.kv_cache,
        memory.num_pages,
        async_scheduling=async_scheduling,
        last_ids=memory.last_ids,
        replayer=memory.graphs,
        hooks=hooks,
    )
