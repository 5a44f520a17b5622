"""Compile the Triton kernels to machine code without a GPU, and print the resources of each.

By default the capabilities are 9.0 and 8.0. With arguments such as 80 89 90 100 120 they are these,
with all tiles of products with quantized weights; with gfx942 it is AMD's MI300, of which only the
shared memory is printed. Kernels are compiled in bfloat16, at the shapes
of real models. Each line on stdout is JSON: the kernel, the shape and the capability, registers per
thread, bytes of stack and accesses to spilled values, bytes of shared memory, the kinds of matrix
products, how many loads read 16 bytes at once, how many of these go to shared memory past the
registers, what accesses memory before the wait of a programmatic dependent launch, and of each loop
with matrix products its instructions, selections and waits for products of wgmma.
TRITON_INTERPRET must not be set.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from llama.kernels.cuda import adapters, attention, elementwise, linear, quantized, scaled
from llama.ops.adapters import FIELDS, MAX_PARTS, RANK_STEP

_AMD = "gfx942"
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_MMA = re.compile(r"\b[HQ]G?MMA\b")
_TYPES = {  # argument types, by name
    **dict.fromkeys(
        ("queries", "kv_cache", "out", "x", "delta", "weight", "total", "qkv"), "*bf16"
    ),
    **dict.fromkeys(("table", "query_starts", "seq_lens", "slots", "numbers"), "*i64"),
    **dict.fromkeys(("partial", "logsumexp", "freqs", "middle"), "*fp32"),
    "outer_scales": "*fp16",
    "codes": "*fp8e4nv",
    "scales": "*fp32",
    "parts": "*i32",
    **dict.fromkeys(
        ("width", "num_decodes", "num_prefills", "num_sequences", "wanted", "most", "m", "n"), "i32"
    ),
    **dict.fromkeys(("splits", "ranks", "product", "num_products"), "i32"),
    **dict.fromkeys(("first", "magic"), "i32"),
    "plane": "i64",
    **dict.fromkeys(("score_scale", "eps"), "fp32"),
}
_MULTIPLES = ("plane", "n", "k", "part_columns", "ranks")  # arguments that 16 divides
_HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64), "70B of 8 ranks": (8, 1, 128)}  # H, K, D
_WIDTHS = {"8B": (4096, 14336), "1B": (2048, 8192), "70B of 8 ranks": (8192, 3584)}  # E, F


class Job(NamedTuple):
    kernel: Any
    shape: str
    capability: int
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2
    types: Mapping[str, str] = MappingProxyType({})  # argument types that override _TYPES
    elements: float = 0.0  # elements of the weight per thread and iteration of the loop


def jobs(capability: int, *, every: bool) -> list[Job]:
    """Return attention jobs, also over an 8-bit cache: for 8B, or with `every` for all shapes."""
    found = attention_jobs(capability) + elementwise_jobs(capability)
    over_cache = [x for x in found if "W" in x.constants and (every or x.shape.startswith("8B"))]
    products = scaled_jobs(capability) + linear_jobs(capability) + adapter_jobs(capability)
    return found + [_in_8_bits(x) for x in over_cache] + products


def attention_jobs(capability: int) -> list[Job]:
    found = []
    for shape, (n_heads, n_kv_heads, head_dim) in _HEADS.items():
        group = n_heads // n_kv_heads
        sizes: dict[str, Any] = {"H": n_heads, "K": n_kv_heads, "D": head_dim, "S": 16}
        sizes |= {"WIDE": False, "W": head_dim, "kv_scales": None}
        for most in attention.decode_variants(group):
            tile = attention.decode_tile(group, head_dim, most)
            tiled = {"ROWS": tile.rows, "KEYS": tile.columns, "LANES": attention.LANES}
            tiled["IS_SINGLE"] = most == 1
            found.append(
                Job(attention.decode_kernel, f"{shape}, {most} queries", capability,
                    sizes | tiled, tile.warps, tile.stages)
            )  # fmt: skip
        tile = attention.prefill_tile(group, head_dim, capability in (90, 100))
        tiled = {"ROWS": tile.rows, "KEYS": tile.columns}
        found.append(
            Job(attention.prefill_kernel, shape, capability, sizes | tiled, tile.warps, tile.stages)
        )
    merge = {"H": 32, "D": 128, "PARTS": attention.MERGED}
    found.append(Job(attention.merge_kernel, "8B", capability, merge))
    far = dict(found[0].constants, WIDE=True)  # a cache beyond offsets of 32 bits
    found.append(found[0]._replace(shape="8B, 64 bits", constants=far))
    return found


def _in_8_bits(job: Job) -> Job:
    """Return the same kernel over a cache in 8 bits."""
    constants = job.constants | {"W": job.constants["D"] + 2}
    del constants["kv_scales"]
    types = {"kv_cache": "*i8", "kv_scales": "*i16"}
    return job._replace(shape=f"{job.shape}, 8 bits", constants=constants, types=types)


def elementwise_jobs(capability: int) -> list[Job]:
    found = []
    shapes = _WIDTHS if capability >= 90 else {"8B": _WIDTHS["8B"]}
    for shape, (width, ffn) in shapes.items():
        n_heads, n_kv_heads, head_dim = _HEADS[shape]
        block, norm_warps = elementwise.norm_block(width)
        norm = {"E": width, "BLOCK": block, "HAS_DELTA": True}
        rope: dict[str, Any] = {"H": n_heads, "K": n_kv_heads, "D": head_dim, "S": 16}
        rope |= {"HEADS": elementwise.ROPE_HEADS, "W": head_dim, "kv_scales": None}
        silu = {"F": ffn, "BLOCK": elementwise.SILU_BLOCK}
        warps = norm_warps, elementwise.rope_warps(head_dim)
        found += [
            Job(elementwise.norm_kernel, shape, capability, norm, warps[0]),
            Job(elementwise.rope_kernel, shape, capability, rope, warps[1]),
            Job(elementwise.silu_mul_kernel, shape, capability, silu),
        ]
    return found


def adapter_jobs(capability: int) -> list[Job]:
    """Return the kernels of adapters, of which there is one for all sizes."""
    sizes = {"ROWS": adapters.ROWS, "RANKS": RANK_STEP, "PARTS": MAX_PARTS, "FIELDS": FIELDS}
    shrink = sizes | {"COLUMNS": adapters.COLUMNS}
    expand = sizes | {"SPLITS": adapters.MAX_SPLITS, "OUTPUTS": adapters.OUTPUTS}
    types = {"table": "*i64", "k": "i32", "part_columns": "i32"}
    return [
        Job(adapters.shrink_kernel, "8B", capability, shrink, types=types),
        Job(adapters.expand_kernel, "8B", capability, expand, types=types),
    ]


def scaled_jobs(capability: int) -> list[Job]:
    """Return the kernels of rows in e4m3, which the older device does not have."""
    if capability < 89:
        return []
    found = []
    codes = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scales": "*fp32"}
    for shape, (width, ffn) in _WIDTHS.items():
        block, warps = scaled.row_block(ffn)
        norm_block, norm_warps = scaled.row_block(width)
        norm = {"E": width, "BLOCK": norm_block, "HAS_DELTA": True}
        found += [
            Job(scaled.round_rows_kernel, shape, capability, {"K": ffn, "BLOCK": block}, warps),
            Job(scaled.round_norm_kernel, shape, capability, norm, norm_warps),
            Job(scaled.round_silu_mul_kernel, shape, capability, {"F": ffn, "BLOCK": block}, warps),
        ]
    for m in (1, 16, 31):
        for tile in scaled.candidates(4096, ffn := _WIDTHS["8B"][1]):
            sizes = {
                "K": ffn, "BATCH": 8 if m == 1 else 16 if m == 16 else 32, "ROWS": tile.rows,
                "COLUMNS": tile.columns, "STAGES": tile.stages,
            }  # fmt: skip
            elements = tile.rows * tile.columns / (32 * tile.warps)
            found.append(
                Job(scaled.few_scaled_rows_kernel, f"8B, e4m3, {m} rows, {tuple(tile)}", capability,
                    sizes, tile.warps, tile.stages, codes, elements)
            )  # fmt: skip
    return found


def linear_jobs(capability: int) -> list[Job]:
    """Return jobs of every tile, for the w2 of 8B; on the older device every second tile."""
    tiles = linear.candidates(4096, 14336, 1)
    return [
        _product(f"8B, {tuple(tile)}", capability, 14336, tile)
        for tile in (tiles if capability >= 90 else tiles[::2])
    ]


_FORMATS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # constants, types of pointers
    "int8": ({"KIND": 1, "FIRST": 0, "GROUP": 0, "PARTS": 1, "outer_scales": None},
             {"weight": "*i32", "scales": "*fp32"}),
    "Q8_0": ({"KIND": 1, "FIRST": 0, "GROUP": 32, "PARTS": 1, "outer_scales": None},
             {"weight": "*i32", "scales": "*fp16"}),
    "Q6_K": ({"KIND": 1, "FIRST": 0, "GROUP": 16, "PARTS": 1}, {"weight": "*i32", "scales": "*u8"}),
    "fp8": ({"KIND": 2, "FIRST": 0, "GROUP": 0, "PARTS": 1, "outer_scales": None},
            {"weight": "*i32", "scales": "*fp32"}),
    "W4A16": ({"KIND": 3, "FIRST": -8, "GROUP": 32, "PARTS": 1, "outer_scales": None},
              {"weight": "*i32", "scales": "*fp16"}),
    "int4": ({"KIND": 3, "FIRST": 0, "GROUP": 32, "PARTS": 2}, {"weight": "*i32", "scales": "*u8"}),
}  # fmt: skip


def quantized_jobs(capability: int, *, every: bool) -> list[Job]:
    """Return products of 1, 16 and 64 rows with quantized weights, and dequantization of these.

    They use the w2 of 8B; with `every`, each K of it, of 1B and of 70B on 8 ranks, and all tiles.
    """
    found = []
    all_widths = [(shape, k) for shape, widths in _WIDTHS.items() for k in widths]
    for shape, k in all_widths if every else [("8B", _WIDTHS["8B"][1])]:
        for name, (constants, types) in _FORMATS.items():
            constants = constants | {"GROUP": constants["GROUP"] or k}
            for m in (1, 16, 64, 128):
                tiles = quantized.candidates(constants["KIND"], 4096, k, m)
                if not every and (name, m) != ("int8", 1):
                    tiles = tiles[:1]
                for tile in tiles:
                    what = f"{shape}, K {k}, {name}, {m} rows, {tuple(tile)}"
                    found.append(_quantized(what, capability, k, tile, m, constants, types))
            fragments = 128 // quantized.fragment_columns(constants["KIND"])
            sizes = {"K": k, "FRAGMENTS": fragments, **constants}
            found.append(
                Job(quantized.plain_kernel, f"{shape}, {name}", capability, sizes, 4, 3, types)
            )
    return found


def _quantized(
    shape: str, capability: int, k: int, tile: linear.Tile, m: int, constants: dict[str, Any],
    types: dict[str, str],
) -> Job:  # fmt: skip
    is_few = m <= quantized.MAX_FEW_ROWS
    sizes = {
        "K": k, "BATCH": max(8, m), "TILES": tile.rows // 16,
        "FRAGMENTS": tile.columns // quantized.fragment_columns(constants["KIND"]),
        "STAGES": tile.stages, **constants,
    }  # fmt: skip
    if is_few:
        kernel = quantized.few_rows_kernel
    else:
        kernel = quantized.many_rows_kernel
        sizes["SPLITS"] = tile.splits
        by_tens = capability // 10, capability % 10
        sizes["AT_ONCE"] = quantized.fragments_at_once(sizes["FRAGMENTS"], by_tens)
    elements = tile.rows * tile.columns / (32 * tile.warps)
    job = Job(kernel, shape, capability, sizes, tile.warps, tile.stages, types, elements)
    return job if tile.splits == 1 else job._replace(types={**types, "out": "*fp32"})


def _product(shape: str, capability: int, k: int, tile: linear.Tile) -> Job:
    sizes = {
        "K": k, "BATCH": 16 if tile.uses_dot else 1, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "STAGES": tile.stages,
    }  # fmt: skip
    elements = tile.rows * tile.columns / (32 * tile.warps)
    return Job(
        linear.product_kernel, shape, capability, sizes, tile.warps, tile.stages, elements=elements
    )


def compiled(job: Job) -> dict[str, Any]:
    kernel = _compile(job, GPUTarget("cuda", job.capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        use = _dumped("res-usage", kernel.asm["cubin"], file.name)
        code = _dumped("sass", kernel.asm["cubin"], file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", use)
    assert found, use
    return {
        "kernel": job.kernel.__name__, "shape": job.shape, "capability": job.capability,
        "batch": job.constants.get("BATCH"), "rows": job.constants.get("ROWS"),
        "registers": int(found[1]), "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared": kernel.metadata.shared,
        "products": sorted(set(_MMA.findall(code))),
        "vectors": len(re.findall(r"\bLDG\.\S*128\b", code)),
        "copies": len(re.findall(r"\bLDGSTS\S*128\b", code)),
        "before_wait": _before_wait(code),
        "per_element": round(len(_loop(code)) / job.elements, 2) if job.elements else None,
        "loop": _counts(code, job.elements) if job.elements else None,
        "product_loops": [_summary(loop) for loop in _loops(code) if _MMA.search("".join(loop))],
    }  # fmt: skip


def _before_wait(code: str) -> list[str] | None:
    """Return the accesses to memory before a kernel waits for its predecessor, None if it does not.

    In machine code the wait is ACQBULK.
    """
    start, *rest = code.split("ACQBULK")
    if not rest:
        return None
    assert len(rest) == 1, "it waits more than once"
    wait = int(re.findall(r"/\*([0-9a-f]{4,})\*/", start)[-1], 16)
    # On sm_100 a warp allocates tensor memory first, by branches that end before the wait.
    jumps = re.findall(r"\bBRA\b[^;]*\b0x([0-9a-f]+)", start)
    is_passed = any(int(target, 16) > wait for target in jumps)
    assert not (is_passed or re.search(r"\bEXIT\b", start)), "not every program waits"
    return sorted(set(re.findall(r"\b(?:LDG|LDGSTS|STG|ATOMG?|RED|CCTL)\b", start)))


def _loop(code: str) -> list[str]:
    """Return the instructions of the longest loop."""
    return max(_loops(code), key=len, default=[])


def _loops(code: str) -> list[list[str]]:
    """Return the instructions of each loop, in the order of their ends."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    lines = [(int(address, 16), text) for address, text in found]
    found_loops = []
    for end, text in lines:
        jump = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < end:
            body = [x for address, x in lines if int(jump[1], 16) <= address <= end]
            found_loops.append(body)
    return found_loops


def _summary(loop: list[str]) -> dict[str, int]:
    """Return the instructions, selections and waits for wgmma of a loop."""
    return {
        "instructions": len(loop),
        "selections": sum(bool(re.search(r"\bFSEL\b", x)) for x in loop),
        "waits": sum("WARPGROUP.DEPBAR" in x for x in loop),
    }


def _counts(code: str, elements: float) -> dict[str, float]:
    """Return how often each opcode occurs in the loop per element, the most frequent first."""
    opcodes = [re.sub(r"^@!?U?P\w+ ", "", x).split()[0].split(".")[0] for x in _loop(code)]
    return {name: round(x / elements, 2) for name, x in Counter(opcodes).most_common(8)}


def compiled_for_amd(job: Job) -> dict[str, Any]:
    kernel = _compile(job, GPUTarget("hip", _AMD, 64))
    return {"kernel": job.kernel.__name__, "shape": job.shape, "shared": kernel.metadata.shared}


def _compile(job: Job, target: GPUTarget) -> Any:
    names = job.kernel.arg_names
    constants = dict(job.constants)
    if "PDL" in names:
        constants["PDL"] = target.backend == "cuda" and job.capability >= 90
    signature = {x: "constexpr" if x in constants else {**_TYPES, **job.types}[x] for x in names}
    unaligned = job.kernel.do_not_specialize_on_alignment or ()
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(names)
        if (signature[x].startswith("*") and x not in unaligned) or x in _MULTIPLES
    }
    source = ASTSource(fn=job.kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": job.warps, "num_stages": job.stages}
    return triton.compile(source, target=target, options=options)


def _dumped(what: str, cubin: bytes, path: str) -> str:
    """Return the output of cuobjdump, stored in Triton's cache.

    Disassembling takes half a second, and each start of the program some milliseconds.
    """
    kept = get_cache_manager(hashlib.sha256(cubin).hexdigest())
    if (found := kept.get_file(what)) is None:
        command = [str(_CUOBJDUMP), f"-{what}", path]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found = kept.put(done.stdout, what, binary=False)
    return Path(found).read_text()


def main() -> None:
    if sys.argv[1:] == [_AMD]:
        shapes = (
            "8B",
            "8B, 1 queries",
            "8B, (32, 256, 4, 4, True, 1)",
            "8B, (16, 256, 4, 5, True, 1)",
        )
        for job in jobs(80, every=False):
            if job.shape in shapes:
                print(json.dumps(compiled_for_amd(job)), flush=True)
        return
    asked = [*map(int, sys.argv[1:])]
    chosen = [
        job
        for capability in asked or (90, 80)
        for job in jobs(capability, every=bool(asked))
        + quantized_jobs(capability, every=bool(asked))
    ]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(compiled, chosen):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
