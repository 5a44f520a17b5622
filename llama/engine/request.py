"""The request of one sequence to the engine: `SequenceSpec`, in numbers and ids.

`llama.requests.prepare` makes it from a checked request. The engine's `SequenceState` refers to it,
and where rank 0 leads it is sent to the other ranks unchanged. A new request field that the engine
needs is a field here and the code that uses it. It holds no text, no tensor and nothing that
changes.
"""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

_GREEDY_BELOW = 1e-5  # lower temperatures take the top token, as in vLLM

PoolingKind = Literal["last", "mean", "first"]


@dataclass(frozen=True)
class Pooling:
    """The way in which one vector is made of the normalised hidden states of a prompt.

    Attributes:
        kind: The states that count: that of the last token, the mean of all, or that of the first.
        skip: The leading tokens that a mean leaves out.
    """

    kind: PoolingKind = "last"
    skip: int = 0


@dataclass(frozen=True)
class Capture:
    """The hidden states of a prompt that are reported.

    Attributes:
        layers: Numbers of states: 0 is the embedding, i the residual stream after i layers, and
            the number of layers plus one its normalised form, from which logits are computed.
        last_only: Whether only the states of the last token are wanted.
    """

    layers: tuple[int, ...]
    last_only: bool = False


@dataclass(frozen=True)
class ImageSpan:
    """An image in a prompt, without its pixels.

    Attributes:
        position: The index of its token.
        digest: The SHA-256 of its pixels and of their arrangement.
        rows: The rows of its tiles.
        columns: The columns of its tiles.
    """

    position: int
    digest: bytes
    rows: int
    columns: int

    __pydantic_config__: ClassVar[dict[str, str]] = {
        "ser_json_bytes": "base64",
        "val_json_bytes": "base64",
    }


@dataclass(frozen=True)
class SequenceSpec:
    """A prompt, how its next tokens are chosen, and when they end.

    Attributes:
        tokens: The prompt.
        max_len: The largest number of tokens, prompt and output together.
        seed: The seed of the sequence's random draws.
        stop_ids: Tokens that end the sequence and are left out of its output.
        call: The call that it belongs to. Calls share the batch fairly, see
            `llama.engine.scheduler`.
        sender: Whoever sent it, such as a tenant. Senders share the batch fairly before their calls
            do; a sequence without a known sender has an empty one.
        prefix_root: The root of the chain of hashes by which its pages are shared. Sequences share
            pages only if their roots are equal, except for public ones.
        num_public: Its leading tokens that are no secret. The pages wholly inside them do not
            depend on the root: all sequences with the same adapter share them.
        tenant: The name of whoever sent it in files of pages, a hash; empty without tenants.
        stays_in_memory: Whether its pages are written nowhere else.
        adapter: The hash of the LoRA adapter that the model runs with; empty for none.
        is_constrained: Whether a `Constraint` chooses among its tokens. It is true on every rank,
            while the constraint may be rank 0's alone.
        prediction: Tokens that the output may repeat, as drafts.
        bad_words: Sequences of tokens. The last token of one must not follow the others.
        prompt_logprobs: The number of most probable tokens to report besides the log-probability
            of each prompt token; None for no log-probabilities. `logprobs` is the same for the
            output.
        pooling: How the prompt becomes one vector; None: it does not. A sequence with `pooling` or
            `capture` generates nothing: its `max_len` is the length of its prompt.
        capture: The hidden states of the prompt that are wanted; None: none.
        images: The images of the prompt, in order.

    The other fields are those of `llama.sampling_params.SamplingParams`.
    """

    tokens: tuple[int, ...]
    max_len: int
    _: KW_ONLY
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    call: int = 0
    sender: bytes = b""
    prefix_root: bytes = b""
    num_public: int = 0
    tenant: bytes = b""
    stays_in_memory: bool = False
    adapter: bytes = b""
    is_constrained: bool = False
    prediction: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    capture: Capture | None = None
    images: tuple[ImageSpan, ...] = ()

    # As JSON, bytes are written in base64: a hash is no UTF-8.
    __pydantic_config__: ClassVar[dict[str, str]] = {
        "ser_json_bytes": "base64",
        "val_json_bytes": "base64",
    }

    @property
    def greedy(self) -> bool:
        """Whether the top token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @functools.cached_property
    def takes_top(self) -> bool:
        """Whether the top token is all that is asked for, unless a token is banned."""
        changes_logits = self.logit_bias or self.has_penalties
        return self.greedy and self.logprobs is None and not changes_logits

    @functools.cached_property
    def image_positions(self) -> frozenset[int]:
        """The indices of the prompt's tokens that stand for images."""
        return frozenset(image.position for image in self.images)

    @property
    def is_only_read(self) -> bool:
        """Whether the sequence ends with its prompt, of which states are wanted."""
        return self.pooling is not None or self.capture is not None

    @functools.cached_property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt have results of their own."""
        return self.is_only_read or self.prompt_logprobs is not None

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens that came before."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @functools.cached_property
    def has_long_bad_words(self) -> bool:
        """Whether a token can be banned because of those right before it."""
        return any(len(word) > 1 for word in self.bad_words)

    @functools.cached_property
    def needs_tokens(self) -> bool:
        """Whether the host must know every token before it can choose the next one."""
        return self.is_constrained or self.has_long_bad_words


class Constraint(Protocol):
    """A rule that says which tokens may follow the output of one sequence."""

    @property
    def failure(self) -> str | None:
        """Why the rule can be followed no longer, in which case no token is allowed."""
        ...

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: "np.ndarray"
    ) -> None:
        """Set the bits of the tokens that may follow the output and its drafts.

        Args:
            tokens: The prompt and the output. The output of the call before is a beginning of it.
            first: The index of the first output token.
            drafts: Tokens that may follow the output.
            bits: (1 + drafts, ceil(V / 32)) int32. Bit t % 32 of bits[j, t // 32] is set if token t
                may follow the output and the first j drafts. Behind a draft that may not follow,
                all are cleared.
        """

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        """Return tokens that may follow the output, and whether they must.

        Tokens that must follow come first. Where none must, they are as much of the given draft as
        may follow.
        """
