"""The LoRA adapters of a server, and vLLM's routes to load and drop them.

In: names and paths of clients. Out: what /v1/models lists, and adapters in the engine, or an
`ApiError`. Clients can load adapters only from the folder that the server was given for them, and
only safetensors files.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from llama.api import AdapterInUseError
from llama.common.checks import FieldError, brief
from llama.prompts.fields import Fields
from llama.server.errors import ApiError
from llama.server.exchange import Exchange, body_router
from llama.server.service import Service
from llama.server.serving import Serving

LOAD_URL = "/v1/load_lora_adapter"
UNLOAD_URL = "/v1/unload_lora_adapter"
_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadBody(Fields):
    """The body of /v1/load_lora_adapter."""

    lora_name: _Name
    lora_path: _Path
    load_inplace: bool | None = None


class UnloadBody(Fields):
    """The body of /v1/unload_lora_adapter; vLLM's number of an adapter has no effect."""

    lora_name: _Name
    lora_int_id: int | None = None


def cards(serving: Serving) -> Iterator[dict[str, Any]]:
    """Yield a model and its adapters as /v1/models lists them, with vLLM's `root` and `parent`."""
    card = {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "llama",
        "max_model_len": serving.loaded().card.max_seq_len,
    }
    yield card
    for info in serving.loaded().adapters.values():
        root = Path(info.path).name
        yield {**card, "id": info.name, "root": root, "parent": serving.name}


def path_in(folder: Path, path: str) -> str:
    """Return the folder of an adapter that a client names, within the folder for adapters.

    Raises:
        ApiError: 400 if the path or one of its files leads out of that folder, 404 if there is no
            adapter.
    """
    root = folder.resolve()
    found = root / path
    for file in (found, found / _CONFIG_FILE, found / _WEIGHTS_FILE):
        try:
            target = file.resolve()
        except (OSError, RuntimeError, ValueError):
            raise ApiError(400, f"lora_path={brief(path)} is no path", param="lora_path") from None
        if not target.is_relative_to(root):
            message = f"lora_path={brief(path)} leads out of the folder for adapters"
            raise ApiError(400, message, param="lora_path")
    for file in (found / _CONFIG_FILE, found / _WEIGHTS_FILE):
        if not os.path.isfile(file):  # also where the system refuses the path, as too long
            message = f"lora_path={brief(path)} has no {file.name} in the folder for adapters"
            raise ApiError(404, message, param="lora_path")
    return str(found.resolve())


def routes(service: Service) -> APIRouter:
    """Return vLLM's routes that load and drop adapters; none without a folder for them."""
    router = body_router()
    folder = service.default.lora_folder
    if folder is None:
        return router

    @router.post(LOAD_URL)
    async def load(body: LoadBody, http: Exchange) -> Response:
        """Load an adapter of the folder for adapters (https://docs.vllm.ai, LoRA adapters)."""
        serving = http.serving
        serving.loaded()
        desk = serving.desk
        assert desk is not None
        name = body.lora_name
        if name == serving.name:
            message = f"lora_name={brief(name)} is the name of the base model"
            raise ApiError(400, message, param="lora_name")
        path = await asyncio.to_thread(path_in, folder, body.lora_path)
        try:
            await desk.load_adapter(name, path, replace=bool(body.load_inplace))
        except FieldError as error:
            raise ApiError(400, str(error), param="lora_name") from None
        except AdapterInUseError as error:
            raise ApiError(409, str(error), param="lora_name") from None
        except (OSError, ValueError) as error:
            raise ApiError(400, str(error), param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post(UNLOAD_URL)
    async def unload(body: UnloadBody, http: Exchange) -> Response:
        """Free an adapter that no request is using."""
        http.serving.loaded()
        desk = http.serving.desk
        assert desk is not None
        name = body.lora_name
        try:
            await desk.drop_adapter(name)
        except FieldError:
            message = f"lora_name={brief(name)}: no adapter of this name is loaded"
            raise ApiError(404, message, param="lora_name") from None
        except AdapterInUseError as error:
            raise ApiError(409, str(error), param="lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router
