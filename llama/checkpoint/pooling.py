"""Settings for embeddings and scores of whole prompts in the files of a checkpoint.

In: the content of config.json, and the files alongside it that sentence-transformers writes. Out:
`PoolingSettings`: which hidden states make the vector of a prompt, the texts that are put before
inputs, and the labels of a classification head. No tensor is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from llama.common.checks import brief, errors_in, whole_number
from llama.storage.downloads import parse_json, read_json, read_small

PoolingKind = Literal["last", "mean", "first"]
TokenTemplate = tuple[str | int, ...]  # names of special tokens, and indices of texts
HEAD = "score.weight"  # the matrix of a classification head, (labels, E)

# Values of "pooling" in config.json, and of "pooling_mode" in 1_Pooling/config.json.
_KINDS: dict[str, PoolingKind] = {
    "avg": "mean",
    "mean": "mean",
    "last": "last",
    "lasttoken": "last",
    "cls": "first",
}
_FLAGS: dict[str, PoolingKind] = {  # switches of 1_Pooling/config.json
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}
_BIDIRECTIONAL = "LlamaBidirectional"  # begins the names of NVIDIA's classes
_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = ("LlamaModel", "LlamaBidirectionalModel")
_MODULES = ("Transformer", "Pooling", "Normalize")  # modules of sentence-transformers
_IDENTITY = "Identity"
_MAX_NAMED = 8  # labels and prompts that a description names
_MEANINGS = {"mean": "the mean of all tokens", "last": "the last token", "first": "the first token"}
# The prompt of NVIDIA's rerankers, which is in their model cards alone.
_NVIDIA_PAIR = "question:{query} \n \n passage:{document}"


@dataclass(frozen=True)
class HeadSettings:
    """The classification head of a model.

    Attributes:
        labels: The name of each label; empty where the files name none.
        is_multi_label: Whether each label has a probability of its own.
        has_activation: Whether the score of a pair is a probability, as in sentence-transformers'
            cross-encoders by default, and not the logit itself.
    """

    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    has_activation: bool = True


@dataclass(frozen=True)
class PoolingSettings:
    """How a model embeds and scores whole prompts.

    Attributes:
        kind: The states that make the vector of a prompt; None if the files do not say it.
        include_prompt: Whether a mean has the states of the text that is put before an input.
        prompts: Texts to put before inputs, by their names.
        default_prompt: The name of the text that is used where the caller names none.
        architecture: The name of the model's class in transformers; empty if it is unknown.
        has_lm_head: Whether the files have an lm_head, which generation needs.
        head: The classification head; None: the model has none.
        text: The special tokens around a text, by their names; 0 is the text. None: the token that
            begins a text comes before it.
        pair: The same for a pair of texts, which are 0 and 1.
        max_tokens: The number of tokens that a text is cut to; None: a longer one is an error.
        lowers: Whether it changes texts to lower case.
        pair_template: A text in which {query} and {document} stand for a pair; None: `pair` says
            how it is written.
    """

    kind: PoolingKind | None = None
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str | None = None
    architecture: str = ""
    has_lm_head: bool = True
    head: HeadSettings | None = None
    text: TokenTemplate | None = None
    pair: TokenTemplate | None = None
    pair_template: str | None = None
    max_tokens: int | None = None
    lowers: bool = False

    def describe(self) -> str:
        """Return what the model does with whole prompts; empty if its files say nothing of it."""
        parts = []
        if self.head is not None:
            names = ", ".join(self.head.labels[:_MAX_NAMED])
            parts.append(f"labels texts ({names})" if names else "labels texts")
        elif self.kind is not None:
            parts.append("embeds texts")
        if self.kind is not None:
            parts.append(f"by {_MEANINGS[self.kind]}")
        if self.prompts:
            parts.append(f"with the prompts {', '.join(list(self.prompts)[:_MAX_NAMED])}")
        return " ".join(parts)


GENERATES = PoolingSettings()  # a checkpoint whose files say nothing of embeddings


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether a token attends only to those before it, by the content of config.json."""
    is_named = _architecture(config).startswith(_BIDIRECTIONAL)
    return config.get("is_causal") is not False and not is_named


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the name of the model's class; empty if config.json has none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def settings_of(folder: Path, config: Mapping[str, Any]) -> PoolingSettings:
    """Return what a folder of Hugging Face's layout says about embeddings and scores.

    sentence-transformers' own files count before the key "pooling" of config.json, and that before
    the architecture.

    Args:
        folder: The folder.
        config: The content of its config.json.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file asks for something that this runtime does not compute.
    """
    architecture = _architecture(config)
    has_head = architecture in (f"Llama{_CLASSIFIER}", f"{_BIDIRECTIONAL}{_CLASSIFIER}")
    prompts, default_prompt = _prompts(folder)
    kind, include_prompt = _kind(folder, config)
    if kind is None and has_head and is_causal(config):
        kind = "last"
    if kind == "first" and is_causal(config):
        raise ValueError(
            f"{folder}: the pooling of this model is that of the first token, which in a causal "
            "model has seen no other token: its vector would be the same for every text"
        )
    has_lm_head = not has_head and architecture not in _HEADLESS
    text, pair = (None, None) if has_lm_head and kind is None else _templates(folder)
    max_tokens, lowers = _text_settings(folder)
    return PoolingSettings(
        max_tokens=max_tokens,
        lowers=lowers,
        kind=kind,
        include_prompt=include_prompt,
        prompts=MappingProxyType(prompts),
        default_prompt=default_prompt,
        architecture=architecture,
        has_lm_head=has_lm_head,
        head=_head(config) if has_head else None,
        text=text,
        pair=pair,
        pair_template=_NVIDIA_PAIR
        if has_head and architecture.startswith(_BIDIRECTIONAL)
        else None,
    )


def _text_settings(folder: Path) -> tuple[int | None, bool]:
    """Return how sentence-transformers changes a text: its maximum of tokens, and its case."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None, False
    content = read_json(path)
    with errors_in(str(path)):
        length = content.get("max_seq_length")
        lowers = content.get("do_lower_case") or False
        if not isinstance(lowers, bool):
            raise ValueError(f"do_lower_case={brief(lowers)} must be true or false")
        return whole_number("max_seq_length", length, 1, 2**31 - 1, optional=True), lowers


def _kind(folder: Path, config: Mapping[str, Any]) -> tuple[PoolingKind | None, bool]:
    """Return the pooling that the files ask for, and whether a mean has the prompt's states."""
    _check_modules(folder)
    path = folder / "1_Pooling" / "config.json"
    if path.is_file():
        return _kind_of_module(path)
    pooling = config.get("pooling")
    if pooling is None:
        return None, True
    if not isinstance(pooling, str) or pooling not in _KINDS:
        raise ValueError(f"{folder / 'config.json'}: {_unknown('pooling', pooling)}")
    return _KINDS[pooling], True


def _kind_of_module(path: Path) -> tuple[PoolingKind, bool]:
    """Return the pooling of sentence-transformers' 1_Pooling/config.json."""
    content = read_json(path)
    modes = content.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key for key, value in content.items() if key.startswith(prefix) and value is True]
        known: Mapping[str, PoolingKind] = _FLAGS
    else:
        modes = modes if isinstance(modes, list) else [modes]
        known = _KINDS
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"{path}: {_unknown('the pooling', modes)}")
    return known[modes[0]], content.get("include_prompt") is not False


def _unknown(name: str, value: object) -> str:
    return (
        f"{name} is {brief(value)}, and this runtime knows the mean, the last and the first token"
    )


def _check_modules(folder: Path) -> None:
    """Raise a ValueError for modules of sentence-transformers that change the vector."""
    path = folder / "modules.json"
    if not path.is_file():
        return
    modules = parse_json(path, read_small(path))
    if not isinstance(modules, list):
        raise ValueError(f"{path} must hold a list of modules, not {brief(modules)}")
    for module in modules:
        name = str(module.get("type") if isinstance(module, dict) else module)
        if name.rpartition(".")[2] not in _MODULES:
            raise ValueError(
                f"{path}: the module {brief(name)} changes the embeddings, and this runtime knows "
                f"{', '.join(_MODULES)}: run this model with sentence-transformers"
            )


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the texts that sentence-transformers puts before inputs, and the default's name."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    content = read_json(path)
    prompts = content.get("prompts") or {}
    default = content.get("default_prompt_name")
    is_table = isinstance(prompts, dict) and all(isinstance(x, str) for x in prompts.values())
    if not is_table or (default is not None and default not in [*prompts]):
        raise ValueError(
            f"{path}: prompts is {brief(prompts)} and default_prompt_name {brief(default)}: the "
            "first must map names to texts, and the second be one of these names"
        )
    return prompts, default


def _templates(folder: Path) -> tuple[TokenTemplate | None, TokenTemplate | None]:
    """Return the special tokens around a text and a pair, as a tokenizer.json has them."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None, None
    processor = read_json(path).get("post_processor")
    processors = [processor]
    if isinstance(processor, dict) and isinstance(processor.get("processors"), list):
        processors = processor["processors"]
    for each in processors:
        if isinstance(each, dict) and each.get("type") == "TemplateProcessing":
            return _template(path, each.get("single")), _template(path, each.get("pair"))
    return (0,), (0, 1)


def _template(path: Path, parts: object) -> TokenTemplate:
    """Return a template of a TemplateProcessing, whose texts are called A and B."""
    template: list[str | int] = []
    for part in parts if isinstance(parts, list) else [parts]:
        match part:
            case {"Sequence": {"id": "A" | "B" as name}}:
                template.append("AB".index(name))
            case {"SpecialToken": {"id": str(name)}}:
                template.append(name)
            case _:
                raise ValueError(
                    f"{path}: the post_processor has {brief(part)}, which is no part of a template"
                )
    return tuple(template)


def _head(config: Mapping[str, Any]) -> HeadSettings:
    """Return the labels of a classification head, as config.json has them."""
    names = config.get("id2label")
    labels: tuple[str, ...] = ()
    if isinstance(names, dict):
        labels = tuple(str(names.get(str(i))) for i in range(len(names)))
    cross_encoder = config.get("sentence_transformers")
    activation = cross_encoder.get("activation_fn") if isinstance(cross_encoder, dict) else None
    return HeadSettings(
        labels=labels,
        is_multi_label=config.get("problem_type") == "multi_label_classification",
        has_activation=str(activation).rpartition(".")[2] != _IDENTITY,
    )
