"""A broken harness passes wrong schemes: each bug injected into it hides a mistake that it otherwise catches.

A sentinel is a scheme with one mistake. The harness must find it for the right reason; with the injected bug it must
not, which shows that no other part does the broken part's work.
"""

from dataclasses import replace

import numpy as np
import pytest

from parity_tests.specimens.sentinels import SENTINELS
from shardproof import verify_one_case
from shardproof.draw import inputs
from shardproof.engines import program, stitch
from shardproof.judge import compare, side_checks

VERDICTS = {"cotangent": "hygiene", "input": "hygiene", "last bit": "hygiene", "cost": "cost"}


def sentinel_report(name):
    sentinel = SENTINELS[name]
    return verify_one_case.verify_case(sentinel, sentinel.case(b=4, seed=7))


@pytest.mark.parametrize("name", SENTINELS)
def test_the_harness_catches_the_sentinel(name):
    report = sentinel_report(name)
    assert report.failure is None
    assert report.verdict == VERDICTS.get(name, "mismatch"), str(report)


# Bugs: each takes pytest's monkeypatch and breaks one thing.


def comparison_that_always_passes(patch):
    patch.setattr(compare, "errors", lambda got, want, dtype: np.zeros(np.broadcast_shapes(got.shape, want.shape)))


def infinite_budget(patch):
    patch.setattr(compare, "K", 1e9)


def dropped_cotangent(patch):
    """Gradients are zero on both sides."""
    original = inputs.cotangent
    patch.setattr(inputs, "cotangent", lambda *arguments: 0.0 * original(*arguments))


def skipped_gradients(patch):
    compared = compare.compare
    patch.setattr(
        compare, "compare", lambda *arguments: [tensor for tensor in compared(*arguments) if tensor.role == "output"]
    )


def skipped_second_output(patch):
    compared = compare.compare
    patch.setattr(
        compare, "compare", lambda *arguments: [tensor for tensor in compared(*arguments) if tensor.name != "out[1]"]
    )


def missing_gradient_accepted(patch):
    """A None becomes whatever the reference says."""
    compare_elements = compare._compare_elements

    def lenient(scheme, case, arg, role, stitched, want, *rest, gradient_is_none=None, **more):
        if gradient_is_none is not None and gradient_is_none.all():
            stitched = replace(stitched, copies=np.broadcast_to(want, stitched.copies.shape))
            gradient_is_none = None
        return compare_elements(
            scheme, case, arg, role, stitched, want, *rest, gradient_is_none=gradient_is_none, **more
        )

    patch.setattr(compare, "_compare_elements", lenient)


def addends_replaced_by_the_sum(patch):
    """Each rank gets the full tensor: then a missing sum is right."""
    patch.setattr(inputs, "addends", lambda arg, array, case, role: array[None])
    patch.setattr(inputs, "addend_of_rank", lambda arg, terms, case, coords, role: terms[0])


def addends_not_summed(patch):
    """A partial output is judged by the addend of its first rank."""
    patch.setattr(stitch, "SUMMED", {"output": "none", "gradient": "R"})
    only_first_copy(patch)


def only_first_copy(patch):
    stitched = compare.stitch

    def first(*arguments):
        outcome = stitched(*arguments)
        return replace(outcome, copies=outcome.copies[:1], coordinates=outcome.coordinates[:1])

    patch.setattr(compare, "stitch", first)


def stitch_with_the_wrong_layout(patch):
    """The ranks are sharded by one layout and stitched by another, which undoes the mistake."""
    original = inputs.built_in_positions

    def contiguous(name, *sizes):
        return original("contiguous" if name == "striped" else name, *sizes)

    patch.setattr(inputs, "built_in_positions", contiguous)


def modifications_are_ignored(patch):
    patch.setattr(program, "_modified", lambda *_: [])


def costs_are_never_checked(patch):
    patch.setattr(side_checks, "PHASES", {})


def replicas_are_never_compared(patch):
    patch.setattr(side_checks, "_replicas", lambda tensor: [])


def nan_is_close(patch):
    wrong = compare.errors
    patch.setattr(compare, "errors", lambda got, want, dtype: np.where(np.isnan(got), 0.0, wrong(got, want, dtype)))


def reference_that_echoes_the_ranks(patch):
    """The ranks' output replaces the reference's: the harness compares a value with itself."""
    evaluated = verify_one_case.evaluate

    def echo(scheme, program, case):
        evaluation = evaluated(scheme, program, case)
        results = verify_one_case.run(program, case, case.engine).results
        outputs = {
            arg.name: compare.stitch(arg, [r.outputs[arg.name] for r in results], case, {}, "output").copies[0]
            for arg in scheme.outputs
        }
        return replace(evaluation, outputs=outputs)

    patch.setattr(verify_one_case, "evaluate", echo)


INJECTED = [
    (comparison_that_always_passes, "value"),
    (comparison_that_always_passes, "gradient"),
    (infinite_budget, "value"),
    (dropped_cotangent, "gradient"),
    (skipped_gradients, "gradient"),
    (skipped_second_output, "second output"),
    (missing_gradient_accepted, "no gradient"),
    (addends_replaced_by_the_sum, "sum"),
    (addends_not_summed, "doubled sum"),
    (only_first_copy, "copy"),
    (stitch_with_the_wrong_layout, "order"),
    (modifications_are_ignored, "cotangent"),
    (modifications_are_ignored, "input"),
    (costs_are_never_checked, "cost"),
    (replicas_are_never_compared, "last bit"),
    (nan_is_close, "not a number"),
    (reference_that_echoes_the_ranks, "value"),
]


@pytest.mark.parametrize(("bug", "name"), INJECTED, ids=[f"{bug.__name__}-{name}" for bug, name in INJECTED])
def test_a_broken_harness_lets_the_sentinel_pass(bug, name, monkeypatch):
    bug(monkeypatch)
    report = sentinel_report(name)
    assert report.verdict == "equal", str(report)


def test_every_sentinel_guards_something():
    assert {name for _, name in INJECTED} == set(SENTINELS)
