"""LoRA adapters in folders, as PEFT saves them, opened and checked.

In: a folder with adapter_config.json and adapter_model.safetensors (or .bin, of which only tensors
are read), and the sizes of the base model. Out: an `Adapter` with an `Update` for each tensor of
the base model that it changes, by Meta's name. Every tensor of the file is part of an update, or a
ValueError names it. The weights of the base model are not read.

Shapes: N rows and K columns of a weight of the base model, R the rank.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Size, Tensor

from llama.build_args import lora_paths
from llama.checkpoint.files import open_tensors
from llama.checkpoint.lora.config import (
    CONFIG_FILE,
    AdapterConfig,
    names_module,
    read_config,
)
from llama.checkpoint.lora.merging import LowRank, Update
from llama.checkpoint.table import name_in, whole_shapes
from llama.common.checks import brief, errors_in
from llama.model.args import ModelArgs
from llama.storage.downloads import check_utf8
from llama.storage.hub import model_folder
from llama.weights.plain import all_finite

TIED = ("tok_embeddings.weight", "output.weight")  # the matrices that can be one
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_INNER = "model."  # absent from the names of a model without lm_head, as LLM2Vec has it
# The ends of the tensors' names, and what they are. The last one is an end of others.
_ROLES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".base_layer.weight": "weight",
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
    """

    folder: Path
    weights_path: Path
    config: AdapterConfig
    updates: dict[str, Update]

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
    return tuple(_open(model_folder(path), params) for path in lora_paths(lora))


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
        modules = _modules(tensors, shapes)
        _check_names(modules, config, shapes)
        updates = {module.name: module.update(config) for module in modules}
        for name, tensor in tensors.items():
            if not all_finite(tensor):
                raise ValueError(f"{brief(name)} holds NaN or infinity: train or fetch it again")
        _check_tie(updates, config, params)
    return Adapter(folder, weights_path, config, updates)


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
        shape: The shape of the weight.
        tensors: The tensors by their roles.
    """

    name: str
    title: str
    shape: Size
    tensors: dict[str, Tensor]

    @property
    def has_product(self) -> bool:
        """Whether the weight has a low-rank update."""
        return self.tensors.keys() != {"weight"}

    def update(self, config: AdapterConfig) -> Update:
        """Return the update of the weight.

        Raises:
            ValueError: A tensor is missing, or has a wrong shape or type.
        """
        weight = self.tensors.get("weight")
        if weight is not None:
            self._check("weight", self.shape)
        return Update(weight, self._low_rank(config) if self.has_product else None)

    def _low_rank(self, config: AdapterConfig) -> LowRank:
        is_embedding = "embedding_A" in self.tensors or "embedding_B" in self.tensors
        prefix = "embedding_" if is_embedding else ""
        needed = {f"{prefix}A", f"{prefix}B"} | ({"magnitude"} if config.use_dora else set())
        self._check_roles(needed)
        rank = config.rank_of(self.title)
        n, k = self.shape
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

    def _check_roles(self, needed: set[str]) -> None:
        """Raise ValueError unless the module has a low-rank update with exactly these tensors."""
        if len(self.shape) != 2:
            raise ValueError(f"{self.title} has a low-rank update, but it is no matrix")
        roles = self.tensors.keys() - {"weight"}
        if "embedding_A" in needed and self.name != TIED[0]:
            raise ValueError(f"{self.title} has the update of an embedding, but it is none")
        missing = sorted(needed - roles)
        if missing:
            raise ValueError(
                f"{self.title} has no tensor lora_{missing[0]}, beside {', '.join(sorted(roles))}: "
                f"fetch the adapter again; use_dora in {CONFIG_FILE} must fit the file"
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


def _modules(tensors: dict[str, Tensor], shapes: dict[str, Size]) -> list[_Module]:
    """Return the modules that the tensors of a file belong to.

    Raises:
        ValueError: A tensor belongs to no module of the base model, or to the same as another.
    """
    if not tensors:
        raise ValueError("the file holds no tensors: fetch the adapter again")
    known = _names_by_title(shapes)
    modules: dict[str, _Module] = {}
    for tensor_name, tensor in tensors.items():
        title, role = _split(tensor_name)
        name = known.get(title)
        if name is None or not role:
            raise ValueError(
                f"{brief(tensor_name)} is a tensor that cannot be merged into this model: it has "
                "no module of that name, or the tensor is of another method than LoRA or DoRA"
            )
        module = modules.setdefault(name, _Module(name, title, shapes[name], {}))
        if role in module.tensors or module.title != title:
            raise ValueError(f"{brief(tensor_name)} is the second {role} of {name} in the file")
        module.tensors[role] = tensor
    return list(modules.values())


def _names_by_title(shapes: dict[str, Size]) -> dict[str, str]:
    """Return Meta's name of a weight by the name of its module, with and without `model.`."""
    known = {}
    for name in shapes:
        title = name_in("hf", name).removesuffix(".weight")
        known[title] = name
        known[title.removeprefix(_INNER)] = name
    return known


def _split(tensor_name: str) -> tuple[str, str]:
    """Return the module of a tensor, and the tensor's role; two empty texts if it has none."""
    if tensor_name.startswith(_PREFIX):
        rest = tensor_name.removeprefix(_PREFIX)
        for end, role in _ROLES.items():
            if rest.endswith(end):
                return rest.removesuffix(end), role
    return "", ""


def _check_names(modules: list[_Module], config: AdapterConfig, shapes: dict[str, Size]) -> None:
    """Raise ValueError unless the file holds the modules that the configuration names.

    A module that PEFT would leave out, or whose tensors are missing, would be lost silently.
    """
    updated = [module.title for module in modules if module.has_product]
    replaced = [module.title for module in modules if "weight" in module.tensors]
    for module in modules:
        if module.has_product and not _is_targeted(module, config):
            raise ValueError(
                f"{module.title} has a low-rank update, but target_modules and "
                f"layers_to_transform of {CONFIG_FILE} do not name it"
            )
    known = _names_by_title(shapes)
    for key, ends, titles in (
        ("target_modules", () if config.has_exclusions else config.targets, updated),
        ("modules_to_save", config.modules_to_save, replaced),
    ):
        for end in ends:
            is_known = any(names_module(end, title) for title in known)
            if is_known and not any(names_module(end, title) for title in titles):
                raise ValueError(
                    f"{key} of {CONFIG_FILE} names {brief(end)}, of which the file holds no "
                    "tensor: fetch or save the adapter again"
                )


def _is_targeted(module: _Module, config: AdapterConfig) -> bool:
    """Return whether PEFT gives a module a low-rank update."""
    if config.targets and not any(names_module(end, module.title) for end in config.targets):
        return False
    parts = module.name.split(".")
    if config.layers is None or parts[0] != "layers":
        return True
    return int(parts[1]) in config.layers


def _check_tie(updates: dict[str, Update], config: AdapterConfig, params: ModelArgs) -> None:
    """Raise ValueError where embedding and lm_head must stay one matrix and would not."""
    if config.keeps_tie and params.tied_output and not updates.keys().isdisjoint(TIED):
        raise ValueError(
            "ensure_weight_tying is true, and the adapter changes the embedding or lm_head, which "
            "are one matrix in the base model: merge it with PEFT's merge_and_unload, and give the "
            "merged model"
        )
