"""The instructions of torchrun_examples/Dockerfile, for tests."""

import re

from helpers.launch import REPO

FILE = REPO / "torchrun_examples" / "Dockerfile"


def instructions(stage: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage after its FROM, as (name, arguments)."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            name = arguments.rpartition(" ")[2]
            found[name] = []
        elif instruction:
            found[name].append((instruction, arguments.strip()))
    return found[stage]


def copied(stage: str) -> dict[str, str]:
    """Return what a stage copies from the checkout: each file or folder, and its new path."""
    pairs: dict[str, str] = {}
    for instruction, arguments in instructions(stage):
        if instruction == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                name = source.rpartition("/")[2]
                pairs[source] = f"{target}{name}" if target.endswith("/") else target
    return pairs
