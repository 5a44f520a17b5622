"""Meta's Llama 3 API as a runtime: the names that Meta's package exports, and those of requests."""

from llama.args import ModelArgs
from llama.generation import Llama
from llama.model import Transformer
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import CompletionOutput, LLMEngine, RequestOutput
from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Dialog, Message, Tokenizer

__all__ = [
    "AsyncLLMEngine",
    "ChatFormat",
    "CompletionOutput",
    "Dialog",
    "LLMEngine",
    "Llama",
    "Message",
    "ModelArgs",
    "RequestOutput",
    "SamplingParams",
    "Tokenizer",
    "Transformer",
]
