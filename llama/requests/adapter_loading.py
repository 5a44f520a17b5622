"""Loading and dropping adapters while an engine answers requests.

In: names and paths. Out: adapters that requests can choose, the same ones on every rank, or an
error before anything has changed. `adapters.py` has the names; here are ranks, threads, and the
requests that use an adapter.
"""

import threading
from collections.abc import Callable

from llama.checkpoint.lora.unmerged import LoadedAdapter
from llama.requests.adapters import AdapterInfo, AdapterInUseError, AdapterNames
from llama.requests.rank_calls import RankCalls
from llama.requests.threads import StepThreads


class AdapterLoader:
    """Loads and drops the adapters of one engine, one at a time."""

    def __init__(
        self,
        names: AdapterNames,
        num_users: Callable[[bytes], int],
        ranks: RankCalls,
        threads: StepThreads,
    ) -> None:
        """Make a loader.

        Args:
            names: The adapters that are loaded, by name.
            num_users: Returns how many sequences use the adapter of a hash, under the lock.
            ranks: The calls of all ranks.
            threads: The threads that run steps, and their lock.
        """
        self._names = names
        self._num_users = num_users
        self._ranks = ranks
        self._threads = threads
        self._lock = threads.lock
        self._is_changing = threading.Lock()  # owned while adapters are loaded or dropped
        self._dropped: list[bytes] = []  # hashes of adapters to free when no step is running

    def load(self, name: str, path: str, *, replace: bool) -> AdapterInfo:
        """Load an adapter; see `LLMEngine.load_adapter`."""
        with self._ranks.one_caller(), self._is_changing:
            with self._ranks.agree("the adapter") as must_match:
                self._names.check_new(name, replace=replace)
                replaced = self._names.get(name)
                if replaced is not None:
                    self._check_unused(replaced)
                if not self._ranks.is_led:
                    adapter = self._ranks.adapters.read(path)
                    must_match += [name, adapter.digest]
            if self._ranks.is_led:
                adapter = self._ranks.load_adapter(path)
            else:
                self._ranks.adapters.add(adapter)
            if replaced is not None and replaced.digest != adapter.digest:
                try:
                    self._forget(replaced)
                except AdapterInUseError:
                    self._drop_unnamed(adapter.digest)
                    raise
            info = _info(name, path, adapter)
            with self._lock:
                self._names.set(info)
        return info

    def drop(self, name: str) -> None:
        """Free an adapter; see `LLMEngine.drop_adapter`."""
        with self._ranks.one_caller(), self._is_changing:
            with self._ranks.agree("the adapter") as must_match:
                info = self._names.check_known(name)
                must_match.append(name)
                self._check_unused(info)
            self._forget(info)

    def apply_dropped(self) -> None:
        """Free the adapters that no name has any more. Call it with the lock, between two steps."""
        for digest in self._dropped:
            if not self._names.has_digest(digest):
                self._ranks.drop_adapter(digest)
        self._dropped.clear()

    def _check_unused(self, info: AdapterInfo) -> None:
        """Raise AdapterInUseError if requests are using an adapter that no other name keeps."""
        with self._lock:
            if self._names.is_shared(info):
                return
            num_users = self._num_users(info.digest)
            if num_users:
                raise AdapterInUseError(
                    f"the adapter {info.name!r} is in use by {num_users} unfinished sequences: "
                    "abort them, or wait until they have ended"
                )

    def _forget(self, info: AdapterInfo) -> None:
        """Forget a name, then the adapter itself unless another name has it.

        No request can be queued between the check of its users and the end of its name.
        """
        with self._lock:
            self._check_unused(info)
            self._names.remove(info.name)
        self._drop_unnamed(info.digest)

    def _drop_unnamed(self, digest: bytes) -> None:
        """Free an adapter that no name has any more.

        A running step may still compute a sequence that was aborted: then it is freed afterwards.
        While rank 0 leads, the message waits for the step itself.
        """
        if self._ranks.is_led:
            if not self._names.has_digest(digest):
                self._ranks.drop_adapter(digest)
            return
        with self._lock:
            self._dropped.append(digest)
            if not self._threads.is_stepping:
                self.apply_dropped()


def _info(name: str, path: str, adapter: LoadedAdapter) -> AdapterInfo:
    """Return what is known of an adapter that is loaded under a name."""
    return AdapterInfo(
        name, path, adapter.digest, adapter.rank, adapter.base_model, adapter.weights.nbytes
    )
