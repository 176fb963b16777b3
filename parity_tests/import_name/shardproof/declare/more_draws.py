"""Rarer draws: a user's function or Hypothesis strategy, exactly k of n, permutations, pages.

Like every draw, each has a record, which Hypothesis shrinks and a replay reads. A strategy's record is its numbers; a
function's numbers follow from the case's seed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator, Philox

from shardproof.declare.case import CaseSpec
from shardproof.declare.draws import Chooser, Draw

MAX_NUMBERS = 8  # distinct numbers from a strategy in one array


@dataclass(frozen=True)
class _OfUser(Draw):
    """A draw that the user wrote; errors name it as `who`."""

    integer: bool = False
    who: str = "draw"

    @property
    def is_integer(self) -> bool:
        return self.integer


@dataclass(frozen=True)
class OfFunction(_OfUser):
    """Arrays from a function `(generator, shape)` or `(generator, shape, case)`."""

    function: Callable[..., Any] | None = None

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        return {"kind": "function"}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        """Errors: ValueError for a wrong shape or kind, or for numbers that do not follow from the generator."""
        again = Generator(Philox())
        again.bit_generator.state = rng.bit_generator.state
        array, same = (self._array(generator, shape, case) for generator in (rng, again))
        if not np.array_equal(array, same, equal_nan=array.dtype.kind == "f"):
            raise ValueError(f"{self.who} returns other numbers at each call; draw them from the generator it gets")
        return array

    def _array(self, rng: Generator, shape: tuple[int, ...], case: CaseSpec) -> np.ndarray:
        assert self.function is not None
        arguments = (rng, shape, case)[: _positional(self.function)]
        array = np.asarray(self.function(*arguments))
        if array.shape != shape:
            raise ValueError(f"{self.who} returned an array of {array.shape}; it was asked for {shape}")
        if array.dtype.kind not in ("iub" if self.integer else "f"):
            remedy = "return floats, or write drawn(f, integer=True) for an input of integers or booleans"
            remedy = "return integers or booleans" if self.integer else remedy
            raise ValueError(f"{self.who} returned {array.dtype}; {remedy}")
        return array if array.dtype.kind == "b" else array.astype(np.int64 if self.integer else np.float64)


@dataclass(frozen=True)
class OfStrategy(_OfUser):
    """Numbers from a Hypothesis strategy, up to eight distinct ones per array."""

    strategy: Any = None

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        """Errors: ValueError for an example that is not a number, or if there is no example."""
        from hypothesis import strategies as st
        from hypothesis.errors import HypothesisException

        try:
            sample = choose(st.lists(self.strategy, min_size=1, max_size=MAX_NUMBERS))
        except HypothesisException as error:
            found = "Hypothesis found no example of its strategy"
            raise ValueError(f"{self.who}: {found}, {type(error).__name__}; loosen its filters") from error
        numbers = [number.item() if isinstance(number, np.generic) else number for number in sample]
        kinds = (bool, int) if self.integer else (int, float)
        wrong = [number for number in numbers if not isinstance(number, kinds)]
        if wrong:
            kind = "integers or booleans" if self.integer else "numbers"
            remedy = f"give a strategy of {kind}; for arrays pass a function of (generator, shape)"
            raise ValueError(f"{self.who} gave {wrong[0]!r}, a {type(wrong[0]).__name__}; {remedy}")
        return {"kind": "numbers", "numbers": numbers}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        numbers = np.array(value["numbers"])
        array = numbers[rng.integers(0, len(numbers), size=shape)]
        return array if array.dtype.kind == "b" else array.astype(np.int64 if self.integer else np.float64)

    def __reduce__(self) -> Any:
        return OfStrategy, (self.kind, self.dim), {"integer": self.integer, "who": self.who}  # ranks read the record

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True)
class Exactly(Draw):
    """A boolean mask with `count` true in each row of the last dim; if the count is a dim's size, `dim` names it."""

    count: int = 0

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        return {"kind": "exactly", "place": choose(("anywhere", "first", "last"))}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        """Errors: ValueError if a row has fewer elements."""
        size = shape[-1] if shape else 1
        count = case.dims[self.dim] if self.dim else self.count
        if count > size:
            raise ValueError(
                f"exactly({self.dim or self.count!r}): {count} of {size} cannot be true; exclude such sizes by "
                "dims={...} or assume="
            )
        order = {"first": np.arange(size), "last": np.arange(size)[::-1]}.get(value["place"])
        ranks = rng.random(shape).argsort(-1).argsort(-1) if order is None else order
        return np.broadcast_to(ranks < count, shape).copy()


@dataclass(frozen=True)
class Permutation(Draw):
    """The positions of the last dim, in a separate order for each row."""

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        return {"kind": "permutation", "order": choose(("same", "reversed", "random", "random"))}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        positions = np.arange(shape[-1] if shape else 1)
        orders = {"same": positions, "reversed": positions[::-1]}
        order = orders.get(value["order"])
        return rng.random(shape).argsort(-1) if order is None else np.broadcast_to(order, shape).copy()


@dataclass(frozen=True)
class BlockTable(Draw):
    """Pages of a paged cache: numbers below the size of `dim`, each at most once in the tensor."""

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        return {"kind": "block_table", "order": choose(("same", "random", "random"))}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        """Errors: ValueError if there are fewer pages than places."""
        pages, places = case.dims[self.dim or ""], math.prod(shape)
        if places > pages:
            raise ValueError(
                f"block_table({self.dim!r}): {pages} pages for {places} places, and no page is used twice; tie "
                f"{self.dim} to the places, as in dims={{{self.dim!r}: 'b*n + 1'}}"
            )
        order = np.arange(pages) if value["order"] == "same" else rng.permutation(pages)
        return order[:places].reshape(shape)


def drawn(how: Any, *, integer: bool = False) -> Draw:
    """A draw from a function or a Hypothesis strategy; `integer` says that its numbers are integers or booleans.

    A function takes a NumPy generator and a shape, and the case if it has a third argument; its result must depend on
    the generator alone. Errors: ValueError for anything else.
    """
    return draw_of(how, integer, getattr(how, "__name__", "draw"))


def draw_of(how: Any, integer: bool, who: str) -> Draw:
    """See drawn; errors name the draw as `who`."""
    if hasattr(how, "filter") and hasattr(how, "example"):  # a strategy, recognized without importing Hypothesis
        return OfStrategy("own", strategy=how, integer=integer, who=who)
    if not callable(how):
        makers = "token_below, ids, mask, offsets, lengths, integers, values, exactly, permutation or block_table"
        raise ValueError(
            f"{who} is {type(how).__name__}; use {makers}, a function of (generator, shape), or a Hypothesis strategy"
        )
    if _positional(how) not in (2, 3):
        names = ", ".join(inspect.signature(how).parameters)
        raise ValueError(f"{who} takes ({names}); a draw takes (generator, shape), or (generator, shape, case)")
    return OfFunction("own", function=how, integer=integer, who=who)


def _positional(function: Callable[..., Any]) -> int:
    """How many of (generator, shape, case) a function takes."""
    try:
        parameters: Sequence[Any] = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin may have no signature
        return 2
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def exactly(count: int | str) -> Draw:
    """A boolean mask with exactly `count` true in each row of the last dim; a name stands for the size of that dim."""
    if isinstance(count, str):
        return Exactly("exactly", count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"exactly: {count!r} is not a number of elements; give an integer >= 0 or the name of a dim")
    return Exactly("exactly", count=count)


def permutation() -> Draw:
    """The positions of the input's last dim, in a separate order for each row."""
    return Permutation("permutation")


def block_table(dim: str) -> Draw:
    """Page numbers below the size of `dim`, each used at most once: the block table of a paged cache."""
    return BlockTable("block_table", dim)
