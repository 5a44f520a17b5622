"""Hooks of mkdocs: what the documentation site has beside the pages of docs/.

In: the pages of docs/. Out: tables of flags made from the commands, pages and pictures that live
elsewhere in the repository, and links to its other files as paths. Nothing here imports torch.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from llama.cli import COMMANDS  # noqa: E402
from llama.cli.parser import REQUIRED, Command  # noqa: E402

# Page or picture of the site -> its file in the repository.
INCLUDED = {
    "reference/benchmarks.md": "scripts/bench/README.md",
    "reference/benchmark-log.md": "scripts/bench/results/LOG.md",
    "images/terminal.svg": ".github/images/terminal.svg",
}
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
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", command_reference())
    return site_links(markdown, page.file.src_uri)


def command_reference() -> str:
    """Return a section in Markdown for each command, with its flags."""
    return "\n".join(_command_section(name, command) for name, command in COMMANDS.items())


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
