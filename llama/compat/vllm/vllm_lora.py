"""vLLM's `LoRARequest`, and the adapter that it stands for in a `Llama`.

In: what a client of vLLM gives as `lora_request`. Out: names of loaded adapters. An adapter is
loaded at the first request that names it.
"""

from dataclasses import dataclass
from typing import Any

from llama.api import Llama
from llama.common.checks import brief, whole_number


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, as in vLLM.

    Attributes:
        lora_name: The name of the adapter.
        lora_int_id: vLLM's number of the adapter, from 1; it has no effect here.
        lora_path: Its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        whole_number("lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}={brief(value)} must be a text that is not empty")

    @property
    def name(self) -> str:
        """The name, as in vLLM."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The folder, as in vLLM."""
        return self.lora_path


def adapters_of(llama: Llama, lora_request: Any) -> list[str | None]:
    """Return the name of the adapter of each request; load those that are not loaded.

    Under torchrun every rank makes this call.

    Args:
        llama: The model.
        lora_request: A `LoRARequest`, None, or a list of these. One that is no list gives one name.

    Raises:
        TypeError: It is something else.
        ValueError: An adapter cannot be loaded, or its name is that of another path.
    """
    names: list[str | None] = []
    requests = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    for request in requests:
        if request is None:
            names.append(None)
            continue
        if not isinstance(request, LoRARequest):
            raise TypeError(
                f"lora_request={brief(lora_request)} must be a LoRARequest of llama.compat.vllm, "
                "or a list with one or None for each prompt"
            )
        loaded = llama.adapters.get(request.lora_name)
        if loaded is None:
            llama.load_adapter(request.lora_name, request.lora_path)
        elif loaded.path != request.lora_path:
            raise ValueError(
                f"lora_name={brief(request.lora_name)} is loaded from {loaded.path}, and not from "
                f"{request.lora_path}: give another name"
            )
        names.append(request.lora_name)
    return names
