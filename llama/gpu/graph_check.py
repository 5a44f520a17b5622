"""Checks whether decode steps may be replayed as CUDA graphs on a device: a program that tries it.

    python -m llama.gpu.graph_check '{"device": "cuda:0", "dtype": "bf16", ...}'

In and out: as `llama.gpu.selfcheck`, with "graph" for the name of a kernel. Some layers of the
model's sizes run both ways, in a process of their own, as a wrong graph can hang or end it: as a
whole model, or as the first, a middle or the last stage of a pipeline. That does not show captured
collectives: the ranks try those together, in their own processes, where each wait has a limit.
"""

import itertools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from llama.checkpoint.packing import pack_model
from llama.common.device import DTYPES, current
from llama.engine.hooks import Decoded
from llama.engine.request import SequenceSpec
from llama.engine.rows import Scheduled
from llama.engine.runner import LastIds
from llama.engine.sequence import SequenceState
from llama.gpu.cases import fill_cache, read_cache
from llama.gpu.job import Choice, Job
from llama.gpu.program import run
from llama.kernels.cuda.table import table
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.kv_cache import FORMATS
from llama.options.graphs.decode_graphs import DecodeGraphs
from llama.options.graphs.decode_inputs import DecodeStep
from llama.options.graphs.recorder import CudaRecorder, Recorder
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

PROGRAM = ("-m", "llama.gpu.graph_check")
_LENGTHS = (1, 15, 16, 17, 100, 255, 300, 1025, 1500)  # lengths of the sequences
_MAX_ROWS = 64
_MAX_SEQ_LEN = 2048
_MAX_VOCAB_SIZE = 8192  # graphs do not depend on the outputs of lm_head
_TOLERANCE = 2e-2  # relative error of logits and the cache, where the library may add otherwise
_REPEATS = 3  # runs of each batch: the first one records, the others replay
_MAX_MESSAGE = 300  # characters of an error in a reason


@torch.inference_mode()
def compare(model: Transformer, recorder: Recorder, page_size: int) -> None:
    """Compare replayed steps with steps that run operator by operator, for several batches.

    Raises:
        ArithmeticError: Ids, logits, hidden states, keys or values differ.
    """
    generator = torch.Generator().manual_seed(0)
    weight = model.norm.weight

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    all_lengths = [n for n in _LENGTHS if n <= model.params.max_seq_len]
    num_pages = sum(-(-n // page_size) for n in all_lengths)
    kv_cache = model.new_kv_cache(num_pages + 1, page_size)
    fill_cache(kv_cache, model.params.head_dim, draw)
    used_pages = kv_cache[:, :, :-1]
    unused_page = kv_cache[:, :, -1]  # the page of unused rows
    last_ids = LastIds(_MAX_ROWS, kv_cache.device)
    last_ids.ids.copy_(torch.randint(model.vocab_size, (_MAX_ROWS,), generator=generator))
    is_first = model.parallel.placement.is_first
    graphs = DecodeGraphs(model, kv_cache, recorder, last_ids)
    batches = [
        all_lengths[:1],
        all_lengths[-1:],
        all_lengths[1:4],
        all_lengths,
        all_lengths[2:5],
    ]
    for lengths in batches:
        scheduled = _decoding(lengths, page_size)
        n = len(lengths)
        sources = [-1 if i % 2 else i for i in range(n)]  # every second token is on the device
        for wants_logits, _ in itertools.product((True, False), range(_REPEATS)):
            tokens = torch.randint(model.vocab_size, (n,), generator=generator)
            step = DecodeStep.of(tokens.tolist(), sources, scheduled, page_size)
            x = None if is_first else draw(n, model.params.dim)
            eager = graphs.run_eagerly(step, x, wants_logits=wants_logits)
            eager_cache = read_cache(used_pages)
            unused_page.fill_(7.0)  # nobody may read it
            replayed = graphs.run(step, x, wants_logits=wants_logits)
            assert replayed is not None, "a step was not recorded"
            _expect_same(n, replayed, eager)
            replayed_cache = read_cache(used_pages)
            _expect_close("keys and values", replayed_cache, eager_cache)
    graphs.close()


def _decoding(lengths: Sequence[int], page_size: int) -> list[Scheduled]:
    """Return sequences whose last token is new, on pages of their own."""
    scheduled = []
    pages = itertools.count()
    for n in lengths:
        spec = SequenceSpec(tokens=(0,) * n, max_len=n + 1)
        seq = SequenceState(spec)
        num_pages = -(-n // page_size)
        seq.pages.extend(itertools.islice(pages, num_pages))
        scheduled.append(Scheduled(seq, n - 1, 1))
    return scheduled


def _expect_same(n: int, replayed: Decoded | Tensor, eager: Decoded | Tensor) -> None:
    """Compare the first n rows. If logits are nearly equal, either of them may be the top one."""
    if isinstance(replayed, Tensor) or isinstance(eager, Tensor):
        assert isinstance(replayed, Tensor) and isinstance(eager, Tensor)
        _expect_close("hidden states", replayed[:n], eager[:n])
        return
    differ = replayed.ids[:n] != eager.ids[:n]
    if replayed.logits is not None and eager.logits is not None:
        logits = eager.logits[:n]
        _expect_close("logits", replayed.logits[:n], logits)
        replayed_top = logits.gather(1, replayed.ids[:n, None])[:, 0]
        eager_top = logits.gather(1, eager.ids[:n, None])[:, 0]
        distance = (replayed_top - eager_top).abs()
        differ &= distance > _TOLERANCE * logits.abs().amax(1)
    if rows := differ.nonzero().flatten().tolist():
        raise ArithmeticError(f"the ids of rows {rows} differ from those of plain steps")


def _expect_close(name: str, replayed: Tensor, eager: Tensor) -> None:
    right = eager.float()
    difference = (replayed.float() - right).abs().max()
    error = float(difference / right.abs().max())
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


def check_graphs(job: Job, _: str) -> list[Choice]:
    """Check graphs of a model of two layers per stage, of which the job names one.

    The model has one rank's heads, and the model dim that goes with them.
    """
    dtype = DTYPES[job.dtype]
    args = ModelArgs(
        dim=job.n_heads * job.head_dim,
        n_layers=2 * job.stages,
        n_heads=job.n_heads,
        n_kv_heads=job.n_kv_heads,
        vocab_size=min(job.vocab_size, _MAX_VOCAB_SIZE),
        multiple_of=1,
        max_seq_len=_MAX_SEQ_LEN,
        max_batch_size=_MAX_ROWS,
    )
    kv_format = FORMATS[job.kv_format]
    ranks = Parallel(Placement(stage=job.stage, stages=job.stages))
    model = Transformer(args, parallel=ranks, dtype=dtype, device=job.device, kv_format=kv_format)
    for weight in model.parameters():
        weight.data.normal_(0, 0.02 if weight.dim() > 1 else 1.0)
    format = job.formats[-1]
    pack_model(model, quantize=str(format) if format else None)
    kernels = table(job.in_use, {dtype})
    model.use_kernels(kernels)
    recorder = CudaRecorder(torch.device(job.device))
    compare(model, recorder, job.page_size)
    return []


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], check_graphs))
