"""Which pairs the examples of a scheme have: each size or option that it lists, on each mesh and in each dtype.

A wrong order of repeated heads may show for g=2 on cp=4 alone, a sum in bfloat16 for m=32 alone. Independent draws
leave such pairs out, so the first choices of `verify`'s examples follow a plan until each pair was drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.random import Generator, Philox

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import Choice
from shardproof.draw.drawing import MeshChoices, mesh_choices, option_choices
from shardproof.draw.size_choices import assumed_options, features, sizes_text

Pair = tuple[str, str]  # a size, an option or a mesh, and where it is: ("g=2", "on cp=4"), ("g=2", "in bfloat16")
Place = tuple[int, int]  # of a mesh, and of one of its shapes


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
    """The first choices of `count` examples or fewer, each with as many pairs as possible that none before it has.

    They are the choices of `draw_case`: mesh, shape, options, dtype. The first example has none: it is the simplest.
    Errors: as of draw_case.
    """
    search = _Search(scheme, fixed, dtype, world, limit)
    missing = search.possible() - search.simplest()
    rng = Generator(Philox(key=[seed % 2**64, 0]))
    places = list(search.pairs)
    rng.shuffle(places)
    examples: list[list[Choice]] = [[]]
    while missing and len(examples) < count:
        place = max(places, key=lambda place: len(search.pairs[place] & missing))
        options = search.options(place, missing, rng)
        chosen_dtype = search.dtype(place, options, missing, rng)
        drawn = search.drawn(place, options, chosen_dtype)
        if not drawn & missing:  # in no combination with the place that has the most
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
    """The pairs that could have been drawn and that no case has, as "g=2 on cp=4". Errors: as of draw_case."""
    search = _Search(scheme, fixed, dtype, world, limit)
    missing = search.possible()
    for case in cases:
        missing -= search.pairs_of(case.scheme_mesh, case.dims, [case.options], [case.dtype])
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

    def __post_init__(self) -> None:
        self.choices, self.given = mesh_choices(self.scheme, self.fixed, self.world, self.limit)
        self.dtypes = (self.given_dtype,) if self.given_dtype else self.scheme.dtypes
        options = self.scheme.all_options
        self.listed = [name for name, values in options.items() if len(values) > 1 and name not in self.given]
        every = [{name: value} for name in self.listed for value in options[name]]
        self.pairs = {}
        for number, (mesh, fits) in enumerate(self.choices.fits):
            for shape_number, shape in enumerate(fits):
                allowed = assumed_options(self.scheme, shape, mesh, self.given) if self.scheme.assume else every
                self.pairs[number, shape_number] = self.pairs_of(mesh, shape, allowed, self.dtypes)

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
        words = {words for _, words in features(self.scheme, shape, mesh)}
        words |= {f"{name}={chosen[name]}" for chosen in options for name in self.listed if name in chosen}
        found = {(word, f"on {where}") for word in words} if len(self.choices.fits) > 1 or words else set[Pair]()
        if len(self.dtypes) > 1:
            found |= {(word, f"in {dtype}") for word in (*words, where) for dtype in dtypes}
        return found

    def simplest(self) -> set[Pair]:
        """The pairs of the first example, which takes the first of everything."""
        mesh, fits = self.choices.fits[0]
        allowed = assumed_options(self.scheme, fits[0], mesh, self.given)[0]
        return self.pairs_of(mesh, fits[0], [allowed], self.dtypes[:1])

    def options(self, place: Place, missing: set[Pair], rng: Generator) -> dict[str, Any]:
        """Options for a place, with as many missing pairs as possible, else any."""
        mesh, fits = self.choices.fits[place[0]]

        def new_pairs(options: Mapping[str, Any]) -> int:
            return len(self.pairs_of(mesh, {}, [options], self.dtypes) & missing)

        if self.scheme.assume:
            allowed = assumed_options(self.scheme, fits[place[1]], mesh, self.given)
            rng.shuffle(allowed)
            return max(allowed, key=new_pairs)
        chosen: dict[str, Any] = dict(self.given)
        for name, values in self.scheme.all_options.items():
            order = [values[i] for i in rng.permutation(len(values))]
            chosen.setdefault(name, max(order, key=lambda value: new_pairs({name: value})))
        return chosen

    def dtype(self, place: Place, options: Mapping[str, Any], missing: set[Pair], rng: Generator) -> str:
        order = [self.dtypes[i] for i in rng.permutation(len(self.dtypes))]
        return max(order, key=lambda dtype: len(self.drawn(place, options, dtype) & missing))

    def drawn(self, place: Place, options: Mapping[str, Any], dtype: str) -> set[Pair]:
        mesh, fits = self.choices.fits[place[0]]
        return self.pairs_of(mesh, fits[place[1]], [options], [dtype])

    def choices_of(self, place: Place, options: Mapping[str, Any], dtype: str) -> list[Choice]:
        """The places at which `draw_case` finds these in its menus."""
        mesh, fits = self.choices.fits[place[0]]
        names = iter(self.scheme.all_options)
        option_places: list[Choice] = []

        def choose(menu: Any) -> Any:
            value = options[next(names)]
            option_places.append(Choice(next((i for i, item in enumerate(menu) if item == value), 0)))
            return menu[option_places[-1].place]

        option_choices(self.scheme, mesh, fits[place[1]], self.given, choose)
        of_dtype = [] if self.given_dtype else [Choice(self.dtypes.index(dtype))]
        return [*map(Choice, place), *option_places, *of_dtype]
