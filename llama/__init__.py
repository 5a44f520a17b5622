"""Meta's Llama 3 API as a runtime: the names of Meta's package, and those of the request API.

A name is imported when it is first used, so that `llama --help` does not import torch. Type
checkers read the names in __init__.pyi.
"""

import importlib
import sys
from typing import Any

from llama.ops import kernels as _kernels

if sys.platform == "win32":
    raise ImportError(
        "llama runs on Linux and macOS. On Windows, install and run it inside WSL 2 "
        "(https://learn.microsoft.com/windows/wsl), which also reaches an NVIDIA GPU"
    )

_MODULES = {  # module -> the names that it defines
    "generation": ["Llama"],
    "model": ["ModelArgs", "Transformer"],
    "requests.async_engine": ["AsyncLLMEngine"],
    "requests.llm_engine": ["LLMEngine"],
    "requests.request": ["CompletionOutput", "RequestOutput"],
    "sampling_params": ["SamplingParams", "StructuredOutput"],
    "tokenizer": ["ChatFormat", "Dialog", "Message", "Tokenizer"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def _host_kernels() -> _kernels.Kernels:
    """Return the kernels of models that a program makes by itself, which are for the CPU."""
    kernels: _kernels.Kernels = importlib.import_module("llama.kernels.host").host_kernels()
    return kernels


_kernels.set_default(_host_kernels)


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use, and store the name for the next use."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("llama-runtime")
        except metadata.PackageNotFoundError:
            return "0+unknown"  # a copy that is not installed; lower than any release
    if name in _MODULE_OF:
        module = importlib.import_module(f"llama.{_MODULE_OF[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value
    if name in _MODULES:  # programs rely on `import llama` for these modules, too
        return importlib.import_module(f"llama.{name}")
    raise AttributeError(f"module 'llama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, "__version__"])
