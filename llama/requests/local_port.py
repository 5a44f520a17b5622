"""The port to a core in this process: its sequences between two steps, and the steps themselves.

In: sequences of any owners. Out: steps of the core, and calls of the owners with what these gave
their sequences. The port has no thread of its own: whoever waits runs the steps (`threads.py`).
Under torchrun, `rank_calls.py` makes each step one of all ranks. Nothing here knows a text.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from llama.common.checks import FieldError
from llama.engine.core import EngineCore
from llama.engine.sequence import SequenceState
from llama.requests.adapter_loading import AdapterLoader
from llama.requests.adapters import AdapterNames
from llama.requests.mask_budget import MaskBudget
from llama.requests.port import Group, Owner, Port
from llama.requests.rank_calls import RankCalls
from llama.requests.seeds import derived_seed
from llama.requests.threads import StepThreads


class LocalPort(Port):
    """The sequences of one core, for any number of owners and threads.

    Attributes:
        mask_budget: Gives slow token masks turns; set where rank 0 alone takes requests.
        loader: Loads and drops adapters.
        threads: The threads that wait for outputs, and run steps meanwhile.
    """

    def __init__(self, core: EngineCore, ranks: RankCalls, seed: int) -> None:
        """Begin without sequences.

        Args:
            core: The core.
            ranks: The calls of all ranks.
            seed: The seed that the seeds of calls without one are derived from.
        """
        self.adapters = AdapterNames()
        self.mask_budget: MaskBudget | None = None
        self.threads = StepThreads(self._step, self._settle)
        self.lock = self.threads.lock
        self.loader = AdapterLoader(self.adapters, self.num_users, ranks, self.threads)
        self._core = core
        self._ranks = ranks
        self._seed = seed
        self._num_calls = 0
        # The owner of each sequence that is queued or in the core.
        self._owners: dict[SequenceState, Owner] = {}
        self._added: dict[SequenceState, None] = {}  # sequences to add at the next step
        self._removed: list[SequenceState] = []  # sequences to remove at the next step

    @property
    def has_sequences(self) -> bool:
        """Whether any sequence is queued or in the core. Read it with the lock."""
        return bool(self._owners)

    def num_users(self, digest: bytes) -> int:
        """Return how many sequences have the adapter with this hash. Call it with the lock."""
        return sum(seq.spec.adapter == digest for seq in self._owners)

    def next_seed(self) -> int:
        """Return the seed of the next call that gives none."""
        return derived_seed(self._seed, self._ranks.take_number(), of="call")

    def add(self, groups: Sequence[Group], owner: Owner) -> None:
        """Queue the sequences of a call; they enter the core at the next step. See `Port.add`."""
        sequences = [seq for group in groups for seq in group.sequences]
        for seq in sequences:
            digest = seq.spec.adapter
            if digest and not self.adapters.has_digest(digest):
                raise FieldError("adapter", "the adapter of a request has been dropped")
        self._num_calls += 1
        for seq in sequences:
            seq.spec = replace(seq.spec, call=self._num_calls)
            self._owners[seq] = owner
            self._added[seq] = None
        if self.mask_budget is not None:
            self.mask_budget.watch(groups)

    def remove(self, sequences: Iterable[SequenceState]) -> None:
        """Remove sequences from the core as soon as no step is running; see `Port.remove`."""
        for seq in sequences:
            if self._owners.pop(seq, None) is None:
                continue
            if seq in self._added:
                del self._added[seq]
            else:
                self._removed.append(seq)
        if not self.threads.is_stepping:
            self._apply_removed()

    def wake(self) -> None:
        """Wake the sleeping threads whose condition is true. Call it with the lock."""
        self.threads.wake_ready()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()` is true."""
        self.threads.wait_until(is_ready)

    def check_shared(self) -> None:
        """Check that this process is alone or leads; see `Port.check_shared`."""
        parallel = self._ranks.parallel
        if not parallel.is_alone and not self._ranks.is_led:
            # Ranks must see the same requests in the same order; each event loop has its own.
            raise ValueError(
                f"with {parallel.num_ranks} ranks of one model, rank 0 must lead: "
                "call llama.lead(work) on every rank, and make the AsyncLLMEngine in `work`"
            )

    def _step(self) -> None:
        """Run the model once for all sequences; the lock is released while it runs."""
        try:
            with self.lock:
                added = list(self._added)
                self._added = {}
                removed = self._take_removed()
                budget = self.mask_budget
                resting = budget.resting(self._owners.keys()) if budget else []
            moved = self._ranks.step(added, removed, resting)
            with self.lock:
                self._announce(moved)
        except BaseException as error:
            with self.lock:
                self._fail(error)
            raise

    def _announce(self, moved: list[SequenceState]) -> None:
        """Give the owners their sequences that have moved, and forget those that have ended."""
        of_owners: dict[Owner, list[SequenceState]] = {}
        for seq in moved:
            owner = self._owners.get(seq)
            if owner is None:  # removed during the step
                continue
            of_owners.setdefault(owner, []).append(seq)
            if seq.finish_reason is not None:
                del self._owners[seq]
        for owner, sequences in of_owners.items():
            owner.moved(sequences)

    def _settle(self) -> None:
        """Do what was asked for while the step was running."""
        self._apply_removed()
        self.loader.apply_dropped()

    def _apply_removed(self) -> None:
        """Free the pages of removed sequences.

        While rank 0 leads, nothing is done here: the next step frees them on every rank.
        """
        if not self._ranks.is_led:
            for seq in self._take_removed():
                self._core.finish(seq, "abort")

    def _take_removed(self) -> list[SequenceState]:
        """Return the sequences that the core has and no owner needs any more."""
        removed = self._removed
        self._removed = []
        return removed

    def _fail(self, error: BaseException) -> None:
        """End the sequences that a failed step was computing, and tell their owners.

        Sequences that have not started yet stay queued, except while rank 0 leads: then no step can
        follow, and all of them end.
        """
        if self._ranks.is_led:
            self._core.clear("error")
            self._removed.clear()
            self._added.clear()
        else:
            self._core.break_off("error")
        if not isinstance(error, Exception):  # SystemExit, for example, must not end other threads
            error = RuntimeError(f"the step was ended by {type(error).__name__}: {error}")
        waiting = {*self._core.scheduler.live(), *self._added}
        of_owners: dict[Owner, list[SequenceState]] = {}
        for seq, owner in self._owners.items():
            if seq not in waiting:
                of_owners.setdefault(owner, []).append(seq)
        for owner, sequences in of_owners.items():
            for seq in sequences:
                del self._owners[seq]
            owner.failed(error, sequences)
