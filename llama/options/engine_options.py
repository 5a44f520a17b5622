"""The options that an engine is made with: its sizes, drafts and graphs.

In: the arguments of `Llama.build`, and what loading has found. Out: an `EngineOptions`, which
`llama.assembly` reads. To pass an argument on to the engine, add a field of its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from llama.build_args import BuildArgs
from llama.engine.core import PAGE_SIZE
from llama.model.transformer import Transformer
from llama.options.graphs.recorder import Recorder
from llama.storage.kv_folder import Identity


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        num_pages: The pages of its KV cache; with graphs, at most so many. 0: as many as
            max_batch_size sequences of max_seq_len tokens need.
        page_size: The slots of a page.
        token_budget: The maximum number of tokens in a step; None: as the model's sizes ask.
        speculate: The drafter, as the argument of `Llama.build`; None: steps get no drafts.
        speculate_tokens: The maximum number of draft tokens of a sequence in a step.
        speculate_shared: Whether the drafter may use the texts of other requests.
        draft_model: The model that drafts tokens, if `speculate` is one. Its KV cache is allocated
            first.
        recorder_for: Returns the recorder of a model's graphs, or None for no graphs.
        reserve: The bytes that a step needs, which a KV cache alongside graphs leaves free.
        kv_cache_dir: The folder of KV pages on disk; None: there is none.
        kv_cache_disk_bytes: The limit of all files in it; None: by the free disk.
        kv_cache_reuse: Whether pages that other kernels or ranks have rounded are loaded: "exact"
            or "close".
        page_identity: What the pages depend on; None: none are kept on disk.
        async_scheduling: Whether a step may start before the previous one is read; by default it
            may on a GPU.
    """

    num_pages: int = 0
    page_size: int = PAGE_SIZE
    token_budget: int | None = None
    speculate: str | None = None
    speculate_tokens: int = 7
    speculate_shared: bool = False
    draft_model: Transformer | None = None
    recorder_for: Callable[[Transformer], Recorder | None] = lambda model: None
    reserve: int = 0
    kv_cache_dir: str | None = None
    kv_cache_disk_bytes: int | None = None
    kv_cache_reuse: str = "exact"
    page_identity: Identity | None = None
    async_scheduling: bool | None = None

    @classmethod
    def of(cls, args: BuildArgs, **others: Any) -> "EngineOptions":
        """Return the arguments of `Llama.build` that are fields here, and other fields."""
        names = {field.name for field in fields(cls)} & {field.name for field in fields(args)}
        return cls(**{name: getattr(args, name) for name in names}, **others)
