"""From the form that an answer must have to the tokens that may come next (llguidance).

In: a `StructuredOutput` and a tokenizer. Out: a `Grammar`, of which each sequence gets a `Matcher`:
after the tokens so far, a bit for each token that may follow. What has been compiled is kept.
"""

import contextlib
import functools
import json
import re
from typing import TYPE_CHECKING

import numpy as np

from llama.checks import FieldError
from llama.sampling_params import StructuredOutput
from llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_KEPT = 256  # grammars
# Far beyond what schemas need. With the package's own, (a{1000}){1000} took a second of a step.
_COMPILE_FUEL, _STEP_FUEL, _STATES = 200_000, 50_000, 50_000
# The package's own 50,000 end the answers of an object of 400 properties after their first brace.
_STEP_ITEMS = 500_000
# Between the tokens of JSON: a small model that may write more blanks writes little else, and one
# that may write none does not end its numbers.
_WHITESPACE = " ?"
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# A backslash, or a character of which the package's conversion would lose a leading zero.
_ESCAPE = re.compile(r"(\\\\)|\\u0([1-9a-f][\da-f]{2}|0[89a-f][\da-f])", re.IGNORECASE)
_MISSING = (
    "structured_output needs the package llguidance: pip install 'llama[serve]', or in a checkout "
    "pip install -e '.[serve]'"
)


class Matcher:
    """Where one sequence is in its grammar; the engine asks it before each token. It never raises:
    where the grammar cannot go on, it allows no token, and `failure` says why."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self.failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """As `Constraint` has it; bits (1 + drafts, ceil(V / 32)) int32."""
        bits.fill(0)
        self._consume(tokens, first)
        # A copy takes a microsecond; to go back fails where a rule has max_tokens or stop.
        ahead = self._matcher.deep_copy() if drafts else self._matcher
        for row, token in zip(bits, [*drafts, None], strict=True):
            if not ahead.is_error():
                ahead.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if ahead.is_error():
                self.failure = _first_line(ahead.get_error())
                row.fill(0)
            if token is None or not row[token // 32] >> token % 32 & 1:
                break
            ahead.consume_token(token)

    def draft(self, output: list[int], guess: list[int]) -> tuple[list[int], bool]:
        """As `Constraint` has it. There may be other ways to write what must follow."""
        self._consume(output, 0)
        if self._matcher.is_error():
            return [], False
        if forced := self._matcher.compute_ff_tokens():
            return forced, True
        return guess[: self._matcher.validate_tokens(guess)], False

    def _consume(self, tokens: list[int], first: int) -> None:
        if new := tokens[first + self._num_consumed :]:
            self._matcher.consume_tokens(new)
            self._num_consumed += len(new)


class GrammarCompiler:
    """Compiles for one tokenizer; any thread may use it. Its index takes a second at first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = functools.lru_cache(_KEPT)(self._compile)

    def matcher(self, form: StructuredOutput) -> Matcher:
        """A matcher at the beginning of the form; FieldError says what is wrong with it."""
        return Matcher(self._compiled(form).deep_copy())

    def warm_up(self) -> None:
        """Make the index now, where the package is installed: it holds Python's lock meanwhile."""
        with contextlib.suppress(ModuleNotFoundError):
            _ = self._index

    def _compile(self, form: StructuredOutput) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            raise FieldError("structured_output", _MISSING) from None
        place = f"structured_output.{form.kind}"
        limits = LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_STEP_FUEL, max_lexer_states=_STATES,
            step_max_items=_STEP_ITEMS,
        )  # fmt: skip
        try:
            matcher = LLMatcher(self._index, _grammar(form), log_level=0, limits=limits)
        except (ValueError, RuntimeError) as e:
            raise FieldError(place, f"{place} cannot be used: {_first_line(str(e))}") from None
        tried = matcher.deep_copy()  # to go back in it fails where a rule has max_tokens or stop
        if not tried.is_error():
            _try_first_tokens(tried)
        if tried.is_error():
            raise FieldError(place, f"{place} cannot be used: {_first_line(tried.get_error())}")
        return matcher

    @functools.cached_property
    def _index(self) -> "LLTokenizer":
        from llguidance.tiktoken import lltokenizer_from_encoding

        own, ends = self._tokenizer, sorted(self._tokenizer.stop_tokens)
        return lltokenizer_from_encoding(own.model, n_vocab=own.n_words, eos_token=ends)


def _try_first_tokens(matcher: "LLMatcher") -> None:
    """What is too large to go on with shows here, and not in a step of the engine."""
    for _ in range(2):
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        first = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
        if matcher.is_error() or not len(first):
            return
        matcher.consume_token(int(first[0]))
        if matcher.is_stopped():
            return


def _grammar(form: StructuredOutput) -> str:
    """The form in llguidance's own JSON."""
    from llguidance import LLMatcher

    if form.regex:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar:
        return LLMatcher.grammar_from_lark(_lark(form.grammar))
    if form.choice:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    schema = '{"type": "object"}' if form.json_object else str(form.json)
    options: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _lark(grammar: str) -> str:
    """A grammar in Lark as it is, or one in GBNF as Lark; ValueError says what is wrong with it."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not _GBNF_RULE.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(lambda x: x[1] or chr(int(x[2], 16)), grammar))
    except Exception as e:  # the package raises Exception itself, too
        raise ValueError(f"as GBNF: {e}") from None


def _first_line(error: str) -> str:
    """What the package says, in one line; it knows no words for some errors."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "it is not valid"
    if lines[0] == "NoExtensionBias":
        return "there is no text that it allows"
    if lines[0].endswith("regex parse error:"):  # then the expression, a mark below it, the reason
        reasons = [line for line in lines if line.startswith("error: ")]
        return f"regex parse error: {''.join(reasons[:1]).removeprefix('error: ')}"[:300]
    return lines[0][:300]
