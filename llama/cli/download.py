"""`llama download`: fetch a model from Hugging Face's hub.

Every command then finds the model by its name. Only the files that the model is loaded from
are stored, in Hugging Face's cache. A connection that is cut is resumed. Of a download that was
stopped, the complete files remain. What is fetched is compared with the sizes and hashes that the
hub lists; a file that differs is removed, so that the next download fetches it from its beginning.
"""

import argparse
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Never

from llama.cli.flags import UsageError, extra
from llama.common.checks import nearest, printable
from llama.storage.downloads import Digest, broken, check_digest
from llama.storage.hub import downloads_of, hub_cache, model_folder, repository, snapshot_of

# The files of each layout, as regular expressions.
_CONFIG = r"(generation_|tokenizer_)?config\.json|(original/)?tokenizer\.(model|json)"
_TEMPLATES = r"chat_template\.\w+|additional_chat_templates/[\w.-]+\.jinja"
_HUGGING_FACE = rf"model[\w.-]*\.safetensors(\.index\.json)?|{_TEMPLATES}|{_CONFIG}"
_META_WEIGHTS = r"consolidated(\.\d+)?\.pth|fp8_scales_\d+\.pt|params\.json|checklist\.chk"
_META = rf"original/({_META_WEIGHTS})|{_CONFIG}"
_OTHER_WEIGHTS = "*.safetensors"  # these would be loaded before Meta's
_PART = re.compile(r"\d{5}(?=\\-of\\-\d{5}\\.gguf$)")  # the number of a part, in an escaped name
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_HASH = re.compile(r"\w[\w:.-]*")
_WEIGHTS = (".pth", ".safetensors", ".gguf")
_NAMES = [
    "Meta-Llama-3-8B-Instruct",
    "Meta-Llama-3-70B-Instruct",
    "Llama-3.1-8B-Instruct",
    "Llama-3.1-70B-Instruct",
    "Llama-3.1-405B-Instruct",
    "Llama-3.2-1B-Instruct",
    "Llama-3.2-3B-Instruct",
    "Llama-3.2-11B-Vision-Instruct",
    "Llama-3.2-90B-Vision-Instruct",
    "Llama-3.3-70B-Instruct",
]


def download(options: argparse.Namespace) -> int:
    """Fetch the missing files of a model, and print where they are.

    Raises:
        OSError: The model cannot be downloaded; the message says why and what to type.
        UsageError: Torchrun started this process, or a package is missing.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("one process downloads for all ranks: start it without torchrun")
    with extra("download", "llama download"):
        from huggingface_hub import errors
    # The base class of the errors of huggingface_hub's HTTP library, which is not exported.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    repo = repository(options.name)
    if not _REPOSITORY.fullmatch(repo):
        raise UsageError(f"{options.name!r} is not the name of a model: give ORG/NAME, or NAME")
    parts = downloads_of(repo) / "blobs"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, functools.partial(_stop, parts))
    try:
        path = _fetch(repo, hub, options.file)
        _remove_stale(parts)
    except (OSError, ValueError, http_error) as e:
        reason = printable(_reason(e, repo, hub))
        raise OSError(f"{repo} is not downloaded: {reason}; then: llama download {repo}") from None
    print(path)
    print(f"next: llama chat {shlex.quote(path) if options.file else options.name}")
    return 0


def _stop(folder: Path, number: int, _: object) -> Never:
    """End the process at once, and remove the parts of files.

    The threads of huggingface_hub would otherwise continue until their files are complete. Parts
    are useless afterwards, because their names belong to one process.
    """
    # Those threads may begin another file meanwhile.
    while parts := list(folder.glob("*.incomplete")):
        for part in parts:
            part.unlink(missing_ok=True)
    os._exit(128 + number)


def _remove_stale(folder: Path) -> None:
    """Remove the parts that a killed process left of files that are complete by now."""
    for part in folder.glob("*.incomplete"):
        if part.with_name(part.name.partition(".")[0]).exists():
            part.unlink(missing_ok=True)


def _reason(error: Exception, repo: str, hub: str) -> str:
    """Return why a download failed, and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"accept its licence at {hub}/{repo} and set HF_TOKEN, from {hub}/settings/tokens"
    if isinstance(error, errors.RepositoryNotFoundError):
        suggestion = nearest(repo.rpartition("/")[2], _NAMES)
        suggestion = suggestion or f"; Meta's models are {', '.join(_NAMES)}"
        return f"{hub} has no such model, or shows it only with HF_TOKEN{suggestion}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE forbids downloads: unset it, or {_copy_hint(repo)}"
    message = getattr(error, "server_message", None) or error.__cause__ or error
    text = str(message).partition("\n")[0]
    if isinstance(error, vars(errors)["HTTPError"]) and not isinstance(
        error, errors.HfHubHTTPError
    ):
        return (
            f"{hub} cannot be reached ({text}): connect this machine to a network, set HTTPS_PROXY "
            f"to a proxy or HF_ENDPOINT to a mirror, or {_copy_hint(repo)}"
        )
    return text


def _copy_hint(repo: str) -> str:
    """Return how to get a model without a network."""
    return f"copy {downloads_of(repo)} from a machine that has the model"


def _fetch(repo: str, hub: str, file: str | None) -> str:
    """Fetch a GGUF file, or one layout of a model, and return its path.

    The layout is Hugging Face's. It is Meta's if the repository has no other, or if its weights
    alone are in the cache already.
    """
    import huggingface_hub

    with _answers_of(hub):
        info = huggingface_hub.HfApi(hub).model_info(repo, files_metadata=True)
    entries: dict[str, Any] = {entry.rfilename: entry for entry in info.siblings or []}
    sizes = {name: entry.size or 0 for name, entry in entries.items()}
    names = _wanted(sizes, model_folder(repo), file)
    cache = hub_cache()
    folder = snapshot_of(repo, info.sha)
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        if path.is_file() and path.stat().st_size != sizes[name]:
            _remove(path)  # an earlier download did not compare it
    missing = [name for name in names if not (folder / name).exists()]
    needed = sum(sizes[name] for name in missing)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise OSError(
            f"it needs {needed:,} more bytes in {cache}, where {free:,} are free: delete something "
            "there, or set HF_HUB_CACHE to a folder elsewhere"
        )
    hooks = huggingface_hub.get_session().event_hooks["response"]
    hooks.append(_check_names)
    try:
        with _answers_of(hub):
            snapshot = huggingface_hub.snapshot_download(
                repo, allow_patterns=names, cache_dir=cache, endpoint=hub
            )
    finally:
        hooks.remove(_check_names)
    if Path(snapshot) != folder:  # The library has asked the hub again.
        raise ValueError("the hub has given two commits: start again")
    _check_all({Path(snapshot, name): entries[name] for name in missing})
    return snapshot if file is None else os.path.join(snapshot, names[0])


def _check_names(response: Any) -> None:
    """Check what huggingface_hub takes out of a response as names of files and folders.

    Args:
        response: A response of its HTTP client.

    Raises:
        ValueError: A hash or a commit is none, and could be a path out of the cache.
    """
    names = []
    if response.request.method == "HEAD":  # The hash may be that of another protocol.
        given = [response.headers.get(name, "") for name in ("etag", "x-linked-etag")]
        names = [name.lstrip("W/").strip('"') for name in given]
        names.append(response.headers.get("x-repo-commit", ""))
    elif "/tree/" in response.request.url.path and response.is_success:
        response.read()
        names = [(entry.get("lfs") or {}).get("oid") or "" for entry in response.json()]
    for name in names:
        if name and not _HASH.fullmatch(name):
            raise ValueError(f"the hub gives a file the hash {name!r:.100}")


@contextlib.contextmanager
def _answers_of(hub: str) -> Iterator[None]:
    """Turn what huggingface_hub raises for answers of another form into a ValueError."""
    try:
        yield
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{hub} answers what no hub does: {error!r:.200}") from error


def _check_all(fetched: Mapping[Path, Any]) -> None:
    """Compare files with their entries in the hub's listing, and remove those that differ.

    Raises:
        ValueError: A file differs; the first one is named.
    """
    with ThreadPoolExecutor() as pool:
        errors = [error for error in pool.map(_check, fetched, fetched.values()) if error]
    if errors:
        raise errors[0]


def _check(path: Path, entry: Any) -> ValueError | None:
    """Return what is wrong with a fetched file, which is then removed."""
    try:
        size = path.stat().st_size
        if entry.size is not None and size != entry.size:
            raise broken(path, f"is of another size than the hub lists ({entry.size:,} bytes)")
        digest = _listed_digest(entry)
        if digest is not None:
            for _ in check_digest(path, digest):
                pass
    except ValueError as error:
        _remove(path)
        return error
    return None


def _listed_digest(entry: Any) -> Digest | None:
    """Return the hash that the hub lists for a file: SHA-256 for large ones, git's for others."""
    if entry.lfs is not None:
        return Digest("sha256", entry.lfs.sha256, "the hub")
    return Digest("sha1", entry.blob_id, "the hub") if entry.blob_id else None


def _remove(path: Path) -> None:
    """Remove a file of the cache and what it links to, so that nothing takes it for complete.

    Raises:
        ValueError: The file is not in the cache.
    """
    cache = hub_cache().resolve()
    if not path.parent.resolve().is_relative_to(cache):
        raise ValueError(f"{path} is not in {cache}: it is not removed")
    blob = path.resolve()
    path.unlink()
    if blob.parent.name == "blobs" and blob.is_relative_to(cache):
        blob.unlink(missing_ok=True)


def _wanted(sizes: dict[str, int], folder: Path, file: str | None) -> list[str]:
    """Return the names of the files that the model is loaded from.

    Args:
        sizes: The files of the repository, with their sizes in bytes.
        folder: The model's folder in the cache.
        file: A GGUF file, which stands for all of its parts.
    """
    has_meta_weights = any(folder.glob("original/*.pth")) and not any(folder.glob(_OTHER_WEIGHTS))
    pattern = _META if has_meta_weights or "config.json" not in sizes else _HUGGING_FACE
    if file is not None:
        pattern = _PART.sub(r"\\d{5}", re.escape(file))
    names = [name for name in sizes if re.fullmatch(pattern, name)]
    if not any(name.endswith(_WEIGHTS) for name in names):
        others = ", ".join(name for name in sizes if name.endswith(".gguf"))
        remedy = f"; give --file, one of {others}" if others else ""
        raise OSError(f"it has no {file or 'model*.safetensors or original/*.pth'}{remedy}")
    return names
