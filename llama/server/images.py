"""The images of a request, read in processes with limits.

In: data: URLs or base64, as the body has them, or URLs of hosts that are allowed. Out: pictures in
the order of the images, or an `ApiError` that names one. What they take in memory counts as a part
of the answer, until the client has read its last byte.
"""

import base64
from collections.abc import Iterator, Sequence

from llama.prompts.pictures import Picture
from llama.server.errors import ApiError, first_name
from llama.server.fetch import MAX_BYTES, fetch, host_names, is_url
from llama.server.memory import Holding
from llama.server.request import ImageSource
from llama.server.serving import Serving


async def read_images(
    serving: Serving, images: Sequence[ImageSource], sender: bytes, answer: Holding
) -> list[Picture]:
    """Return the images of a request.

    Args:
        serving: the model.
        images: the images.
        sender: whoever sends them, see `AuthAndLimits`.
        answer: what the request holds in memory.

    Raises:
        ApiError: 400 names the image that cannot be read; 503 says that the server is busy.
    """
    sizes = serving.loaded().card.images
    assert sizes is not None, "the model reads text alone"
    limit = serving.limits.max_images
    if len(images) > limit:
        message = (
            f"there are {len(images)} images, and this server reads at most {limit} of a request "
            "(--max_images): send fewer"
        )
        raise ApiError(400, message, param=first_name(images[0].path))
    pixel_bytes = 3 * sizes.chunk_size**2 * sizes.max_tiles
    answer.grow_to(sum(_file_bytes(image) + pixel_bytes for image in images))
    files = [await _file(serving, image) for image in images]
    return await serving.workers.read_images(sender, _pictures(serving, images, files))


def _file_bytes(image: ImageSource) -> int:
    """Return the largest number of bytes that the file of an image takes."""
    return MAX_BYTES if is_url(image.url) else len(image.url)


async def _file(serving: Serving, image: ImageSource) -> str | bytes:
    """Return a data: URL or base64, or the bytes of a file that has been fetched."""
    if not is_url(image.url):
        return image.url
    try:
        return await fetch(image.url, host_names(serving.limits.image_hosts))
    except ValueError as error:
        raise _refusal(image, error) from None


def _pictures(
    serving: Serving, images: Sequence[ImageSource], files: Sequence[str | bytes]
) -> Iterator[Picture]:
    """Read images one by one, in a thread."""
    sizes = serving.loaded().card.images
    assert sizes is not None, "the model reads text alone"
    for image, file in zip(images, files, strict=True):
        max_tiles = 1 if image.is_small else sizes.max_tiles
        text = base64.b64encode(file).decode() if isinstance(file, bytes) else file
        try:
            picture = serving.workers.pictures.read(text, sizes.chunk_size, max_tiles)
        except ValueError as error:
            raise _refusal(image, error) from None
        assert picture.digest  # computed here, and not in the event loop
        yield picture


def _refusal(image: ImageSource, error: ValueError) -> ApiError:
    return ApiError(400, f"{image.path}: {error}", param=first_name(image.path))
