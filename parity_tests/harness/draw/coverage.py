"""Which pairs the examples of a scheme have: each size or option that it lists, on each of its meshes.

A wrong order of repeated heads may show for g=2 on cp=4 alone. Independent draws of mesh, shape and options leave such
pairs out, so the first choices of `verify`'s examples follow a plan until each pair was drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.random import Generator, Philox

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.draw.choosers import Choice
from parity_tests.harness.draw.drawing import MeshChoices, mesh_choices, option_choices
from parity_tests.harness.draw.size_choices import assumed_options, features, sizes_text

Pair = tuple[str, str]  # a size or an option, and a mesh, in words: ("g=2", "cp=4")
Place = tuple[int, int]  # of a mesh, and of one of its shapes


def plan(
    scheme: Declared, fixed: Mapping[str, Any], count: int, seed: int, *, world: int | None, limit: int
) -> list[list[Choice]]:
    """The first choices of `count` examples or fewer, each with as many pairs as possible that none before it has.

    They are the choices of `draw_case`: mesh, shape, then options. The first example has none: it is the simplest.
    Errors: as of draw_case.
    """
    choices, given = mesh_choices(scheme, fixed, world, limit)
    rng = Generator(Philox(key=[seed % 2**64, 0]))
    pairs = _pairs(scheme, choices, given)
    places = list(pairs)
    rng.shuffle(places)
    missing = set[Pair]().union(*pairs.values())
    first = _options(scheme, choices, (0, 0), given, set(), None)
    missing -= _drawn(scheme, choices, (0, 0), first, given)
    examples: list[list[Choice]] = [[]]
    while missing and len(examples) < count:
        place = max(places, key=lambda place: len(pairs[place] & missing))
        options = _options(scheme, choices, place, given, missing, rng)
        missing -= _drawn(scheme, choices, place, options, given)
        examples.append([*map(Choice, place), *_option_places(scheme, choices, place, options, given)])
    return examples


def pairs_not_drawn(
    scheme: Declared, fixed: Mapping[str, Any], cases: Iterable[CaseSpec], *, world: int | None, limit: int
) -> list[str]:
    """The pairs that could have been drawn and that no case has, as "g=2 on cp=4". Errors: as of draw_case."""
    choices, given = mesh_choices(scheme, fixed, world, limit)
    missing = set[Pair]().union(*_pairs(scheme, choices, given).values())
    for case in cases:
        options = {name: value for name, value in case.options.items() if name not in given}
        missing -= _pairs_of(scheme, case.scheme_mesh, case.dims, [options])
    return sorted(f"{words} on {mesh}" if mesh else words for words, mesh in missing)


def _pairs(scheme: Declared, choices: MeshChoices, given: Mapping[str, Any]) -> dict[Place, set[Pair]]:
    """The pairs that each place can have; an option that is given makes none."""
    found: dict[Place, set[Pair]] = {}
    every = [{name: value} for name, values in scheme.all_options.items() if name not in given for value in values]
    for number, (mesh, fits) in enumerate(choices.fits):
        for shape_number, shape in enumerate(fits):
            options = every
            if scheme.assume:
                options = [
                    {name: value for name, value in allowed.items() if name not in given}
                    for allowed in assumed_options(scheme, shape, mesh, given)
                ]
            found[number, shape_number] = _pairs_of(scheme, mesh, shape, options)
    return found


def _pairs_of(
    scheme: Declared, mesh: Mapping[str, int], shape: Mapping[str, int], options: Sequence[Mapping[str, Any]]
) -> set[Pair]:
    words = {words for _, words in features(scheme, shape, mesh)}
    words |= {f"{name}={value}" for chosen in options for name, value in chosen.items() if _is_listed(scheme, name)}
    return {(word, sizes_text(mesh)) for word in words}


def _is_listed(scheme: Declared, option: str) -> bool:
    return len(scheme.all_options[option]) > 1


def _drawn(
    scheme: Declared, choices: MeshChoices, place: Place, options: Mapping[str, Any], given: Mapping[str, Any]
) -> set[Pair]:
    mesh, fits = choices.fits[place[0]]
    free = {name: value for name, value in options.items() if name not in given}
    return _pairs_of(scheme, mesh, fits[place[1]], [free])


def _options(
    scheme: Declared,
    choices: MeshChoices,
    place: Place,
    given: Mapping[str, Any],
    missing: set[Pair],
    rng: Generator | None,
) -> dict[str, Any]:
    """Options for a place, with as many missing pairs as possible; without a generator, the first of each."""
    mesh, fits = choices.fits[place[0]]
    where = sizes_text(mesh)

    def missing_pairs(options: Mapping[str, Any]) -> int:
        return sum((f"{name}={value}", where) in missing for name, value in options.items())

    if scheme.assume:
        allowed = assumed_options(scheme, fits[place[1]], mesh, given)
        if rng is not None:
            rng.shuffle(allowed)
        return max(allowed, key=missing_pairs)
    chosen: dict[str, Any] = dict(given)
    for name, values in scheme.all_options.items():
        order = range(len(values)) if rng is None else rng.permutation(len(values))
        chosen.setdefault(name, max((values[i] for i in order), key=lambda value: missing_pairs({name: value})))
    return chosen


def _option_places(
    scheme: Declared, choices: MeshChoices, place: Place, options: Mapping[str, Any], given: Mapping[str, Any]
) -> list[Choice]:
    """The places at which `draw_case` finds these options in its menus."""
    mesh, fits = choices.fits[place[0]]
    names = iter(scheme.all_options)
    places: list[Choice] = []

    def choose(menu: Any) -> Any:
        value = options[next(names)]
        places.append(Choice(next((i for i, item in enumerate(menu) if item == value), 0)))
        return menu[places[-1].place]

    option_choices(scheme, mesh, fits[place[1]], given, choose)
    return places
