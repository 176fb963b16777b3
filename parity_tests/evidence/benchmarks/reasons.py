"""Where the time of a missed figure goes: by its profile, or by other records of its run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from parity_tests.evidence.benchmarks.cells import NUMBER, SPREAD, cells_of
from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.benchmarks.stored import Section
from parity_tests.evidence.benchmarks.words import REASONS

PROFILE = re.compile(r"([^,;%]+?) (\d+)% in \d+ calls")
LEAST_SHARE = 10  # percent of a profile that the page names
MOST_NAMED = 3
SHARES = re.compile(r"[\w/.` -]+ \d[\d.]*(?: s|%)(?:, [\w/.`= -]+ (?:\d[\d.]*(?: s|%)|not run))+")
EXAMPLES = re.compile(r"\d+ s(?: of \d+ processes together)?, (\d+% of it tracing references and \d+% running ranks)")
SLOWEST = re.compile(r"slowest: ([^,;]+, [^,;]+)")
EXCHANGE = re.compile(r"the exchange alone ([\d.]+)")


def reason(figure: Figure, section: Section) -> str:
    """The first reason that is known, or that none is."""
    return next(_reasons(figure, section), "not profiled")


def _reasons(figure: Figure, section: Section) -> Iterator[str]:
    """The figure's profile and shares, the profile of the same work, the note on its section, its spread."""
    yield from _profile(figure)
    yield from (clause for clause in figure.how.split("; ") if SHARES.fullmatch(clause))
    if parts := cells_of(figure).parts:
        yield parts
    for examples in EXAMPLES.finditer(figure.how):
        slowest = (re.sub(r"\w+(?= \d)", r"`\g<0>`", names) for names in SLOWEST.findall(figure.how))
        yield "; slowest: ".join([examples[1].replace(" of it", ""), *slowest])
    for factor in EXCHANGE.findall(figure.measured):
        yield f"its messages, which alone are {factor} times faster than the loop"
    work = figure.name.rpartition(", ")[0]
    for other in section.figures:
        if work and other.name.rpartition(", ")[0] == work:
            yield from (f"of the whole: {profile}" for profile in _profile(other))
    if section.title in REASONS:
        yield REASONS[section.title]
    yield from _within(figure)


def _profile(figure: Figure) -> Iterator[str]:
    """The largest shares of a profile."""
    profile: Counter[str] = Counter()
    for name, share in PROFILE.findall(figure.how):
        profile[_function(name.strip())] += int(share)
    named = [f"{name} {share}%" for name, share in profile.most_common(MOST_NAMED) if share >= LEAST_SHARE]
    if named:
        yield ", ".join(named)


def _within(figure: Figure) -> Iterator[str]:
    """That the promise lies within the spread of the rounds."""
    promise, spread = re.search(NUMBER, figure.promised), SPREAD.search(figure.measured)
    if promise and spread:
        least, greatest = re.findall(NUMBER, spread[0])
        if float(least) <= float(promise[0]) <= float(greatest):
            yield f"within the spread of the rounds, {least} to {greatest}"


def _function(name: str) -> str:
    """The name that a profile has for an operation; compiled graphs have a hash there, and count together."""
    return "compiled graphs" if "CompiledFxGraph" in name else f"`{name.rpartition('::')[2]}`"
