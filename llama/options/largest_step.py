"""The step of the most tokens, which a GPU runs before its KV cache is allocated.

In: a model. Out: a function that runs the step. It takes as much memory as any step of prompts, and
loads the modules of torch's libraries, for which the first request would wait. Requests must not be
known here.

Its rows ask for all that takes memory in sampling: penalties, a bias, filters and scores.
"""

import itertools
from collections.abc import Callable

import torch

from llama.engine.processors import LogitsProcessors
from llama.engine.request import SequenceSpec
from llama.engine.sampler import sample
from llama.engine.sequence import SequenceState
from llama.model.transformer import Transformer
from llama.ops.batch import Batch

_SAMPLED = SequenceSpec(
    (0,),
    2,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
)


def largest_step(model: Transformer, num_tokens: int, page_size: int) -> Callable[[], None]:
    """Return a function that runs a step of prompts, of which nobody reads the results.

    Args:
        model: The model.
        num_tokens: The maximum number of tokens of a step.
        page_size: The slots of a page.
    """
    params = model.params
    share = model.plan.share
    counts: list[int] = []
    while (left := num_tokens - sum(counts)) and len(counts) < params.max_batch_size:
        counts.append(min(left, params.max_seq_len))
    counts.sort()  # single tokens come first
    pages = itertools.count()
    tables = [[*itertools.islice(pages, -(-n // page_size))] for n in counts]
    kv_cache = model.new_kv_cache(next(pages), page_size)
    tokens = [0] * sum(counts)
    starts = [0] * len(counts)
    logit_rows = range(min(len(tokens), params.max_batch_size))
    ids, batch = Batch.pack(tokens, starts, counts, tables, page_size, logit_rows, kv_cache.device)

    @torch.inference_mode()
    def run() -> None:
        if share.has_embedding:
            x = model.tok_embeddings(ids)
        else:
            x = model.norm.weight.new_zeros(len(tokens), params.dim)
        hidden = model.normalize(model.run_layers(x, batch, kv_cache), batch)
        if not share.has_lm_head:
            return
        logits = model.logits(hidden)
        sequences = [SequenceState(_SAMPLED) for _ in logits]
        sample(logits, sequences, None, model.kernels, LogitsProcessors())

    return run
