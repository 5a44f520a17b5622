from llama.checkpoint.find import find
from llama.checkpoint.generation_config import sampling_defaults
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.generation import Llama
from llama.ranks.collectives import ModelParallel
from llama.ranks.errors import NotMetError
from llama.ranks.launch import LAUNCHER, launch
from llama.ranks.parallel import Parallel, RankError
from llama.ranks.processes import address_space_limit, describe_end
from llama.ranks.signals import DRAIN_S, SIGNALS, stop_requested
from llama.ranks.watch import Watch
from llama.requests.adapters import AdapterInUseError
from llama.requests.answer import Answer
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.beam_search import Beam, beam_search
from llama.requests.detokenizer import Detokenizer
from llama.requests.engine_side import EngineSide
from llama.requests.llm_engine import LLMEngine
from llama.requests.mask_budget import MaskBudget
from llama.requests.pooling import EmbeddingOptions
from llama.requests.port import RefusedError
from llama.requests.prepare import ContextLengthError
from llama.requests.request import CompletionOutput, Request, RequestOutput, Usage
from llama.requests.scoring import ClassificationHead, ranked
from llama.requests.seeds import derived_seed
from llama.requests.served import ModelCard, ServedModel
from llama.requests.text_side import TextSide
from llama.weights.choice import QUANTIZED

__all__ = [
    "DRAIN_S",
    "LAUNCHER",
    "QUANTIZED",
    "SIGNALS",
    "AdapterInUseError",
    "Answer",
    "AsyncLLMEngine",
    "Beam",
    "ClassificationHead",
    "CompletionOutput",
    "ContextLengthError",
    "Detokenizer",
    "EmbeddingOptions",
    "EngineSide",
    "LLMEngine",
    "Llama",
    "MaskBudget",
    "ModelCard",
    "ModelParallel",
    "NotMetError",
    "Parallel",
    "RankError",
    "RefusedError",
    "Request",
    "RequestOutput",
    "ServedModel",
    "TextSide",
    "Usage",
    "Watch",
    "address_space_limit",
    "beam_search",
    "convert",
    "derived_seed",
    "describe_end",
    "find",
    "launch",
    "load_tokenizer",
    "pack",
    "ranked",
    "reshard",
    "sampling_defaults",
    "stop_requested",
    "verify",
]
