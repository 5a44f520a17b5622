"""Names of models on the Hugging Face hub, and where their downloads lie on this machine.

In: a path, or the name of a model. Out: a repository or a folder. No network is used.
"""

import os
import re
from pathlib import Path

_COMMIT = re.compile("[0-9a-f]{40}")


def repository(name: str | os.PathLike[str]) -> str:
    """Return the hub repository of a model name: ORG/NAME, or one of Meta's for NAME alone."""
    return str(name) if "/" in str(name) else f"meta-llama/{name}"


def hub_cache() -> Path:
    """Return the cache folder of Hugging Face's libraries, as their environment variables say.

    The cache is shared, so a model that another program has downloaded is there too.
    """
    get = os.environ.get
    home = get("HF_HOME") or get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    return Path(get("HF_HUB_CACHE") or home + "/hub").expanduser()


def downloads_of(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def snapshot_of(repo: str, commit: str | None) -> Path:
    """Return the folder of a commit of a repository in the cache.

    Raises:
        ValueError: what a hub, or a file that it wrote, calls a commit is none. It would be a path
            to anywhere on this machine.
    """
    if commit is None or not _COMMIT.fullmatch(commit):
        raise ValueError(
            f"the hub calls {ascii(commit)[:100]} a commit of {repo}, which is not 40 hexadecimal "
            "digits: use another hub (HF_ENDPOINT)"
        )
    return downloads_of(repo) / "snapshots" / commit


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Return an existing path unchanged, or the folder where `llama download` put a named model.

    A name that was not downloaded is returned as a path, too.

    Raises:
        ValueError: the cache names no commit for the model; see `snapshot_of`.
    """
    folder = Path(name)
    repo = repository(name)
    commit = downloads_of(repo) / "refs" / "main"
    if folder.exists() or not commit.is_file():
        return folder
    return snapshot_of(repo, commit.read_text())
