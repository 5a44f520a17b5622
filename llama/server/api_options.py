"""The options of the API processes of a server, which the engine's process tells them first.

In: the options of `llama serve`. Out: an `ApiOptions`, which travels as JSON and is checked on
arrival. The model is described later, once it is loaded.
"""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llama.prompts import ToolFormat
from llama.server.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """The options of all API processes of a server.

    Attributes:
        name: the name of the model.
        limits: the limits of the server.
        given_format: the format of tool calls; see `Serving`.
        reasoning_field: the field that reasoning has in answers; see `Serving`.
        sampling_defaults: the sampling parameters of requests that give none.
        lora_folder: the folder from which clients can load adapters.
        public_text: a text that prompts may share, whoever sends them; see `Serving`.
        api_keys: the keys that are accepted; see `make_app`.
        metrics_keys: the keys that open /metrics and /load; see `make_app`.
        allowed_origins: origins whose web pages may send requests; see `make_app`.
        lenient: whether fields without effect are dropped; see `make_app`.
        secret: the secret of the roots of tenants, in hex.
        created: when the server was started, in seconds since 1970.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    given_format: ToolFormat | None = None
    reasoning_field: str = "reasoning_content"
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    lora_folder: Path | None = None
    public_text: str = ""
    api_keys: list[str] = field(default_factory=list)
    metrics_keys: list[str] = field(default_factory=list)
    allowed_origins: list[str] = field(default_factory=list)
    lenient: bool = False
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        values: dict[str, Any] = _OPTIONS.dump_python(self, mode="json")
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> "ApiOptions":
        """Return the options; a ValueError says what is none."""
        return _OPTIONS.validate_python(values)


_OPTIONS = TypeAdapter(ApiOptions)
