"""The adapter_config.json of a LoRA adapter, as PEFT writes it.

In: the path of the file. Out: an `AdapterConfig`: ranks, scales and the modules that the adapter
names. A key that would change the result and is not computed here is a ValueError that names it,
and so is a key that is not known, unless its value is empty. No tensor is known here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from llama.common.checks import brief, errors_in, number, whole_number
from llama.model.args import MAX_SIZE
from llama.storage.downloads import read_json

CONFIG_FILE = "adapter_config.json"
_MAX_RANK = 1 << 16
_MAX_ALPHA = 1e9
_MAX_LAYER = 1 << 20
_MATCH_S = 1.0  # seconds in which a pattern must match; a hostile one can take years
# Keys that `read_config` reads.
_READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "init_lora_weights",
    "layers_to_transform",
    "lora_alpha",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
}
# Keys that concern training, or only record where the adapter comes from.
_HARMLESS = {
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Initial values that leave the base model as it is.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
# Prefixes of methods that subtract the initial adapter from the weights of the base model.
_BASE_CHANGES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks, scales and names of modules in an adapter_config.json.

    Attributes:
        rank: The rank of modules that no pattern matches.
        alpha: Their alpha, the numerator of the scale.
        rank_pattern: Ranks by the regular expression of a module's name.
        alpha_pattern: The alphas, likewise.
        use_rslora: Whether the scale is alpha / sqrt(rank) instead of alpha / rank.
        use_dora: Whether every low-rank update has a magnitude.
        targets: The modules with low-rank updates, by the ends of their names; empty where the file
            gives one regular expression.
        has_exclusions: Whether some modules that `targets` names have no update.
        modules_to_save: The modules that were trained whole, by the ends of their names.
        token_ids: The tokens whose rows were trained alone, by the end of the module's name.
        layers: The layers with updates; None for all.
        keeps_tie: Whether embedding and lm_head stay one matrix if the adapter changes it.
        base_model: The name of the base model, for messages. It is often a path of another machine.
    """

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    use_rslora: bool
    use_dora: bool
    targets: tuple[str, ...]
    has_exclusions: bool
    modules_to_save: tuple[str, ...]
    token_ids: dict[str, tuple[int, ...]]
    layers: frozenset[int] | None
    keeps_tie: bool
    base_model: str

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, whose name is that in the base model."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of B and A of a module."""
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def names_module(end: str, module: str) -> bool:
    """Return whether a name in a configuration, such as q_proj, stands for a module."""
    return module == end or module.endswith(f".{end}")


def read_config(path: Path) -> AdapterConfig:
    """Read an adapter_config.json.

    Raises:
        OSError: The file cannot be read.
        ValueError: The adapter is not LoRA, or has a key or value that cannot be merged.
    """
    content = read_json(path)
    with errors_in(str(path)):
        _check_keys(content)
        _check_init(content.get("init_lora_weights"))
        rank = whole_number("r", content.get("r"), 1, _MAX_RANK)
        ranks = _patterns(content, "rank_pattern")
        alphas = _patterns(content, "alpha_pattern")
        return AdapterConfig(
            rank=rank,
            alpha=_alpha("lora_alpha", content.get("lora_alpha")),
            rank_pattern={
                _pattern(key): whole_number(f"rank_pattern[{brief(key)}]", value, 1, _MAX_RANK)
                for key, value in ranks.items()
            },
            alpha_pattern={
                _pattern(key): _alpha(f"alpha_pattern[{brief(key)}]", value)
                for key, value in alphas.items()
            },
            use_rslora=_flag(content, "use_rslora"),
            use_dora=_flag(content, "use_dora"),
            targets=_targets(content.get("target_modules")),
            has_exclusions=bool(content.get("exclude_modules")),
            modules_to_save=_names("modules_to_save", content.get("modules_to_save")),
            token_ids=_token_ids(content.get("trainable_token_indices")),
            layers=_layers(content.get("layers_to_transform")),
            keeps_tie=_flag(content, "ensure_weight_tying"),
            base_model=brief(content.get("base_model_name_or_path")),
        )


def _check_keys(content: dict[str, Any]) -> None:
    """Raise ValueError for another method than LoRA, and for keys that are not computed here."""
    method = content.get("peft_type")
    if method != "LORA":
        raise ValueError(
            f"peft_type is {brief(method)}, and this runtime merges 'LORA' only: merge the adapter "
            "with PEFT's merge_and_unload, and give the merged model"
        )
    if content.get("bias", "none") != "none":
        raise ValueError(
            f"bias is {brief(content['bias'])}: a Llama has no biases, so that only 'none' can be "
            "merged"
        )
    for key, value in content.items():
        if key not in _READ | _HARMLESS and value not in _EMPTY:
            raise ValueError(
                f"{brief(key)} is {brief(value)}: this runtime does not compute what the key asks "
                "for: merge the adapter with PEFT's merge_and_unload, and give the merged model"
            )


def _check_init(init: object) -> None:
    """Raise ValueError for a method after which the adapter fits no published base model."""
    if isinstance(init, str) and init.startswith(_BASE_CHANGES):
        raise ValueError(
            f"init_lora_weights is {brief(init)}, which changes the base model before training, so "
            "that the adapter does not fit the published one: save it with PEFT's "
            "path_initial_model_for_weight_conversion, or give the merged model"
        )
    if not any(init is known or init == known for known in _PLAIN_INITS):
        known_names = ", ".join(map(str, _PLAIN_INITS))
        raise ValueError(
            f"init_lora_weights is {brief(init)}, which this runtime does not know; it merges "
            f"adapters that began with one of {known_names}"
        )


def _flag(content: dict[str, Any], key: str) -> bool:
    value = content.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {brief(value)}, and must be true or false")
    return bool(value)


def _alpha(name: str, value: object) -> float:
    return number(name, value, -_MAX_ALPHA, _MAX_ALPHA)


def _patterns(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} is {brief(value)}, and must be an object")
    return value or {}


def _names(key: str, value: object) -> tuple[str, ...]:
    """Return a list of names; None stands for an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} is {brief(value)}, and must be a list of names")
    return tuple(value)


def _targets(value: object) -> tuple[str, ...]:
    """Return target_modules. A regular expression is not run: the tensors say what it matched."""
    return () if isinstance(value, str) else _names("target_modules", value)


def _token_ids(value: object) -> dict[str, tuple[int, ...]]:
    """Return trainable_token_indices; a list is that of the embedding."""
    key = "trainable_token_indices"
    by_module = value if isinstance(value, dict) else {"embed_tokens": value or []}
    token_ids = {}
    for module, ids in by_module.items():
        if not isinstance(ids, list) or len({str(x) for x in ids}) < len(ids):
            raise ValueError(f"{key} is {brief(value)}, and must be a list of different tokens")
        if ids:
            token_ids[module] = tuple(whole_number(key, x, 0, MAX_SIZE - 1) for x in ids)
    return token_ids


def _layers(value: object) -> frozenset[int] | None:
    if value is None:
        return None
    indices = value if isinstance(value, list) else [value]
    name = "layers_to_transform"
    return frozenset(whole_number(name, index, 0, _MAX_LAYER) for index in indices)


def _pattern(key: str) -> str:
    """Return a key of a pattern if it is a regular expression."""
    try:
        regex.compile(key)
    except regex.error as e:
        raise ValueError(f"the pattern {brief(key)} is no regular expression ({e})") from e
    return key


def _first_match(patterns: Sequence[str] | dict[str, Any], module: str) -> str:
    """Return the first pattern that matches a module's name or its end, as PEFT does; else ""."""
    for pattern in patterns:
        try:
            if regex.match(rf"(.*\.)?({pattern})$", module, timeout=_MATCH_S):
                return pattern
        except TimeoutError:
            raise ValueError(
                f"the pattern {brief(pattern)} of {CONFIG_FILE} takes too long to match {module}: "
                "give the name of the module instead"
            ) from None
    return ""
