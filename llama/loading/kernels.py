"""The choice of the kernels that a model may run on its device.

In: the files of a model and what its rank holds. Out: the same files with their kernels, and with
plain weights where no kernel multiplies by quantized ones, or exact activations where none
multiplies rounded ones.
"""

import warnings
from dataclasses import replace

from llama.common.device import dtype_name
from llama.gpu import selection
from llama.gpu.cases import Computed
from llama.kernels.cuda.table import SCALED
from llama.kernels.host import host_kernels
from llama.loading.files import Files
from llama.model.plan import LayerPlan
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ranks.parallel import Parallel


def choose_kernels(
    files: Files,
    parallel: Parallel,
    allowed: frozenset[str],
    kv_format: KVFormat = AS_COMPUTED,
) -> Files:
    """Return the files with the kernels that their model may run on its device.

    On a GPU, weights become plain where no kernel multiplies by quantized ones: PyTorch would
    dequantize them in each step. Activations are not rounded where no kernel multiplies them.
    """
    if files.device.type != "cuda":
        is_cpu = files.device.type == "cpu"
        return replace(files, kernels=host_kernels()) if is_cpu else files
    # The file of one rank may be truncated, which every rank must learn before kernels are chosen.
    with parallel.agree("the formats of the weights", world=True):
        formats = files.formats()
    placed = parallel.placed(files.placement)
    params = files.checkpoint.params
    plan = LayerPlan.of(params, placed.placement, kv_format)
    computed = Computed(
        plan, params.vocab_size, files.device, files.dtype, formats, files.activations
    )
    kernels = selection.kernels_for(computed, placed, allowed)
    files = replace(files, kernels=kernels)
    is_plain = files.quantize is None and not files.checkpoint.in_codes
    if is_plain or "linear" in kernels.names:
        return _with_activations(files, parallel)
    if parallel.global_rank == 0:
        warnings.warn(
            f"the weights are held in {dtype_name(files.dtype)}: products of quantized ones "
            "need the GPU's kernel linear, which is not in use",
            stacklevel=3,
        )
    checkpoint = replace(files.checkpoint, in_codes=False)
    return replace(files, quantize=None, activations=None, checkpoint=checkpoint)


def _with_activations(files: Files, parallel: Parallel) -> Files:
    """Return the files without activations in e4m3 where their product is not in use."""
    if files.activations != "fp8" or SCALED in files.kernels.names:
        return files
    if parallel.global_rank == 0:
        warnings.warn(
            f"activations stay in {dtype_name(files.dtype)}: those in fp8 need the GPU's kernel "
            f"{SCALED}, which is not in use",
            stacklevel=4,
        )
    return replace(files, activations=None)
