"""The extras of this package that a user may lack, and the command that installs one.

In: the name of an extra. Out: a text for an error message. The command names the checkout or the
wheel that this package came from, which need not be on PyPI.
"""

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path

# A module of each extra that the extra `all` includes. The extra is missing where it is.
_MODULES = {
    "serve": "fastapi",
    "client": "httpx2",
    "download": "huggingface_hub",
    "gguf": "gguf",
    "vision": "PIL",
}
_ROOT = Path(__file__).resolve().parent.parent.parent


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, and the names of the others that are missing."""
    hint = _command(extra)
    others = [name for name in _MODULES if name != extra and not _is_installed(name)]
    if not others:
        return hint
    return f"{hint} (also missing: {', '.join(others)}; the extra all installs everything)"


def _is_installed(extra: str) -> bool:
    try:
        return importlib.util.find_spec(_MODULES[extra]) is not None
    except ValueError:  # Something else put an object of this name into sys.modules.
        return False


def _command(extra: str) -> str:
    """Return the command that installs an extra from where this package came from."""
    if (_ROOT / "pyproject.toml").is_file():
        constraints = shlex.quote(str(_ROOT / "constraints.txt"))
        return f"pip install -c {constraints} -e {shlex.quote(f'{_ROOT}[{extra}]')}"
    requirement = f"llama-runtime[{extra}] @ {_url() or 'file:///FOLDER/WHEEL'}"
    return f"pip install {shlex.quote(requirement)}"


def _url() -> str | None:
    """Return the URL of the wheel or archive that pip has installed, if pip has recorded it.

    The format of the record is that of PEP 610.
    """
    try:
        record = json.loads(
            metadata.distribution("llama-runtime").read_text("direct_url.json") or "{}"
        )
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url: str | None = record.get("url")
    version_control = record.get("vcs_info")
    if url is None or version_control is None:
        return url
    return f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
