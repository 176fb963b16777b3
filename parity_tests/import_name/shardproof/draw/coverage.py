"""Plan examples that cover all pairs: a listed size or option with a mesh or a dtype, and an option with another.

A wrong order of repeated heads may show for g=2 on cp=4 only, a sum in bfloat16 for m=32 only, a wrong scale of sinks
for a scale of the caller only. Independent draws leave such pairs out, so the first choices of `verify`'s examples
follow a plan until each pair was drawn. Among places with equally many new pairs, one without a local size of 1 comes
first: a size of 1 hides many mistakes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.random import Generator, Philox

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import Choice
from shardproof.draw.drawing import MeshChoices, mesh_choices, option_choices
from shardproof.draw.size_choices import assumed_options, features, has_smallest_size, sizes_text

Pair = tuple[str, str]  # a size, an option or a mesh, and where: ("g=2", "on cp=4"), ("g=2", "in bfloat16"), or an
# option and another: ("scale=2.0", "with sinks=True")
WITH = "with "
ABOVE_1 = "at sizes above 1"  # on several ranks
Place = tuple[int, int]  # the index of a mesh, and of one of its shapes


def plan(
    scheme: Declared,
    fixed: Mapping[str, Any],
    count: int,
    seed: int,
    *,
    dtype: str | None = None,
    world: int | None = None,
    limit: int,
) -> list[list[Choice]]:
    """The first choices of `count` examples or fewer, each with as many new pairs as possible.

    They are the choices of `draw_case`: mesh, shape, options, dtype. The first example has none: it is the simplest.
    Errors: see `draw_case`.
    """
    search = _Search(scheme, fixed, dtype, world, limit)
    missing = search.possible() - search.simplest()
    rng = Generator(Philox(key=[seed % 2**64, 0]))
    places = list(search.pairs)
    rng.shuffle(places)
    examples: list[list[Choice]] = [[]]
    while missing and len(examples) < count:
        place = max(places, key=lambda place: (len(search.pairs[place] & missing), place in search.general))
        options = search.options(place, missing, rng)
        chosen_dtype = search.dtype(place, options, missing, rng)
        drawn = search.drawn(place, options, chosen_dtype)
        if not drawn & missing:  # no example has the missing pairs of the place with the most
            missing -= search.pairs[place]
            continue
        missing -= drawn
        examples.append(search.choices_of(place, options, chosen_dtype))
    return examples


def pairs_not_drawn(
    scheme: Declared,
    fixed: Mapping[str, Any],
    cases: Iterable[CaseSpec],
    *,
    dtype: str | None = None,
    world: int | None = None,
    limit: int,
) -> list[str]:
    """The possible pairs that no case has, as "g=2 on cp=4". Errors: see `draw_case`."""
    search = _Search(scheme, fixed, dtype, world, limit)
    missing = search.possible()
    for case in cases:
        missing -= search.pairs_of(case.scheme_mesh, case.dims, [case.options], [case.dtype])
        missing -= search.pairs_of_options(case.options)
    return sorted(" ".join(pair) for pair in missing)


@dataclass
class _Search:
    """The places that examples may have, with the pairs that are possible at each."""

    scheme: Declared
    fixed: Mapping[str, Any]
    given_dtype: str | None
    world: int | None
    limit: int
    choices: MeshChoices = field(init=False)
    given: dict[str, Any] = field(init=False)
    pairs: dict[Place, set[Pair]] = field(init=False)
    general: set[Place] = field(init=False)  # on several ranks, and no size is the smallest on its mesh

    def __post_init__(self) -> None:
        self.choices, self.given = mesh_choices(self.scheme, self.fixed, self.world, self.limit)
        self.dtypes = (self.given_dtype,) if self.given_dtype else self.scheme.dtypes
        options = self.scheme.all_options
        self.listed = [name for name, values in options.items() if len(values) > 1 and name not in self.given]
        every = [{name: value} for name in self.listed for value in options[name]]
        two = [
            dict(zip(names, values, strict=True))
            for names in itertools.combinations(self.listed, 2)
            for values in itertools.product(*(options[name] for name in names))
        ]
        self.pairs, self.general = {}, set[Place]()
        for number, (mesh, fits) in enumerate(self.choices.fits):
            for shape_number, shape in enumerate(fits):
                place = number, shape_number
                allowed = assumed_options(self.scheme, shape, mesh, self.given) if self.scheme.assume else every
                combined = allowed if self.scheme.assume else two
                self.pairs[place] = self.pairs_of(mesh, shape, allowed, self.dtypes)
                self.pairs[place] |= {pair for chosen in combined for pair in self.pairs_of_options(chosen)}
                if self.is_general(mesh, shape):
                    self.general.add(place)

    def possible(self) -> set[Pair]:
        return set[Pair]().union(*self.pairs.values())

    def pairs_of(
        self,
        mesh: Mapping[str, int],
        shape: Mapping[str, int],
        options: Sequence[Mapping[str, Any]],
        dtypes: Sequence[str],
    ) -> set[Pair]:
        where = sizes_text(mesh)
        option_words = {f"{name}={chosen[name]}" for chosen in options for name in self.listed if name in chosen}
        words = {words for _, words in features(self.scheme, shape, mesh)} | option_words
        found = {(word, f"on {where}") for word in words} if len(self.choices.fits) > 1 or words else set[Pair]()
        if len(self.dtypes) > 1:
            found |= {(word, f"in {dtype}") for word in (*words, where) for dtype in dtypes}
        if self.is_general(mesh, shape):
            found |= {(word, ABOVE_1) for word in option_words}
        return found

    def is_general(self, mesh: Mapping[str, int], shape: Mapping[str, int]) -> bool:
        return math.prod(mesh.values()) > 1 and not has_smallest_size(self.scheme, shape, mesh)

    def pairs_of_options(self, options: Mapping[str, Any]) -> set[Pair]:
        """The pairs of two options."""
        words = [f"{name}={options[name]}" for name in self.listed if name in options]
        return {(first, WITH + second) for first, second in itertools.combinations(words, 2)}

    def simplest(self) -> set[Pair]:
        """The pairs of the first example, which takes the first of everything."""
        mesh, fits = self.choices.fits[0]
        allowed = assumed_options(self.scheme, fits[0], mesh, self.given)[0]
        return self.pairs_of(mesh, fits[0], [allowed], self.dtypes[:1]) | self.pairs_of_options(allowed)

    def options(self, place: Place, missing: set[Pair], rng: Generator) -> dict[str, Any]:
        """Options for a place, with as many missing pairs as possible, else any."""
        mesh, fits = self.choices.fits[place[0]]

        def new_pairs(options: Mapping[str, Any]) -> int:
            pairs = self.pairs_of(mesh, fits[place[1]], [options], self.dtypes) | self.pairs_of_options(options)
            return len(pairs & missing)

        if self.scheme.assume:
            allowed = assumed_options(self.scheme, fits[place[1]], mesh, self.given)
            rng.shuffle(allowed)
            return max(allowed, key=new_pairs)
        chosen: dict[str, Any] = dict(self.given)
        left = [name for name in self.scheme.all_options if name not in chosen]
        rng.shuffle(left)
        # The option with the most missing pairs comes first; the others are chosen for their new pairs with it.
        lacking = self.lacking(mesh, missing)
        left.sort(key=lambda name: -max(lacking[f"{name}={value}"] for value in self.scheme.all_options[name]))
        for name in left:
            values = self.scheme.all_options[name]
            order = [values[i] for i in rng.permutation(len(values))]
            order.sort(key=lambda value: -lacking[f"{name}={value}"])
            chosen[name] = order[0] if name == left[0] else max(order, key=lambda v: new_pairs({**chosen, name: v}))
        return chosen

    def lacking(self, mesh: Mapping[str, int], missing: set[Pair]) -> Counter[str]:
        """For each size or option, the number of missing pairs on a mesh that have it."""
        here = {f"on {sizes_text(mesh)}", ABOVE_1, *(f"in {dtype}" for dtype in self.dtypes)}
        own = [word for word, where in missing if where in here]
        both = [(word, where.removeprefix(WITH)) for word, where in missing if where.startswith(WITH)]
        return Counter([*own, *itertools.chain(*both)])

    def dtype(self, place: Place, options: Mapping[str, Any], missing: set[Pair], rng: Generator) -> str:
        order = [self.dtypes[i] for i in rng.permutation(len(self.dtypes))]
        return max(order, key=lambda dtype: len(self.drawn(place, options, dtype) & missing))

    def drawn(self, place: Place, options: Mapping[str, Any], dtype: str) -> set[Pair]:
        mesh, fits = self.choices.fits[place[0]]
        return self.pairs_of(mesh, fits[place[1]], [options], [dtype]) | self.pairs_of_options(options)

    def choices_of(self, place: Place, options: Mapping[str, Any], dtype: str) -> list[Choice]:
        """The indices of these in the menus of `draw_case`."""
        mesh, fits = self.choices.fits[place[0]]
        names = iter(self.scheme.all_options)
        option_places: list[Choice] = []

        def choose(menu: Any) -> Any:
            value = options[next(names)]
            # By type too: False and 0.0 are equal and may be two options.
            places = (i for i, item in enumerate(menu) if (type(item), item) == (type(value), value))
            option_places.append(Choice(next(places, 0)))
            return menu[option_places[-1].place]

        option_choices(self.scheme, mesh, fits[place[1]], self.given, choose)
        dtype_choice = [] if self.given_dtype else [Choice(self.dtypes.index(dtype))]
        return [*map(Choice, place), *option_places, *dtype_choice]
