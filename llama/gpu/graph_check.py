"""Whether decode steps may be replayed as CUDA graphs on a device: a program that tries it.

    python -m llama.gpu.graph_check '{"device": "cuda:0", "dtype": "bf16", ...}'

In and out: as `llama.gpu.selfcheck`, with "graph" for the name of a kernel. Two layers of
the model's sizes are run both ways, in a process of its own, as a wrong graph can hang or end it.
What that does not show is captured collectives: ranks try those together, in their own processes,
where each wait has a limit.
"""

import itertools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from llama.device import DTYPES, current
from llama.engine.graphs import CudaRecorder, Decoded, DecodeGraphs, Recorder
from llama.engine.request import SequenceSpec
from llama.engine.rows import Scheduled
from llama.engine.sequence import SequenceState
from llama.gpu.cases import filled, numbers_of
from llama.gpu.job import Choice, Job
from llama.gpu.program import run
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.kv_cache import FORMATS
from llama.ops.triton.kernels import KernelSet

PROGRAM = ("-m", "llama.gpu.graph_check")
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
    kv_cache = filled(
        model.new_kv_cache(num_pages + 1, page_size), model.params.head_dim,
        lambda *shape: torch.randn(shape, generator=draw).to(model.norm.weight),
    )  # fmt: skip
    last_ids = torch.randint(model.vocab_size, (64,), generator=draw).to(kv_cache.device)
    graphs = DecodeGraphs(model, kv_cache, recorder, last_ids)
    for lengths in (every[:1], every[-1:], every[1:4], every, every[2:5]):
        scheduled, n = _decoding(lengths, page_size), len(lengths)
        for wants_logits, _ in itertools.product((True, False), range(3)):  # recorded, replayed
            tokens = torch.randint(model.vocab_size, (n,), generator=draw).tolist()
            asked = tokens, [-1 if i % 2 else i for i in range(n)], scheduled
            wanted = graphs.run(*asked, wants_logits=wants_logits, is_eager=True)
            held = numbers_of(kv_cache[:, :, :-1])
            kv_cache[:, :, -1] = 7.0  # nobody reads the page of rows that are not used
            found = graphs.run(*asked, wants_logits=wants_logits)
            _expect_same(n, found, wanted)
            now = numbers_of(kv_cache[:, :, :-1])
            _expect_close("keys and values", now, held)
    graphs.close()


def _decoding(lengths: Sequence[int], page_size: int) -> list[Scheduled]:
    """Sequences whose last token is new, on pages of their own."""
    found, pages = [], itertools.count()
    for n in lengths:
        seq = SequenceState(SequenceSpec((0,) * n, n + 1))
        seq.pages.extend(itertools.islice(pages, -(-n // page_size)))
        found.append(Scheduled(seq, n - 1, 1))
    return found


def _expect_same(n: int, found: Decoded, wanted: Decoded) -> None:
    """The first n rows. Of logits that are as good as equal either may be the top one."""
    differ = found.ids[:n] != wanted.ids[:n]
    if found.logits is not None and wanted.logits is not None:
        _expect_close("logits", found.logits[:n], wanted.logits[:n])
        ours, theirs = (wanted.logits[:n].gather(1, x.ids[:n, None])[:, 0] for x in (found, wanted))
        differ &= (ours - theirs).abs() > _TOLERANCE * wanted.logits[:n].abs().amax(1)
    if rows := differ.nonzero().flatten().tolist():
        raise ArithmeticError(f"the ids of rows {rows} differ from those of plain steps")


def _expect_close(what: str, found: Tensor, wanted: Tensor) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    if not float(error) <= _TOLERANCE:  # NaN is not
        raise ArithmeticError(f"{what} are off by {float(error):.2g} of the largest")


def try_collectives(model: Transformer) -> str | None:
    """Why sums over the ranks cannot be part of a graph; None where they can.

    All ranks call it. They agree before each step that waits for the others on the device, so that
    one which cannot take it keeps nobody waiting, and the watch sees who does not come.
    """
    parallel, weight = model.parallel, model.norm.weight
    x = torch.zeros(8, 64, dtype=weight.dtype, device=weight.device)
    large = x.new_zeros(1 << 19)  # its sum goes another way than a small one's

    def collectives() -> tuple[Tensor, ...]:
        sums = parallel.all_reduce(x.clone()), parallel.all_reduce(large + x[0, 0])
        return *sums, parallel.all_gather(x.int()) * parallel.size

    reason = None
    with parallel.step(), current(weight.device):
        recorder = CudaRecorder(weight.device)
        try:
            sums, replay = recorder.record(collectives, [x, large])
        except RuntimeError as e:
            reason = f"sums over the ranks cannot be captured: {e}".partition("\n")[0][:300]
        for value in (1.0, 3.0):
            if not parallel.all_reduce_min(int(reason is None)):
                break
            x.fill_(value)
            replay()
            if not all(bool((out == value * parallel.size).all()) for out in sums):
                reason = "a captured sum over the ranks is wrong"
        recorder.close()
    return reason


def check_graphs(job: Job, _: str) -> list[Choice]:
    """Two layers of a model of the job's sizes, with a rank's heads and the model dim that goes
    with them."""
    dtype = DTYPES[job.dtype]
    args = ModelArgs(
        dim=job.n_heads * job.head_dim, n_layers=2, n_heads=job.n_heads, n_kv_heads=job.n_kv_heads,
        vocab_size=min(job.vocab_size, _MOST_VOCABULARY), multiple_of=1,
        max_seq_len=2048, max_batch_size=64,
    )  # fmt: skip
    kv_format = FORMATS[job.kv_format]
    model = Transformer(args, dtype=dtype, device=job.device, kv_format=kv_format)
    for weight in model.parameters():
        weight.data.normal_(0, 0.02 if weight.dim() > 1 else 1.0)
    model.pack(quantize=str(job.formats[-1]) if job.formats[-1] else None)
    model.use_kernels(KernelSet(frozenset(job.in_use), frozenset({dtype})))
    compare(model, CudaRecorder(torch.device(job.device)), job.page_size)
    return []


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], check_graphs))
