"""The table of the CPU's kernels in C++.

In: nothing. Out: for each operator the function that calls its kernel. They take bf16, and sampling
float32, wherever the library runs; it is loaded, or compiled, at the first call. Models must not be
known here.
"""

from llama.kernels.cpu.layers import native_layers
from llama.kernels.cpu.operators import (
    attention,
    paged_attention,
    rms_norm,
    rope_and_store,
    silu_mul,
)
from llama.kernels.cpu.sample import sample_ids, top_tokens
from llama.ops.kernels import Kernels

KERNELS = Kernels(
    {
        "attention": attention,
        "layers": native_layers,
        "paged_attention": paged_attention,
        "rms_norm": rms_norm,
        "rope_and_store": rope_and_store,
        "sample_ids": sample_ids,
        "silu_mul": silu_mul,
        "top_tokens": top_tokens,
    }
)
