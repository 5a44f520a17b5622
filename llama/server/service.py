"""A server as its routes see it: the table of its models, and what all of them share.

In: the `model` of a body. Out: the `Serving` that answers it. The process asks the table for what
concerns all models: whether one has failed, and how many sequences run. This file knows no API and
no HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llama.api import MaskBudget, ServedModel
from llama.server.errors import unknown_model
from llama.server.limits import Limits, State
from llama.server.metrics import Metrics
from llama.server.serving import Serving


@dataclass(eq=False)
class Service:
    """The models of one server. `llama serve` adds one.

    Attributes:
        limits: the limits of the server.
        servings: the models, by their names. The first one is the default.
        metrics: the metrics of the server.
    """

    limits: Limits
    servings: dict[str, Serving] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def __iter__(self) -> Iterator[Serving]:
        """Iterate over the models."""
        return iter(self.servings.values())

    def add(self, name: str, **options: Any) -> Serving:
        """Add a model that is not loaded yet.

        Args:
            name: name of the model.
            options: further attributes of its `Serving`.

        Raises:
            ValueError: a model has this name.
        """
        if name in self.servings:
            raise ValueError(f"two models of the server have the name {name!r}: rename one")
        serving = Serving(name, self.limits, self.metrics, **options)
        self.servings[name] = serving
        return serving

    @property
    def default(self) -> Serving:
        """The model for requests that name none."""
        return next(iter(self))

    def of(self, model: str | None) -> Serving:
        """Return the model that answers a body, which names it or one of its adapters.

        A server with one model answers with it, whatever a body names. `Serving.adapter_of` refuses
        unknown names where the model has adapters.

        Raises:
            ApiError: 404 if the server has several models, and none has this name.
        """
        if model is None or len(self.servings) == 1:
            return self.default
        for serving in self:
            if serving.answers_to(model):
                return serving
        raise unknown_model(model, self.servings)

    @property
    def max_body_bytes(self) -> int:
        """The largest number of bytes of a body."""
        takes_images = any(serving.takes_images for serving in self)
        return self.limits.max_image_body_bytes if takes_images else self.limits.max_body_bytes

    def start(self, llama: Any) -> None:
        """Answer requests from now on, with a `Llama` of this process as the default model."""
        # They import torch, which a process without an engine does not have.
        from llama.server.engine_metrics import EngineMetrics
        from llama.server.local_desk import LocalDesk

        serving = self.default
        self.metrics.registry.register(EngineMetrics(llama, serving.num_unfinished))
        desk = LocalDesk(llama, self.limits.max_loras, serving.num_unfinished, self.metrics.text)
        llama.llm_engine.port.mask_budget = MaskBudget()
        serving.start(ServedModel.of(llama), desk)

    def drain(self) -> None:
        """Reject new requests from now on."""
        for serving in self:
            serving.drain()

    @property
    def state(self) -> State:
        """The first state that is not `READY`; the process serves only while all models can."""
        return next((x.state for x in self if x.state is not State.READY), State.READY)

    @property
    def has_failed(self) -> bool:
        """Whether a step of a model failed, even if no client is left that waits for it."""
        return any(serving.has_failed for serving in self)

    @property
    def failure(self) -> BaseException | None:
        """The exception of the first step that failed."""
        engines = [serving.engine for serving in self]
        return next((x.failure for x in engines if x and x.failure is not None), None)

    def break_off(self, *, is_failure: bool = True) -> None:
        """End all requests; see `Serving.break_off`."""
        for serving in self:
            serving.break_off(is_failure=is_failure)

    @property
    def is_busy(self) -> bool:
        """Whether any request is being answered."""
        return any(serving.is_busy for serving in self)

    async def ranks_alive(self) -> bool:
        """Return whether all ranks of the loaded models work."""
        desks = [serving.desk for serving in self if serving.desk is not None]
        return all([await desk.ranks_alive() for desk in desks])

    async def load(self) -> int:
        """Return the number of sequences that run or wait, of the whole server."""
        desks = [serving.desk for serving in self if serving.desk is not None]
        return sum([await desk.num_unfinished() for desk in desks])

    async def metrics_text(self) -> bytes:
        """Return the metrics of the whole server."""
        desk = self.default.desk
        return self.metrics.text() if desk is None else await desk.metrics()

    def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait."""
        return sum(serving.num_unfinished() for serving in self)

    def close(self) -> None:
        """End all requests and the engines' threads."""
        for serving in self:
            serving.close()
