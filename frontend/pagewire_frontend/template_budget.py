"""What rendering a chat template may spend: steps, processor time, and what it makes.

The sandbox (`template_sandbox`) tells of each thing that is done or made; the budget says when it
is too much.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

MAX_CHARACTERS = 8_000_000
MAX_BYTES = 32_000_000
MAX_TOTAL_BYTES = 512_000_000
MAX_NODES = 200_000  # of nested lists and objects that are made into text, compared or looked up
MAX_STEPS = 4_000_000
MAX_SECONDS = 2.0
_STEPS_BETWEEN_CLOCK_READS = 16
# What takes so long to make or to walk that the clock is read at once.
_BYTES_OF_A_LONG_STEP = 1_000_000
_NODES_OF_A_LONG_STEP = 10_000


class BudgetExceededError(TemplateError):
    """The template did more than a template may."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._steps = 0
        self._bytes = 0
        self._until = time.thread_time() + MAX_SECONDS
        self.now = datetime.now()

    def step(self) -> None:
        """Counts a turn of a loop, a call, a filter or a comparison."""
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLOCK_READS == 0:
            if self._steps > MAX_STEPS:
                raise BudgetExceededError(f"it takes more than {MAX_STEPS} steps")
            self.read_clock()

    def read_clock(self) -> None:
        """Raises when the time is over."""
        if time.thread_time() > self._until:
            raise BudgetExceededError(f"it takes more than {MAX_SECONDS} s")

    def charge(self, size: int) -> None:
        """Raises unless something of this many bytes may be made."""
        check_bytes(size)
        self._bytes += size
        if self._bytes > MAX_TOTAL_BYTES:
            raise BudgetExceededError(f"it makes more than {MAX_TOTAL_BYTES} bytes of text")
        if size > _BYTES_OF_A_LONG_STEP:
            self.read_clock()


# None while Jinja is folding constants as it compiles.
_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def render_within_budget(
    generate: Callable[..., Iterable[str]], variables: Mapping[str, Any]
) -> str:
    """Joins what a compiled template generates. Raises BudgetExceededError when it is too much."""
    token = _budget.set(Budget())
    try:
        pieces: list[str] = []
        size = 0
        for piece in generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise BudgetExceededError(f"the prompt has more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def now() -> datetime:
    """The time that a rendering is told: the same throughout."""
    budget = _budget.get()
    return budget.now if budget else datetime.now()


def step() -> None:
    """Counts a step of the rendering under way."""
    if budget := _budget.get():
        budget.step()


def charge(size: int) -> None:
    """Raises unless something of this many bytes may be made."""
    if budget := _budget.get():
        budget.charge(size)
    else:
        check_bytes(size)


def charge_text(length: int, *made_of: str) -> None:
    """Raises unless a text of this many characters, of these texts', may be made."""
    charge(length if all(text.isascii() for text in made_of) else 4 * length)


def check_bytes(size: int) -> None:
    """Raises when a single thing of this many bytes is too much."""
    if size > MAX_BYTES:
        raise BudgetExceededError(f"it makes something of more than {MAX_BYTES} bytes")


def weigh(value: Any) -> int:
    """About how many bytes the value's text takes. Lists that hold each other twice are
    exponentially long: what takes too long to walk may not be made into text."""
    weight = nodes_seen = 0
    rest = [value]
    while rest:
        item = rest.pop()
        nodes_seen += 1
        if nodes_seen > MAX_NODES:
            raise BudgetExceededError(f"it walks more than {MAX_NODES} values")
        if isinstance(item, str | bytes):
            weight += sys.getsizeof(item)
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            check_bytes(8 * len(item))
            rest += item
        else:
            weight += 8
    if nodes_seen > _NODES_OF_A_LONG_STEP and (budget := _budget.get()):
        budget.read_clock()
    return weight


def check_walk(*values: Any) -> None:
    """Raises unless these may be walked: compared, hashed or told of. Python does that in one go,
    in which nothing else runs, however long it takes."""
    for value in values:
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            check_bytes(weigh(value))


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items, each of which is a step."""
    for item in items:
        step()
        yield item
