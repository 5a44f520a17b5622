"""Names of models on the Hugging Face hub, and where their downloads lie on this machine.

In: a path, or the name of a model. Out: a repository or a folder. No network is used.
"""

import os
from pathlib import Path


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


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Return an existing path unchanged, or the folder where `llama download` put a named model.

    A name that was not downloaded is returned as a path, too.
    """
    folder = Path(name)
    downloads = hub_cache() / f"models--{repository(name).replace('/', '--')}"
    commit = downloads / "refs" / "main"
    if folder.exists() or not commit.is_file():
        return folder
    return downloads / "snapshots" / commit.read_text()
