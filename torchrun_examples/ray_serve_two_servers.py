"""Two servers as replicas of Ray Serve: one URL, and Ray starts a replica again that has died.

    pip install -c constraints.txt -e '.[serve,ray]'   # Ray 2.60 or later
    ray start --head                                   # or a cluster that runs
    LLAMA_CKPT_DIR=DIR serve run torchrun_examples.ray_serve_two_servers:app

and clients ask http://localhost:8000/v1. Without LLAMA_CKPT_DIR it is the demo model. Requests with
the same header x-session-id go to one replica, where their prefix is cached, and others to any; Ray
does not read bodies. Ray sends nothing to a replica that is not healthy. Each replica is one
process: a model on several GPUs is for `llama serve --ranks`, and on one machine `llama serve
--replicas` does without Ray. Keys in LLAMA_API_KEY, with commas between them, are checked, and each
is a tenant, for which /metrics is closed; without one, only for localhost.
"""

import asyncio
import functools
import os
from pathlib import Path

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from llama import Llama
from llama.cli.model import demo_dir
from llama.server.app import make_app
from llama.server.service import Limits, Service, State

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
CKPT_DIR = os.environ.get("LLAMA_CKPT_DIR") or demo_dir()
DRAIN_S = 20.0


@functools.cache
def service_of_process() -> Service:
    return Service(Path(CKPT_DIR).resolve().name, Limits())


def build_app() -> ASGIApp:
    """The app of one replica, made in its process."""
    keys = [key for key in os.environ.get("LLAMA_API_KEY", "").split(",") if key]
    return make_app(service_of_process(), api_keys=keys, loopback=not keys)


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=64,  # the engine batches them
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=DRAIN_S,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    ray_actor_options={"num_cpus": 1, "num_gpus": float(os.environ.get("LLAMA_GPUS", "0"))},
)
@serve.ingress(build_app)
class Server:
    """Loads the model; a replica that loads, or whose step failed, gets no requests."""

    def __init__(self) -> None:
        self._service = service_of_process()
        self._service.start(Llama.build(CKPT_DIR))

    def check_health(self) -> None:
        if self._service.state is State.BROKEN:
            raise RuntimeError("a step of the model failed")

    async def __del__(self) -> None:
        self._service.drain()
        if self._service.engine is not None:
            await asyncio.to_thread(self._service.engine.close)


app = Server.bind()
