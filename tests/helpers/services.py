"""A server's table with one model, which is not loaded yet."""

from typing import Any

from llama.server.limits import Limits
from llama.server.service import Service


def service_of(name: str = "demo", limits: Limits | None = None, **options: Any) -> Service:
    service = Service(limits or Limits())
    service.add(name, **options)
    return service
