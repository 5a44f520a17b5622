"""Meta's Llama 3 API as a runtime: the names that Meta's package exports, and those of requests.

Each name is imported when it is first used, so that `llama --help` need not wait for torch; type
checkers find them in __init__.pyi.
"""

import importlib
from typing import Any

_MODULES = {  # the names of the package, by the module that defines them
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


def __getattr__(name: str) -> Any:
    """The first use of a name: its module is imported, and the name kept for the next use."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("llama")
        except metadata.PackageNotFoundError:
            return "0+unknown"  # of a copy that was not installed: below all others
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"llama.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:  # `import llama` once imported these modules, and programs count on it
        return importlib.import_module(f"llama.{name}")
    raise AttributeError(f"module 'llama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, "__version__"])
