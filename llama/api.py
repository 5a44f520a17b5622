"""The face of the core: all that the server, compat and the commands may import from it.

The core is what stands below: generation, requests, options, engine, model, ranks, loading and
checkpoints. A server of another kind needs no more than these names. `llama.prompts`,
`llama.common`, `llama.sampling_params`, `llama.tokenizer`, `llama.build_args` and `llama.storage`
are vocabularies, and imported by themselves; `llama doctor`, `llama plan` and `llama verify
--answers` look inside on purpose. A test holds this.

A name is imported when it is first used, so that a client does not import torch. Type checkers read
the names in api.pyi.
"""

import importlib
from typing import Any

_MODULES = {  # module -> the names that it defines
    "checkpoint.find": ["find"],
    "checkpoint.generation_config": ["sampling_defaults"],
    "checkpoint.tokenizer_files": ["load_tokenizer"],
    "checkpoint.verify": ["verify"],
    "checkpoint.write.convert": ["convert", "pack", "reshard"],
    "generation": ["Llama"],
    "ranks.collectives": ["ModelParallel"],
    "ranks.errors": ["NotMetError"],
    "ranks.launch": ["LAUNCHER", "launch"],
    "ranks.parallel": ["Parallel", "RankError"],
    "ranks.processes": ["address_space_limit", "describe_end"],
    "ranks.signals": ["DRAIN_S", "SIGNALS", "stop_requested"],
    "ranks.watch": ["Watch"],
    "requests.adapters": ["AdapterInUseError"],
    "requests.answer": ["Answer"],
    "requests.async_engine": ["AsyncLLMEngine"],
    "requests.beam_search": ["Beam", "beam_search"],
    "requests.detokenizer": ["Detokenizer"],
    "requests.engine_side": ["EngineSide"],
    "requests.llm_engine": ["LLMEngine"],
    "requests.mask_budget": ["MaskBudget"],
    "requests.pooling": ["EmbeddingOptions"],
    "requests.port": ["RefusedError"],
    "requests.prepare": ["ContextLengthError"],
    "requests.request": ["CompletionOutput", "Request", "RequestOutput", "Usage"],
    "requests.scoring": ["ClassificationHead", "ranked"],
    "requests.seeds": ["derived_seed"],
    "requests.served": ["ModelCard", "ServedModel"],
    "requests.text_side": ["TextSide"],
    "weights.choice": ["QUANTIZED"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use, and store the name for the next use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'llama.api' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"llama.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
