"""LoRA adapters in folders, as PEFT saves them, opened and checked.

In: a folder with adapter_config.json and adapter_model.safetensors (or .bin, of which only tensors
are read), and the sizes of the base model. Out: an `Adapter` with an `Update` for each tensor of
the base model that it changes, by Meta's name. Every tensor of the file is part of an update, or a
ValueError names it. The weights of the base model are not read.

Shapes: N rows and K columns of a weight of the base model, R the rank.
"""

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Size, Tensor

from llama.build_args import lora_paths
from llama.checkpoint.file_tensors import titles_of_modules
from llama.checkpoint.files import open_tensors
from llama.checkpoint.lora.config import (
    CONFIG_FILE,
    AdapterConfig,
    names_module,
    read_config,
)
from llama.checkpoint.lora.ends import TIED, stays_tied, token_ids_of, vocab_size_of
from llama.checkpoint.lora.merging import LowRank, TokenRows, Update
from llama.checkpoint.table import whole_shapes
from llama.common.checks import brief, errors_in
from llama.model.args import ModelArgs
from llama.storage.downloads import check_utf8
from llama.storage.hub import model_folder
from llama.weights.plain import all_finite

_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# The ends of the tensors' names, and what they are. The last ones are ends of others.
_ROLES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".token_adapter.trainable_tokens_delta": "tokens",
    ".token_adapter.base_layer.weight": "weight",
    ".base_layer.weight": "weight",
    ".modules_to_save.weight": "saved",
    ".original_module.weight": "original",
    ".weight": "weight",
}
_HASHED_BYTES = 1 << 20  # bytes that are hashed at a time


@dataclass(frozen=True)
class Adapter:
    """An adapter whose configuration and tensors fit a base model.

    Attributes:
        folder: Its folder.
        weights_path: The file of its tensors.
        config: Its configuration.
        updates: What it changes, by Meta's name of the tensor.
        vocab_size: The rows of the model's embedding and lm_head after it.
        unties: Whether embedding and lm_head, if they were one matrix, are two after it.
    """

    folder: Path
    weights_path: Path
    config: AdapterConfig
    updates: dict[str, Update]
    vocab_size: int
    unties: bool

    def digest(self) -> str:
        """Return the SHA-256 of its configuration and its tensors."""
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG_FILE, self.weights_path):
            with path.open("rb", buffering=0) as file:
                while block := file.read(_HASHED_BYTES):
                    digest.update(block)
        return digest.hexdigest()


def open_adapters(
    lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None, params: ModelArgs
) -> tuple[Adapter, ...]:
    """Open the adapters that a build or a conversion names.

    Args:
        lora: As for `build`: folders or names of downloads, a text of which commas separate.
        params: The sizes of the base model.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: An adapter is damaged, does not fit the model, or cannot be merged.
    """
    adapters: list[Adapter] = []
    for path in lora_paths(lora):
        adapters.append(_open(model_folder(path), params))
        params = replace(params, vocab_size=adapters[-1].vocab_size)
    return tuple(adapters)


def _open(folder: Path, params: ModelArgs) -> Adapter:
    """Open one adapter: first its configuration, then its tensors, which are read whole."""
    check_utf8(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"lora={folder} is not a folder: give the folder of an adapter, which holds "
            f"{CONFIG_FILE} and {_WEIGHT_FILES[0]}"
        )
    config = read_config(folder / CONFIG_FILE)
    weights_path = _weights_path(folder)
    # A tied lm_head has a shape as well: a change of it alone unties it.
    shapes = whole_shapes(replace(params, tied_output=False))
    tensors = {name: tensor.data for name, tensor in open_tensors(weights_path).items()}
    with errors_in(f"{weights_path} (made for {config.base_model})"):
        known = _names_by_title(shapes, params)
        modules = _modules(tensors, known)
        _check_names(modules, config, known)
        ends = {module.name: module.tensors for module in modules if module.name in TIED}
        vocab_size = vocab_size_of(ends, config, params)
        for name in TIED:
            shapes[name] = Size([vocab_size, params.dim])
        updates = {module.name: module.update(config, shapes) for module in modules}
        for name, tensor in tensors.items():
            if not all_finite(tensor):
                raise ValueError(f"{brief(name)} holds NaN or infinity: it was trained so")
        unties = params.tied_output and not stays_tied(updates)
        if unties and config.keeps_tie:
            raise ValueError(
                "ensure_weight_tying is true, and the adapter changes the embedding or lm_head, "
                "which are one matrix in the base model: merge it with PEFT's merge_and_unload, "
                "and give the merged model"
            )
    if params.tied_output and not unties and TIED[0] in updates:
        updates[TIED[1]] = updates[TIED[0]]  # in case that another adapter unties them
    return Adapter(folder, weights_path, config, updates, vocab_size, unties)


def _weights_path(folder: Path) -> Path:
    for name in _WEIGHT_FILES:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{folder} holds no tensors: neither {' nor '.join(_WEIGHT_FILES)} is there; an adapter is "
        "the folder that PEFT's save_pretrained writes"
    )


@dataclass(frozen=True)
class _Module:
    """The tensors of an adapter for one module of the base model.

    Attributes:
        name: Meta's name of the weight.
        title: The module's name in the adapter.
        tensors: The tensors by their roles.
    """

    name: str
    title: str
    tensors: dict[str, Tensor]

    @property
    def has_product(self) -> bool:
        """Whether the weight has a low-rank update."""
        return not self.tensors.keys() <= {"weight", "tokens"}

    def update(self, config: AdapterConfig, shapes: dict[str, Size]) -> Update:
        """Return the update of the weight.

        Args:
            config: The configuration of the adapter.
            shapes: The shapes of the model's weights, by Meta's names.

        Raises:
            ValueError: A tensor is missing, or has a wrong shape or type.
        """
        shape = shapes[self.name]
        weight = self.tensors.get("weight")
        if weight is not None:
            self._check("weight", shape)
        low_rank = self._low_rank(config, shape) if self.has_product else None
        return Update(weight, low_rank, self._tokens(config, shape))

    def _tokens(self, config: AdapterConfig, shape: Size) -> TokenRows | None:
        """Return the rows that were trained alone."""
        values = self.tensors.get("tokens")
        if values is None:
            return None
        if self.has_product:
            raise ValueError(
                f"{self.title} has a low-rank update and rows of tokens: merge it with PEFT's "
                "merge_and_unload, and give the merged model"
            )
        ids, order = torch.tensor(token_ids_of(config, self.name)).sort()
        self._check("tokens", Size([len(ids), shape[1]]))
        return TokenRows(ids, values[order])

    def _low_rank(self, config: AdapterConfig, shape: Size) -> LowRank:
        is_embedding = "embedding_A" in self.tensors or "embedding_B" in self.tensors
        prefix = "embedding_" if is_embedding else ""
        needed = {f"{prefix}A", f"{prefix}B"} | ({"magnitude"} if config.use_dora else set())
        self._check_roles(needed, shape)
        rank = config.rank_of(self.title)
        n, k = shape
        first, second = (n, k) if is_embedding else (k, n)
        self._check(f"{prefix}A", Size([rank, first]))
        self._check(f"{prefix}B", Size([second, rank]))
        a = self.tensors[f"{prefix}A"]
        b = self.tensors[f"{prefix}B"]
        magnitude = self.tensors.get("magnitude")
        if magnitude is not None:
            self._check("magnitude", Size([second]))
        # An embedding is used by rows, so that PEFT stores its product transposed.
        up, down = (a.T, b.T) if is_embedding else (b, a)
        return LowRank(up, down, config.scale_of(self.title), magnitude, is_embedding)

    def _check_roles(self, needed: set[str], shape: Size) -> None:
        """Raise ValueError unless the module has a low-rank update with exactly these tensors."""
        if len(shape) != 2:
            raise ValueError(f"{self.title} has a low-rank update, but it is no matrix")
        roles = self.tensors.keys() - {"weight", "tokens"}
        if "embedding_A" in needed and self.name != TIED[0]:
            raise ValueError(f"{self.title} has the update of an embedding, but it is none")
        missing = sorted(needed - roles)
        if missing:
            raise ValueError(
                f"{self.title} has no tensor lora_{missing[0]} with {', '.join(sorted(roles))}: "
                f"save the whole adapter; use_dora in {CONFIG_FILE} must fit the file"
            )
        unexpected = sorted(roles - needed)
        if unexpected:
            raise ValueError(
                f"{self.title} has a tensor lora_{unexpected[0]}, which {CONFIG_FILE} does not "
                "describe: use_dora must be true where there are magnitudes"
            )

    def _check(self, role: str, expected: Size) -> None:
        """Raise ValueError unless a tensor has a plain float type and the expected shape."""
        tensor = self.tensors[role]
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{self.title}: {role} has type {tensor.dtype}: this runtime merges float32, "
                "bfloat16 and float16 tensors"
            )
        if tensor.shape != expected:
            raise ValueError(
                f"{self.title}: {role} has shape {brief(tuple(tensor.shape))}, but the rank in "
                f"{CONFIG_FILE} and the base model give {tuple(expected)}: the adapter is one of "
                "another model, or of another vocabulary"
            )


def _modules(tensors: dict[str, Tensor], known: dict[str, str]) -> list[_Module]:
    """Return the modules that the tensors of a file belong to.

    Args:
        tensors: The tensors.
        known: Meta's names of weights, see `_names_by_title`.

    Raises:
        ValueError: A tensor belongs to no module of the base model, or to the same as another.
    """
    if not tensors:
        raise ValueError("the file holds no tensors: save the adapter with its tensors")
    modules: dict[str, _Module] = {}
    for tensor_name, tensor in tensors.items():
        title, role = _split(tensor_name)
        name = known.get(title)
        if name is None or not role:
            raise ValueError(
                f"{brief(tensor_name)} is a tensor that cannot be merged into this model: it has "
                "no module of that name, or the tensor is of another method than LoRA or DoRA"
            )
        module = modules.setdefault(name, _Module(name, title, {}))
        if role in module.tensors or module.title != title:
            raise ValueError(f"{brief(tensor_name)} is the second {role} of {name} in the file")
        module.tensors[role] = tensor
    for module in modules.values():
        _drop_copies(module)
    return [module for module in modules.values() if module.tensors]


def _drop_copies(module: _Module) -> None:
    """Leave one of the copies of a weight that PEFT saves with save_embedding_layers=True."""
    module.tensors.pop("original", None)  # the base model's, which the saved one replaces
    saved = module.tensors.pop("saved", None)
    if saved is None:
        return
    weight = module.tensors.setdefault("weight", saved)
    if not torch.equal(weight, saved):
        raise ValueError(
            f"{module.title}.weight and {module.title}.modules_to_save.weight differ: save the "
            "adapter again"
        )


def _names_by_title(shapes: dict[str, Size], params: ModelArgs) -> dict[str, str]:
    """Return Meta's name of a weight by the names that its module can have in an adapter."""
    return {title: name for name in shapes for title in titles_of_modules(name, params)}


def _split(tensor_name: str) -> tuple[str, str]:
    """Return the module of a tensor, and the tensor's role; two empty texts if it has none."""
    if tensor_name.startswith(_PREFIX):
        rest = tensor_name.removeprefix(_PREFIX)
        for end, role in _ROLES.items():
            if rest.endswith(end):
                return rest.removesuffix(end), role
    return "", ""


def _check_names(modules: list[_Module], config: AdapterConfig, known: Collection[str]) -> None:
    """Raise ValueError unless the file holds the modules that the configuration names.

    A module that PEFT would leave out, or whose tensors are missing, would be lost silently.
    """
    updated = [module.title for module in modules if module.has_product]
    replaced = [module.title for module in modules if "weight" in module.tensors]
    with_tokens = [module.title for module in modules if "tokens" in module.tensors]
    for module in modules:
        if module.has_product and not _is_targeted(module, config):
            raise ValueError(
                f"{module.title} has a low-rank update, but target_modules and "
                f"layers_to_transform of {CONFIG_FILE} do not name it"
            )
    for key, ends, titles in (
        ("target_modules", () if config.has_exclusions else config.targets, updated),
        ("modules_to_save", config.modules_to_save, replaced),
        ("trainable_token_indices", tuple(config.token_ids), with_tokens),
    ):
        for end in ends:
            is_known = any(names_module(end, title) for title in known)
            if is_known and not any(names_module(end, title) for title in titles):
                raise ValueError(
                    f"{key} of {CONFIG_FILE} names {brief(end)}, of which the file holds no "
                    "tensor: save the whole adapter"
                )


def _is_targeted(module: _Module, config: AdapterConfig) -> bool:
    """Return whether PEFT gives a module a low-rank update."""
    if config.targets and not any(names_module(end, module.title) for end in config.targets):
        return False
    numbered = re.search(r"(?:^|\.)layers\.(\d+)\.", module.title)
    if config.layers is None or numbered is None:
        return True
    return int(numbered[1]) in config.layers
