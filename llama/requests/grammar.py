"""Structured output: from the format of an answer to the tokens that may come next (llguidance).

In: a `StructuredOutput` and a tokenizer. Out: a `Matcher` for each sequence, which gives a bit for
each token that may follow the tokens so far. Compiled grammars are cached.
"""

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llama.common.checks import FieldError
from llama.common.extras import install_hint
from llama.requests.grammar_cache import GrammarCache
from llama.sampling_params import StructuredOutput
from llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_T = TypeVar("_T")
# llguidance follows references between rules by recursion, with about 3 KB of stack for each. The
# longest texts that `StructuredOutput` allows have chains of 12,000 rules, which would overflow an
# ordinary stack and end the process. Only the pages of a stack that are used take memory.
_STACK_BYTES = 256 * 2**20
# These limits are far beyond what schemas need. With llguidance's defaults, (a{1000}){1000} took a
# second of a step.
_COMPILE_FUEL = 200_000
_STEP_FUEL = 50_000
_MAX_STATES = 50_000
# The default of 50,000 ends the answers of an object of 400 properties after their first brace.
_MAX_STEP_ITEMS = 500_000
# White space between the tokens of JSON. A small model that may write more of it writes little
# else, and one that may write none does not end its numbers.
_WHITESPACE = " ?"
# The beginning of the schema of a tool in a grammar of calls (`llama.prompts.grammar`).
_TOOL = '%json {"$comment": "tools'
_ANY_TYPE = ["object", "array", "string", "number", "boolean", "null"]
# What llguidance enforces of `format`, the keywords whose objects have names as keys, and those
# whose values are no schemas.
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
_BAD_SCHEMA = "failed to compile JSON schema"
_AT_LINE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_OPTION = re.compile(r"\. Enable '\w+' option[^\n]*")  # llguidance has such an option
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# A backslash, or a character of which the package's conversion would lose a leading zero.
_ESCAPE = re.compile(r"(\\\\)|\\u0([1-9a-f][\da-f]{2}|0[89a-f][\da-f])", re.IGNORECASE)


class Matcher:
    """The position of one sequence in its grammar; the engine asks it before each token.

    It never raises: where the grammar cannot go on it allows no token, and `failure` says why.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self.failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Set the bits of the tokens that may follow; see `Constraint.fill_allowed`.

        The shape of `bits` is (1 + drafts, ceil(V / 32)), int32.
        """
        bits.fill(0)
        self._consume(tokens, first)
        # A copy takes a microsecond. A rollback fails where a rule has max_tokens or stop.
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

    def draft(self, output: list[int], prediction: list[int]) -> tuple[list[int], bool]:
        """Return tokens that must or may follow; see `Constraint.draft`.

        There may be other ways to write what must follow.
        """
        self._consume(output, 0)
        if self._matcher.is_error():
            return [], False
        if forced := self._matcher.compute_ff_tokens():
            return forced, True
        return prediction[: self._matcher.validate_tokens(prediction)], False

    def _consume(self, tokens: list[int], first: int) -> None:
        if new := tokens[first + self._num_consumed :]:
            self._matcher.consume_tokens(new)
            self._num_consumed += len(new)


class Alternatives:
    """The position of one sequence in several grammars; it follows any of them.

    Their tokens are allowed together. Grammars would be combined within llguidance if its lexer did
    not commit to the longest literal: after `{"`, a call as JSON would exclude every other object.
    """

    def __init__(self, matchers: list[Matcher]) -> None:
        self._matchers = matchers

    @property
    def failure(self) -> str | None:
        """Why none of the grammars can go on."""
        return None if self._following else self._matchers[-1].failure

    @property
    def _following(self) -> list[Matcher]:
        return [matcher for matcher in self._matchers if matcher.failure is None]

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Set the bits of the tokens that may follow; see `Constraint.fill_allowed`."""
        bits.fill(0)
        own_bits = np.empty_like(bits)
        for matcher in self._following:
            matcher.fill_allowed(tokens, first, drafts, own_bits)
            bits |= own_bits

    def draft(self, output: list[int], prediction: list[int]) -> tuple[list[int], bool]:
        """Return tokens that must or may follow; see `Constraint.draft`."""
        drafts = [matcher.draft(output, prediction) for matcher in self._following]
        if len(drafts) == 1:
            return drafts[0]
        return max((tokens for tokens, _ in drafts), key=len, default=[]), False


class GrammarCompiler:
    """A compiler of grammars for one tokenizer, for use by any thread.

    Its index of the vocabulary takes a second at first use.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: GrammarCache[LLMatcher] = GrammarCache()
        self._starting = threading.Lock()

    def matcher(
        self, response_format: StructuredOutput, root: bytes = b""
    ) -> Matcher | Alternatives:
        """Return a matcher at the beginning of a format.

        Args:
            response_format: The format.
            root: The prefix root of the request. A grammar that was compiled for another root is
                compiled again, so that the time does not reveal the formats of other tenants.

        Raises:
            FieldError: The format cannot be compiled, or llguidance is not installed.
        """
        formats = [response_format]
        if response_format.calls and response_format.kind != "calls":
            calls = StructuredOutput(calls=response_format.calls)
            formats = [calls, replace(response_format, calls=None)]
        matchers = [Matcher(self._compiled(root, each).deep_copy()) for each in formats]
        return Alternatives(matchers) if len(matchers) > 1 else matchers[0]

    def warm_up(self) -> None:
        """Build the index now if llguidance is installed; that keeps the GIL for a second."""
        with contextlib.suppress(ModuleNotFoundError):
            _ = self._index

    def _compiled(self, root: bytes, response_format: StructuredOutput) -> "LLMatcher":
        """Return a compiled format; the root distinguishes the entries of the cache."""
        key = (root, response_format)
        matcher = self._cache.get(key)
        if matcher is None:
            matcher = self._with_large_stack(lambda: self._compile(response_format))
            self._cache.add(key, matcher)
        return matcher

    def _with_large_stack(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, or raise what it raises; it runs in a thread of its own."""
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="llama-compile", daemon=True)
        with self._starting:  # The stack size belongs to the process.
            usual_size = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(usual_size)
        thread.join()
        if errors:
            raise errors.pop()
        return results.pop()

    def _compile(self, response_format: StructuredOutput) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            message = f"structured_output needs the package llguidance: {install_hint('serve')}"
            raise FieldError("structured_output", message) from None
        field = f"structured_output.{response_format.kind}"
        limits = LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_STATES,
            step_max_items=_MAX_STEP_ITEMS,
        )
        try:
            matcher = LLMatcher(self._index, _grammar(response_format), log_level=0, limits=limits)
            if response_format.calls and _BAD_SCHEMA in matcher.get_error():
                calls = _with_enforceable_schemas(response_format.calls)
                grammar = LLMatcher.grammar_from_lark(calls)
                matcher = LLMatcher(self._index, grammar, log_level=0, limits=limits)
        except FieldError:
            raise
        except (ValueError, RuntimeError) as e:
            raise FieldError(field, f"{field} cannot be used: {_first_line(str(e))}") from None
        tried = matcher.deep_copy()  # a rollback fails where a rule has max_tokens or stop
        if not tried.is_error():
            _try_first_tokens(tried)
        if tried.is_error():
            raise FieldError(field, f"{field} cannot be used: {_first_line(tried.get_error())}")
        return matcher

    @functools.cached_property
    def _index(self) -> "LLTokenizer":
        from llguidance.tiktoken import lltokenizer_from_encoding

        tokenizer = self._tokenizer
        return lltokenizer_from_encoding(
            tokenizer.model,
            n_vocab=tokenizer.n_words,
            eos_token=sorted(tokenizer.stop_tokens),
        )


def _try_first_tokens(matcher: "LLMatcher") -> None:
    """Take two tokens, so that a grammar that is too large fails here and not in a step."""
    for _ in range(2):
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        first = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
        if matcher.is_error() or not len(first):
            return
        matcher.consume_token(int(first[0]))
        if matcher.is_stopped():
            return


def _grammar(response_format: StructuredOutput) -> str:
    """Return the format as llguidance's own JSON."""
    from llguidance import LLMatcher

    if response_format.regex:
        return LLMatcher.grammar_from_regex(response_format.regex)
    if response_format.calls:
        return LLMatcher.grammar_from_lark(response_format.calls)
    if response_format.grammar:
        return LLMatcher.grammar_from_lark(_lark(response_format.grammar))
    if response_format.choice:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in response_format.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    schema = '{"type": "object"}'
    if response_format.json:
        schema = json.dumps(_without_annotations(json.loads(str(response_format.json))))
    options: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _without_annotations(schema: Any) -> Any:
    """Return a JSON schema without formats that constrain nothing here.

    An unknown `format` is an annotation (JSON Schema 2020-12, 7.2.1); llguidance refuses it.
    """
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):  # The keys are names, such as "format".
            kept[key] = {name: _without_annotations(each) for name, each in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key != "format" or value in _FORMATS or not isinstance(value, str):
            kept[key] = _without_annotations(value)
    return kept


def _with_enforceable_schemas(calls: str) -> str:
    """Return a grammar of calls whose schemas can be enforced; lenient ones are loosened for it.

    Raises:
        FieldError: A schema that is not lenient cannot be enforced; its place is named.
    """
    lines = []
    for line in calls.split("\n"):
        rule, mark, text = line.partition(_TOOL)
        if mark:
            schema = json.loads(mark.removeprefix("%json ") + text)
            line = f"{rule}%json {json.dumps(_enforceable(_without_annotations(schema)))}"
        lines.append(line)
    return "\n".join(lines)


def _enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance compiles; see `_with_enforceable_schemas`."""
    problem = _problem(schema)
    if problem is None:
        return schema
    properties = schema.get("properties", {})
    alone = {
        name: _problem({**schema, "properties": {name: properties[name]}, "required": []})
        for name in properties
    }
    at_fault = {name: problem for name, problem in alone.items() if problem}
    own: dict[str, Any] = {
        key: schema[key] for key in ("$comment", "x-guidance", "type") if key in schema
    }
    without = {**schema, "properties": {**properties, **{name: {} for name in at_fault}}}
    looser: list[dict[str, Any]] = [without, own, {**own, "type": _ANY_TYPE}]
    if schema["x-guidance"]["lenient"]:
        return next(each for each in looser if _problem(each) is None)
    path = str(schema["$comment"])
    if at_fault and _problem(without) is None:
        name, problem = next(iter(at_fault.items()))
        path = f"{path}.properties.{name}"
    raise FieldError(path, f"{path} cannot be used: {problem}")


def _problem(schema: dict[str, Any]) -> str | None:
    """Return why llguidance cannot compile a schema, or None if it can."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}")
    error = LLMatcher.validate_grammar(grammar, None)
    return _first_line(error) if error else None


def _lark(grammar: str) -> str:
    """Return a Lark grammar unchanged and a GBNF grammar as Lark; ValueError where it is wrong."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not _GBNF_RULE.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(lambda x: x[1] or chr(int(x[2], 16)), grammar))
    except Exception as e:  # llguidance raises plain Exception, too
        raise ValueError(f"as GBNF: {e}") from None


def _first_line(error: str) -> str:
    """Return llguidance's error in one line, with a message of ours where it has none."""
    error = _OPTION.sub("", _AT_LINE.sub("", error))
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "it is not valid"
    if lines[0] == "NoExtensionBias":
        return "there is no text that it allows"
    if lines[0].endswith("regex parse error:"):
        # The expression follows, a mark below it, then the reason.
        reasons = [line for line in lines if line.startswith("error: ")]
        return f"regex parse error: {''.join(reasons[:1]).removeprefix('error: ')}"[:300]
    return lines[0][:300]
