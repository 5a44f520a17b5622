"""Chat templates in Jinja, compiled to keep the marks of their constants and rendered in a sandbox.

In: the source of a template from a model's files, and the variables of one dialog. Out: a
`MarkedText`, or a `TemplateError` that says why there is none. It knows no tokens and no messages.

Every text constant of the compiled template becomes a `MarkedText`, by a subclass of Jinja's code
generator. The template can call what `filters` and `operations` list, and each `Rendering` has a
budget, as a template of a model's files may be hostile.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from llama.prompts.jinja.filters import EACH, FILTERS, FUNCTIONS, TESTS, Raised, shown, written
from llama.prompts.jinja.marked import MarkedText, trusted
from llama.prompts.jinja.operations import METHODS, call_text, compute
from llama.prompts.jinja.rendering import MAX_BYTES, STEP, Rendering

MAX_SOURCE = 256 << 10  # characters of a template; the longest published one has 17,000
_LITERAL_ITEMS = 8  # a literal with more items than this counts its memory
_REFUSED = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.ScopedEvalContextModifier,
    nodes.EvalContextModifier,
)
_Visitor = Callable[[Any, Frame], None]


class TemplateError(ValueError):
    """A template that cannot be compiled, or that renders no prompt for a dialog."""


class ChatTemplate:
    """A chat template, compiled once and rendered from any thread.

    Args:
        source: the template.
        constants: variables that count as the template's own text, such as bos_token.

    Raises:
        TemplateError: the source is no template, or uses what no chat template may use.
    """

    def __init__(self, source: str, constants: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"not a chat template: it has {len(source):,} characters, and the limit is "
                f"{MAX_SOURCE:,}"
            )
        _check_jinja()
        self._constants = {name: trusted(text) for name, text in (constants or {}).items()}
        self._template, self.variables = _compiled(source)

    def render(self, variables: Mapping[str, Any]) -> MarkedText:
        """Render the template.

        Args:
            variables: JSON values; texts that are no `MarkedText` become no special token.

        Raises:
            TemplateError: the template refuses the dialog, fails, or exceeds a limit.
        """
        context = self._template.new_context({**variables, **self._constants})
        assert isinstance(context, Rendering)
        try:
            text = context.concat(list(self._template.root_render_func(context)))
        except Raised as e:
            raise TemplateError(f"the chat template refuses this dialog: {e}") from None
        except RecursionError:
            raise TemplateError("the chat template calls itself too often") from None
        except Exception as e:  # a template can raise whatever its operations do
            raise TemplateError(f"the chat template fails on this dialog: {shown(e)}") from e
        return text if isinstance(text, MarkedText) else MarkedText(text)


def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Return a template, and the names of the variables that it reads."""
    environment = _Environment()
    try:
        tree = environment.parse(source)
        for node in tree.find_all(_REFUSED):
            tag = type(node).__name__.lower()
            raise TemplateError(f"not a chat template: line {node.lineno} has the block {tag!r}")
        for loop in tree.find_all(nodes.For):
            if loop.test is not None:
                loop.iter = nodes.Filter(loop.iter, EACH, [], [], None, None)
        code = environment.compile(tree)
        read = meta.find_undeclared_variables(tree)  # it changes the tree: it comes last
    except jinja2.TemplateSyntaxError as e:
        raise TemplateError(f"not a chat template: line {e.lineno}: {shown(e.message)}") from None
    except TemplateError:
        raise
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as e:
        raise TemplateError(f"not a chat template: {type(e).__name__}: {shown(e)}") from None
    template = Template.from_code(environment, code, environment.globals)
    return template, frozenset(read - environment.globals.keys())


_PROBE = (
    "A{{ 'B' }}{{ 'C' ~ x }}{% macro m(y) %}D{{ y + 'E' }}{% endmacro %}{{ m(x) }}"
    "{% set y %}F{% endset %}{{ y }}{% for i in passes %}{% endfor %}"
)


def _check_jinja() -> None:
    """Raise a RuntimeError if this version of Jinja does not compile as expected.

    Some of the hooks in `_Generator` are not documented. If one of them were renamed, constants
    would be ordinary texts, and renderings would have no limits.
    """
    template, _ = _compiled(_PROBE)
    text = ""
    spent = []
    for passes in (0, 100):
        context = template.new_context({"x": "u", "passes": [0] * passes})
        assert isinstance(context, Rendering)
        with contextlib.suppress(SecurityError):
            text = context.concat(list(template.root_render_func(context)))
        spent.append(MAX_BYTES - context.bytes_left)
    is_marked = isinstance(text, MarkedText) and (text, text.mask) == ("ABCuDuEF", "11101011")
    if not is_marked or spent[1] - spent[0] < 100 * STEP:
        raise RuntimeError(
            f"jinja2 {jinja2.__version__} compiles templates in a way that this version of llama "
            "does not know: install jinja2==3.1.6"
        )


class _Generator(CodeGenerator):
    """Compiles templates so that constants are marked and the budget of the rendering is used."""

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

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.concat")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("context.step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if _is_cheap(node):
            super().visit_Compare(node, frame)
            return
        self.write("(context.measured(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f") {operators[operand.op]} context.measured(")
            self.visit(operand.expr, frame)
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_new = isinstance(node.arg, nodes.Slice)
        self._visit_through("stored", is_new, super().visit_Getitem, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        is_long = len(node.items) > _LITERAL_ITEMS
        self._visit_through("stored", is_long, super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        is_long = len(node.items) > _LITERAL_ITEMS
        self._visit_through("stored", is_long, super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        is_value = node.ctx == "load"  # else the targets of an assignment
        self._visit_through("measured", is_value, super().visit_Tuple, node, frame)

    def _visit_through(
        self, method: str, is_needed: bool, visit: _Visitor, node: Any, frame: Frame
    ) -> None:
        """Write the code of a node, as the argument of a method of the rendering where needed."""
        self.write(f"context.{method}(" if is_needed else "(")
        visit(node, frame)
        self.write(")")


def _is_cheap(node: nodes.Compare) -> bool:
    """Return whether a comparison's time is limited by the length of the template."""
    left = node.expr
    for operand in node.ops:
        right = operand.expr
        if operand.op in ("in", "notin"):
            is_limited = isinstance(right, nodes.Const) or _is_constant_list(right)
        else:
            is_limited = isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
        if not is_limited:
            return False
        left = right
    return True


def _is_constant_list(node: nodes.Expr) -> bool:
    if not isinstance(node, nodes.List | nodes.Tuple):
        return False
    return all(isinstance(item, nodes.Const) for item in node.items)


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
    context_class = Rendering
    # Jinja computes operators that are not intercepted when it compiles.
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,
            finalize=written,
        )
        self.constants: list[MarkedText] = []
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self.globals = dict(FUNCTIONS)

    @staticmethod
    def concat(parts: Iterable[str]) -> NoReturn:
        """Refuse: all code of `_Generator` calls `Rendering.concat`, which has a budget."""
        raise SecurityError("a text was joined without a budget")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute or a method of a value."""
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return attr in METHODS.get(type(obj), ())

    def wrap_str_format(self, value: Any) -> None:
        """Allow neither str.format nor str.format_map, whose widths have no limit."""
        return None

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a loop, a function or a method of a value."""
        context.step()
        if isinstance(obj, Macro | LoopContext):
            return super().call(context, obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        for value in chain(args, kwargs.values()):
            context.measured(value)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            context.spend(len(owner))
            return context.stored(call_text(context, owner, obj, args, kwargs))
        if isinstance(owner, list | tuple):
            context.measured(owner)
        return context.stored(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator of `intercepted_binops`."""
        return compute(context, operator, left, right)
