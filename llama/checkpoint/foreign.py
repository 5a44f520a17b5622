"""Folders that hold weights in a form that is not read here.

In: a folder without weights that are read. Out: the error that names what is there, and what to do
with it. Only the names of files are looked at.
"""

from pathlib import Path
from typing import NamedTuple


class _Form(NamedTuple):
    """A form of weights.

    Attributes:
        pattern: The files or folders that show it.
        name: What it is.
        remedy: What to do; {path} is the first of these files, {folder} the folder.
    """

    pattern: str
    name: str
    remedy: str


_DCP = (
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {parent} model.pt, then "
    "save its tensors with transformers' save_pretrained"
)
_FORMS = (
    _Form(
        "adapter_config.json",
        "a LoRA adapter, and no model",
        "give the folder of its base model, and this one as lora={folder} (--lora {folder})",
    ),
    _Form(
        "checkpoint-*/*.safetensors",
        "the output of a Trainer",
        "give the folder of one checkpoint, such as {parent}",
    ),
    _Form(
        "checkpoint-*/pytorch_model*.bin",
        "the output of a Trainer",
        "give the folder of one checkpoint, such as {parent}",
    ),
    _Form(
        "pytorch_model_fsdp*/*.distcp",
        "a checkpoint of accelerate's FSDP",
        "convert it: accelerate merge-weights {parent} {folder}",
    ),
    _Form("*.distcp", "a checkpoint of torch.distributed.checkpoint", f"convert it: {_DCP}"),
    _Form("*/*.distcp", "a checkpoint of torch.distributed.checkpoint", f"convert it: {_DCP}"),
    _Form(
        "zero_to_fp32.py",
        "a checkpoint of DeepSpeed",
        "convert it: python {path} {folder} OUT --safe_serialization",
    ),
    _Form(
        "global_step*/*model_states.pt",
        "a checkpoint of DeepSpeed",
        "convert it: python -m deepspeed.utils.zero_to_fp32 {folder} OUT --safe_serialization",
    ),
    _Form(
        "meta_model_*.pt",
        "torchtune's files with Meta's names",
        "rename {path} to consolidated.00.pth, with Meta's params.json next to it",
    ),
    _Form(
        "hf_model_*.pt",
        "torchtune's files with Hugging Face's names",
        "rename each to pytorch_model-NNNNN-of-NNNNN.bin, with config.json next to them",
    ),
    _Form(
        "consolidated*.safetensors",
        "safetensors with Meta's names",
        "get the folder with model*.safetensors and config.json, or Meta's .pth files",
    ),
    _Form(
        "tf_model.h5", "weights for TensorFlow", "save the model with transformers' save_pretrained"
    ),
    _Form("flax_model*.msgpack", "weights for Flax", "save it with transformers' save_pretrained"),
)


def describe_foreign(folder: Path) -> str:
    """Return what a folder holds, with the remedy; empty if that is not known."""
    for form in _FORMS:
        for path in sorted(folder.glob(form.pattern)):
            remedy = form.remedy.format(path=path, folder=folder, parent=path.parent)
            return f"{folder} holds {form.name} ({path.relative_to(folder)}): {remedy}"
    return ""
