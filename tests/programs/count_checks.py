"""Count what a build's check of the GPU's kernels launches and compiles, without a GPU.

    python tests/programs/count_checks.py [--compile] [FORMAT ...]

In: formats of the weights of an 8B model: bf16, int8, fp8, int4 or Q4_K. Out: JSON with the
cases, the launches and the compiled variants of each kernel, all for capability 9.0. Triton binds
the arguments of each launch, which its interpreter does in another way; with --compile it compiles
each variant as well. TRITON_INTERPRET must not be set.
"""

import json
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from llama.gpu import cases as cases_module
from llama.gpu.cases import Cases, Computed
from llama.kernels.cuda.table import table
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.weights import choice
from llama.weights.groups import QuantKey
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

_Q4_K = QuantKey(kind=3, first=0, group=32, per_group=2, scale_type=2)
_8B = ModelArgs(
    dim=4096, n_heads=32, n_kv_heads=8, vocab_size=128_256, multiple_of=1024,
    ffn_dim_multiplier=1.3,
)  # fmt: skip


def _packed(plain: Tensor, name: str | None, device: torch.device) -> Weight:
    """Return a weight as a GPU holds it, in fragment order."""
    return choice.on_gpu(plain, name, device) if name else PlainWeight.pack(plain)


def main(arguments: list[str]) -> None:
    compiles = arguments[:1] == ["--compile"]
    named = {"Q4_K": _Q4_K, "bf16": None}
    formats = tuple(named.get(x, x) for x in arguments[compiles:]) or (None,)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    counts = {"launches": Counter[str](), "variants": Counter[str]()}
    seen: set[tuple[str, str]] = set()
    run: Any = JITFunction.run
    compile_variant: Any = JITFunction._do_compile

    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        counts["launches"][kernel.fn.__name__] += 1
        return run(kernel, *args, **options | {"warmup": True})

    def compiled(kernel: Any, key: str, *args: Any) -> Any:
        name = kernel.fn.__name__
        if (name, key) not in seen:
            seen.add((name, key))
            counts["variants"][name] += 1
        return compile_variant(kernel, key, *args) if compiles else None

    functions: Any = JITFunction
    functions.run = launched
    functions._do_compile = compiled
    module: Any = cases_module
    module.packed = _packed
    plan = LayerPlan.of(_8B)
    computed = Computed(plan, _8B.vocab_size, torch.device("cpu"), torch.bfloat16, formats)
    cases = Cases(computed)
    kernels = table(computed.names, {torch.bfloat16})
    num_cases: Counter[str] = Counter()
    began = time.process_time()
    for name in computed.names:
        served: tuple[Any, ...] = ()
        for case in getattr(cases, name)():
            if case.tile is None or case.serves != served:  # other tiles are for small GPUs
                num_cases[name] += 1
                case.op(*case.inputs, kernels=kernels)
            served = case.serves
    report = {"cases": num_cases, **counts, "seconds": time.process_time() - began}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
