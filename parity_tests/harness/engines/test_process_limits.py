"""A limit that a rank sets for its process is of no other run, and of no command."""

import resource

import pytest

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run

FILES = resource.RLIMIT_NOFILE
LOW = 256


def limit(*_):
    return resource.getrlimit(FILES)[0]


def sets(mesh, case):
    _, hard = resource.getrlimit(FILES)
    if case.dims["of_any"]:
        resource.prlimit(0, FILES, (LOW, hard))
    else:
        resource.setrlimit(FILES, (LOW, hard))
    return limit()


@pytest.mark.parametrize("of_any", [0, 1])
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_lower_limit_ends_with_the_run(engine, of_any):
    case = CaseSpec("limits", {"tp": 2}, dims={"of_any": of_any}, engine=engine)
    before, of_ranks = limit(), run(limit, case, engine).results
    assert before > LOW and min(of_ranks) > LOW
    assert run(sets, case, engine).results == ((LOW, LOW) if engine == "gloo" else of_ranks)
    assert (limit(), run(limit, case, engine).results) == (before, of_ranks)


def raises_limit(mesh, case):
    soft, hard = resource.getrlimit(FILES)
    resource.setrlimit(FILES, (soft + 1, hard))
    return limit() - soft


def test_a_rank_of_lockstep_may_raise_a_limit():
    before = resource.getrlimit(FILES)
    try:
        resource.setrlimit(FILES, (before[0] - 10, before[1]))
        assert run(raises_limit, CaseSpec("limits", {"tp": 2}), "lockstep").results == (1, 1)
    finally:
        resource.setrlimit(FILES, before)
