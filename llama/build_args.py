"""The arguments of `Llama.build`, in one table.

The checks of these arguments, the flags of the commands with their LLAMA_* variables, and the
values that ranks compare are made from it. To add an argument, add a field here, add it to the
signature and the docstring of `Llama.build`, and read it where it matters.

It imports neither torch nor pydantic, because every command reads it for its flags.
"""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from llama.common.checks import (
    FieldError,
    FieldTypeError,
    brief,
    checked_number,
    index_of,
    limits_of,
)

if TYPE_CHECKING:
    import torch

MEASURED_SHARES = ("memory", "speed")  # values of `shares` that each rank measures
# Arguments that are lists of whole numbers, and what errors say of them.
_COUNTS = {
    "pipeline_layers": "give the number of layers of each stage, such as 10,6",
    "ffn_shares": "give a whole number for each rank, such as 3,2,2",
}
_MAX_LISTED = 10**6  # the largest number in a list


def _flag(
    default: Any,
    metavar: str,
    meaning: str,
    absent: str = "",
    *,
    limits: tuple[float, float] | None = None,
    may_differ: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """Make a field that is a flag of the commands, too.

    Args:
        default: the value of a field that is not given.
        metavar: the name of the value in `--help`.
        meaning: the text of `--help`.
        absent: what None stands for, in `--help`.
        limits: the smallest and the largest number.
        may_differ: ranks of one group may have different values.
        choices: values that shells complete; others may be valid, too.
    """
    metadata: dict[str, Any] = {
        "flag": (metavar, meaning, absent),
        "may_differ": may_differ,
        "choices": choices,
    }
    if limits is not None:
        metadata["limits"] = limits
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class BuildArgs:
    """The arguments of `Llama.build`, whose docstring explains them.

    A test holds its signature equal to these fields: names, types and defaults.
    """

    ckpt_dir: str
    tokenizer_path: str | None = _flag(
        None, "FILE", "Tokenizer file", "the one beside the weights", may_differ=True
    )
    max_seq_len: int | None = _flag(
        None,
        "N",
        "Maximum number of tokens of a prompt and its answer",
        "the model's context, at most 8192, as far as it fits the memory",
        limits=(1, 2**31),
    )
    max_batch_size: int | None = _flag(
        None,
        "N",
        "Number of sequences that run at once; more wait",
        "what fits",
        limits=(1, 2**20),
    )
    model_parallel_size: int | None = _flag(
        None, "N", "Number of ranks that share each layer", "all ranks"
    )
    seed: int = _flag(
        1,
        "N",
        "Seed of the samples; the same command gives the same answers",
        limits=(0, 2**63 - 1),
    )
    _: KW_ONLY
    pipeline_parallel_size: int = _flag(
        1, "N", "Number of pipeline stages that divide the layers", limits=(1, 2**13)
    )
    pipeline_layers: "str | Sequence[int] | None" = _flag(
        None, "LIST", "Number of layers of each pipeline stage, such as 10,6", "by their work"
    )
    device: "str | torch.device | None" = _flag(
        None,
        "NAME",
        "Device: cuda, mps or cpu",
        "the first one available",
        may_differ=True,
        choices=("cuda", "mps", "cpu"),
    )
    dtype: "str | torch.dtype | None" = _flag(
        None,
        "NAME",
        "Data type: bf16, fp16 or fp32",
        "bf16 if the device supports it",
        choices=("bf16", "fp16", "fp32"),
    )
    quantize: str | None = _flag(
        None,
        "NAME",
        "Quantize the weights: int8, fp8 or int4",
        "as they are",
        choices=("int8", "fp8", "int4"),
    )
    chat_template: str | None = _flag(
        None, "FILE", "Chat template (Jinja), or llama3 for Meta's format", "the model's own"
    )
    activations: str | None = _flag(
        None,
        "NAME",
        "Round the activations: on the CPU int8, int8_lm_head (also those of lm_head), or "
        "int8_token with one scale per token; on a GPU fp8",
        "as the files ask, else bf16",
        choices=("bf16", "fp8", "int8", "int8_lm_head", "int8_token"),
    )
    lora: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None" = _flag(
        None,
        "DIR",
        "Folder of a LoRA adapter to merge into the weights; several are separated by commas",
        "none",
        may_differ=True,  # Ranks compare what is in the folders.
    )
    shares: "str | Sequence[int] | None" = _flag(
        None,
        "LIST",
        "Relative share of each rank, such as 3,2,2; memory or speed to measure it",
        "equal shares",
        choices=MEASURED_SHARES,
    )
    ffn_shares: "str | Sequence[int] | None" = _flag(
        None, "LIST", "Relative share of the feed-forward columns of each rank", "as shares"
    )
    kv_cache_memory_bytes: int | None = _flag(
        None, "N", "Size of the KV cache on each rank, in bytes", "what fits", limits=(1, 2**60)
    )
    kv_cache_dtype: str | None = _flag(
        None,
        "NAME",
        "Data type of the KV cache: int8 takes half the memory",
        "dtype",
        choices=("int8",),
    )
    reasoning_parser: str = _flag(
        "auto",
        "NAME",
        "Marks of the reasoning in answers: auto, deepseek_r1 or none",
        choices=("auto", "deepseek_r1", "none"),
    )
    tool_call_parser: str = _flag(
        "auto",
        "NAME",
        "Format of tool calls of a chat template: hermes, llama3_json, xlam, nemotron, functionary,"
        " pythonic, none",
        choices=(
            "auto",
            "hermes",
            "llama3_json",
            "xlam",
            "nemotron",
            "functionary",
            "pythonic",
            "none",
        ),
    )
    timeout_s: float = _flag(
        600.0, "S", "Maximum time that a rank waits for another, in seconds", may_differ=True
    )
    verify: bool = _flag(
        False, "", "Compare the weights with their checksums while they load", may_differ=True
    )
    pooling: Literal["last", "mean"] | None = _flag(
        None,
        "NAME",
        "Hidden states that make an embedding: last or mean",
        "as the model's files say",
        choices=("last", "mean"),
    )
    bidirectional: bool = _flag(
        False, "", "Let each token attend to its whole text, for embeddings (LLM2Vec)"
    )
    mute_ranks: bool = True
    verbose: bool = True
    speculate: str | None = _flag(
        None,
        "NAME",
        "Speculative decoding: lookup, or the name of a draft model",
        "none",
        choices=("lookup",),
    )
    speculate_tokens: int = _flag(
        7, "N", "Maximum number of tokens drafted per step", limits=(1, 64)
    )
    speculate_shared: bool = _flag(False, "", "Let lookup use the texts of other requests, too")

    def checked(self) -> "BuildArgs":
        """Return the same arguments with plain Python numbers.

        The values that other arguments may take depend on the machine and the files, and are
        checked where these are known.

        Raises:
            FieldError: a number is out of its limits, or a value has a wrong type.
        """
        checked_values: dict[str, Any] = {
            name: checked_number(name, getattr(self, name), *limits)
            for name, limits in limits_of(BuildArgs).items()
        }
        for argument in fields(BuildArgs):
            value = getattr(self, argument.name)
            if argument.type is bool and not isinstance(value, bool):
                text = f"{argument.name}={brief(value)} must be True or False"
                raise FieldTypeError(argument.name, text)
        name = self.speculate
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"speculate={brief(name)}: give 'lookup', a draft model, or None")
        if self.pooling not in (None, "last", "mean"):
            raise FieldError("pooling", f"pooling={brief(self.pooling)} must be 'last' or 'mean'")
        lora = lora_paths(self.lora) or None
        shares = read_shares(self.shares)
        counts: dict[str, Any] = {x: read_counts(x, getattr(self, x)) for x in _COUNTS}
        return replace(self, **checked_values, lora=lora, shares=shares, **counts)

    def shared(self) -> dict[str, Any]:
        """Return the arguments that must be the same on every rank, by name."""
        names = [x.name for x in fields(self) if x.metadata and not x.metadata["may_differ"]]
        return {name: getattr(self, name) for name in names}


def lora_paths(
    lora: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None",
) -> tuple[str, ...]:
    """Return the paths of adapters that an argument `lora` names.

    Args:
        lora: one text, in which commas separate paths; one path; a list of paths; or None.

    Raises:
        FieldError: it is something else, or a path is empty.
    """
    if lora is None:
        return ()
    if isinstance(lora, str):
        paths: Sequence[object] = lora.split(",")
    else:
        paths = list(lora) if isinstance(lora, list | tuple) else [lora]
    texts = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            text = f"lora={brief(lora)} must be the path of an adapter, or a list of paths"
            raise FieldTypeError("lora", text)
        texts.append(os.fspath(path))
    if not all(texts):
        raise FieldError("lora", f"lora={brief(lora)} has an empty path: leave it out")
    return tuple(texts)


def read_shares(shares: object) -> str | tuple[int, ...] | None:
    """Return an argument `shares` as numbers, or as the name of what is measured.

    Args:
        shares: numbers in a sequence or, with commas between them, in a text; or a name.

    Raises:
        FieldError: it is something else.
    """
    if shares is None:
        return None
    if isinstance(shares, str) and shares in MEASURED_SHARES:
        return shares
    values = _read_integers(shares)
    if values is None:
        text = (
            f"={brief(shares)}: give a whole number from 1 to {_MAX_LISTED} for each rank, such as "
            f"3,2,2, or one of {', '.join(MEASURED_SHARES)}"
        )
        raise FieldError.of("shares", text)
    return values


def read_counts(name: str, value: object) -> tuple[int, ...] | None:
    """Return an argument of `_COUNTS` as numbers.

    Args:
        name: the argument.
        value: numbers in a sequence or, with commas between them, in a text; or None.

    Raises:
        FieldError: it is something else.
    """
    if value is None:
        return None
    counts = _read_integers(value)
    if counts is None:
        raise FieldError.of(name, f"={brief(value)}: {_COUNTS[name]}")
    return counts


def _read_integers(value: object) -> tuple[int, ...] | None:
    """Return the positive numbers of a sequence or a text; None if it is something else."""
    parts: Any = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        return None
    values = [_read_integer(part) for part in parts]
    return tuple(values) if all(1 <= x <= _MAX_LISTED for x in values) else None


def _read_integer(part: object) -> int:
    """Return a part of a list as a number; 0 if it is none."""
    if isinstance(part, str) and part.strip().isdecimal() and len(part) < 10:
        return int(part)
    return 0 if isinstance(part, str) else index_of(part) or 0
