"""A chat template of a model's files, which another process compiles and renders.

In: the source of a template, and the variables of one dialog. Out: a `MarkedText`, or a
`TemplateError` that says why there is none. A template may be hostile, and so `sandbox` runs in a
process with limits of processor time and memory; see `llama.common.confined`. Jinja is not imported
here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from llama.common.confined import ConfinedError, ConfinedPool, LimitError
from llama.prompts.jinja.marked import TRUSTED, MarkedText

MAX_SOURCE = 256 << 10  # characters of a template; the longest published one has 17,000
CPU_S = 2.0
MEMORY_MB = 512
_WAIT_S = 60.0
_MAX_CHARS = 1 << 20  # characters that a template may write besides four times those it is given

# A server renders in four threads, of which one sender has two.
_PROCESSES = ConfinedPool(
    "llama.prompts.jinja.sandbox", 4, cpu_s=CPU_S, memory_mb=MEMORY_MB, wait_s=_WAIT_S
)


class TemplateError(ValueError):
    """A template that cannot be compiled, or that renders no prompt for a dialog."""


class ChatTemplate:
    """A chat template, rendered from any thread.

    Args:
        source: the template.
        constants: variables that count as the template's own text, such as bos_token.

    Attributes:
        variables: the names of the variables that it reads.

    Raises:
        TemplateError: the source is no template, or uses what no chat template may use.
    """

    def __init__(self, source: str, constants: Mapping[str, str] | None = None) -> None:
        """Compile the template."""
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"not a chat template: it has {len(source):,} characters, and the limit is "
                f"{MAX_SOURCE:,}"
            )
        self._template = {"source": source, "constants": dict(constants or {})}
        self.variables = frozenset(self._answer({}))

    def render(self, variables: Mapping[str, Any]) -> MarkedText:
        """Render the template.

        Args:
            variables: JSON values; texts that are no `MarkedText` become no special token.

        Raises:
            TemplateError: the template refuses the dialog, fails, or exceeds a limit.
        """
        texts = list(_texts(variables, ()))
        marks = [(path, text.mask) for path, text in texts if isinstance(text, MarkedText)]
        request = {
            "variables": variables,
            "marks": [(path, mask) for path, mask in marks if TRUSTED in mask],
            "max_chars": _MAX_CHARS + 4 * sum(len(text) for _, text in texts),
        }
        text, mask = self._answer(request)
        return MarkedText(text, mask)

    def _answer(self, request: Mapping[str, Any]) -> Any:
        try:
            return _PROCESSES.call({**self._template, **request})
        except LimitError as error:
            raise TemplateError(f"the chat template cannot be used: {error}") from None
        except ConfinedError as error:
            raise TemplateError(str(error)) from None


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield each text of a JSON value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _texts(item, (*path, i))
