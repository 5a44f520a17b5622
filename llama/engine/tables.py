"""Tables of results: what the host reads of each sampled or scored row, in one tensor of integers.

In: a table on the model's device, as the runner makes it. Out: `Tokens` on the host. One tensor is
one copy from the device, one broadcast among ranks and one message between pipeline stages.

A table of R rows and K likeliest tokens is (R, 1), (R, 2) or (R, 2 + 2K) int32: ids,
log-probabilities, top ids and theirs. Floats keep their bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llama.engine.rows import Tokens
from llama.engine.sampler import Sampled
from llama.engine.sequence import SequenceState

DTYPE = torch.int32


def make_table(sampled: Sampled) -> Tensor:
    """Return the table of sampled rows, on their device."""
    columns = [sampled.ids.int()[:, None]]
    if sampled.logprobs is not None:
        columns.append(sampled.logprobs[:, None].view(DTYPE))
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        columns.append(sampled.top_ids.int())
        columns.append(sampled.top_logprobs.view(DTYPE))
    return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]


def num_columns(num_top: int | None, vocab_size: int) -> int:
    """Return the columns of a table.

    Args:
        num_top: The likeliest tokens of each row; None: without log-probabilities.
        vocab_size: The size of the vocabulary, which bounds them.
    """
    return 1 if num_top is None else 2 + 2 * min(num_top, vocab_size)


def max_top(sequences: Sequence[SequenceState]) -> int | None:
    """Return the likeliest tokens that rows of these sequences are sampled with."""
    asked = [seq.spec.logprobs for seq in sequences if seq.spec.logprobs is not None]
    return max(asked, default=None)


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy; what is returned waits for the copy."""
    if x.device.type != "cuda":
        host = x.cpu()
        return lambda: host
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read


def tokens_of(table: Tensor) -> Tokens:
    """Return the tokens of a table on the host."""
    ids = table[:, 0].tolist()
    if table.shape[1] == 1:
        return Tokens(ids)
    k = (table.shape[1] - 2) // 2
    end_of_ids = 2 + k
    logprobs = [value for (value,) in _as_floats(table[:, 1:2])]
    top_ids = table[:, 2:end_of_ids].tolist()
    top_logprobs = _as_floats(table[:, end_of_ids:])
    tops = []
    for row in zip(top_ids, top_logprobs, strict=True):
        tops.append(list(zip(*row, strict=True)))
    return Tokens(ids, logprobs, tops)


def _as_floats(bits: Tensor) -> list[list[float]]:
    return bits.contiguous().view(torch.float32).tolist()
