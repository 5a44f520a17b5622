"""The arguments of `Llama.build`, in one table.

The signature and the help of `Llama.build`, its checks, the flags of the commands with their
LLAMA_* variables, and the values that ranks compare are made from it. To add an argument, add a
field here, and read it where it matters.

It imports neither torch nor pydantic: every command, `llama --help` too, reads it for its flags.
The file has over 400 lines because it is one table.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from llama.common.checks import (
    FieldError,
    FieldTypeError,
    brief,
    checked_number,
    index_of,
    limits_of,
    nearest,
)

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_A = TypeVar("_A")
_T = TypeVar("_T")
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
    """Arguments of `Llama.build`.

    Args:
        ckpt_dir: a folder with Meta's consolidated.NN.pth and params.json, in any number of
            shards, or with Hugging Face's *.safetensors and config.json; or a GGUF file, or a
            folder that holds one; or the name of a model that `llama download` has fetched.
        tokenizer_path: a tokenizer.model, a tokenizer.json or a GGUF file. Default: the tokenizer
            that lies beside the weights, or inside them.
        chat_template: the file of a Jinja chat template that replaces the model's own, or "llama3"
            for Meta's format. Default: the template in the model's files, if they hold one.
        max_seq_len: the maximum number of tokens of a prompt and its answer together. Default: the
            model's own limit, but no more than 8,192 and no more than fits the memory.
        max_batch_size: the number of sequences that run at once; further sequences wait.
            Default: 32, and 256 on CUDA.
        model_parallel_size: the number of ranks that share each layer. Default: all processes, or
            all of a pipeline stage.
        seed: the seed of calls that give none. Each call draws from this seed and from its own
            number: a second call draws new samples, and a second run of the program the same.
        pipeline_parallel_size: the number of pipeline stages that divide the layers, each with
            model_parallel_size ranks. Only hidden states cross from one stage to the next: use
            stages between machines, and between GPUs without NVLink. Several steps are in
            flight, so that all stages work at once if several sequences run.
        pipeline_layers: the number of layers of each stage, such as "10,6" or [10, 6], beginning
            with the stage that has the first layers: for stages of unequal speed or memory.
            Default: so that all stages take as long for a step that generates, with the lm_head.
        device: "cuda", "mps" or "cpu". Default: the first of these that is available.
        dtype: "bf16", "fp16" or "fp32", or torch's names for them. Default, and also "auto": bf16
            where the device supports it, else fp16. On the CPU quantized matrices stay as their
            file has them, unless "bf16" is given.
        quantize: the format that matrices are quantized to while they are loaded. "int8" and "fp8"
            take half the memory of bf16, with one scale per row; "int4" takes less than a third,
            with a scale and an offset for each group of 32. The lm_head is quantized to int8, and
            the rest of the model stays in bf16. The older dtype="int8" means the same.
        activations: "int8" also rounds the inputs of each layer's matrices on the CPU, with one
            scale for each group of 32, if the elements of these matrices are whole numbers, as they
            are with quantize="int8" or "int4" and in most quantized files: prompts and batches take
            a third less time. lm_head is multiplied as before. "int8_lm_head" rounds its
            inputs, too, and computes the largest logits of each row again without rounding.
            "int8_token" has one scale per token instead, which loses more. "fp8" is for
            quantize="fp8" on NVIDIA GPUs of compute capability 8.9 and up: in steps of more than
            256 tokens the inputs are rounded to e4m3, with one scale per token. "bf16" rounds none.
            Default: as W8A8 files ask, which is "int8_token", and otherwise "bf16".
        lora: LoRA or DoRA adapters in PEFT's format that are merged into the weights while these
            are loaded: the folder of one, several with commas between them, or a list, which are
            merged in order. The result is a model like any other, so that it takes no longer to
            run. Quantized weights must not keep their codes: give dtype="bf16", too.
        shares: the relative share of the model that each rank of a group holds, such as "3,2,2" or
            [3, 2, 2], in whole numbers: for GPUs with unequal memory or speed. Whole key-value
            heads, or query heads where there are more ranks, are dealt to the ranks, so that the
            shares are met as far as the heads allow. On a CPU the ranks of a machine divide its
            cores and its memory in the same way. "memory" measures the free memory of each rank's
            device, and "speed" the rate at which each reads memory; the result is printed.
            With "memory", ranks with more heads or less memory hold fewer feed-forward columns, so
            that the KV cache has more tokens. Default: equal shares.
        ffn_shares: the same for the feed-forward columns alone, in whole numbers. Default: those of
            `shares`, or with shares="memory" what that measures.
        kv_cache_memory_bytes: the size of the KV cache on each rank. Default: the memory that is
            left beside the weights, but no more than max_batch_size x max_seq_len tokens need.
        kv_cache_dtype: "int8" stores the KV cache in int8, on CPU or CUDA, with one scale per token
            and head: almost twice as many tokens fit. Default, and also "auto": `dtype`.
        timeout_s: the maximum time that a rank waits for another rank, in seconds.
        reasoning_parser: "deepseek_r1" says that answers may begin with reasoning between <think>
            and </think>; "none" leaves the text of answers as the model writes it. Default, "auto":
            the model's tokens and its chat template tell.
        tool_call_parser: the format of the tool calls of a model with a chat template of its own:
            "hermes", "llama3_json", "xlam", "nemotron", "functionary", "pythonic" or "none".
            Default, "auto": as the template writes them.
        verify: compare the weights with their checksums, in .pth files or checklist.chk, while they
            are loaded. A warning names files without a checksum. See `llama verify`.
        pooling: how embeddings make a vector of a text: "last" takes the hidden state of the last
            token, "mean" the mean of all. Default: as the model's files say.
        bidirectional: let each token attend to its whole text, as models need that were trained so
            and whose files do not say it (LLM2Vec). Such a model makes embeddings and generates
            nothing.
        mute_ranks: drop what ranks other than 0 print to `sys.stdout`, until `close`. Their stderr
            is not affected.
        verbose: print "Loaded in ... seconds", with a summary of the model, to stdout on rank 0.
        speculate: "lookup" drafts the next tokens by looking up earlier occurrences of the end of
            the text, and one step verifies several drafted tokens. The folder, file or name of a
            smaller model with the same vocabulary drafts with that model, which is loaded in the
            same dtype and quantize. Answers stay the same bit for bit with the CPU kernels (bf16
            and quantized weights). Steps do not overlap on CUDA while speculation is on.
        speculate_tokens: the maximum number of tokens drafted per step.
        speculate_shared: "lookup" may also use the texts of other requests that have ended. The
            speed of an answer then reveals something about them.
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


def taking(arguments: Callable[_P, _A]) -> Callable[[Callable[[_A], _T]], Callable[_P, _T]]:
    """Decorate a function of one such object so that it takes the object's fields as arguments.

    The decorated function has the signature of `arguments`, and its docstring continues with the
    docstring of `arguments`, without the first line.
    """
    signature = inspect.signature(arguments)
    help_text = (inspect.getdoc(arguments) or "").partition("\n\n")[2]

    def decorate(function: Callable[[_A], _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in signature.parameters:
                    likely = nearest(name, signature.parameters)
                    raise TypeError(f'{function.__qualname__}() has no argument "{name}"{likely}')
            return function(arguments(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{help_text}"
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate
