"""Choosers pick one of several options when a case is drawn; the first option is the simplest.

A chooser takes a sequence and returns an element, or a Hypothesis strategy and returns an example; only a strategy
loads Hypothesis.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardproof.declare.draws import Chooser

MOST_EVEN = 1024  # options; with more, such as seeds, examples would rarely repeat one anyway


def seeded_chooser(seed: int) -> Chooser:
    """A chooser that picks every option with equal probability."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))

    def choose(options: Any) -> Any:
        if not isinstance(options, Sequence):
            return _example(options, int(rng.integers(2**31)))
        return options[int(rng.integers(len(options)))]

    return choose


def even_chooser(number: int, seed: int = 0) -> Chooser:
    """The chooser of example `number`: each choice goes through its options in shuffled rounds, one per example.

    So four examples cover a menu of four, where independent draws would miss an option in every third menu. The first
    example is the simplest: it takes the first option everywhere.
    """
    choices = itertools.count()

    def choose(options: Any) -> Any:
        choice = next(choices)
        if not number:
            return simplest(options)
        if not isinstance(options, Sequence):
            return _example(options, number + choice + (seed << 32))
        if len(options) > MOST_EVEN:
            return options[int(_generator(choice, number, seed).integers(len(options)))]
        turn, place = divmod(number, len(options))
        return options[int(_generator(choice, turn, seed).permutation(len(options))[place])]

    return choose


def _generator(choice: int, turn: int, seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[choice, turn], counter=np.array([0, 0, 0, seed], np.uint64)))


_SIMPLEST_EXAMPLES: dict[str, Any] = {}  # of strategies, by their repr


def simplest(options: Any) -> Any:
    """A chooser that takes the first option, and a strategy's simplest example."""
    if isinstance(options, Sequence):
        return options[0]
    name = repr(options)
    if name not in _SIMPLEST_EXAMPLES:
        _SIMPLEST_EXAMPLES[name] = shrunk_example(options, lambda _: True)
    return _SIMPLEST_EXAMPLES[name]


def shrunk_example(strategy: Any, accepts: Callable[[Any], bool], count: int = 100) -> Any:
    """The simplest accepted example among those that Hypothesis tries; deterministic.

    Calls `accepts` only for the first `count` distinct examples. Errors: hypothesis.errors.NoSuchExample.
    """
    from hypothesis import HealthCheck, find, settings

    from shardproof.draw.reproducible import reproducible_draws

    answers: dict[str, bool] = {}

    def accepts_once(example: Any) -> bool:
        """Remember answers, so that they stay the same even if a function's result does not."""
        key = repr(example)
        if key not in answers:
            answers[key] = len(answers) < count and accepts(example)
        return answers[key]

    quiet = list(HealthCheck)
    limits = settings(max_examples=count, database=None, deadline=None, suppress_health_check=quiet)  # pyright: ignore[reportArgumentType]
    with reproducible_draws():
        return find(strategy, accepts_once, settings=limits, random=random.Random(0))


def _example(strategy: Any, seed: int) -> Any:
    """One of ten examples of a strategy, the same for the same seed."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as hypothesis_seed

    from shardproof.draw.reproducible import reproducible_draws

    examples: list[Any] = []

    @hypothesis_seed(seed)
    @settings(max_examples=10, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]  # fmt: skip
    @given(strategy)
    def example(value: Any) -> None:
        examples.append(value)

    with reproducible_draws():
        example()
    return examples[seed % len(examples)]


class Choice(NamedTuple):
    """One choice: the index of an option or, for a strategy, its example."""

    place: int = 0
    example: Any = None
    strategy: Any = None


@dataclass
class RecordingChooser:
    """A chooser that records its choices. It first repeats the given choices as far as such options exist."""

    beyond: Chooser
    repeated: Sequence[Choice] = ()
    choices: list[Choice] = field(default_factory=list)

    def __call__(self, options: Any) -> Any:
        number = len(self.choices)
        before = self.repeated[number] if number < len(self.repeated) else None
        if isinstance(options, Sequence):
            if before is not None and before.strategy is None:
                place = min(before.place, len(options) - 1)
            else:  # record the index, because a menu may repeat an option
                place = self.beyond(range(len(options)))
            self.choices.append(Choice(place))
            return options[place]
        # Another strategy's example may be invalid for this one.
        if before is None or repr(before.strategy) != repr(options):
            before = Choice(0, self.beyond(options), options)
        self.choices.append(before)
        return before.example
