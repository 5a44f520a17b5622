"""One rendering of a chat template: its variables, and the budget of memory, steps and time.

In: values that a template compares, joins or writes. Out: the same values, once their cost is
counted, or a SecurityError that says which limit they exceed. It knows neither filters nor files.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined

from llama.prompts.jinja.marked import concatenate

MAX_CHARS = 16 << 20  # characters of one text
MAX_ITEMS = 1 << 18  # items of one list
MAX_BYTES = 192 << 20  # bytes that one rendering may create in all
MAX_SECONDS = 2.0
STEP = 200  # bytes that a block, a call or a filter counts as: 10**6 of them use the budget up
ITEM = 64  # bytes of an item that a list refers to
_NODE = 128  # bytes that an item counts as where all of a value is compared or written
_MAX_DEPTH = 100  # levels of nested lists and objects
_SCALARS = (str, int, float, type(None), Undefined, range)
_LISTS: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


class Rendering(Context):
    """The variables of one rendering, and what is left of its budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bytes_left = MAX_BYTES
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count a block, a call or a filter."""
        self.spend(STEP)

    def spend(self, num_bytes: int) -> None:
        """Count memory or work, in bytes."""
        self.bytes_left -= num_bytes
        if self.bytes_left < 0:
            raise SecurityError("it makes too many texts or takes too many steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:.0f} seconds")

    def stored(self, value: Any) -> Any:
        """Return a new text or container, and count its memory."""
        if isinstance(value, str):
            if len(value) > MAX_CHARS:
                raise SecurityError(f"a text has more than {MAX_CHARS:,} characters")
            self.spend(value.__sizeof__() + len(value))
        elif isinstance(value, list | tuple | dict):
            if len(value) > MAX_ITEMS:
                raise SecurityError(f"a list has more than {MAX_ITEMS:,} items")
            self.spend(ITEM * len(value))
        return value

    def measured(self, value: Any, *, is_written: bool = False, indent: int = 0) -> Any:
        """Return a value that is compared, hashed or written, and count all that is in it.

        Lists of a template can contain one another many times over, so that a few small lists
        take years to compare.

        Args:
            value: any value of a template.
            is_written: the value becomes a text; only JSON values may.
            indent: how many spaces each level adds to a line.
        """
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, str):
            self.spend(len(value))
            return value
        level: Iterable[Any] = (value,)
        for depth in range(_MAX_DEPTH):
            next_level: list[Any] = []
            cost = 0
            for item in level:
                cost += _NODE + indent * depth
                if isinstance(item, str):
                    cost += 6 * len(item) if is_written else len(item)
                elif isinstance(item, dict):
                    next_level += chain(item.keys(), item.values())
                elif isinstance(item, _LISTS):
                    next_level.extend(item)
                elif is_written and not isinstance(item, _SCALARS):
                    raise SecurityError(f"a {type(item).__name__} cannot be written")
                if cost + ITEM * len(next_level) > self.bytes_left:
                    break
            self.spend(cost + ITEM * len(next_level))
            if not next_level:
                return value
            level = next_level
        raise SecurityError(f"a value is nested more than {_MAX_DEPTH} deep")

    def text_of(self, value: Any) -> str:
        """Return a value as a text; texts keep their marks."""
        self.bytes_left -= ITEM
        if isinstance(value, str):
            return value
        self.measured(value, is_written=True)
        return str(value)

    def concat(self, parts: Iterable[Any]) -> str:
        """Join values as texts."""
        texts = [part if isinstance(part, str) else self.text_of(part) for part in parts]
        if sum(map(len, texts)) > MAX_CHARS:
            raise SecurityError(f"a text has more than {MAX_CHARS:,} characters")
        text = concatenate(texts)
        self.spend(text.__sizeof__() + len(text))
        return text

    def each(self, values: Any) -> Iterator[Any]:
        """Yield the items of a value, each of which counts as a step."""
        for count, item in enumerate(values):
            if count == MAX_ITEMS:
                raise SecurityError(f"a list has more than {MAX_ITEMS:,} items")
            self.step()
            yield item
