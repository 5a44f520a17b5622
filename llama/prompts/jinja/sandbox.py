"""Chat templates in Jinja, compiled to keep the marks of their constants and rendered in a sandbox.

In: requests of `chat_template`, for which this module is a program of its own: the source of a
template, and the variables of one dialog. Out: the text with its mask, or a ValueError that says
why there is none. It knows no tokens and no messages, and its process has all limits of time and
memory.

Every text constant of the compiled template becomes a `MarkedText`, by a subclass of Jinja's code
generator. The template can call what `filters` lists, and the public methods of values.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama.common.confined import answer_requests
from llama.prompts.jinja.filters import FILTERS, FUNCTIONS, Raised, shown
from llama.prompts.jinja.marked import MarkedText, concatenate, trusted

_REFUSED = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.ScopedEvalContextModifier,
    nodes.EvalContextModifier,
)


class SandboxedTemplate:
    """A compiled chat template.

    Args:
        source: the template.
        constants: variables that count as the template's own text.

    Attributes:
        variables: the names of the variables that it reads.

    Raises:
        ValueError: the source is no template, or uses what no chat template may use.
    """

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        """Compile the template."""
        self._constants = {name: trusted(text) for name, text in constants.items()}
        self._template, self.variables = _compiled(source)

    def render(self, variables: Mapping[str, Any]) -> MarkedText:
        """Return what the template writes.

        Raises:
            ValueError: the template refuses the dialog, or fails.
        """
        context = self._template.new_context({**variables, **self._constants})
        try:
            text = _joined(self._template.root_render_func(context))
        except Raised as e:
            raise ValueError(f"the chat template refuses this dialog: {e}") from None
        except RecursionError:
            raise ValueError("the chat template calls itself too often") from None
        except MemoryError:
            raise
        except Exception as e:  # a template can raise whatever its operations do
            raise ValueError(f"the chat template fails on this dialog: {shown(e)}") from e
        return text if isinstance(text, MarkedText) else MarkedText(text)


def _joined(parts: Iterable[Any]) -> str:
    return concatenate([str(part) for part in parts])


def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Return a template, and the names of the variables that it reads."""
    environment = _Environment()
    try:
        tree = environment.parse(source)
        for node in tree.find_all(_REFUSED):
            tag = type(node).__name__.lower()
            raise ValueError(f"line {node.lineno} has the block {tag!r}")
        code = environment.compile(tree)
        read = meta.find_undeclared_variables(tree)  # it changes the tree: it comes last
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"not a chat template: line {e.lineno}: {shown(e.message)}") from None
    except (RecursionError, SyntaxError, ValueError, OverflowError) as e:
        problem = shown(e) if type(e) is ValueError else f"{type(e).__name__}: {shown(e)}"
        raise ValueError(f"not a chat template: {problem}") from None
    template = Template.from_code(environment, code, environment.globals)
    return template, frozenset(read - environment.globals.keys())


_PROBE = (
    "A{{ 'B' }}{{ 'C' ~ x }}{% macro m(y) %}D{{ y + 'E' }}{% endmacro %}{{ m(x) }}"
    "{% set y %}F{% endset %}{{ y }}"
)


def check_jinja() -> None:
    """Raise a RuntimeError if this version of Jinja does not compile as expected.

    Some of the hooks in `_Generator` are not documented. If one of them were renamed, constants
    would be ordinary texts.
    """
    text = SandboxedTemplate(_PROBE, {}).render({"x": "u"})
    if (text, text.mask) != ("ABCuDuEF", "11101011"):
        raise RuntimeError(
            f"jinja2 {jinja2.__version__} compiles templates in a way that this version of llama "
            "does not know: install jinja2==3.1.6"
        )


class _Generator(CodeGenerator):
    """Compiles templates so that constants are marked, and joined texts keep their marks."""

    environment: "_Environment"

    def _constant(self, text: str) -> str:
        """Return the code of a text that the template wrote."""
        self.environment.constants.append(trusted(text))
        return f"environment.constants[{len(self.environment.constants) - 1}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._constant(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._constant(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._constant("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _GenerationBlock(Extension):
    """The block {% generation %}, which marks what the assistant wrote, for training."""

    tags = {"generation"}  # noqa: RUF012  (an attribute of Jinja's class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one chat template: its constants, and all that it may use."""

    code_generator_class = _Generator
    concat = staticmethod(_joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,
        )
        self.constants: list[MarkedText] = []
        self.filters = dict(FILTERS)
        self.globals = dict(FUNCTIONS)


@functools.lru_cache(16)
def _template(source: str, constants: tuple[tuple[str, str], ...]) -> SandboxedTemplate:
    return SandboxedTemplate(source, dict(constants))


def _mark(variables: Any, path: list[str | int], mask: str) -> None:
    """Mark the text at a path."""
    *parents, last = path
    for key in parents:
        variables = variables[key]
    variables[last] = MarkedText(variables[last], mask)


def _answer(request: dict[str, Any]) -> Any:
    """Return the variables that a template reads, or what it writes and its mask."""
    template = _template(request["source"], tuple(request["constants"].items()))
    if "variables" not in request:
        return sorted(template.variables)
    for path, mask in request["marks"]:
        _mark(request["variables"], path, mask)
    text = template.render(request["variables"])
    if len(text) > request["max_chars"]:
        raise ValueError(f"the chat template writes more than {request['max_chars']:,} characters")
    return text.plain, text.mask


if __name__ == "__main__":
    check_jinja()
    answer_requests(_answer)
