"""vLLM's Python API on a `Llama`: a client that was written for vLLM changes its import.

    from llama.compat.vllm import LLM, SamplingParams

An argument that is not supported is an error that names it.
"""

from llama.compat.vllm.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from llama.compat.vllm.vllm_engines import LLM, AsyncLLM, AsyncLLMEngine, LLMEngine, random_uuid
from llama.compat.vllm.vllm_lora import LoRARequest
from llama.compat.vllm.vllm_params import BeamSearchParams, RequestOutputKind, SamplingParams
from llama.compat.vllm.vllm_pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from llama.compat.vllm.vllm_request import CompletionOutput, Logprob, RequestOutput
from llama.sampling_params import StructuredOutput as StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "random_uuid",
]
