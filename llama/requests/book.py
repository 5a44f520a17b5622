"""The requests of one port: from a prompt to the outputs of its answers.

In: prompts and sampling parameters. Out: outputs, as the port computes their tokens. Everything
here is text; where the sequences are computed is the port's affair. Any thread may call it.
"""

from collections.abc import Iterable

from llama.options.image_sizes import ImageSizes
from llama.prompts.dialog_format import DialogFormat
from llama.requests.adapters import AdapterNames
from llama.requests.formats import ConstraintMaker
from llama.requests.interrupts import DeferredInterrupt
from llama.requests.port import Port
from llama.requests.prepare import Preparer
from llama.requests.public_text import PublicText
from llama.requests.registry import RequestRegistry
from llama.requests.request import Request, RequestOutput
from llama.tokenizer import Tokenizer


class RequestBook:
    """The requests of one model, which a port computes.

    Attributes:
        port: The port.
        tokenizer: The tokenizer of the model.
        max_seq_len: The largest number of tokens of a sequence, prompt and answer together.
        why_silent: Why the model cannot generate; empty if it can.
        images: The sizes of images; None where requests cannot have any.
        adapters: The adapters that requests can choose.
    """

    def __init__(
        self,
        port: Port,
        tokenizer: Tokenizer,
        constraints: ConstraintMaker,
        max_seq_len: int,
        why_silent: str = "",
        images: ImageSizes | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            port: Where sequences are computed.
            tokenizer: The tokenizer of the model.
            constraints: Makes what constrains answers.
            max_seq_len: The largest number of tokens of a sequence.
            why_silent: Why the model cannot generate; empty if it can.
            images: The sizes of images; None where requests cannot have any.
        """
        self.port = port
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.why_silent = why_silent
        self.adapters: AdapterNames = port.adapters
        self.images = images
        preparer = Preparer(tokenizer, max_seq_len, constraints, self.adapters, why_silent, images)
        self._preparer = preparer
        self.prepare = preparer.prepare
        self.check_generates = preparer.check_generates
        self._lock = port.lock  # protects the registry
        self._registry = RequestRegistry(port)
        self._is_closed = False

    def share(self, text: str, dialog_format: DialogFormat) -> int:
        """Let all tenants share the pages of a text, from now on.

        Args:
            text: The text: prompts that begin with it, and chats whose system message it is.
            dialog_format: The format of these chats.

        Returns:
            The largest number of tokens that they share.
        """
        self._preparer.public = PublicText(text, self.tokenizer, dialog_format)
        return self._preparer.public.num_tokens

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Queue the requests of one call, and return them.

        Raises:
            ValueError: An id is in use, or an adapter has been dropped. Nothing has been queued.
            RuntimeError: `close` has been called.
        """
        self._check_open()
        listed = list(requests)
        try:
            self._queue(listed)
        except BaseException:  # an id in use or an interrupt: no request may stay queued
            self.discard(listed)
            raise
        return listed

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed: build another one")

    def _queue(self, requests: list[Request]) -> None:
        """Add the requests to the port."""
        with DeferredInterrupt(), self._lock:
            self._registry.queue(requests)

    def take_output(self, request: Request) -> RequestOutput:
        """Return the current output of a request; a finished request is removed."""
        with self._lock:
            self._registry.due.pop(request, None)
            if request.finished:
                self._registry.forget(request)
            return request.take_output()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, free its pages and return its last output.

        Returns:
            None if there is no unfinished request with this id.
        """
        request = self.find(request_id)
        if request is None:
            return None
        self.abort(request)
        return self.take_output(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps; unfinished answers get finish_reason "abort"."""
        with DeferredInterrupt(), self._lock:
            self._registry.end(request)
            self.port.wake()

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id, or None."""
        return self._registry.find(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished or its last output has not been taken."""
        return bool(self._registry.requests)

    @property
    def num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output has not been taken."""
        return len(self._registry.requests)

    def close(self) -> None:
        """Abort all requests; submitting another one raises a RuntimeError."""
        self._is_closed = True
        with DeferredInterrupt(), self._lock:
            for request in list(self._registry.requests):
                self.abort(request)

    def discard_all(self) -> None:
        """Abort and remove all requests."""
        self.discard(list(self._registry.requests))

    def discard(self, requests: Iterable[Request]) -> None:
        """Abort the unfinished requests, and remove all of them."""
        with DeferredInterrupt(), self._lock:
            for request in requests:
                self.abort(request)
                self._registry.forget(request)
