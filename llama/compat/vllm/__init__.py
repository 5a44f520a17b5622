"""vLLM's Python API on a `Llama`: a client that was written for vLLM changes its import.

    from llama.compat.vllm import LLM, SamplingParams

In: vLLM's calls, in the forms of 0.4 to today. Out: outputs in vLLM's shape. An argument that means
nothing here is an error that names it.
"""

from llama.compat.vllm.engine_args import AsyncEngineArgs, EngineArgs
from llama.compat.vllm.vllm_engines import LLM, AsyncLLMEngine, LLMEngine
from llama.compat.vllm.vllm_params import BeamSearchParams, RequestOutputKind, SamplingParams
from llama.compat.vllm.vllm_request import CompletionOutput, Logprob, RequestOutput
from llama.sampling_params import StructuredOutput as StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
