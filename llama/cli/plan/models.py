"""The model of a plan: its sizes, and how wide its files store a weight.

In: what the user calls the model. Out: a `Model`. No weight is read.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from llama.checkpoint import meta_quantized
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.hf import config as huggingface
from llama.checkpoint.table import num_elements, whole_shapes
from llama.checkpoint.vision import split_config, split_params
from llama.model.args import ModelArgs
from llama.model.shapes import NAMES, args_of
from llama.storage.downloads import read_json
from llama.storage.hub import model_folder


@dataclass(frozen=True)
class Model:
    """The sizes of a model.

    Attributes:
        name: What the user calls it.
        args: Its sizes.
        file_width: Bytes per element of quantized files, which are run as they are; None if the
            files are not quantized.
        file_type: The usual name of their quantization.
        has_files: Whether there is something to load under that name.
    """

    name: str
    args: ModelArgs
    file_width: float | None = None
    file_type: str | None = None
    has_files: bool = False

    @classmethod
    def named(cls, name: str) -> "Model":
        """Find a model: a folder, a GGUF file, a params.json, a config.json, or a usual size.

        Raises:
            OSError, ValueError: There is none, or its files are not sound.
        """
        path = model_folder(name)
        if not path.exists() and name.lower() in NAMES:
            return cls(name.lower(), args_of(name.lower()))
        if not path.exists():
            raise FileNotFoundError(
                f"{name} is neither a file nor a folder nor one of {', '.join(NAMES)}: give one "
                "of these, or fetch a model with llama download NAME"
            )
        if path.suffix == ".json":
            return cls(name, _args_of_file(path))
        try:
            checkpoint = find(path).with_images()
        except FileNotFoundError:
            for file in (path / "config.json", path / "params.json"):
                if file.is_file():
                    return cls(name, _args_of_file(file))
            raise
        return cls.of(name, checkpoint)

    @classmethod
    def of(cls, name: str, checkpoint: Checkpoint) -> "Model":
        """Return a model in files."""
        file_width = None
        if checkpoint.is_quantized or checkpoint.packed is not None:
            num_bytes = sum(file.stat().st_size for file in checkpoint.shards)
            file_width = num_bytes / num_elements(whole_shapes(checkpoint.params))
        return cls(name, checkpoint.params, file_width, checkpoint.file_type, has_files=True)


def _args_of_file(path: Path) -> ModelArgs:
    """Return the sizes in a params.json or a config.json."""
    content = read_json(path)
    source = str(path)
    if "model_type" not in content and "architectures" not in content:
        params, vision = split_params(content, source)
        quantization = meta_quantized.config_of(params, source, 1)
        args = ModelArgs.from_params(params, source=source)
    else:
        config, vision = split_config(content, source)
        quantization = content.get("quantization_config")
        args = huggingface.args_of(config, source=source)
    if quantization is not None:
        raise ValueError(
            f"{path} is that of a quantized model, whose size only its files tell: give the "
            "folder of the files, or the file of the model that was quantized and --quantize"
        )
    if vision is not None and vision.settings:
        args = replace(args, vision=vision.args(source))
    return args
