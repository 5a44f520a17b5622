"""The quantization_config of a folder: its method, and the keys that change the elements.

In: the content of config.json, and the folder that has NVIDIA's file instead. Out: a
quantization_config. A key that asks for what is not computed here is an error where it is not
neutral. Bits, groups and the modules that are quantized follow from the tensors; of the keys about
them, only the sizes of groups and blocks are read, for matrices in which they do not divide.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama.common.checks import brief, errors_in
from llama.storage.downloads import read_json

METHODS = (
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "modelopt",
    "awq",
    "gptq",
    "auto-round",
    "bitsandbytes",
)
# NVIDIA's file, where config.json has no quantization_config.
_MODELOPT_FILE = "hf_quant_config.json"
_OTHER_NAMES = {"intel/auto-round": "auto-round"}
# Keys that change what the tensors stand for, or the equations of the model, and the values that
# are read. What is empty is neutral for each. A rotation would have to be undone at run time.
_READ: dict[str, tuple[object, ...]] = {
    "weight_scale_semantics": ("inverse",),
    "rotation": (),
    "rotation_config": (),
    "spinquant_config": (),
    "transform_config": (),
    "adapter": (),
}
_DENSE = ("dense", None)  # formats of sparse matrices that store all elements
# How auto-round packs GPTQ's tensors: whether each zero point is stored less one.
_PACKED_LESS_ONE = {
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto": True,
    "auto_round": False,
    "auto_round:gptqmodel": False,
}
_KERNEL = ":exllamav2"
_GPTQ_LESS_ONE = {"gptq": True, "gptq_v2": False}


class UnknownLayoutError(ValueError):
    """A layout of tensors that is not read here, though the program that wrote them reads it."""


def quantization_of(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a folder, with its quant_method; None if it has none.

    Args:
        folder: The folder.
        config: The content of its config.json.

    Raises:
        OSError: NVIDIA's file cannot be read.
        ValueError: The method is not read, or a key asks for what is not computed; the error names
            the file.
    """
    path = folder / "config.json"
    found: object = config.get("quantization_config")
    if found is None:
        path = folder / _MODELOPT_FILE
        if not path.exists():
            return None
        found = read_json(path) | {"quant_method": "modelopt"}
    known = dict(found) if isinstance(found, dict) else {}
    method = known.get("quant_method")
    if method is None and (known.get("load_in_4bit") or known.get("load_in_8bit")):
        method = "bitsandbytes"  # whose older versions do not write it
    method = _OTHER_NAMES.get(str(method), method)
    if method not in METHODS:
        raise ValueError(
            f"{path}: quantization_config is of {brief(method)}, and this runtime reads "
            f"{', '.join(METHODS)}: get the model in one of these, or in bfloat16"
        )
    with errors_in(f"{path}: quantization_config"):
        _check_keys(known)
    return known | {"quant_method": method}


def _check_keys(config: dict[str, Any]) -> None:
    """Raise ValueError where a key asks for something that is not computed here."""
    for key, read in _READ.items():
        value = config.get(key)
        if not _is_empty(value) and value not in read:
            wanted = " or ".join(map(repr, read)) or "null"
            raise ValueError(
                f"{key} is {brief(value)}, and this runtime needs {wanted}: get the model in "
                "bfloat16, or quantized without it"
            )
    sparsity = config.get("sparsity_config")
    sparse_format = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if not _is_empty(sparsity) and sparse_format not in _DENSE:
        raise ValueError(
            f"sparsity_config has the format {brief(sparse_format)}, and this runtime reads "
            "'dense': get the model without compressed zeros"
        )


def _is_empty(value: object) -> bool:
    """Return whether a value asks for nothing, as nested empty objects do."""
    return not value or (isinstance(value, dict) and all(map(_is_empty, value.values())))


def stores_zeros_less_one(config: dict[str, Any]) -> bool:
    """Return whether the zero points of GPTQ's tensors are stored less one.

    Raises:
        UnknownLayoutError: The config names another layout than those that are read.
    """
    if config.get("quant_method") == "auto-round":
        key = "packing_format"
        known = _PACKED_LESS_ONE
        # Older versions wrote the layout as the backend, and the name of a kernel after it.
        value = str(config.get(key) or config.get("backend") or "auto").removesuffix(_KERNEL)
    else:
        key = "checkpoint_format"
        known = _GPTQ_LESS_ONE
        value = config.get(key) or config.get("format") or "gptq"
    if value not in known:
        names = ", ".join(name for name in known if name != "auto")
        raise UnknownLayoutError(f"{key} is {brief(value)}, and {names} are read")
    return known[value]


def group_sizes(config: dict[str, Any]) -> set[int]:
    """Return all numbers of columns per scale that a config names, for any module."""
    values = itertools.chain(_values_of("group_size", config), _values_of("q_group_size", config))
    return {size for size in values if isinstance(size, int) and size > 0}


def block_sizes(config: dict[str, Any]) -> set[tuple[int, int]]:
    """Return all numbers of rows and columns per scale that a config names, for any module."""
    blocks = set()
    for key in ("weight_block_size", "block_structure", "group_size"):
        for value in _values_of(key, config):
            if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
                value = [int(size) for size in value.split("x")]
            if isinstance(value, list | tuple) and len(value) == 2:
                rows, columns = value
                if all(isinstance(size, int) and size > 0 for size in value):
                    blocks.add((rows, columns))
    return blocks


def _values_of(key: str, config: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of a key in a config and in all objects that it holds."""
    for name, value in config.items():
        if name == key:
            yield value
        elif isinstance(value, dict):
            yield from _values_of(key, value)
