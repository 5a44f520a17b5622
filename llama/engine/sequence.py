"""One request inside the engine: its tokens, how far they are computed, and the pages they hold.

Ids in a list; no torch, no text. The whole state is three lengths:
`0 <= num_computed <= len(tokens) <= limit`. A step lets num_computed catch up with len(tokens);
when it has, one token is sampled.
"""

from dataclasses import dataclass, field

from llama.sampling_params import SamplingParams


@dataclass(eq=False)  # two requests with the same tokens are two requests
class Sequence:
    """`limit` is the most tokens it may come to; `stop_ids` end it and are left out."""

    tokens: list[int]  # prompt, then what was generated
    params: SamplingParams
    limit: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    num_computed: int = 0  # leading tokens whose keys and values are in pages
    num_cached: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of its full pages, in order
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_id: int | None = None  # the id that stopped it
    logprobs: list[float] = field(default_factory=list)  # one a generated token
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # [0.0, ...]: nothing comes before
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(0.0)
            self.prompt_top_logprobs.append([])

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_new(self) -> int:
        """Tokens known and not yet computed: what a step may be given."""
        return len(self.tokens) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """A sampled token: kept, unless it stops the sequence."""
        assert not self.finished and len(self.tokens) < self.limit
        if token in self.stop_ids:  # `sample` does not choose one before min_tokens
            self.finish_reason, self.stop_id = "stop", token
            return
        self.tokens.append(token)
        if len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def rows_to_score(self, count: int) -> range:
        """Offsets in its next `count` tokens whose logits score a prompt token not scored yet."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(len(self.prompt_logprobs) - 1 - self.num_computed, 0)
        last = min(count, self.num_prompt - 1 - self.num_computed)
        return range(first, max(first, last))
