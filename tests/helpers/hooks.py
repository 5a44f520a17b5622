"""Hooks of a core that keep what they see."""

from collections import defaultdict

from torch import Tensor

from llama.engine.hooks import StepHook
from llama.engine.step import Step


class SeenStates(StepHook):
    """Keeps hidden states, by the seed of a sequence and the number of the state, then position."""

    def __init__(self, numbers: set[int]) -> None:
        self.wanted_states = frozenset(numbers)
        self.states = defaultdict[tuple[int, int], dict[int, Tensor]](dict)
        self.num_tokens = 0
        self.num_results = 0

    def see(self, step: Step, states: dict[int, Tensor]) -> None:
        self.num_tokens += sum(item.count for item in step.items)
        self.num_results += len(step.result_rows())
        for number in self.wanted_states:
            rows = iter(states[number].clone())
            for item in step.items:
                of_sequence = self.states[item.sequence.spec.seed, number]
                for position in range(item.start, item.start + item.count):
                    of_sequence[position] = next(rows)
            assert next(rows, None) is None
