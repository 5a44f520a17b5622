"""The tensors of a model's file under the names of its layout, without what wrappers add.

In: a file of weights. Out: its tensors, mapped. torch.compile, FSDP, DistributedDataParallel, PEFT
and modules around a model put parts of their own into the names of a state dict. Layouts and sizes
are not known here.
"""

import re
from pathlib import Path

from llama.checkpoint.files import MappedTensor, open_tensors
from llama.common.checks import brief
from llama.storage.gguf import Header

_ANYWHERE = re.compile(r"(_orig_mod|_fsdp_wrapped_module)\.")
_BEGINNINGS = re.compile(r"(module\.)*(base_model\.model\.)?(model\.(?=model\.|lm_head\.))?")


def open_model_tensors(file: Path | Header) -> dict[str, MappedTensor]:
    """Map the tensors of a model's file, by the names that they have in the model itself.

    Raises:
        OSError: The file cannot be read.
        ValueError: As `open_tensors` does, or two tensors have the same name.
    """
    tensors = open_tensors(file)
    named: dict[str, MappedTensor] = {}
    for name, tensor in tensors.items():
        plain = _ANYWHERE.sub("", name)
        match = _BEGINNINGS.match(plain)
        plain = plain[match.end() if match else 0 :]
        if plain in named:
            raise ValueError(
                f"{tensor.file}: {brief(name)} is the second tensor that is {brief(plain)} in the "
                "model: save the state dict of the model itself"
            )
        named[plain] = tensor
    return named
