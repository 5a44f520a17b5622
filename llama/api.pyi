from llama.checkpoint.find import find
from llama.checkpoint.generation_config import sampling_defaults
from llama.checkpoint.lora.config import CONFIG_FILE
from llama.checkpoint.table import part_of
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.generation import Llama
from llama.model.args import ModelArgs
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
from llama.requests.llm_engine import LLMEngine
from llama.requests.mask_budget import MaskBudget
from llama.requests.pooling import EmbeddingOptions
from llama.requests.prepare import ContextLengthError
from llama.requests.request import CompletionOutput, Request, RequestOutput, Usage, derived_seed
from llama.requests.scoring import ClassificationHead, ranked
from llama.weights.choice import QUANTIZED

__all__ = [
    "CONFIG_FILE",
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
    "LLMEngine",
    "Llama",
    "MaskBudget",
    "ModelArgs",
    "ModelParallel",
    "NotMetError",
    "Parallel",
    "RankError",
    "Request",
    "RequestOutput",
    "Usage",
    "Watch",
    "address_space_limit",
    "beam_search",
    "convert",
    "derived_seed",
    "describe_end",
    "find",
    "launch",
    "pack",
    "part_of",
    "ranked",
    "reshard",
    "sampling_defaults",
    "stop_requested",
    "verify",
]
