"""The facts that the KV pages of a model depend on, for pages on disk.

In: the files of a model, as they are loaded. Out: an `Identity`. Pages are garbage under another
content. Under other numerics they differ by rounding only.
"""

import os
from dataclasses import asdict
from pathlib import Path

import torch

from llama.engine.core import PAGE_SIZE
from llama.kernels.cpu import native
from llama.loading.files import Files
from llama.ops.kv_cache import KVFormat
from llama.storage.kv_folder import Identity

_FORMAT = 2  # the number changes when the bytes of pages do
_SIZES_OF_A_RUN = ("max_batch_size", "max_seq_len")
_END_BYTES = 32  # the digest at the end of a compiled library


def identity_of(files: Files, kv_format: KVFormat) -> Identity:
    """Return what the pages of a model depend on."""
    checkpoint = files.checkpoint
    params = asdict(checkpoint.params).items()
    content: dict[str, object] = {
        "format": _FORMAT,
        "params": {name: value for name, value in params if name not in _SIZES_OF_A_RUN},
        "dtype": str(files.dtype),
        "quantize": checkpoint.file_type if checkpoint.in_codes else files.quantize,
        "activations": files.activations,
        "activations where possible": files.rounds_where_possible,
        "KV cache": kv_format.name,
        "page size": PAGE_SIZE,
        "weights": checkpoint.samples(),
        "versions of the weights": [_version(path) for path in checkpoint.shards],
    }
    placement = files.placement
    numerics: dict[str, object] = {
        "torch": torch.__version__,
        "ranks": [placement.size, placement.shares, placement.ffn_shares, placement.column_step],
        "stages": [placement.stages, placement.layer_counts],
        "kernels": _kernels(files),
    }
    return Identity(str(checkpoint.weights_path.absolute()), content, numerics)


def _version(path: Path) -> str:
    """Return what changes when a file is written again: its time, or its hash in the hub's cache.

    Samples of a file can miss an adapter that was merged into a few matrices.
    """
    target = path.resolve()
    return target.name if target.parent.name == "blobs" else str(target.stat().st_mtime_ns)


def _kernels(files: Files) -> list[str]:
    """Return what tells the kernels that run from others."""
    if files.device.type == "cuda":
        return [torch.cuda.get_device_name(files.device), *sorted(files.kernels.names)]
    library = native.kernels() if files.device.type == "cpu" else None
    # What torch computes depends on its threads.
    names = [files.device.type, str(torch.get_num_threads())]
    if library is not None:
        if files.dtype is torch.bfloat16:
            names.pop()
        names.append(os.path.basename(library._name))
        try:
            names.append(Path(library._name).read_bytes()[-_END_BYTES:].hex())
        except OSError:  # It was compiled for this process alone.
            names.append("not stored")
    return names
