"""The arguments of `Llama.build`, in one table.

The checks of these arguments, the flags of the commands with their LLAMA_* variables, and the
values that ranks compare are made from it. To add an argument, add a field here, add it to the
signature and the docstring of `Llama.build`, and read it where it matters.

It imports neither torch nor pydantic, because every command reads it for its flags. The file has
over 400 lines because it is one table.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from llama.common.checks import (
    FieldError,
    FieldTypeError,
    Range,
    ReadBy,
    brief,
    index_of,
    true_or_false,
)

if TYPE_CHECKING:
    import torch

# Headings of flags in `--help`.
RANKS = "Ranks"
SAMPLING = "Sampling"
_MEMORY = "Memory and batches"
_DRAFTS = "Speculative decoding"

MEASURED_SHARES = ("memory", "speed")  # values of `shares` that each rank measures
# What errors say of arguments that are lists of whole numbers.
_COUNTS = {
    "pipeline_layers": "give the number of layers of each stage, such as 10,6",
    "ffn_shares": "give a whole number for each rank, such as 3,2,2",
}
MIN_DISK_BYTES = 128 << 20  # two segments
_MAX_LISTED = 10**6  # the largest number in a list


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
    """Return the argument `pipeline_layers` or `ffn_shares` as numbers.

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


def _drafter(name: object) -> str:
    """Return an argument `speculate` that is not None."""
    if isinstance(name, str) and name:
        return name
    text = f"={brief(name)}: give 'lookup', a draft model, or None"
    raise FieldTypeError.of("speculate", text)


def _folder(path: object) -> str | None:
    """Return an argument `kv_cache_dir`; None for "none"."""
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        text = os.fspath(path)
        return None if text == "none" else text
    raise FieldTypeError.of("kv_cache_dir", f"={brief(path)}: give a folder, or None")


_Switch = Annotated[bool, ReadBy(true_or_false)]
_AS_GIVEN = ReadBy(lambda value: value)  # checked where it is used
_LAYERS = ReadBy(functools.partial(read_counts, "pipeline_layers"))
_COLUMNS = ReadBy(functools.partial(read_counts, "ffn_shares"))
_ADAPTERS = ReadBy(lambda lora: lora_paths(lora) or None)


@dataclass(frozen=True)
class Flag:
    """Annotation of a field that is a flag of the commands, too.

    Attributes:
        metavar: the name of the value in `--help`.
        meaning: the text of `--help`.
        absent: what None stands for, in `--help`.
        choices: values that shells complete; others may be valid, too.
        group: the heading of the flag in `--help`.
        may_differ: ranks of one group may have different values.
    """

    metavar: str
    meaning: str
    absent: str = ""
    choices: tuple[str, ...] = ()
    group: str = "Model"
    may_differ: bool = False


class FlagArgument(NamedTuple):
    """A field with its flag, its type, its default, and the limits of a number."""

    flag: Flag
    kind: Any
    default: Any
    limits: Range | None


@dataclass(frozen=True)
class BuildArgs:
    """The arguments of `Llama.build`, whose docstring explains them.

    A test holds its signature equal to these fields: names, types and defaults.
    """

    # pydantic checks the fields: see `checked`.
    __pydantic_config__ = {  # noqa: RUF012
        "strict": True,
        "arbitrary_types_allowed": True,
        "defer_build": True,
        "revalidate_instances": "always",
    }

    ckpt_dir: Annotated[str, _AS_GIVEN]
    tokenizer_path: Annotated[
        str | None,
        _AS_GIVEN,
        Flag("FILE", "Tokenizer file", "the one alongside the weights", may_differ=True),
    ] = None
    max_seq_len: Annotated[
        int | None,
        Range(1, 2**31),
        Flag(
            "N",
            "Maximum number of tokens of a prompt and its answer",
            "the model's context, as far as it fits the memory",
            group=_MEMORY,
        ),
    ] = None
    max_batch_size: Annotated[
        int | None,
        Range(1, 2**20),
        Flag("N", "Number of sequences that run at once; more wait", "what fits", group=_MEMORY),
    ] = None
    model_parallel_size: Annotated[
        int | None,
        _AS_GIVEN,
        Flag("N", "Number of ranks that share each layer", "all ranks", group=RANKS),
    ] = None
    seed: Annotated[
        int,
        Range(0, 2**63 - 1),
        Flag("N", "Seed of the samples; the same command gives the same answers", group=SAMPLING),
    ] = 1
    _: KW_ONLY
    pipeline_parallel_size: Annotated[
        int,
        Range(1, 2**13),
        Flag("N", "Number of pipeline stages that divide the layers", group=RANKS),
    ] = 1
    pipeline_layers: Annotated[
        str | Sequence[int] | None,
        _LAYERS,
        Flag(
            "LIST",
            "Number of layers of each pipeline stage, such as 10,6",
            "by their work",
            group=RANKS,
        ),
    ] = None
    device: Annotated[
        "str | torch.device | None",
        _AS_GIVEN,
        Flag(
            "NAME",
            "Device: cuda, mps or cpu",
            "the first one available",
            choices=("cuda", "mps", "cpu"),
            may_differ=True,
        ),
    ] = None
    dtype: Annotated[
        "str | torch.dtype | None",
        _AS_GIVEN,
        Flag(
            "NAME",
            "Data type: bf16, fp16 or fp32",
            "bf16 if the device supports it",
            choices=("bf16", "fp16", "fp32"),
        ),
    ] = None
    quantize: Annotated[
        str | None,
        _AS_GIVEN,
        Flag(
            "NAME",
            "Quantize the weights: int8, fp8 or int4",
            "as they are",
            choices=("int8", "fp8", "int4"),
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _AS_GIVEN,
        Flag("FILE", "Chat template (Jinja), or llama3 for Meta's format", "the model's own"),
    ] = None
    activations: Annotated[
        str | None,
        _AS_GIVEN,
        Flag(
            "NAME",
            "Round the activations: on the CPU int8, int8_lm_head (also those of lm_head), or "
            "int8_token with one scale per token; to e4m3 fp8, which GPUs multiply fast",
            "as the files ask (GGUF: int8_lm_head), else bf16",
            choices=("bf16", "fp8", "int8", "int8_lm_head", "int8_token"),
        ),
    ] = None
    lora: Annotated[
        str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        _ADAPTERS,
        Flag(
            "DIR",
            "Folder of a LoRA adapter to merge into the weights; several are separated by commas",
            "none",
            may_differ=True,
        ),
    ] = None
    shares: Annotated[
        str | Sequence[int] | None,
        ReadBy(read_shares),
        Flag(
            "LIST",
            "Relative share of each rank, such as 3,2,2; memory or speed to measure it",
            "equal shares",
            choices=MEASURED_SHARES,
            group=RANKS,
        ),
    ] = None
    ffn_shares: Annotated[
        str | Sequence[int] | None,
        _COLUMNS,
        Flag(
            "LIST",
            "Relative share of the feed-forward columns of each rank",
            "as shares",
            group=RANKS,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Range(1, 2**24),
        Flag(
            "N",
            "Maximum number of tokens that one step computes",
            "2048, and 8192 on GPUs of 80 GB, over the number of pipeline stages",
            group=_MEMORY,
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Range(1, 2**60),
        Flag("N", "Size of the KV cache on each rank, in bytes", "what fits", group=_MEMORY),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _AS_GIVEN,
        Flag(
            "NAME",
            "Data type of the KV cache: int8 takes half the memory",
            "dtype",
            choices=("int8",),
            group=_MEMORY,
        ),
    ] = None
    kv_cache_dir: Annotated[
        str | os.PathLike[str] | None,
        ReadBy(_folder),
        Flag(
            "DIR",
            "Folder on a local disk that keeps KV pages of prompts, so that they are not computed "
            "again after a restart. A page is the text",
            "none; servers in the background have ~/.cache/llama/kv",
            group=_MEMORY,
        ),
    ] = None
    kv_cache_disk_bytes: Annotated[
        int | None,
        Range(MIN_DISK_BYTES, 2**60),
        Flag(
            "N",
            "Size of all files in kv_cache_dir, in bytes",
            "8 GiB, or a tenth of the free disk",
            group=_MEMORY,
        ),
    ] = None
    kv_cache_reuse: Annotated[
        Literal["exact", "close"],
        Flag(
            "NAME",
            "Pages that are loaded: exact keeps the bits of answers, close also takes those that "
            "other kernels or numbers of ranks have rounded",
            choices=("exact", "close"),
            group=_MEMORY,
        ),
    ] = "exact"
    reasoning_parser: Annotated[
        str,
        _AS_GIVEN,
        Flag(
            "NAME",
            "Marks of the reasoning in answers: auto, deepseek_r1 or none",
            choices=("auto", "deepseek_r1", "none"),
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        _AS_GIVEN,
        Flag(
            "NAME",
            "Format of tool calls of a chat template: hermes, llama3_json, xlam, nemotron, "
            "functionary, pythonic, none",
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
        ),
    ] = "auto"
    timeout_s: Annotated[
        float,
        _AS_GIVEN,
        Flag(
            "S",
            "Maximum time that a rank waits for another, in seconds",
            may_differ=True,
            group=RANKS,
        ),
    ] = 600.0
    silence_s: Annotated[
        float,
        _AS_GIVEN,
        Flag(
            "S",
            "Time after which ranks give up another machine that is silent, in seconds",
            group=RANKS,
        ),
    ] = 30.0
    verify: Annotated[
        _Switch,
        Flag("", "Compare the weights with their checksums while they load", may_differ=True),
    ] = False
    pooling: Annotated[
        Literal["last", "mean"] | None,
        Flag(
            "NAME",
            "Hidden states that make an embedding: last or mean",
            "as the model's files say",
            choices=("last", "mean"),
        ),
    ] = None
    bidirectional: Annotated[
        _Switch,
        Flag("", "Let each token attend to its whole text, for embeddings (LLM2Vec)"),
    ] = False
    mute_ranks: _Switch = True
    verbose: _Switch = True
    speculate: Annotated[
        str | None,
        ReadBy(_drafter),
        Flag(
            "MODEL",
            "Speculative decoding: lookup, or the name of a draft model",
            "none",
            choices=("lookup",),
            group=_DRAFTS,
        ),
    ] = None
    speculate_tokens: Annotated[
        int, Range(1, 64), Flag("N", "Maximum number of tokens drafted per step", group=_DRAFTS)
    ] = 7
    speculate_shared: Annotated[
        _Switch, Flag("", "Let lookup use the texts of other requests, too", group=_DRAFTS)
    ] = False
    images: _Switch = True

    def checked(self) -> "BuildArgs":
        """Return the same arguments with plain Python values.

        The values that other arguments may take depend on the machine and the files, and are
        checked where these are known.

        Raises:
            FieldError: a number is out of its limits, or a value has a wrong type.
        """
        import torch

        from llama.common.validation import checked_fields

        return checked_fields(self, {"torch": torch})

    def shared(self) -> dict[str, Any]:
        """Return the arguments that must be the same on every rank, by name."""
        return {
            name: getattr(self, name)
            for name, argument in BuildArgs.flags().items()
            if not argument.flag.may_differ
        }

    @staticmethod
    def flags() -> dict[str, FlagArgument]:
        """Return the arguments that are flags of the commands, by name."""
        found = {}
        for each in fields(BuildArgs):
            kind, *annotations = get_args(each.type) or (each.type,)
            flag = next((x for x in annotations if isinstance(x, Flag)), None)
            limits = next((x for x in annotations if isinstance(x, Range)), None)
            if flag is not None:
                found[each.name] = FlagArgument(flag, kind, each.default, limits)
        return found
