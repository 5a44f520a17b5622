"""A command of the command line as click reads it: flags, LLAMA_* variables and help in groups.

In: a table of flags, the names of a command's flags with their defaults, and the arguments of a
shell. Out: an `argparse.Namespace` with a value for each flag, or a `UsageError`. It must know
neither models nor torch, and no flag by name.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
WIDTH = 100  # columns of the help at most

_KEPT_BYTES = re.compile(r"[\udc80-\udcff]")  # bytes that os.fsdecode could not decode
_PATHS = ("DIR", "FILE", "IN", "OUT", "MODEL")  # metavars of flags whose value is a path
# Flags as vLLM and llama.cpp call them, and their names here.
_OTHER_NAMES = {
    "tensor_parallel_size": "ranks",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "ctx_size": "max_seq_len",
    "parallel": "max_batch_size",
    "quantization": "quantize",
    "tokenizer": "tokenizer_path",
    "max_tokens": "max_gen_len",
    "n_predict": "max_gen_len",
}
# Variables that are no flag of a command. Others that begin alike belong to other programs.
_VARIABLES = (
    "LLAMA_API_KEY", "LLAMA_CPU_KERNELS", "LLAMA_DRAIN_S", "LLAMA_GPU_KERNELS",
    "LLAMA_LOCAL_SERVERS", "LLAMA_SHARE_GPU",
)  # fmt: skip
_BY_POSITION = "_by_position"  # ends the name of the argument for a flag


class _Value(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions
    """The value of a flag, as `Flag` describes it."""

    name = "value"

    def __init__(self, flag: Flag) -> None:
        self.flag = flag

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a text; a default is a value already."""
        kind: Any = self.flag.kind
        if not isinstance(value, str) or value == param.default:
            return value
        if kind is str:
            return self._text(value, param, ctx)
        if self.flag.absent and value.lower() == "none":
            return None
        if kind in (int, float) or isinstance(kind, click.ParamType):
            number = click.types.convert_type(kind).convert(value, param, ctx)
            if number != number:  # click finds NaN in every range
                self.fail(f"{value!r} is not a number", param, ctx)
            return number
        try:
            return kind(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)

    def _text(self, value: str, param: Any, ctx: Any) -> str:
        """Check a name, or decode a text: Python keeps bytes that the locale does not have."""
        if self.flag.metavar != "TEXT":
            if not value:  # "$UNSET" must not mean the demo model.
                self.fail("'' is empty: leave it out, or give a value", param, ctx)
            return value
        if not _KEPT_BYTES.search(value):
            return value
        try:
            return os.fsencode(value).decode()
        except UnicodeDecodeError:
            self.fail("the text is not UTF-8: give a text in UTF-8", param, ctx)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> "list[CompletionItem[str]]":
        """Return the choices that begin so, or let the shell complete a path."""
        found = [CompletionItem(x) for x in self.flag.choices if x.startswith(incomplete)]
        if not found and self.flag.metavar in _PATHS:
            return [CompletionItem(incomplete, type="file")]
        return found


class _Option(click.Option):
    """A flag of a command, with the heading of its group in the help."""

    def __init__(self, name: str, flag: Flag, default: Any, variable: str | None) -> None:
        is_required = default is REQUIRED
        super().__init__(
            [f"--{name}"],
            type=click.BOOL if flag.kind is bool else _Value(flag),
            is_flag=flag.kind is bool,
            metavar=flag.metavar,
            default=None if is_required else default,
            show_default=_shown_default(flag, default),
            envvar=variable,
            show_envvar=True,
            help=f"{flag.meaning}{' (required)' if is_required else ''}.",
        )
        self.group = flag.group

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return what gave the value: the flag, or its variable."""
        source = ctx.get_parameter_source(self.name or "") if ctx else None
        is_variable = source is ParameterSource.ENVIRONMENT
        return str(self.envvar) if is_variable else self.opts[0]


def _shown_default(flag: Flag, default: Any) -> str | bool:
    """Return the text of a default in the help; True stands for the value."""
    if default is None:
        return flag.absent
    if default is REQUIRED or not flag.absent:
        return default is not REQUIRED
    return f"{default}, none: {flag.absent}"


def text_option(names: Sequence[str], meaning: str, text_of: Callable[..., str]) -> click.Option:
    """Return an option that raises `HelpWanted` with a text, which rank 0 alone prints."""

    def show(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given and not ctx.resilient_parsing:
            raise HelpWanted(f"{text_of(ctx)}\n")

    return click.Option(
        names, is_flag=True, is_eager=True, expose_value=False, help=meaning, callback=show
    )


def help_option() -> click.Option:
    """Return the option --help."""
    return text_option(["-h", "--help", "show_help"], "Show this help.", click.Context.get_help)


class Command(click.Command):
    """A command of the command line.

    Attributes:
        summary: The first sentences of its `--help`.
        defaults: The names of its flags, with their defaults.
        positional: Names of the flags that may also be given by position.
        function: The module in `llama.cli` and the function that runs the command, such as
            "serve:serve"; it is imported when the command is run.
        examples: Command lines for `--help`.
        error_code: The exit code after an error.
        flags: The table of flags.
        has_variables: Whether LLAMA_* variables stand for flags, see `has_variable`.
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
        self.summary = summary
        self.defaults = defaults
        self.positional = positional
        self.function = function
        self.examples = examples
        self.error_code = error_code
        self.flags = flags
        self.has_variables = has_variables
        options: list[click.Parameter] = [
            _Option(name, flags[name], default, variable(name) if self.has_variable(name) else None)
            for name, default in defaults.items()
        ]
        arguments = [
            click.Argument(
                [f"{name}{_BY_POSITION}"],
                type=_Value(flags[name]),
                required=False,
                metavar=self._shown(name),
            )
            for name in positional
        ]
        super().__init__(
            None,
            params=[*arguments, *options, help_option()],
            help=summary,
            short_help=summary,
            add_help_option=False,
            context_settings={"max_content_width": WIDTH, "token_normalize_func": _underscored},
        )

    def has_variable(self, name: str) -> bool:
        """Return whether a variable stands for a flag: a name of two flags is that of `FLAGS`."""
        return self.has_variables and self.flags[name] is FLAGS.get(name, self.flags[name])

    def _shown(self, name: str) -> str:
        """Return a flag by position as the usage shows it."""
        metavar = self.flags[name].metavar
        return metavar if self.defaults[name] is REQUIRED else f"[{metavar}]"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments into `ctx.params`, one value for each flag."""
        rest = super().parse_args(ctx, args)
        for name in self.positional:
            value = ctx.params.pop(f"{name}{_BY_POSITION}")
            metavar = self.flags[name].metavar
            if value is None:
                continue
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UsageError(f"{metavar} is given twice: {value!r} and --{name}")
            ctx.params[name] = value
        for name, default in self.defaults.items():
            if default is REQUIRED and ctx.params[name] is None and not ctx.resilient_parsing:
                source = self.flags[name].metavar if name in self.positional else f"--{name}"
                remedy = "shows an example" if self.examples else "lists the flags"
                raise UsageError(f"{source} is missing; --help {remedy}")
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
        with usage_errors(BUILD_FLAGS | NETWORK_FLAGS), self._files_of_flags(options):
            return function(options)

    @contextlib.contextmanager
    def _files_of_flags(self, options: argparse.Namespace) -> Iterator[None]:
        """Turn the error of a file that a flag has named into a UsageError."""
        try:
            yield
        except OSError as e:
            for name, value in vars(options).items():
                if value and e.strerror and e.filename in (value, Path(str(value))):
                    source = self.flags[name].metavar if name in self.positional else f"--{name}"
                    raise UsageError(f"{source} {value}: {e.strerror.lower()}") from e
            raise

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


def misspelt_variables() -> Iterator[str]:
    """Describe each variable that is no flag's, but is spelt almost like one."""
    known = {*_VARIABLES, *(variable(name) for name in FLAGS)}
    for name in sorted(os.environ.keys() - known):
        similar = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if name.startswith("LLAMA_") and similar:
            yield f"the variable {name} has no effect: did you mean {similar[0]}?"


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
        if isinstance(e, click.NoSuchOption) and (here := _name_here(e)):
            message = f"no such option '{e.option_name}': it is --{here} here"
        elif isinstance(e, click.BadParameter) and e.param is not None:
            source = e.param.get_error_hint(e.ctx).strip("'[]")
            message = f"{source}: {e.message}"
        elif message[1:2].islower():
            message = f"{message[0].lower()}{message[1:]}"
        raise UsageError(message) from None


def _name_here(error: click.NoSuchOption) -> str | None:
    """Return what a flag of another program is called here, if the command has it."""
    name = _OTHER_NAMES.get(_underscored(error.option_name.lstrip("-")))
    known = {param.name for param in error.ctx.command.params} if error.ctx else set()
    return name if name in known else None


def _underscored(name: str) -> str:
    """Replace the dashes in the name of a flag: `--ckpt-dir` is `--ckpt_dir`."""
    return name.replace("-", "_")
