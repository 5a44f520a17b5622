"""The argument `speculate`: whether it can be used, and the draft model that it may name.

In: the arguments of `Llama.build` and the files of the model. Out: the files of the draft model, if
there is one, or an error that names `speculate`.
"""

from dataclasses import replace

from llama.build_args import BuildArgs
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.common.checks import FieldError, brief
from llama.loading.files import Files, find_files
from llama.options.speculation.hook import DRAFTERS, kind_of
from llama.tokenizer import Tokenizer

_PROBES = (  # tokenizers that agree on these texts are taken to be the same
    "Hello, world!  The year 1984;\n\n\tdef f(x): return {x: 'é'}",
    "straße, naïve, 日本語, привет, عربى, 🎈 and antidisestablishmentarianism",
)


def check_drafter(args: BuildArgs) -> None:
    """Raise a ValueError for a drafter that cannot be used like this.

    It has no use for the texts that `speculate_shared` offers, or it is a model alongside a
    pipeline.
    """
    name = args.speculate
    kind = kind_of(name)
    if args.pipeline_parallel_size > 1 and name is not None and kind is None:
        raise FieldError.of(
            "speculate",
            f"={brief(name)} is a draft model, which needs pipeline_parallel_size=1: give "
            f"speculate={' or '.join(map(repr, DRAFTERS))}, which works with "
            f"pipeline_parallel_size={args.pipeline_parallel_size}",
        )
    if args.speculate_shared and not (kind and kind.can_share):
        sharing = [repr(known) for known, each in DRAFTERS.items() if each.can_share]
        raise ValueError(
            f"speculate_shared looks up the texts of other requests, and speculate={name!r} "
            f"looks nothing up: give speculate={' or '.join(sharing)}, or leave out "
            "speculate_shared"
        )


def check_speculation(args: BuildArgs, models: list[Files]) -> None:
    """Raise a ValueError for speculation with a model that generates no text."""
    for files in models if args.speculate else ():
        why_silent = files.checkpoint.why_silent
        if why_silent:
            raise FieldError.of(
                "speculate",
                f"={args.speculate!r}: {files.checkpoint.folder} cannot generate: "
                f"{why_silent}; leave out speculate",
            )


def find_draft_files(args: BuildArgs, model: Files, tokenizer: Tokenizer) -> list[Files]:
    """Find the draft model, if `speculate` is one and not a drafter of `DRAFTERS`.

    Raises:
        ValueError: There is no model, or it does not have the model's vocabulary.
    """
    path = args.speculate
    if path is None or kind_of(path) is not None:
        return []
    try:
        # What is rounded depends on the matrices, so a draft model follows its own files.
        activations = "bf16" if args.activations == "bf16" else None
        draft_args = replace(
            args,
            ckpt_dir=str(path),
            activations=activations,
            lora=None,
            pooling=None,
            bidirectional=False,
            pipeline_layers=None,
            images=False,
        )
        files = find_files(draft_args, model.placement, model.device)
        draft_tokenizer = load_tokenizer(files.checkpoint)
    except (OSError, ValueError) as e:
        names = ", ".join(map(repr, DRAFTERS))
        raise FieldError.of(
            "speculate", f"={path!r}, neither {names} nor a draft model: {e}"
        ) from e
    num_tokens = tokenizer.n_words
    num_draft_tokens = draft_tokenizer.n_words
    if num_tokens != num_draft_tokens or _probe(tokenizer) != _probe(draft_tokenizer):
        raise FieldError.of(
            "speculate",
            f"={path!r}: the draft model has another vocabulary ({num_draft_tokens} "
            f"tokens) than the model ({num_tokens}): give one of the same family",
        )
    return [files]


def _probe(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, bos=True, eos=True) for text in _PROBES]
