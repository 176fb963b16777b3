"""Every built-in scheme where its own tests need not look: inside a sub-group, and on processes that really send.

The same cases are judged everywhere, so that each is traced and evaluated on one device once.
"""

import itertools
from functools import lru_cache

import pytest

from parity_tests.evidence.injected_bugs.trials import drawn_cases
from parity_tests.slow import slow_unless
from shardproof.declare.case import SPARE
from shardproof.declare.discover import built_in
from shardproof.draw.profiles import few
from shardproof.engines.program import Program
from shardproof.experiments.undecided import mark_undecided
from shardproof.judge.reference import evaluate
from shardproof.verify_one_case import verify_case

SCHEMES = {scheme.key: scheme for scheme in built_in()}
ON_GLOO, INSIDE = few(4), few(3)  # cases


# A module that a scheme builds in its call has inference tensors for parameters, which DTensor and FSDP do not take;
# one that runs its own backward needs gradients.
OF_MODULES = ("parity_tests.parallelizer.", "parity_tests.pipelining.", "parity_tests.models.")


class Trials:
    """Cases of a scheme with their references; the first is the simplest."""

    def __init__(self, key):
        self.scheme = SCHEMES[key]
        self.cases = drawn_cases(self.scheme, ON_GLOO, "lockstep")
        self.references = [evaluate(self.scheme, Program.of(self.scheme), case) for case in self.cases]

    def check(self, count, change, undecided):
        """Each of the last cases is equal once it is changed; so many may be undecided."""
        reports = []
        for case, reference in list(zip(self.cases, self.references, strict=True))[-count:]:
            report = verify_case(self.scheme, change(case), reference=reference)
            reports.append(report if report.ok else mark_undecided(self.scheme, report))
        assert [str(report) for report in reports if report.failed] == []
        assert sum(report.is_undecided for report in reports) <= undecided


trials_of = lru_cache(maxsize=1)(Trials)


def inside_a_subgroup(key):
    """It knows no world but its mesh; a tie may fall otherwise in a larger one."""
    trials_of(key).check(INSIDE, lambda case: case.replace(mesh={SPARE: 2, **case.mesh}), undecided=1)


def on_gloo(key):
    trials_of(key).check(ON_GLOO, lambda case: case.replace(engine="gloo"), undecided=0)


def in_inference_mode(key):
    """It is not drawn by default, since other projects' functions need not allow it; ours do."""
    trials = trials_of(key)
    verify_case(trials.scheme, trials.cases[-1].replace(conditions={"inference_mode": True})).raise_if_failed()


def is_of_a_module(key):
    return key.startswith(OF_MODULES) or SCHEMES[key].module is not None


WHERE = {where.__name__: where for where in (inside_a_subgroup, on_gloo, in_inference_mode)}
EVERYWHERE = [(key, where) for key in SCHEMES for where in WHERE]
EVERYWHERE = [pair for pair in EVERYWHERE if pair[1] != "in_inference_mode" or not is_of_a_module(pair[0])]


# `make test` judges each scheme in one of its places, and another scheme in another.
PLACES = [list(pairs) for _, pairs in itertools.groupby(EVERYWHERE, key=lambda pair: pair[0])]
KEPT = {places[number % len(places)] for number, places in enumerate(PLACES)}


# One scheme after the other, so that its cases are there.
@pytest.mark.fast_values(24)
@pytest.mark.parametrize(("key", "where"), slow_unless(KEPT.__contains__, EVERYWHERE))
def test_a_scheme(key, where):
    WHERE[where](key)


def test_a_scheme_declared_by_a_wrapper_is_among_them():
    assert "colwise_linear" in {scheme.name for scheme in SCHEMES.values()}
