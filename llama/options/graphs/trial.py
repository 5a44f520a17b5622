"""The trial of graphs before requests use them: replays of steps, and of sums over the ranks.

In: recorded steps whose KV cache holds no sequence yet, or a model of several ranks. Out: why
graphs must not be used, or None. A replayed step must give what the same step gives operator by
operator, for other tokens, positions and pages than those it was recorded with. Requests must not
be known here.

Shapes: P pages and S slots per page of the cache, n rows of a step.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from llama.common.device import current
from llama.engine.hooks import Decoded
from llama.engine.runner import LastIds
from llama.model.transformer import Transformer
from llama.ops.cache_values import fill_cache, read_cache
from llama.ops.kv_cache import format_of
from llama.options.graphs.recorder import CaptureError, CudaRecorder
from llama.options.graphs.shapes import Shape, bucket_of
from llama.options.graphs.step_graphs import StepGraphs
from llama.options.graphs.step_inputs import PreparedStep

_MIN_PAGES = 8
_MAX_PROMPT = 100  # tokens of a prompt
_TOLERANCE = 2e-2  # relative error of logits and the cache, where the library may add otherwise
_MIN_VALUE = 1e-30
_MAX_MESSAGE = 300  # characters of an error in a reason


@torch.inference_mode()
def replay_problem(
    graphs: StepGraphs, model: Transformer, kv_cache: Tensor, last_ids: LastIds
) -> CaptureError | None:
    """Return how the first replay of a recorded step differs from the step; None where none does.

    All ranks of a group call it, and run all steps, whatever they find. The cache and the ids are
    zero afterwards.
    """
    generator = torch.Generator().manual_seed(0)
    weight = model.norm.weight

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    page_size = kv_cache.shape[3]
    num_ids = len(last_ids.ids)
    shapes = graphs.shapes()
    # Each row writes to a slot of its own; prompts have pages of their own.
    most_rows = num_ids + max(shape.prompts for shape in shapes)
    num_pages = min(kv_cache.shape[2] - 1, max(_MIN_PAGES, -(-most_rows // page_size)))
    used_pages = kv_cache[:, :, :num_pages]
    unused_page = kv_cache[:, :, -1]  # the page of unused rows
    fill_cache(used_pages, model.params.head_dim, draw)
    last_ids.ids.copy_(torch.randint(model.vocab_size, (num_ids,), generator=generator))
    problem: CaptureError | None = None
    for shape in shapes:
        wants_logits = shape.wants_logits
        step = _step(shape, num_pages, page_size, model.params.max_seq_len)
        num_rows = step.fields.shape[1]
        tokens = torch.randint(model.vocab_size, (num_rows,), generator=generator)
        step.fields[0] = tokens.numpy()
        is_first = model.parallel.placement.is_first
        x = None if is_first else draw(num_rows, model.params.dim)
        eager = graphs.run_eagerly(step, x, wants_logits=wants_logits)
        eager_cache = read_cache(used_pages)
        slots = torch.from_numpy(step.fields[3]).to(weight.device)
        zeros = weight.new_zeros(num_rows, kv_cache.shape[-2], model.params.head_dim)
        _clear(used_pages, slots, zeros)
        unused_page.fill_(7.0)  # nobody may read it
        replayed = graphs.run(step, x, wants_logits=wants_logits)
        try:
            _expect_same(step, replayed, eager)
            _expect_close("keys and values", read_cache(used_pages), eager_cache)
        except ArithmeticError as error:
            rows = shape.rows + shape.prompts
            problem = problem or CaptureError(f"a replay of {rows} rows is wrong: {error}")
    for tensor in (used_pages, unused_page, last_ids.ids):
        tensor.zero_()
    return problem


def _step(shape: Shape, num_pages: int, page_size: int, max_len: int) -> PreparedStep:
    """Return a step for a shape, as far as so many pages have slots for it; its tokens are 0."""
    if not shape.prompts:
        rows = shape.rows
        num_rows = rows - 1 if rows > 1 and bucket_of(rows - 1) == rows else rows
        num_rows = min(num_rows, num_pages * min(page_size, max_len))
        return _single_tokens(num_rows, shape.width, num_pages, page_size)
    prompts, num_left = _prompts(shape.prompts // 2 + 1, num_pages, page_size, max_len)
    num_rows = min(max(shape.rows - 1, 0), num_left * min(page_size, max_len))
    if not num_rows:
        return prompts
    single = _single_tokens(num_rows, min(shape.width, num_left), num_left, page_size)
    assert prompts.results is not None
    return PreparedStep(
        np.concatenate([single.fields, prompts.fields], 1),
        np.concatenate([single.ends, num_rows + prompts.ends]),
        single.pages + prompts.pages,
        prompts.num_prompts,
        [*range(num_rows), *(num_rows + row for row in prompts.results)],
    )


def _single_tokens(num_rows: int, width: int, num_pages: int, page_size: int) -> PreparedStep:
    """Return a step of rows of many lengths, the first of which has `width` pages.

    Row i writes to page i modulo P, in the next slot at each round, and reads the pages before.
    """
    rows = np.arange(num_rows)
    counts = 1 + 7 * rows % max(1, width - 1)
    counts[0] = width
    last_pages = rows % num_pages
    offsets = rows // num_pages
    positions = (counts - 1) * page_size + offsets
    sources = np.where(rows % 2, -1, rows)  # every second token is on the device
    slots = last_pages * page_size + offsets
    no_adapters = np.full_like(rows, -1)
    fields = np.stack([no_adapters, sources, positions, slots, no_adapters])
    pages = [
        [(last + 1 + j) % num_pages for j in range(-count, 0)]
        for last, count in zip(last_pages.tolist(), counts.tolist(), strict=True)
    ]
    return PreparedStep(fields, np.arange(1, len(pages) + 1), list(pages))


def _prompts(
    num_tokens: int, num_pages: int, page_size: int, max_len: int
) -> tuple[PreparedStep, int]:
    """Return a step of prompts with so many tokens, and how many pages it does not write to.

    Each prompt writes to the last of the pages that are left. All but the first one continue.
    """
    parts: list[np.ndarray] = []
    tables: list[Seq[int]] = []
    num_left = num_pages
    while (count := min(num_tokens - sum(map(len, parts)), max_len, _MAX_PROMPT)) > 1:
        start = 7 * len(parts) % (max_len - count + 1)
        positions = np.arange(start, start + count)
        first_page = start // page_size
        num_new = positions[-1] // page_size + 1 - first_page
        if num_new >= num_left:
            break
        num_left -= int(num_new)
        read = [page % num_pages for page in range(first_page)]
        tables.append([*read, *range(num_left, num_left + num_new)])
        parts.append(positions)
    positions = np.concatenate(parts)
    slots = [
        np.array(table)[at // page_size] * page_size + at % page_size
        for table, at in zip(tables, parts, strict=True)
    ]
    none = np.full_like(positions, -1)
    fields = np.stack([none, none, positions, np.concatenate(slots), none])
    ends = np.cumsum([len(part) for part in parts])
    results = (ends - 1).tolist()  # the last prompt goes on in the next step
    return PreparedStep(fields, ends, tables, len(ends), results[:-1] or results), num_left


def _clear(kv_cache: Tensor, slots: Tensor, zeros: Tensor) -> None:
    """Make keys and values zero (n, K, D) that a step has written, which its replay does again."""
    for plane in kv_cache.flatten(0, 1):
        format_of(plane).store(plane, slots, zeros)


def _expect_same(step: PreparedStep, replayed: Decoded | Tensor, eager: Decoded | Tensor) -> None:
    """Compare the results. If logits are nearly equal, either of them may be the top one."""
    n = step.fields.shape[1]
    if isinstance(replayed, Tensor) or isinstance(eager, Tensor):
        assert isinstance(replayed, Tensor) and isinstance(eager, Tensor)
        _expect_close("hidden states", replayed[:n], eager[:n])
        return
    n = n if step.results is None else len(step.results)
    differ = replayed.ids[:n] != eager.ids[:n]
    if replayed.logits is not None and eager.logits is not None:
        logits = eager.logits[:n]
        _expect_close("logits", replayed.logits[:n], logits)
        # A row without a maximum has the id -1.
        both = torch.stack([replayed.ids[:n], eager.ids[:n]], 1).clamp(0, logits.shape[1] - 1)
        tops = logits.gather(1, both)
        distance = (tops[:, 0] - tops[:, 1]).abs()
        differ &= distance > _TOLERANCE * logits.abs().amax(1)
    if rows := differ.nonzero().flatten().tolist():
        raise ArithmeticError(f"the ids of rows {rows} differ from those of the step")


def _expect_close(name: str, replayed: Tensor, eager: Tensor) -> None:
    """Compare values; weights that are not finite give the same NaN and infinity in both."""
    found = replayed.float()
    right = eager.float()
    is_same = (found == right) | (found.isnan() & right.isnan())
    difference = (found - right).abs().masked_fill(is_same, 0.0).max()
    largest = right.abs().nan_to_num(0.0, posinf=0.0).max()
    error = float(difference / largest.clamp(min=_MIN_VALUE))
    if not error <= _TOLERANCE:  # so written, the condition holds for NaN
        raise ArithmeticError(f"{name} are off by {error:.2g} of the largest")


def try_collectives(model: Transformer) -> str | None:
    """Return why sums over the ranks cannot be part of a graph; None where they can.

    All ranks call it. They agree before each step that waits for the others on the device, so that
    a rank which cannot take the step keeps nobody waiting, and a rank that does not come is
    noticed.
    """
    parallel = model.parallel
    weight = model.norm.weight
    x = torch.zeros(8, 64, dtype=weight.dtype, device=weight.device)
    large = x.new_zeros(1 << 19)  # its sum takes another path than a small one's
    widths = [x.shape[-1] - rank % 2 for rank in range(parallel.size)]  # unequal ones do, too

    def collectives() -> tuple[Tensor, ...]:
        return (
            parallel.all_reduce(x.clone()),
            parallel.all_reduce(large + x[0, 0]),
            parallel.all_gather(x.int()) * parallel.size,
            parallel.all_gather(x[:, : widths[parallel.rank]], widths) * parallel.size,
        )

    reason = None
    with parallel.step(), current(weight.device):
        recorder = CudaRecorder(weight.device)
        try:
            sums, replay = recorder.record(collectives, [x, large])
        except RuntimeError as e:
            message = f"sums over the ranks cannot be captured: {e}".partition("\n")[0]
            reason = message[:_MAX_MESSAGE]
        for value in (1.0, 3.0):
            if not parallel.all_reduce_min(int(reason is None)):
                break
            x.fill_(value)
            replay()
            right = value * parallel.size
            if not all(bool((out == right).all()) for out in sums):
                reason = "a captured sum over the ranks is wrong"
        recorder.close()
    return reason
