"""The CPU's kernels for sampling: sample.cpp gives the ids of `llama.ops.sample` without sorting.

In: logits and filters, as the operators have them. Out: ids; None where the kernels do not run.
The ids are the operators', by radix select.

Shapes: B rows; V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama.kernels.cpu import native
from llama.ops.sample import SamplingRow, pack_params, relative_probs


def top_tokens(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the largest logit of each row, and its id; see `llama.ops.sample.top_tokens`."""
    if not _takes(logits):
        return None
    b, v = logits.shape
    row_max = torch.empty(b)
    ids = torch.empty(b, dtype=torch.int64)
    logits = logits.contiguous()
    native.call("top_tokens", logits, row_max, ids, b, v)
    return row_max, ids


def sample_ids(
    logits: Tensor,
    row_max: Tensor,
    rows: Sequence[SamplingRow],
    uniforms: Tensor,
) -> Tensor | None:
    """Return a sampled id for each row; see `llama.ops.sample.sample_ids`."""
    if not _takes(logits):
        return None
    b, v = logits.shape
    draws = uniforms[:, None].tolist()
    packed_params = pack_params(rows, draws)
    without_rates = packed_params[:, 1:].copy()
    params = torch.from_numpy(without_rates)
    ids = torch.empty(b, dtype=torch.int64)
    threads = torch.get_num_threads()
    num_bytes = native.call("sample_workspace", b, v, threads)
    workspace = torch.empty(num_bytes, dtype=torch.uint8)  # touched as far as rows have candidates
    probs = relative_probs(logits, row_max, rows).contiguous()
    native.call("sample_ids", probs, params, ids, workspace, b, v)
    return ids


def _takes(logits: Tensor) -> bool:
    """Return whether the kernels take these logits, and run here."""
    if logits.dtype is not torch.float32:
        return False
    if logits.device.type != "cpu":
        return False
    return native.kernels() is not None
