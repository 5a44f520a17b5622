"""What a build is asked for: the one table of the arguments of `Llama.build`.

The signature and the help of `Llama.build`, its checks, the flags of the commands with their
LLAMA_* variables, and what ranks compare are made from it. To add an argument, write a field, and
read it where it matters. Nothing here imports torch.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from llama.checks import FieldTypeError, brief, checked_number, limits_of, nearest

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_A = TypeVar("_A")
_T = TypeVar("_T")
_LENGTH = "what fits; in a chat 4096; with the demo model 512"
_QUANTIZE = "round the weights: int8, fp8, int4 (CPU); in a .gguf file q8_0, q4_0"


def _flag(
    default: Any,
    metavar: str,
    meaning: str,
    absent: str = "",
    *,
    limits: tuple[float, float] | None = None,
    may_differ: bool = False,
) -> Any:
    """A field that is a flag too. absent: what None stands for. limits: both included. may_differ:
    each rank may have a value of its own."""
    metadata: dict[str, Any] = {"flag": (metavar, meaning, absent), "may_differ": may_differ}
    return field(default=default, metadata=metadata | ({"limits": limits} if limits else {}))


@dataclass(frozen=True)
class BuildArgs:
    """
    Args:
        ckpt_dir: a folder with Meta's consolidated.NN.pth and params.json, in any number of
            shards, or with Hugging Face's *.safetensors and config.json; or a GGUF file, or a
            folder of one; or the name of a model that `llama download` has fetched.
        tokenizer_path: tokenizer.model, tokenizer.json or a GGUF file. Default: the one beside
            the weights, or in them.
        max_seq_len: the most tokens of prompt and answer. Default: the model's limit, at most
            8,192, or what fits the memory.
        max_batch_size: how many sequences run at once; more wait. Default: 32, on CUDA 256.
        model_parallel_size: ranks that share the model. Default: all processes.
        seed: of calls that give none. Each draws from it and the number of the call: anew in
            the second call, and the same when the program is run again.
        device: "cuda", "mps" or "cpu". Default: the first of these that there is.
        dtype: "bf16", "fp16", "fp32", or the names that torch has for them. Default, also by
            "auto": bf16 where the device has it, else fp16; on the CPU, quantized matrices stay
            as their file has them, unless "bf16" is given.
        quantize: a format that matrices are rounded to while they are loaded.
            "int8" and "fp8" take half the memory of bf16, with a scale per row; "int4" less
            than a third, with a scale and an offset for each 32. The output's matrix is in int8,
            the rest in bf16. The older dtype="int8" means the same.
        kv_cache_memory_bytes: the size of the KV cache on each rank. Default: what is free
            beside the weights, but no more than max_batch_size x max_seq_len tokens.
        kv_cache_dtype: "int8" keeps keys and values in 8 bits, on CPU or CUDA, with a unit for
            each token and head: almost twice the tokens fit. Default, also by "auto": `dtype`.
        timeout_s: the longest wait for another rank, in seconds.
        verify: compare weights with their checksums, in .pth files or checklist.chk, while they
            are loaded; a warning names files without any. See `llama verify`.
        mute_ranks: drop what ranks but 0 print to `sys.stdout`, until `close`; not stderr.
        speculate: "lookup" guesses the next tokens from what the request's text has had, and
            lets one step verify several. The folder, file or name of a smaller model with the
            same vocabulary guesses with that, held in the same dtype and quantize. Answers keep
            their bits in the CPU's kernels (bf16 and quantized), and come sooner where guesses
            are right. Not on CUDA, for now.
        speculate_tokens: the most that are guessed at once.
        speculate_shared: "lookup" may also use the texts of other requests that have ended. How
            fast an answer comes then says something about them.
    """

    ckpt_dir: str
    tokenizer_path: str | None = _flag(
        None, "FILE", "tokenizer file", "the one beside the weights", may_differ=True
    )
    max_seq_len: int | None = _flag(
        None, "N", "most tokens of a prompt and its answer", _LENGTH, limits=(1, 2**31)
    )
    max_batch_size: int | None = _flag(
        None, "N", "sequences that run at once; more wait", "what fits", limits=(1, 2**20)
    )
    model_parallel_size: int | None = _flag(
        None, "N", "ranks that share one model", "all that were started"
    )
    seed: int = _flag(
        1, "N", "of samples; the same command gives the same answers", limits=(0, 2**63 - 1)
    )
    _: KW_ONLY
    device: "str | torch.device | None" = _flag(
        None, "NAME", "cuda, mps or cpu", "the first of these that is there", may_differ=True
    )
    dtype: "str | torch.dtype | None" = _flag(
        None, "NAME", "bf16, fp16 or fp32", "bf16 if the device has it"
    )
    quantize: str | None = _flag(None, "NAME", _QUANTIZE, "as they are")
    kv_cache_memory_bytes: int | None = _flag(
        None, "N", "bytes of the KV cache on each rank", "what fits", limits=(1, 2**60)
    )
    kv_cache_dtype: str | None = _flag(
        None, "NAME", "of the KV cache: int8, half the bytes", "dtype"
    )
    timeout_s: float = _flag(
        600.0, "S", "seconds that a rank waits for another rank", may_differ=True
    )
    verify: bool = _flag(
        False, "", "compare the weights with their checksums while they load", may_differ=True
    )
    mute_ranks: bool = True
    speculate: str | None = _flag(
        None, "NAME", "guess ahead: lookup, in the text; or a draft model", "none"
    )
    speculate_tokens: int = _flag(
        7, "N", "the most tokens that are guessed at once", limits=(1, 64)
    )
    speculate_shared: bool = _flag(False, "", "look up what other requests had, too")

    def checked(self) -> "BuildArgs":
        """The same, with numbers of Python. An error names what is out of its limits, or does not
        go together; what else an argument may be depends on the machine and the files."""
        numbers: dict[str, Any] = {
            name: checked_number(name, getattr(self, name), *limits)
            for name, limits in limits_of(BuildArgs).items()
        }
        for each in fields(BuildArgs):
            if each.type is bool and not isinstance(value := getattr(self, each.name), bool):
                raise FieldTypeError(each.name, f"{each.name}={brief(value)} must be True or False")
        name = self.speculate
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"speculate={brief(name)}: give 'lookup', a draft model, or None")
        if self.speculate_shared and name != "lookup":
            raise ValueError(
                f"speculate_shared looks up what other requests had, and speculate={name!r} looks "
                "nothing up: give speculate='lookup', or leave out speculate_shared"
            )
        return replace(self, **numbers)

    def shared(self) -> dict[str, Any]:
        """What must be the same on every rank, by name."""
        names = [x.name for x in fields(self) if x.metadata and not x.metadata["may_differ"]]
        return {name: getattr(self, name) for name in names}


def taking(arguments: Callable[_P, _A]) -> Callable[[Callable[[_A], _T]], Callable[_P, _T]]:
    """A decorator: what takes such an object takes its fields as arguments, with its help."""
    signature = inspect.signature(arguments)

    def decorate(function: Callable[[_A], _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in signature.parameters:
                    likely = nearest(name, signature.parameters)
                    raise TypeError(f'{function.__qualname__}() has no argument "{name}"{likely}')
            return function(arguments(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{inspect.getdoc(arguments)}"
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate
