"""The flags of a command, read as the command line reads them.

In: a command, its arguments, and the variables of the environment. Out: a value for each flag.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from unittest import mock

from llama.cli import parser
from llama.cli.parser import Command


def read(
    program: str, command: Command, arguments: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    """Return the value of every flag, with these variables and no others."""
    with mock.patch.dict(os.environ, environ, clear=True):
        return parser.read(program, command, arguments)
