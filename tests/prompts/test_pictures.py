"""Images of prompts: tiles against Meta's image transform, and files that must not be read."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import vision
from helpers.vision import picture
from llama.prompts.pictures import PictureReader, canvas
from llama.vision.encoder import normalized

# Sizes on the borders of grids of tiles of 28 and 560 pixels, and beyond each side.
SIZES = [
    (1, 1), (1, 40), (27, 28), (28, 28), (29, 28), (28, 57), (56, 56), (57, 56), (56, 84), (84, 29),
    (85, 28), (112, 28), (113, 29), (200, 3), (3, 200), (64, 48), (48, 64), (100, 99), (99, 100),
    (300, 200), (200, 300), (333, 111), (111, 333), (555, 560), (560, 560), (561, 560), (1120, 560),
    (1024, 768), (768, 1024), (2000, 500), (640, 1700),
]  # fmt: skip


@pytest.fixture(scope="module")
def metas() -> Iterator[Any]:
    with vision.metas_modules() as module:
        yield module.VariableSizeImageTransform


@pytest.mark.parametrize("side", [28, 560])
def test_tiles_are_those_of_metas_transform(metas, side):
    """Every pixel, in float32, and the grid of the tiles."""
    reader = PictureReader(side, 4)
    for i, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=i)
        expected, grid = metas(size=side)(image, max_num_chunks=4)
        found = reader.read(image)
        assert (found.rows, found.columns) == grid, (width, height)
        assert torch.equal(normalized(torch.from_numpy(found.pixels)), expected), (width, height)


def test_canvases_are_metas(metas):
    """The grid of tiles for random sizes."""
    transform = metas(size=560)
    resolutions = torch.tensor(transform.find_supported_resolutions(4, 560))
    draw = np.random.default_rng(1)
    for width, height in draw.integers(1, 3000, (300, 2)).tolist():
        best = transform.get_best_fit((width, height), resolutions)
        assert canvas(width, height, 560, 4) == (best[1] // 560, best[0] // 560), (width, height)


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


READER = PictureReader(28, 4)


def pixel_of(image: Image.Image, kind: str = "PNG", **more: Any) -> list[int]:
    return READER.read(saved(image, kind, **more)).pixels[0, 0, 0].tolist()


def test_modes_are_read_as_people_see_them():
    """Transparent is white, 16 bits keep their upper ones, and a photo that lies is upright."""
    assert pixel_of(Image.new("RGBA", (28, 28), (200, 0, 0, 0))) == [255, 255, 255]
    assert pixel_of(Image.new("LA", (28, 28), (10, 255))) == [10, 10, 10]
    assert pixel_of(Image.new("1", (28, 28), 1)) == [255, 255, 255]
    assert pixel_of(Image.fromarray(np.full((28, 28), 0x8000, np.uint16))) == [128, 128, 128]
    image = picture(28, 56)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    lying = READER.read(saved(image, "PNG", exif=exif))
    assert (lying.rows, lying.columns) == (1, 2)
    frames = [picture(28, 28, seed=i).convert("P") for i in range(3)]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert READER.read(animated).digest == READER.read(frames[0]).digest


def test_only_here_a_photo_is_upright(metas):
    """Meta's package opens a file and converts it to RGB: a photo that lies stays so."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    data = saved(picture(28, 56), "PNG", exif=exif)
    opened = Image.open(io.BytesIO(data)).convert("RGB")  # as in llama_models' chat_format.py
    _, grid = metas(size=28)(opened, max_num_chunks=4)
    found = READER.read(data)
    assert grid == (2, 1) and (found.rows, found.columns) == (1, 2)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG whose head alone says that it has so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IDAT" + zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(x) - 4) + x + struct.pack(">I", zlib.crc32(x))
        for x in (head, end, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (bomb(20_000, 20_000), "too many pixels"),
        (bomb(40_000, 1), "40000 x 1 pixels"),
        (saved(picture(64, 64), "PNG")[:500], "truncated or damaged"),
        (saved(picture(64, 64), "JPEG")[:900], "truncated or damaged"),
        (saved(picture(8, 8), "TIFF"), "no image in PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in PNG"),
        (b"", "no image in PNG"),
        ("https://example.org/a.png", "images are not fetched"),
        ("file:///etc/passwd", "images are not fetched"),
        ("/etc/passwd", "not base64|no image"),
        ("data:image/png,abc", ";base64 before its comma"),
        ("data:image/png;base64,@@", "not base64"),
        (b"\0" * ((20 << 20) + 1), "more than 20 MiB"),
        (7, "7 is no image"),
    ],
)
def test_hostile_files_are_refused(source, named):
    with pytest.raises((TypeError, ValueError), match=named):
        READER.read(source)
