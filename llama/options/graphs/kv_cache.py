"""The KV cache of a model on its device, and the graphs that share its memory.

In: a model, and the pages that its sequences should have. Out: the KV cache and the graphs, with as
many pages as fit. A GPU runs the largest step first, so that its memory is known.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from llama.common.device import current, peak_bytes
from llama.engine.runner import LastIds
from llama.model.transformer import Transformer
from llama.options.adapters import NumberedAdapters
from llama.options.graphs.recorder import CaptureError, Recorder
from llama.options.graphs.step_graphs import StepGraphs, warn_of_no_graphs
from llama.options.graphs.trial import replay_problem
from llama.options.largest_step import largest_step


@dataclass(frozen=True)
class Allocated:
    """The memory that a runner needs on its device.

    Attributes:
        kv_cache: The KV cache, (L, 2, P, S, K, W). With graphs it has one page more than
            `num_pages`: the unused rows of graphs write there.
        num_pages: The pages that sequences may use.
        last_ids: The tokens of the latest step, which graphs read.
        reserve: The bytes that a step needs.
        graphs: The recorded steps, if there are any.
    """

    kv_cache: Tensor
    num_pages: int
    last_ids: LastIds
    reserve: int = 0
    graphs: StepGraphs | None = None


def allocate(
    model: Transformer,
    num_pages: int,
    page_size: int,
    *,
    recorder: Recorder | None = None,
    reserve: int = 0,
    recorded_rows: int | None = None,
    max_queries: int = 1,
    adapters: NumberedAdapters | None = None,
    step_tokens: int = 0,
    captured_bytes: int = 0,
) -> Allocated:
    """Allocate the KV cache of a model, and record its graphs.

    Args:
        model: The model.
        num_pages: The pages that sequences should have. With graphs the KV cache gets only those
            that fit alongside the graphs and the reserve.
        page_size: The slots of a page.
        recorder: The recorder of graphs; None: there are none.
        reserve: The bytes that a step needs.
        recorded_rows: The rows up to which graphs are recorded now, see `StepGraphs`.
        max_queries: The rows that a sequence usually has at most in a graph, see `StepGraphs`.
        adapters: The adapters that the rows of graphs may have.
        step_tokens: The maximum number of tokens of a step, of which graphs may have prompts. A GPU
            runs one such step first, whose memory is reserved as well; 0: none.
        captured_bytes: The bytes of the hidden states that a step may capture on a GPU.
    """
    device = model.norm.weight.device
    with model.parallel.step(), current(device):
        if device.type == "cuda" and step_tokens:
            run = largest_step(model, step_tokens, page_size)
            reserve = max(reserve, peak_bytes(device, run)) + captured_bytes
        last_ids = LastIds.of(model)
        if recorder is None:
            kv_cache = model.new_kv_cache(num_pages, page_size)
            return Allocated(kv_cache, num_pages, last_ids, reserve)

        def graphs_of(kv_cache: Tensor) -> StepGraphs:
            return StepGraphs(
                model,
                kv_cache,
                recorder,
                last_ids,
                recorded_rows,
                max_queries,
                step_tokens,
                adapters,
            )

        return _allocate_with_graphs(
            model, num_pages, page_size, recorder, reserve, last_ids, graphs_of
        )


def _allocate_with_graphs(
    model: Transformer,
    num_pages: int,
    page_size: int,
    recorder: Recorder,
    reserve: int,
    last_ids: LastIds,
    graphs_of: Callable[[Tensor], StepGraphs],
) -> Allocated:
    """Record the graphs, which `graphs_of` makes, and allocate the KV cache alongside them.

    The memory of the graphs is measured first, with a KV cache of two pages.
    """
    parallel = model.parallel
    small = model.new_kv_cache(2, page_size)
    graph_bytes = 0
    problem: CaptureError | None = None
    try:
        graph_bytes = graphs_of(small).num_bytes()
    except CaptureError as error:
        problem = error
    cache_bytes = recorder.free_bytes() - graph_bytes - reserve
    fitting = 2 * cache_bytes // small.nbytes - 1
    min_pages = -(-model.params.max_seq_len // page_size)
    fitting = max(min_pages, parallel.all_reduce_min(fitting))
    num_pages = min(num_pages, fitting)
    kv_cache = model.new_kv_cache(num_pages + 1, page_size)
    graphs = graphs_of(kv_cache)
    if problem is None:
        try:
            graphs.record_all()
        except CaptureError as error:
            problem = error
        else:
            problem = replay_problem(graphs, model, kv_cache, last_ids)
    if not parallel.all_reduce_min(int(problem is None)):  # all stages alike
        warn_of_no_graphs(problem or CaptureError("another rank cannot record them"))
        graphs.close()
        return Allocated(kv_cache, num_pages, last_ids, reserve)
    return Allocated(kv_cache, num_pages, last_ids, reserve, graphs)
