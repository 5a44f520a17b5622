"""Compile the sampling kernels to machine code without a GPU; print their resources as JSON.

Input: capabilities such as 80 and 90. Output: one line per kernel: its name, the capability,
registers per thread, and bytes of stack and local memory per thread, which spilling would use.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llama.kernels.cuda import sample

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    **dict.fromkeys(("logits", "maxima", "row_max"), "*fp32"),
    **dict.fromkeys(("packed_params", "sums", "ids", "bounds", "totals"), "*i64"),
    **dict.fromkeys(("indices", "bins", "firsts"), "*i32"),
    "finishes": "*fp64",
    **dict.fromkeys(("stride", "v", "n"), "i32"),
}
SIZES: dict = {
    "BLOCK": 1024,
    "N": 128,
    "BINS": sample._BINS,
    "FILTERS": True,
    "CHUNK": sample._CHUNK,
}
ONE_BLOCK = SIZES | {"N": 16, "CHUNK": 1024}  # Triton turns an argument that is 1 into a constant
KERNELS = [  # the launches of `choose` for a vocabulary of 128,256, and for a tiny one
    (kernel, sizes, warps)
    for sizes in (SIZES, ONE_BLOCK | {"n": 1})
    for kernel, warps in (
        (sample.block_tops, 4),
        (sample.row_tops, 4),
        (sample.block_sums, 4),
        (sample.row_bounds, 4),
        (sample.block_races, 4),
        (sample.pick, max(4, sizes["CHUNK"] // 512)),
    )
]


def compiled(kernel, constants: dict, warps: int, capability: int) -> dict:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES[name] for name in names},
        constexprs={name: constants[name] for name in names if name in constants},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if TYPES.get(name, "").startswith("*")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    code = triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert usage is not None, said.stdout
    registers, stack, local = map(int, usage.groups())
    return {"registers": registers, "stack": stack, "local": local}


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for kernel, constants, warps in KERNELS:
            usage = compiled(kernel, constants, warps, capability)
            print(json.dumps({"kernel": kernel.__name__, "capability": capability, **usage}))
