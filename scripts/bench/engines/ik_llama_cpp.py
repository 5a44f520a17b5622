"""ik_llama.cpp behind the benchmark's `Engine`: llama.cpp's older interface with other kernels.

In: a job with "gguf", then prompts as ids. Out: ids. The package ik-llama-cpp-python declares a
part of the C functions; two that it lacks are declared here. The wheels of that package use AVX2
alone, so the README says how to build it for the CPU.
"""

import ctypes
from typing import Any

from bench.engines.llama_cpp import UBATCH, LlamaCpp


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp with one slot per sequence, in a KV cache that all slots share."""

    name = "ik_llama.cpp"

    def _import(self) -> Any:
        from ik_llama_cpp import _ctypes_api as api
        from ik_llama_cpp._lib_loader import load_shared_library

        self.library = load_shared_library()
        self.library.llama_get_logits.argtypes = [ctypes.c_void_p]
        self.library.llama_get_logits.restype = ctypes.c_void_p
        self.library.llama_kv_cache_seq_rm.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
        ]  # fmt: skip
        self.library.llama_kv_cache_seq_rm.restype = ctypes.c_bool
        return api

    def _model_settings(self) -> Any:
        """Return the parameters of the model: its defaults, without repacking at load."""
        return self.api.llama_model_default_params()

    def _settings(self, job: dict[str, Any]) -> Any:
        """Return the parameters of the context.

        Flash attention is on, as it is by default. Keys and values have 16 bits whatever the dtype
        is: it makes no context with 32.
        """
        settings = self.api.llama_context_default_params()
        padded = -(-job["longest"] // 256) * 256
        self.num_batch = job["batch"] * padded
        settings.n_ctx = settings.n_batch = self.num_batch
        settings.n_ubatch = min(UBATCH, self.num_batch)
        settings.n_seq_max = job["batch"]
        settings.n_threads = settings.n_threads_batch = job["threads"]
        settings.flash_attn = True
        return settings

    def _logits(self) -> Any:
        """Return the address of the logits of all rows that asked for them."""
        return self.library.llama_get_logits(self.context)

    def _forget(self, slot: int) -> None:
        """Remove the keys and values of a slot."""
        self.library.llama_kv_cache_seq_rm(self.context, slot, -1, -1)
