"""Images of dialogs: files of images in, tiles of pixels out.

In: bytes, paths, base64 or images of Pillow, as callers give them. Out: a `Picture`, whose tiles
are those that Meta's image transform makes, to the bit, before it normalises them. The formats are
PNG, JPEG, WebP and GIF, whose first frame counts; the size is checked before pixels are decoded.
Nothing here knows tokens or the engine. The extra `vision` has Pillow.
"""

import base64
import binascii
import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.common.checks import FieldError, brief
from llama.common.extras import install_hint

if TYPE_CHECKING:
    import numpy as np

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_BYTES = 20 << 20  # the largest file
_MAX_PIXELS = 64 << 20
_MAX_SIDE = 1 << 15
_AT_MOST = f"at most {_MAX_PIXELS >> 20} megapixels and {_MAX_SIDE} a side are read"
_MAX_SCANS = 100  # scans of a JPEG: a few hundred bytes are a pass over all pixels
MAX_IMAGES = 16  # the largest number in a prompt
_JPEG = b"\xff\xd8"  # begins the file
_SCAN = b"\xff\xda"  # begins a scan; the data of scans cannot have these bytes
_VERSION = b"1"  # changes when the digest covers something else
_PART_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True, eq=False)
class Picture:
    """An image in tiles, as the encoder takes it.

    Attributes:
        pixels: (r, T, T, 3) uint8, the tiles row by row.
        rows: The rows of tiles.
        columns: The columns of tiles; r = rows * columns.
    """

    pixels: "np.ndarray"
    rows: int
    columns: int

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the pixels and their arrangement."""
        head = f"{self.pixels.shape[1]} {self.rows} {self.columns} ".encode()
        return hashlib.sha256(_VERSION + head + self.pixels.tobytes()).digest()


@dataclass(frozen=True)
class PictureReader:
    """Reads images for a model.

    Attributes:
        chunk_size: T, the pixels of a tile's side.
        max_tiles: The largest number of tiles of an image.
    """

    chunk_size: int
    max_tiles: int

    def read(self, source: Any) -> Picture:
        """Read an image.

        Args:
            source: Bytes of a file, a binary file, a path, base64 or a data: URL as str, or an
                image of Pillow.

        Raises:
            OSError: A file cannot be read.
            TypeError, ValueError: It is no image of a known format, or too large.
        """
        image = _modules().Image
        opened = source if isinstance(source, image.Image) else _open(_bytes_of(source))
        return self.tiles(_in_rgb(opened))

    def tiles(self, image: Any) -> Picture:
        """Return an image of Pillow in RGB as tiles."""
        import numpy as np  # Imported here because clients of a server do not need it.

        rows, columns = canvas(image.width, image.height, self.chunk_size, self.max_tiles)
        side = self.chunk_size
        size = fitted(image.width, image.height, columns * side, rows * side, side)
        resized = image.resize(size, _modules().Image.Resampling.BILINEAR)
        whole = np.zeros((rows * side, columns * side, 3), np.uint8)
        whole[: size[1], : size[0]] = np.asarray(resized)
        tiles = whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        pixels = np.ascontiguousarray(tiles).reshape(-1, side, side, 3)
        return Picture(pixels, rows, columns)


def canvas(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Return rows and columns of the tiles on which an image is put.

    Of all grids, it is the one that enlarges the image least, if any holds it whole, else the one
    that shrinks it least; of several such, the smallest. Scales are compared in float32, as Meta's
    transform does.
    """
    import numpy as np

    sides = range(1, max_tiles + 1)
    grids = [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]
    scales = {
        (rows, columns): min(
            np.float32(columns * side) / np.float32(width),
            np.float32(rows * side) / np.float32(height),
        )
        for rows, columns in grids
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    fitting = [grid for grid in grids if scales[grid] == chosen]
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def fitted(
    width: int, height: int, canvas_width: int, canvas_height: int, side: int
) -> tuple[int, int]:
    """Return the size to which an image is resized on its canvas, with its proportions.

    It is enlarged to one tile at most. Each side has a pixel at least.
    """
    target_width = min(max(width, side), canvas_width)
    target_height = min(max(height, side), canvas_height)
    scale_width = target_width / width
    scale_height = target_height / height
    if scale_width < scale_height:
        return target_width, max(min(int(height * scale_width), target_height), 1)
    return max(min(int(width * scale_height), target_width), 1), target_height


def pictures_of(messages: Sequence[Any]) -> list[Picture]:
    """Return the pictures of messages that `with_pictures` has read, in order."""
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message.content
        for part in content if isinstance(content, list) else ():
            picture = part.get("picture") if isinstance(part, Mapping) else None
            if picture is not None:
                found.append(picture)
    return found


def with_pictures(dialog: Any, reader: PictureReader) -> Any:
    """Return a dialog in which each image is a part with a `Picture`.

    Args:
        dialog: Messages in OpenAI's format, or Meta's RawMessage, whose content may be a text, a
            part, or a list of both. A part that is an image is {"type": "image", "image": source},
            OpenAI's {"type": "image_url", "image_url": {"url": "data:..."}}, or Meta's
            RawMediaItem.
        reader: Reads the images.

    Raises:
        OSError: A file cannot be read.
        FieldError: Names the message and the part at fault.
    """
    if not isinstance(dialog, list | tuple):
        return dialog
    read = [_with_pictures(message, i, reader) for i, message in enumerate(dialog)]
    if len(pictures_of([x for x in read if isinstance(x, Mapping)])) > MAX_IMAGES:
        raise FieldError("messages", f"messages have more than {MAX_IMAGES} images: give fewer")
    return read


def split_text(prompt: Any, reader: PictureReader) -> list[str | Picture]:
    """Return a prompt of texts and images as texts and pictures.

    Raises:
        OSError: A file cannot be read.
        TypeError, ValueError: An element is neither a text nor an image.
    """
    parts = prompt if isinstance(prompt, list | tuple) else [prompt]
    read: list[str | Picture] = []
    for i, part in enumerate(parts):
        text = _text_of(part)
        read.append(_read_at(f"[{i}]", _source_of(part), reader) if text is None else text)
    if sum(isinstance(part, Picture) for part in read) > MAX_IMAGES:
        raise ValueError(f"it has more than {MAX_IMAGES} images: give fewer")
    return read


def _with_pictures(message: Any, index: int, reader: PictureReader) -> Any:
    """Return a message with pictures; one of Meta's RawMessage as a dict."""
    is_mapping = isinstance(message, Mapping)
    if not is_mapping and not (hasattr(message, "role") and hasattr(message, "content")):
        return message
    content = message.get("content") if is_mapping else message.content
    is_single = not isinstance(content, str | list | tuple) and _is_part(content)
    parts = [content] if is_single else content
    if isinstance(parts, list | tuple):
        where = f"messages[{index}].content"
        parts = [_read_part(part, f"{where}[{i}]", reader) for i, part in enumerate(parts)]
    if is_mapping:
        return {**message, "content": parts}
    return {"role": str(getattr(message.role, "value", message.role)), "content": parts}


def _is_part(value: Any) -> bool:
    return hasattr(value, "data") or hasattr(value, "text")


def _text_of(part: Any) -> str | None:
    """Return the text of a part that is one."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return part.get("text") if part.get("type") == "text" else None
    text = getattr(part, "text", None) if getattr(part, "type", None) == "text" else None
    return text if isinstance(text, str) else None


def _read_part(part: Any, where: str, reader: PictureReader) -> Any:
    if isinstance(part, Mapping) and part.get("type") not in _PART_TYPES:
        return part
    text = _text_of(part)
    if text is not None:
        return {"type": "text", "text": text}
    return {"type": "image", "picture": _read_at(where, _source_of(part), reader)}


def _source_of(part: Any) -> Any:
    """Return what an image of a dialog is read from."""
    if isinstance(part, Mapping):
        source = part.get("image", part.get("image_url"))
        return source.get("url") if isinstance(source, Mapping) else source
    return getattr(part, "data", part)  # Meta's RawMediaItem


def _read_at(where: str, source: Any, reader: PictureReader) -> Picture:
    try:
        return reader.read(source)
    except (TypeError, ValueError) as e:
        raise FieldError(where, f"{where}: {e}") from None


def import_all() -> None:
    """Import what reads images: a limit of memory that is set later then does not count it."""
    import numpy as np  # noqa: F401

    with contextlib.suppress(ValueError):  # An answer says that Pillow is missing.
        _modules().Image.init()


def _modules() -> Any:
    """Return Pillow.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ValueError(f"images need Pillow: {install_hint('vision')}") from None
    return PIL


def _bytes_of(source: Any) -> bytes:
    """Return the bytes of the file that a source names or holds."""
    if isinstance(source, os.PathLike):
        path = Path(source)
        with path.open("rb") as file:
            return _bounded(file.read(_MAX_BYTES + 1))
    if isinstance(source, bytes | bytearray):
        return _bounded(bytes(source))
    if isinstance(source, str):
        return _bounded(_decoded(source))
    if hasattr(source, "read"):
        if hasattr(source, "seek"):
            source.seek(0)  # Meta's package reads a BytesIO from its beginning each time
        data = source.read(_MAX_BYTES + 1)
        if isinstance(data, bytes):
            return _bounded(data)
    raise TypeError(
        f"{brief(source)} is no image: give bytes, a path of pathlib, a binary file, base64, a "
        "data: URL, or an image of Pillow"
    )


def _decoded(text: str) -> bytes:
    """Return the bytes of a data: URL or of base64."""
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data: URL of an image must have ;base64 before its comma")
    elif "://" in text[:16]:
        raise ValueError("a URL must be a data: URL: images are not fetched")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is not base64; in Python, a file is a pathlib.Path") from None


def _bounded(data: bytes) -> bytes:
    if len(data) > _MAX_BYTES:
        raise ValueError(f"the file has more than {_MAX_BYTES >> 20} MiB")
    return data


def _open(data: bytes) -> Any:
    """Return an image of Pillow, whose pixels are decoded once its size is known to be allowed."""
    pillow = _modules()
    if data.startswith(_JPEG) and data.count(_SCAN) > _MAX_SCANS:
        raise ValueError(f"the JPEG has more than {_MAX_SCANS} scans")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of decompression bombs
            opened = pillow.Image.open(io.BytesIO(data), formats=_FORMATS)
    except (pillow.Image.DecompressionBombError, pillow.Image.DecompressionBombWarning) as error:
        raise ValueError(f"the image has too many pixels: {_AT_MOST}") from error
    except Exception:
        raise ValueError("it is no image in PNG, JPEG, WebP or GIF") from None
    width, height = opened.size
    if width * height > _MAX_PIXELS or max(width, height) > _MAX_SIDE:
        raise ValueError(f"the image has {width} x {height} pixels: {_AT_MOST}")
    try:
        opened.load()
    except MemoryError:
        raise
    except Exception:  # a truncated file has as many kinds of errors as there are formats
        raise ValueError("the image is truncated or damaged") from None
    return opened


def _in_rgb(image: Any) -> Any:
    """Return an image in RGB, upright; what is transparent is on white."""
    pillow = _modules()
    image = pillow.ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value >> 8 if isinstance(value, int) else value / 256)
        return image.convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = pillow.Image.new("RGBA", image.size, "white")
        return pillow.Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
