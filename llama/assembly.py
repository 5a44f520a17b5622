"""The engine of a loaded model, put together: the only file that knows the core and all options.

In: a model on its device, and what its steps should do. Out: an `EngineCore` with its runner, its
KV cache, and the hooks of the options. `llama.Llama` calls it; a program that wants another engine
can make one of the same parts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llama.common.openmp import SpinController
from llama.engine.core import PAGE_SIZE, EngineCore, step_tokens
from llama.engine.hooks import StepHook, Stepper
from llama.engine.pages import PagePool
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.model.transformer import Transformer
from llama.options.adapters import AdapterStore
from llama.options.graphs.kv_cache import Allocated, allocate
from llama.options.graphs.recorder import Recorder
from llama.options.openmp import ShortSpins
from llama.options.speculation.draft_model import ModelDrafter
from llama.options.speculation.drafter import Drafter
from llama.options.speculation.hook import DRAFTERS, speculate
from llama.options.stages import FailedFormats, Pipeline, StageRunner, StageStepper

# The tokens of prompts that a step of a pipeline has at least, on a CPU and on other devices. With
# fewer, reading the weights would take longer than the products.
_MIN_PROMPT_TOKENS_CPU = 32
_MIN_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Speculate:
    """How an engine speculates.

    Attributes:
        max_drafts: The maximum number of draft tokens of a sequence in a step.
        drafter: The drafter of `DRAFTERS` that is used without a draft model.
        draft_model: The model that drafts tokens.
        is_shared: Whether that drafter may use the texts of other requests.
    """

    max_drafts: int
    drafter: str = "lookup"
    draft_model: Transformer | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class Assembled:
    """A core, and the options that its users call.

    Attributes:
        core: The core.
        adapters: The LoRA adapters that its sequences can choose.
    """

    core: EngineCore
    adapters: AdapterStore


def assemble(
    model: Transformer,
    *,
    num_pages: int,
    page_size: int = PAGE_SIZE,
    token_budget: int | None = None,
    speculation: Speculate | None = None,
    recorder_for: Callable[[Transformer], Recorder | None] = lambda model: None,
    reserve: int = 0,
    async_scheduling: bool | None = None,
) -> Assembled:
    """Return the engine core of a loaded model, with its options.

    Args:
        model: The model.
        num_pages: The pages of its KV cache; with graphs, at most so many.
        page_size: The slots of a page.
        token_budget: The maximum number of tokens in a step.
        speculation: How steps get drafts; None: they get none. The KV cache of a draft model is
            allocated first.
        recorder_for: Returns the recorder of a model's graphs, or None for no graphs.
        reserve: The bytes that a step needs, which a KV cache beside graphs leaves free.
        async_scheduling: Whether a step may start before the previous one is read; by default it
            may on a GPU.
    """
    params = model.params
    placement = model.parallel.placement
    budget = token_budget or step_tokens(params, params.max_batch_size, placement.stages)

    def allocated(each: Transformer) -> Allocated:
        return allocate(
            each,
            num_pages,
            page_size,
            recorder=recorder_for(each),
            reserve=reserve,
            # Steps that verify drafts have more rows than sequences.
            recorded_rows=None if speculation is None else max(params.max_batch_size, 64),
            step_tokens=budget,
        )

    hooks: list[StepHook] = []
    draft_runner = None
    if speculation is not None and speculation.draft_model is not None:
        draft_runner = _runner(speculation.draft_model, allocated(speculation.draft_model), [])
    runner = _runner(model, allocated(model), hooks, async_scheduling)
    scheduler = _scheduler(model, runner.num_pages, page_size, budget)
    spin = SpinController.for_this_process()
    if spin is not None:
        hooks.append(ShortSpins(spin))
    adapters = AdapterStore(model, scheduler)
    hooks.append(adapters)
    stepper: Stepper | None = None
    if isinstance(runner, StageRunner):
        stepper = StageStepper(Pipeline(runner))
        hooks.append(FailedFormats(model.vocab_size))
    core = EngineCore(runner, scheduler, stepper, hooks)
    if speculation is not None:
        speculate(core, _drafter(speculation, core, draft_runner))
    return Assembled(core, adapters)


def _scheduler(model: Transformer, num_pages: int, page_size: int, token_budget: int) -> Scheduler:
    """Return the scheduler of a model whose KV cache has so many pages."""
    is_on_cpu = model.norm.weight.is_cpu
    return Scheduler(
        PagePool(num_pages, page_size),
        max_batch_size=model.params.max_batch_size,
        token_budget=token_budget,
        num_stages=model.parallel.placement.stages,
        min_prompt_tokens=_MIN_PROMPT_TOKENS_CPU if is_on_cpu else _MIN_PROMPT_TOKENS,
        has_whole_prompts=not model.params.is_causal,
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


def _drafter(speculation: Speculate, core: EngineCore, draft_runner: ModelRunner | None) -> Drafter:
    """Return the drafter that was asked for."""
    if draft_runner is not None:
        return ModelDrafter(speculation.max_drafts, draft_runner, core.scheduler)
    make = DRAFTERS[speculation.drafter].make
    return make(speculation.max_drafts, core.runner.model.parallel, speculation.is_shared)
