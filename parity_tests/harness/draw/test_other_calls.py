"""The other call of a case differs in one respect at a time, and finds what is kept under a key that lacks it."""

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Int

from shardproof import offsets, scheme, values, verify_one_case
from shardproof.declare.conditions import OTHER_CALLS
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case

KEPT = {}  # from the first call of a rank with these shapes


def kept(mesh, x, value):
    return KEPT.setdefault((mesh.rank("tp"), x.shape), value)


def by_dtype(mesh, x, cu: Int[torch.Tensor, "q"], factor):
    return factor * x.to(kept(mesh, x, x.dtype)).to(x.dtype)


def by_lengths(mesh, x, cu: Int[torch.Tensor, "q"], factor):
    return factor * x + (kept(mesh, x, cu.clone()) - cu).abs().sum()


def by_option(mesh, x, cu: Int[torch.Tensor, "q"], factor):
    return kept(mesh, x, factor) * x


def by_result(mesh, x, cu: Int[torch.Tensor, "q"], factor):
    """It returns what it keeps, and its caller may write there."""
    shape = kept(mesh, x, torch.full_like(x, 1.0))
    return factor * x * shape, shape


WRONG = {
    "other lengths": by_lengths,
    "bfloat16 inputs": by_dtype,
    "factor=": by_option,
    "other values": by_result,
}


def declared(function):
    returns_two = function is by_result
    spec = "b t/tp"
    return scheme(
        reference=lambda x, cu, factor: (factor * x, jnp.ones_like(x)) if returns_two else factor * x,
        mesh={"tp": (1, 2)},
        inputs={"x": spec, "cu": "q"},
        outputs=(spec, spec) if returns_two else spec,
        dims={"q": (3,)},
        draw={"x": values("normal"), "cu": offsets("t")},
        options={"factor": (2.0, 3.0)},
        dtypes=("float32", "bfloat16"),
        engines=("lockstep",),
        excluded_conditions=("inference_mode", "call_between"),
    )(function)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """No state is left from one case to the next."""
    run = verify_one_case.run

    def run_afresh(*arguments, **more):
        KEPT.clear()
        return run(*arguments, **more)

    monkeypatch.setattr(verify_one_case, "run", run_afresh)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.fast_values(2)
@pytest.mark.parametrize("difference", WRONG)
def test_a_key_that_lacks_something_is_found_and_named(difference):
    report = declared(WRONG[difference]).verify(examples=300)
    assert report.failed and f"the function was called with {difference}" in str(report), str(report)


def test_another_call_differs_in_one_respect():
    declaration = declared(by_dtype)
    seen = set()
    for seed in range(300):
        case = draw_case(declaration, seeded_chooser(seed), {}, seed=seed, with_conditions=True)
        for record in (case.conditions[name] for name in OTHER_CALLS if name in case.conditions):
            different = {name for name in ("dims", "dtype", "options") if record[name] != getattr(case, name)}
            if not different and record["lengths"] != case.lengths:
                different = {"lengths"}
            assert len(different) < 2 and record["seed"] != case.seed
            seen |= different or {"values"}
    assert seen == {"dims", "dtype", "options", "lengths", "values"}


def test_a_given_dtype_or_option_stays():
    declaration = declared(by_dtype)
    for seed in range(100):
        choose = seeded_chooser(seed)
        case = draw_case(declaration, choose, {"factor": 3.0}, seed=seed, dtype="float32", with_conditions=True)
        for record in (case.conditions[name] for name in OTHER_CALLS if name in case.conditions):
            assert (record["dtype"], record["options"]) == ("float32", {"factor": 3.0})
