"""The engines that the benchmark runs, ours and its peers, behind the same five methods.

In: a job with folders, sizes, dtype and device, then prompts as ids. Out: ids. Each engine imports
its own package when it is made, since a peer may live in a virtual environment that has no other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.engines.ik_llama_cpp import IkLlamaCpp
from bench.engines.llama_cpp import LlamaCpp
from bench.engines.llama_models import LlamaModels
from bench.engines.ours import Ours
from bench.engines.transformers import Transformers
from bench.engines.vllm import Vllm, vllm_environment

Job = dict[str, Any]


class Engine(Protocol):
    """An engine that decodes greedily and has no stop token.

    Each call returns ids on the host, so it includes the wait for the device.
    """

    def __init__(self, job: Job) -> None: ...

    def start(self, prompts: list[list[int]]) -> list[int]:
        """Read prompts of one length; returns the latest id of each once all have one."""

    def step(self) -> list[int]:
        """The next id of each."""

    def finish(self) -> None:
        """Forget the prompts that were started."""

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        """Answer prompts of any lengths, each with as many tokens as `answers` says."""


class Peer(NamedTuple):
    """How an engine is made, and what its process needs before that."""

    kind: type[Engine]
    modules: tuple[str, ...]  # slow imports that are timed; the last is the package itself
    environment: Callable[[Path], dict[str, str]] = lambda venv: {}
    importing: Callable[[], AbstractContextManager[None]] = nullcontext


def _as_our_commands_do() -> AbstractContextManager[None]:
    from llama.cli.model import quick_imports

    return quick_imports()


# How engines of ours round activations.
ACTIVATIONS = {"ours_rounded": "int8", "ours_rounded_lm_head": "int8_lm_head"}
_OURS = Peer(Ours, ("torch", "llama.generation"), importing=_as_our_commands_do)
ENGINES = {
    "ours": _OURS,
    "ours_bf16": _OURS,  # the comparison where --dtype is another
    "ours_packed": _OURS,  # reads a folder of packed weights
    "ours_rounded": _OURS,
    "ours_rounded_lm_head": _OURS,
    "transformers": Peer(
        Transformers, ("torch", "transformers", "transformers.models.llama.modeling_llama")
    ),
    "llama_models": Peer(
        LlamaModels, ("torch", "fairscale", "llama_models", "llama_models.llama3.model")
    ),
    "vllm": Peer(Vllm, ("torch", "vllm", "vllm.v1.engine.llm_engine"), vllm_environment),
    "llama_cpp": Peer(LlamaCpp, ("numpy", "llama_cpp")),
    "ik_llama_cpp": Peer(IkLlamaCpp, ("numpy", "ik_llama_cpp._ctypes_api")),
}
