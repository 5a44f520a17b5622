"""A command of the command line as click reads it: flags, LLAMA_* variables and help in groups.

In: a table of flags, the names of a command's flags with their defaults, and the arguments of a
shell. Out: an `argparse.Namespace` with a value for each flag, or a `UsageError`. It must know
neither models nor torch, and no flag by name.
"""

import argparse
import contextlib
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from llama.cli.flags import (
    BUILD_FLAGS,
    FLAGS,
    NETWORK_FLAGS,
    Flag,
    HelpWanted,
    UsageError,
    usage_errors,
)
from llama.cli.ranks import start_ranks

REQUIRED = object()  # the default of a flag that must be given

_KEPT_BYTES = re.compile(r"[\udc80-\udcff]")  # bytes that os.fsdecode could not decode
_PATHS = ("DIR", "FILE", "IN", "OUT", "MODEL")  # metavars of flags whose value is a path
_WORD = "_word"  # ends the name of a parameter by position that is a flag, too
WIDTH = 100  # columns of the help at most


# click.ParamType is generic only in recent versions.
class _Text(click.ParamType):  # type: ignore[type-arg]
    """A text of any content, or a name, which must not be empty."""

    name = "text"

    def __init__(self, *, may_be_empty: bool) -> None:
        self.may_be_empty = may_be_empty

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the text; Python keeps the bytes of UTF-8 where the locale is another one."""
        if not self.may_be_empty:
            if value == "" != param.default:  # "$UNSET" must not mean the demo model.
                self.fail("'' is empty: leave it out, or give a value", param, ctx)
            return value
        if not _KEPT_BYTES.search(value):
            return value
        try:
            return os.fsencode(value).decode()
        except UnicodeDecodeError:
            self.fail("the text is not UTF-8: give a text in UTF-8", param, ctx)


class _Value(click.ParamType):  # type: ignore[type-arg]
    """A value that is not a text: a click type or a function reads it."""

    name = "value"

    def __init__(
        self, kind: "Callable[[str], Any] | click.ParamType[Any]", *, may_be_none: bool
    ) -> None:
        self.kind = kind
        self.may_be_none = may_be_none

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value; a default is one already, and "none" may stand for None."""
        if not isinstance(value, str):
            return value
        if self.may_be_none and value.lower() == "none":
            return None
        if isinstance(self.kind, click.ParamType):
            number = self.kind.convert(value, param, ctx)
            if isinstance(self.kind, click.FloatRange) and not math.isfinite(number):
                self.fail(f"{value!r} is not a finite number", param, ctx)
            return number
        try:
            return self.kind(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)


def _type_of(flag: Flag) -> "click.ParamType[Any]":
    if flag.kind is bool:
        return click.BOOL
    if flag.kind is str:
        return _Text(may_be_empty=flag.metavar == "TEXT")
    simple: dict[Any, Any] = {int: click.INT, float: click.FLOAT}
    return _Value(simple.get(flag.kind, flag.kind), may_be_none=bool(flag.absent))


def _completer(flag: Flag) -> "Callable[..., list[CompletionItem[str]]]":
    """Return the function with which a shell completes a value: a choice, else a path."""

    def complete(ctx: Any, param: Any, incomplete: str) -> "list[CompletionItem[str]]":
        found = [CompletionItem(x) for x in flag.choices if x.startswith(incomplete)]
        if not found and flag.metavar in _PATHS:
            return [CompletionItem(incomplete, type="file")]
        return found

    return complete


class _Option(click.Option):
    """A flag of a command, with its group and its default in the help."""

    def __init__(self, name: str, flag: Flag, default: Any, variable: str | None) -> None:
        notes = [_default_text(flag, default), variable]
        super().__init__(
            [f"--{name}"],
            type=_type_of(flag),
            is_flag=flag.kind is bool,
            metavar=flag.metavar,
            default=None if default is REQUIRED else default,
            envvar=variable,
            help=f"{flag.meaning} ({'; '.join(filter(None, notes))}).",
            shell_complete=_completer(flag),
        )
        self.group = flag.group

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return what gave the value: the flag, or its variable."""
        source = ctx.get_parameter_source(self.name or "") if ctx else None
        is_variable = source is ParameterSource.ENVIRONMENT
        return str(self.envvar) if is_variable else self.opts[0]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the flag with the name of its value, and its meaning."""
        return f"{self.opts[0]} {self.metavar}".rstrip(), self.help or ""


def _default_text(flag: Flag, default: Any) -> str:
    """Describe the default of a flag for `--help`."""
    if default is REQUIRED:
        return "required"
    if default is None:
        return f"default: {flag.absent}"
    if flag.kind is bool:
        return f"default: {str(default).lower()}"
    if isinstance(default, tuple):
        return f"default: {','.join(map(str, default))}"
    return f"default: {default}" + (f", none: {flag.absent}" if flag.absent else "")


def show_option(names: Sequence[str], meaning: str, text_of: Callable[..., str]) -> click.Option:
    """Return an option that raises `HelpWanted` with a text, which rank 0 alone prints."""

    def show(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given and not ctx.resilient_parsing:
            raise HelpWanted(text_of(ctx))

    return click.Option(
        names, is_flag=True, is_eager=True, expose_value=False, help=meaning, callback=show
    )


def help_option() -> click.Option:
    """Return the option --help."""
    return show_option(
        ["-h", "--help", "show_help"], "Show this help.", lambda ctx: f"{ctx.get_help()}\n"
    )


class Command(click.Command):
    """A command of the command line.

    Attributes:
        summary: The first sentences of its `--help`.
        defaults: The names of its flags, with their defaults.
        positional: Names of the flags that may also be given by position.
        examples: Command lines for `--help`.
        error_code: The exit code after an error.
        flags: The table of flags.
        has_variables: Whether LLAMA_* variables stand for flags.
    """

    def __init__(
        self,
        summary: str,
        defaults: Mapping[str, Any],
        positional: Sequence[str] = (),
        function: str = "",
        examples: Sequence[str] = (),
        error_code: int = 1,
        flags: Mapping[str, Flag] = FLAGS,
        has_variables: bool = True,
    ) -> None:
        """Make the parameters of the command.

        Args:
            summary: See the attributes, also for the other arguments.
            defaults: The flags.
            positional: Some of them.
            function: The module in `llama.cli` and the function that runs the command, such as
                "serve:serve"; it is imported when the command is run.
            examples: The examples.
            error_code: The exit code.
            flags: The table.
            has_variables: Whether there are variables.
        """
        self.summary = summary
        self.defaults = defaults
        self.positional = positional
        self.function = function
        self.examples = examples
        self.error_code = error_code
        self.flags = flags
        self.has_variables = has_variables
        options: list[click.Parameter] = [
            _Option(name, flags[name], default, variable(name) if has_variables else None)
            for name, default in defaults.items()
        ]
        arguments = [self._argument(name) for name in positional]
        super().__init__(
            None,
            params=[*arguments, *options, help_option()],
            help=summary,
            short_help=summary,
            add_help_option=False,
            context_settings={"max_content_width": WIDTH, "token_normalize_func": _underscored},
        )

    def _argument(self, name: str) -> click.Argument:
        flag = self.flags[name]
        metavar = flag.metavar if self.defaults[name] is REQUIRED else f"[{flag.metavar}]"
        return click.Argument(
            [f"{name}{_WORD}"],
            type=_type_of(flag),
            required=False,
            metavar=metavar,
            shell_complete=_completer(flag),
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments into `ctx.params`, one value for each flag."""
        rest = super().parse_args(ctx, args)
        for name in self.positional:
            word = ctx.params.pop(f"{name}{_WORD}")
            shown = self.flags[name].metavar
            if word is None:
                continue
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UsageError(f"{shown} is given twice: {word!r} and --{name}")
            ctx.params[name] = word
        for name, default in self.defaults.items():
            if default is REQUIRED and ctx.params[name] is None and not ctx.resilient_parsing:
                is_word = name in self.positional
                shown = self.flags[name].metavar if is_word else f"--{name}"
                remedy = "shows an example" if self.examples else "lists the flags"
                raise UsageError(f"{shown} is missing; --help {remedy}")
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Import the function of the command, run it with the flags, and return the exit code."""
        options = argparse.Namespace(**ctx.params)
        code = start_ranks(options)
        if code is not None:
            return code
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"llama.cli.{module}"), name)
        # Some values of flags can be checked only where they are used.
        with usage_errors(BUILD_FLAGS | NETWORK_FLAGS):
            return function(options)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags in their groups, those of the command alone first."""
        groups: dict[str, list[tuple[str, str]]] = {"": []}
        for param in self.params:
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", ""), []).append(record)
        for group, records in groups.items():
            with formatter.section(group or "Flags"):
                formatter.write_dl(records, col_max=28)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")


def variable(name: str) -> str:
    """Return the environment variable that stands for a flag."""
    return f"LLAMA_{name.upper()}"


def read(program: str, command: Command, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the value of every flag: from the command line, else its variable, else its default.

    Args:
        program: The name of the program, for `--help`.
        command: The command.
        arguments: The arguments after the name of the command.

    Raises:
        HelpWanted: `--help` is given.
        UsageError: An argument or a variable cannot be used; the message names it.
    """
    with reported(), command.make_context(program, list(arguments)) as ctx:
        return argparse.Namespace(**ctx.params)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn an error of click within the block into a UsageError."""
    try:
        yield
    except click.ClickException as e:
        message = e.format_message()
        if isinstance(e, click.BadParameter) and e.param is not None:
            source = e.param.get_error_hint(e.ctx).strip("'[]")
            message = f"{source}: {e.message}"
        elif message[1:2].islower():
            message = f"{message[0].lower()}{message[1:]}"
        raise UsageError(message) from None


def _underscored(name: str) -> str:
    """Replace the dashes in the name of a flag: `--ckpt-dir` is `--ckpt_dir`."""
    return name.replace("-", "_")
