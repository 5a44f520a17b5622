"""Machine code of the Triton kernels for real shapes: compiled without a GPU, without spills."""

import json
import os
import re
import runpy
import sys
from typing import Any

import pytest

from helpers.launch import PROGRAMS, REPO, run_program

_ATTENTION = ("decode_kernel", "prefill_kernel")
_ADAPTERS = ("shrink_kernel", "expand_kernel")
_PRODUCTS = ("product_kernel", "few_rows_kernel", "many_rows_kernel", "few_scaled_rows_kernel")
pytestmark = pytest.mark.timeout(900)  # without a cache, more than a minute of processor time


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """One line for each kernel, shape and capability; Triton caches the compiled code."""
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAMS / "compiled_kernels.py")]
    done = run_program(command, env={**clean, "PYTHONPATH": str(REPO)}, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_kernels_keep_their_numbers_in_registers(compiled):
    """Kernels keep their values in registers and spill nothing.

    They use at most 200 registers, so that a processor runs several programs. A prefill over 8 bits
    is allowed one program, and so are products of 128 rows, and of 16 rows in groups of 16 columns.
    Decode over 8 bits with offsets of 64 bits has two programs. Attention of drafts over 8 bits may
    spill two values, and prefill with eight heads two addresses of the result, outside its loops.
    """
    assert {x["capability"] for x in compiled} == {80, 90}
    most = {x["shape"]: 224 for x in compiled if x["kernel"] == "prefill_kernel"}
    most["8B, 64 bits, 8 bits"] = 224
    for x in compiled:
        if re.search(r"Q6_K, 16 rows|128 rows", x["shape"]):
            most[x["shape"]] = 255
    bad = [
        x
        for x in compiled
        if ((x["spills"] or x["stack"]) and not _may_spill(x))
        or x["registers"] > most.get(x["shape"], 200)
    ]
    assert not bad, bad


def _may_spill(x: dict[str, Any]) -> bool:
    """Return whether a kernel is one of two that spill two values on some GPU."""
    if x["kernel"] == "prefill_kernel":
        return x["shape"] == "70B of 8 ranks" and x["spills"] <= 4
    return "8 queries, 8 bits" in x["shape"]


@pytest.mark.slow
def test_products_use_the_matrix_units_and_load_ahead(compiled):
    """Products use the matrix units and asynchronous loads.

    Keys, values and weights are loaded 16 bytes at a time, past the registers, while others are
    used; the small ops also read 16 bytes at a time.
    """
    for x in compiled:
        has_wide_tile = x["kernel"] in ("prefill_kernel", "many_rows_kernel")
        has_wide_tile |= x["kernel"] == "decode_kernel" and x["rows"] == 64
        wide = x["capability"] == 90 and has_wide_tile
        if x["kernel"] in (*_ATTENTION, *_ADAPTERS) or (x["batch"] or 0) > 1:
            assert x["products"] == ["HGMMA" if wide else "HMMA"], x
        if x["kernel"] in (*_ATTENTION, *_ADAPTERS, *_PRODUCTS):
            assert x["copies"] >= 4, x
        elif x["kernel"] != "merge_kernel":
            assert x["vectors"], x
        assert x["shared"] <= 99 * 1024, x  # the smallest limit of these devices


@pytest.mark.slow
def test_prefill_masks_scores_on_the_diagonal_alone(compiled):
    """Prefill has a loop for the diagonal, and one that masks nothing and is shorter.

    In neither does ptxas make a product of wgmma wait for the one before: it does so where it finds
    the accumulators written between them, and the loop still has the same instructions.
    """
    found = [x for x in compiled if x["kernel"] == "prefill_kernel"]
    assert found
    for x in found:
        diagonal, whole = x["product_loops"]
        assert diagonal["selections"] > 0 == whole["selections"], x
        assert whole["instructions"] < 0.95 * diagonal["instructions"], x
        assert max(diagonal["waits"], whole["waits"]) <= 2, x


@pytest.mark.slow
def test_a_byte_takes_at_most_three_instructions(compiled):
    """The loop over a row of bytes has at most three machine instructions per element."""
    counts = {
        x["shape"]: x["per_element"]
        for x in compiled
        if x["kernel"] == "few_rows_kernel"
        and x["capability"] == 90
        and " int8, 1 rows" in x["shape"]
    }
    assert len(counts) == 5 and max(counts.values()) <= 3, counts


@pytest.mark.slow
def test_only_weights_are_read_before_the_previous_kernel_has_ended(compiled):
    """Before its predecessor has ended, a kernel only reads weights: the norm's, and a product's.

    A product prefetches them. On older GPUs no kernel is launched early.
    """
    early = {"norm_kernel": ["LDG"], "round_norm_kernel": ["LDG"]}
    early |= {name: ["CCTL"] for name in _PRODUCTS}
    for x in compiled:
        name = x["kernel"]
        if x["capability"] < 90 or name in ("prefill_kernel", "plain_kernel"):
            assert x["before_wait"] is None, x
        else:
            assert x["before_wait"] == early.get(name, []), x


def test_a_branch_past_the_wait_is_told_from_one_before_it():
    """sm_100 allocates tensor memory in one warp, whose branches end before the wait."""
    before_wait = runpy.run_path(str(PROGRAMS / "compiled_kernels.py"))["_before_wait"]
    code = "/*0050*/ {} ; /* 0x0f00 */\n/*0060*/ CCTL [R2] ;\n/*0070*/ ACQBULK ;\n/*0080*/ EXIT ;"
    assert before_wait(code.format("BRA.U 0x70")) == ["CCTL"]
    for instruction in ("BRA 0x80", "EXIT"):
        with pytest.raises(AssertionError, match="not every program waits"):
            before_wait(code.format(instruction))


def test_kernels_fit_an_amd_gpu_except_for_a_tile():
    """Kernels compile for AMD's MI300 and fit its 64 KiB, except for a tile that is left out."""
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAMS / "compiled_kernels.py"), "gfx942"]
    done = run_program(command, env={**clean, "PYTHONPATH": str(REPO)}, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"prefill_kernel", "decode_kernel", "product_kernel"} < {x["kernel"] for x in rows}
    too_large = [x["shape"] for x in rows if x["shared"] > 64 << 10]
    assert too_large == ["8B, (32, 256, 4, 4, True, 1)"]
