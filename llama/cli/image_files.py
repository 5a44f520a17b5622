"""Files of images that the user of a command names: in a chat, and in the lines of a batch file.

In: a path, or the fields of a line and the folder of their images. Out: data: URLs. A line reads no
file outside of its folder.
"""

import base64
import mimetypes
from pathlib import Path
from typing import Any

_MAX_BYTES = 20 << 20
# The types of images in OpenAI's chats and responses.
_TYPES = ("image_url", "input_image")


def data_url(path: Path) -> str:
    """Return the data: URL of an image.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its name is not that of an image, or it is too large.
    """
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise ValueError(f"{path} is no image: give a file such as photo.jpg")
    data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def with_files(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a line, with a data: URL in place of each name of a file.

    Args:
        fields: The fields, which nobody has checked.
        folder: The folder of the files.

    Raises:
        ValueError: An image is no file in the folder; the message says where it is named.
    """
    body = fields.get("body", fields)
    if not isinstance(body, dict):
        return fields
    given = {
        name: _with_files(body[name], f"{name}", folder)
        for name in ("messages", "input")
        if isinstance(body.get(name), list)
    }
    return fields | ({"body": body | given} if "body" in fields else given)


def _with_files(messages: list[Any], where: str, folder: Path) -> list[Any]:
    found = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [_part(x, f"{where}[{i}].content[{k}]", folder) for k, x in enumerate(content)]
            message = message | {"content": parts}
        found.append(message)
    return found


def _part(part: Any, where: str, folder: Path) -> Any:
    """Return a part of a message, with the data: URL of its file if it names one."""
    if not isinstance(part, dict) or part.get("type") not in _TYPES:
        return part
    place = part.get("image_url")
    url = place.get("url") if isinstance(place, dict) else place
    if not isinstance(url, str) or url.startswith("data:") or "://" in url:
        return part
    try:
        path = (folder / url).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise ValueError(f"{url!r:.200} is no file in {folder}")
        read = data_url(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return part | {"image_url": place | {"url": read} if isinstance(place, dict) else read}
