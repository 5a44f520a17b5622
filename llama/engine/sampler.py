"""Sampling: logits and sequences in, the next token of each and its log-probability out.

A sampled id depends on its own row, seed and position alone. It does not depend on the batch, the
padding or the order in which a device adds; `llama.ops.sample` ensures that. If the vocabulary is
divided among ranks, greedy rows need only the largest logit of each share: see `top_of_share` and
`top_of_all`.

Shapes: B rows, one per sequence; E hidden size; V vocabulary; K most probable tokens; N scored
rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama.engine.constraints import TokenMask
from llama.engine.processors import LogitsProcessors, is_below_min_tokens
from llama.engine.rows import Tokens
from llama.engine.sequence import SequenceState
from llama.model.transformer import Transformer
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.sample import choose_ids, top_tokens


@dataclass(frozen=True)
class Sampled:
    """The tokens that one step samples.

    Log-probabilities are the model's own, before biases, temperature and filters. A row has the id
    -1 if all its tokens are banned, or if its logits hold NaN or +inf. An exception would need a
    sync with the device, and would end the other rows; `SequenceState.append` reports the error.

    Attributes:
        ids: (B) int64.
        logprobs: (B) float32, or None if no sequence asks for it.
        top_ids: (B, K) int64, the most probable first. K is the largest number that a row asks for.
        top_logprobs: (B, K) float32.
    """

    ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def sample(
    logits: Tensor,
    sequences: Sequence[SequenceState],
    mask: TokenMask | None = None,
    kernels: Kernels = NO_KERNELS,
    processors: LogitsProcessors | None = None,
) -> Sampled:
    """Sample the next token of each sequence from logits (B, V) float32, which are not changed.

    These steps follow each other, each only if some row asks for it: the constraint's mask;
    logit_bias, bad_words and min_tokens; the repetition penalty, then presence and frequency
    penalties; temperature; min_p, top_k and top_p; one draw, by an exponential race (see
    `llama.ops.sample`). The order is vLLM's. In transformers min_p comes last, so that there top_p
    counts the mass that min_p is about to remove.

    As in transformers, a bad word may begin in the prompt (vLLM looks at the output only), and
    top_k keeps all tokens as likely as the k-th. Of the tokens as likely as the last one of a
    nucleus, top_p keeps those with the lowest ids.
    """
    assert logits.shape[0] == len(sequences)
    processors = processors or LogitsProcessors()
    adjusted = logits if mask is None else mask(logits)
    adjusted = processors.apply(adjusted, sequences)
    ids = choose_ids(adjusted, processors.rows, processors.seeds, processors.positions, kernels)
    processors.count(ids)
    if processors.logprobs is None:
        return Sampled(ids)
    targets = ids.clamp(min=0)
    logprobs, top_ids, top_logprobs = score(logits, targets, processors.logprobs)
    return Sampled(ids, logprobs, top_ids, top_logprobs)


def needs_top_only(sequences: Sequence[SequenceState]) -> bool:
    """Return whether `sample` would only take the top token of each row of unchanged logits.

    Filters (top_p, top_k, min_p) do not matter, as they never remove the top token.
    """
    for seq in sequences:
        spec = seq.spec
        if not spec.takes_top or spec.is_constrained or spec.bad_words:
            return False
        if spec.min_tokens and is_below_min_tokens(seq) and spec.stop_ids:
            return False
    return True


def top_of_ranks(model: Transformer, hidden: Tensor) -> Tensor:
    """Return the ids (B) that `sample` takes for greedy rows, from hidden states (B, E).

    The ranks exchange 8 bytes per row. All then compare the same pairs, so that their ids are
    equal even if their hardware differs.
    """
    share = model.logits_share(hidden)
    first_id = model.plan.share.vocab.start
    pairs = top_of_share(share, first_id, model.kernels)
    return top_of_all(model.parallel.all_gather(pairs))


def top_of_share(logits: Tensor, first: int, kernels: Kernels = NO_KERNELS) -> Tensor:
    """Return the largest logit of each row of a rank's share, and its id.

    Args:
        logits: (B, V / ranks) float32.
        first: The id of the first column.
        kernels: The kernels that may be used.

    Returns:
        (B, 2) int32: the bits of the largest logit, NaN if the row has one, and its lowest id.
    """
    row_max, ids = top_tokens(logits, kernels)
    bits = row_max.view(torch.int32)
    global_ids = (ids + first).int()
    return torch.stack((bits, global_ids), dim=-1)


def top_of_all(pairs: Tensor) -> Tensor:
    """Return the ids (B) that `sample` takes, from the pairs (B, 2 * ranks) of `top_of_share`.

    It only compares and computes nothing, so that the same pairs yield the same ids on any machine.
    """
    bits = pairs[:, 0::2].contiguous()
    values = bits.view(torch.float32)
    ids = pairs[:, 1::2]
    row_max, rank = values.max(dim=-1)  # the first of equal ones, which has the lowest id
    top_ids = ids.gather(-1, rank[:, None])
    has_top = row_max.isfinite()
    return top_ids.squeeze(-1).long().where(has_top, -1)


def score(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the log-probabilities of tokens, and the most probable tokens of each row.

    Args:
        logits: (N, V).
        targets: The token of each row, (N).
        k: The number of most probable tokens, K = min(k, V).

    Returns:
        Log-probabilities (N) float32; the most probable ids (N, K) and their log-probabilities (N,
        K) float32, or None and None if k is 0.
    """
    norm = _log_sums(logits)
    chosen = logits.gather(-1, targets[:, None])
    logprobs = (chosen - norm).squeeze(-1)
    if not k:
        return logprobs, None, None
    max_k = logits.shape[-1]
    top = logits.topk(min(k, max_k))
    return logprobs, top.indices, top.values - norm


def _log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, (N, 1), alone as in a batch.

    On a CPU, PyTorch divides the sum of a single row among its threads, but computes each of
    several rows in one thread. The bits differ, so a single row is computed as one of two.
    """
    num_rows, _ = logits.shape
    if num_rows == 1 and not logits.is_cuda:
        logits = logits.expand(2, -1)
    return logits.logsumexp(dim=-1, keepdim=True)[:num_rows]


def sample_top_p(probs: Tensor, p: float) -> Tensor:
    """Sample ids (B, 1) from the nucleus of probabilities (B, V) (Holtzman et al. 2020).

    This is a function of Meta's public API that draws from torch's global generator. The engine
    uses `sample` instead.
    """
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    nucleus = ordered.masked_fill(before > p, 0)
    drawn = torch.multinomial(nucleus, num_samples=1)
    return ids.gather(-1, drawn)


# A table has what the host reads of each sampled or scored row: one tensor is one copy from the
# device, one broadcast among ranks and one message between pipeline stages. With K top tokens it is
# (R, 1), (R, 2) or (R, 2 + 2K) int32: ids, log-probabilities, top ids and theirs. Floats keep their
# bits.
TABLE_DTYPE = torch.int32


def make_table(sampled: Sampled) -> Tensor:
    """Return the table of sampled rows, on their device."""
    columns = [sampled.ids.int()[:, None]]
    if sampled.logprobs is not None:
        columns.append(sampled.logprobs[:, None].view(TABLE_DTYPE))
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        columns.append(sampled.top_ids.int())
        columns.append(sampled.top_logprobs.view(TABLE_DTYPE))
    return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]


def num_columns(num_top: int | None, vocab_size: int) -> int:
    """Return the columns of a table.

    Args:
        num_top: The most probable tokens of each row; None: without log-probabilities.
        vocab_size: The size of the vocabulary, which bounds them.
    """
    return 1 if num_top is None else 2 + 2 * min(num_top, vocab_size)


def max_top(sequences: Sequence[SequenceState]) -> int | None:
    """Return the most probable tokens that rows of these sequences are sampled with."""
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
