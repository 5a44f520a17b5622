"""Whether decode steps may be replayed as CUDA graphs on a device: a program that tries it.

    python -m llama.engine.graph_check '{"device": "cuda:0", "dtype": "bf16", ...}'

In: a job as JSON, as for `llama.ops.triton.check`. Out: a line of JSON with the reason why they may
not, or null. Two layers of the model's sizes are run both ways, in a process of its own, as a wrong
graph can hang or end it. What that does not show is captured collectives: ranks try those together,
in their own processes, where each wait has a limit.
"""

import sys
import warnings
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from llama.device import DTYPES
from llama.engine.graphs import CudaRecorder, DecodeGraphs, Recorder
from llama.engine.rows import SAMPLE_ONE
from llama.engine.sampler import top_ids
from llama.engine.scheduler import Scheduled
from llama.engine.sequence import Sequence, TokenParams
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.triton import check
from llama.ops.triton.kernels import KernelSet

NAME = "graph"
CHILD = ("-m", "llama.engine.graph_check")
_LENGTHS = (1, 15, 16, 17, 100, 255, 300, 1025, 1500)
_MOST_VOCABULARY = 8192  # of the model that is tried: its matrices are not what graphs get wrong
_TOLERANCE = 2e-2  # of float32 logits of 16-bit weights, where the library may choose other sums


@torch.inference_mode()
def compare(model: Transformer, recorder: Recorder, page_size: int) -> None:
    """ArithmeticError unless replayed steps give the ids, logits, keys and values of steps that run
    operator by operator: for several batches, each first recorded and then replayed."""
    draw = torch.Generator().manual_seed(0)
    every = [n for n in _LENGTHS if n <= model.params.max_seq_len]
    num_pages = sum(-(-n // page_size) for n in every)
    kv_cache = model.new_kv_cache(num_pages + 1, page_size)
    kv_cache.copy_(torch.randn(kv_cache.shape, generator=draw))
    last_ids = torch.randint(model.vocab_size, (64,), generator=draw).to(kv_cache.device)
    graphs = DecodeGraphs(
        model, kv_cache, recorder, last_ids=last_ids,
        choose=lambda logits: top_ids(logits, model.kernels),
        choose_from_share=lambda hidden: top_ids(model.logits(hidden), model.kernels),
    )  # fmt: skip
    for lengths in (every[:1], every[-1:], every[1:4], every, every[2:5]):
        scheduled = _decoding(lengths, page_size)
        for wants_logits in (True, False):
            for _ in range(3):  # recorded, and replayed with other tokens
                tokens = torch.randint(model.vocab_size, (len(lengths),), generator=draw).tolist()
                sources = [-1 if i % 2 else i for i in range(len(lengths))]
                asked = (tokens, sources, scheduled)
                wanted = graphs.run(*asked, wants_logits=wants_logits, is_eager=True)
                cache = kv_cache.clone()
                kv_cache[:, :, -1] = 7.0  # nobody reads the page of rows that are not used
                found = graphs.run(*asked, wants_logits=wants_logits)
                _expect_same(len(lengths), found, wanted)
                _expect_close("keys and values", kv_cache[:, :, :-1], cache[:, :, :-1])
    graphs.close()


def _decoding(lengths: Seq[int], page_size: int) -> list[Scheduled]:
    """Sequences whose last token is new, on pages of their own."""
    found, first = [], 0
    for n in lengths:
        seq = Sequence([0] * n, TokenParams(), n + 1)
        count = -(-n // page_size)
        seq.pages.extend(range(first, first + count))
        first += count
        found.append(Scheduled(seq, n - 1, 1, SAMPLE_ONE))
    return found


def _expect_same(n: int, found: Any, wanted: Any) -> None:
    if found.logits is not None:
        _expect_close("logits", found.logits[:n], wanted.logits[:n])
    differ = (found.ids[:n] != wanted.ids[:n]).nonzero().flatten().tolist()
    for row in differ:  # of logits that are as good as equal either may be the top one
        if wanted.logits is not None:
            ours, theirs = (wanted.logits[row, x.ids[row]] for x in (found, wanted))
            if abs(float(ours - theirs)) <= _TOLERANCE * float(wanted.logits[row].abs().max()):
                continue
        raise ArithmeticError(f"the ids of rows {differ} differ from those of plain steps")


def _expect_close(what: str, found: Tensor, wanted: Tensor) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    if not float(error) <= _TOLERANCE:  # NaN is not
        raise ArithmeticError(f"{what} are off by {float(error):.2g} of the largest")


def try_collectives(model: Transformer) -> str | None:
    """Why this group's sums cannot be part of a graph; None where they can. All ranks call it."""
    device = model.norm.weight.device
    x = torch.zeros(8, 64, dtype=model.norm.weight.dtype, device=device)
    recorder = CudaRecorder(device)
    try:
        (out,), replay = recorder.record(lambda: (model.parallel.all_reduce(x.clone()),), [x])
        for value in (1.0, 3.0):
            x.fill_(value)
            replay()
            if not bool((out == value * model.parallel.size).all()):
                return "a captured sum over the ranks is wrong"
    except RuntimeError as e:
        return f"a sum over the ranks cannot be captured: {e}".partition("\n")[0][:300]
    finally:
        recorder.close()
    return None


def main(arguments: Seq[str]) -> int:
    """The child: one line of JSON that it runs, one with the reason why graphs are out, or null."""
    job = check.Job.from_json(arguments[0])
    device, sizes = torch.device(job.device), job.sizes
    dtype = DTYPES[job.dtype]
    check.say(started=True)
    args = ModelArgs(  # a rank's heads and their size; the model dim is what goes with them
        dim=sizes.n_heads * sizes.head_dim, n_layers=2,
        n_heads=sizes.n_heads, n_kv_heads=sizes.n_kv_heads,
        vocab_size=min(sizes.vocab_size, _MOST_VOCABULARY), norm_eps=sizes.eps,
        multiple_of=1, max_seq_len=2048, max_batch_size=64,
    )  # fmt: skip
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = Transformer(args, dtype=dtype, device=device)
        model.use_kernels(KernelSet(frozenset(job.in_use), frozenset({dtype})))
        for weight in model.parameters():
            weight.data.normal_(0, 0.02 if weight.dim() > 1 else 1.0)
        compare(model, CudaRecorder(device), sizes.page_size)
        reason = None
    except Exception as e:  # whatever it is: graphs are not used
        reason = check.words_of(e)
    check.say(kernel=NAME, reason=reason)
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
