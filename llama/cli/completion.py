"""Completion in a shell, by click: `llama completion SHELL`, and what its script asks for.

In: the command `llama`, and the variable that a script sets when Tab is pressed. Out: a script for
bash, zsh or fish; or what may come next, found from the same flags as `--help`.
"""

import argparse
import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

from llama.cli.ranks import global_rank

COMPLETE_VARIABLE = "_LLAMA_COMPLETE"


class _WholeFlag(ShellComplete):
    """Completes the value in --flag=value, which zsh and fish take for one argument."""

    def get_completions(self, args: list[str], incomplete: str) -> "list[CompletionItem[str]]":
        """Return what may follow the arguments and take the place of the incomplete one."""
        items = super().get_completions(args, incomplete)
        flag, sign, _ = incomplete.partition("=")
        if sign and flag.startswith("--"):
            for item in items:
                item.value = f"{flag}={item.value}"
        return items


class _Bash(BashComplete):
    """bash splits --flag=value into three; click expects one, or two without the sign."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the arguments before the incomplete one, and that."""
        arguments, incomplete = super().get_completion_args()
        return [argument for argument in arguments if argument != "="], incomplete


class _Zsh(_WholeFlag, ZshComplete):
    pass


class _Fish(_WholeFlag, FishComplete):
    pass


for shell in (_Bash, _Zsh, _Fish):
    add_completion_class(shell)


def complete_line(program: click.Command) -> int:
    """Print what the variable asks for, and return the exit code."""
    instruction = os.environ[COMPLETE_VARIABLE]
    return shell_complete(program, {}, "llama", COMPLETE_VARIABLE, instruction)


def completion(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    if global_rank() == 0:
        program = click.get_current_context().find_root().command
        shell_complete(program, {}, "llama", COMPLETE_VARIABLE, f"{options.shell}_source")
    return 0
