"""Hooks of mkdocs: what the documentation site has in addition to the pages of docs/.

In: the pages of docs/. Out: tables made from the commands, from the arguments of `Llama.build` and
from the names of results; pages and pictures that are elsewhere in the repository; and links to
its other files as paths. Nothing here imports torch.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from llama.build_args import BuildArgs  # noqa: E402
from llama.cli import COMMANDS  # noqa: E402
from llama.cli.parser import REQUIRED, Command  # noqa: E402

# Page or picture of the site -> its file in the repository.
INCLUDED = {
    "reference/benchmarks.md": "scripts/bench/README.md",
    "reference/benchmark-log.md": "scripts/bench/results/LOG.md",
    "images/terminal.svg": ".github/images/terminal.svg",
}
# The device in the name of a result, DATE-DEVICE-..., and what the page calls it.
DEVICES = {
    "cpu-1b": "Xeon without AMX",
    "cpu-amx": "Xeon with AMX",
    "cpu-xeon": "Xeon without AMX",
    "cpu-zen4": "AMD EPYC (Zen 4)",
    "gpu-h100": "NVIDIA H100",
}
_RESULT = re.compile(r"(\d{4}-\d\d-\d\d)-([a-z]+-[a-z0-9]+)")
# The GPU and the versions in a result, as scripts/gpu_check.py and its sections write them.
_GPU = re.compile(r"(NVIDIA [^,\n]+)")
_TORCH = re.compile(r"\btorch +(\d[\d.]*)")
_TRITON = re.compile(r"\b[Tt]riton +(\d[\d.]*)")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the files of `INCLUDED` to the site."""
    from mkdocs.structure.files import File

    for name, source in INCLUDED.items():
        files.append(File.generated(config, name, abs_src_path=str(REPO / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert the generated tables, and rewrite the links that leave docs/."""
    for mark, make in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return site_links(markdown, page.file.src_uri)


def command_reference() -> str:
    """Return a section in Markdown for each command, with its flags."""
    return "\n".join(_command_section(name, command) for name, command in COMMANDS.items())


def build_arguments() -> str:
    """Return a table in Markdown of the arguments of `Llama.build` that are flags, too."""
    lines = ["| argument, flag | meaning | default |", "|---|---|---|"]
    for name, argument in BuildArgs.flags().items():
        meaning = argument.flag.meaning.replace("|", "\\|")
        default = _default(argument.default, argument.flag.absent)
        lines.append(f"| `{name}`, `--{name}` | {meaning} | {default} |")
    return "\n".join(lines)


def measured_devices() -> str:
    """Return a table in Markdown of the devices that scripts/bench/results has figures of."""
    runs: dict[str, list[str]] = {}
    for path in sorted((REPO / "scripts" / "bench" / "results").glob("*.txt")):
        found = _RESULT.match(path.name)
        assert found is not None, f"{path.name} is not DATE-cpu-... or DATE-gpu-..."
        runs.setdefault(DEVICES[found[2]], []).append(found[1])
    lines = ["| device | results | latest |", "|---|---|---|"]
    lines += [f"| {name} | {len(dates)} | {dates[-1]} |" for name, dates in sorted(runs.items())]
    return "\n".join(lines)


def versions_on_gpus() -> list[tuple[str, ...]]:
    """Return the GPU, the torch and the Triton of each result, without repetitions."""
    found = set()
    for path in (REPO / "scripts" / "bench" / "results").glob("*-gpu-*.txt"):
        text = path.read_text()
        matches = [pattern.search(text) for pattern in (_GPU, _TORCH, _TRITON)]
        named = tuple(match[1].strip() for match in matches if match is not None)
        assert len(named) == len(matches), f"{path.name} does not name its GPU, torch and Triton"
        found.add(named)
    return sorted(found)


def versions_table() -> str:
    """Return a table in Markdown of `versions_on_gpus`."""
    lines = ["| GPU | torch | Triton |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in versions_on_gpus()]
    return "\n".join(lines)


def _command_section(name: str, command: Command) -> str:
    lines = [
        f"## llama {name}",
        "",
        command.summary,
        "",
        "```text",
        _usage(name, command),
        "```",
        "",
    ]
    lines += ["| flag | meaning | default |", "|---|---|---|"]
    for flag, default in command.defaults.items():
        known = command.flags[flag]
        shown = f"--{flag} {known.metavar}".rstrip()
        meaning = known.meaning.replace("|", "\\|")
        lines.append(f"| `{shown}` | {meaning} | {_default(default, known.absent)} |")
    if command.examples:
        lines += ["", "```bash", *command.examples, "```"]
    return "\n".join([*lines, ""])


def _usage(name: str, command: Command) -> str:
    words = []
    for flag in command.positional:
        metavar = command.flags[flag].metavar
        words.append(metavar if command.defaults[flag] is REQUIRED else f"[{metavar}]")
    return " ".join(["llama", name, *words, "[flags]"])


def _default(default: Any, absent: str) -> str:
    if default is REQUIRED:
        return "required"
    if default is None:
        return absent
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


# Mark in a page -> the function that makes what replaces it.
GENERATED = {
    "<!-- commands -->": command_reference,
    "<!-- build arguments -->": build_arguments,
    "<!-- measured devices -->": measured_devices,
    "<!-- versions on GPUs -->": versions_table,
}


def site_links(markdown: str, page: str) -> str:
    """Rewrite links of a page, written for a reader of the repository, for the site.

    A link to an included file becomes a link to its page. One to another file of the repository
    becomes its text and its path, since the site does not have it.
    """
    origin = INCLUDED.get(page, f"docs/{page}")
    pages = {source: name for name, source in INCLUDED.items()}

    def rewritten(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path, hash_mark, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if target in pages:
            target = pages[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return text if text.strip("`") == target else f"{text} (`{target}`)"
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({relative}{hash_mark}{anchor})"

    pieces = []
    end = 0
    for block in _FENCED.finditer(markdown):
        pieces += [_LINK.sub(rewritten, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*pieces, _LINK.sub(rewritten, markdown[end:])])
