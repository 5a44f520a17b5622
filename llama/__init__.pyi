from llama.generation import Llama
from llama.model import ModelArgs, Transformer
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import CompletionOutput, RequestOutput
from llama.sampling_params import SamplingParams, StructuredOutput
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
    "StructuredOutput",
    "Tokenizer",
    "Transformer",
]

__version__: str
