"""Lockstep and gloo give one verdict where inputs and cotangents are strided, transposed or expanded."""

import itertools

import pytest
import torch

from parity_tests.slow import slow_unless
from shardproof import scheme, values
from shardproof.declare.conditions import COTANGENT
from shardproof.declare.discover import built_in
from shardproof.draw.calling_conditions import is_parameter, may_be_expanded
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.draw.size_choices import meshes
from shardproof.engines.program import Program
from shardproof.judge.reference import evaluate
from shardproof.verify_one_case import verify_case

EACH = 5  # of the built-in schemes
STORED = ("transposed", "stepped", "expanded")


def views(declared):
    """Inputs that may be strided views: a module has no such parameters, and FSDP2 rejects them."""
    return [arg.name for arg in declared.inputs if arg.spec.dims and not is_parameter(declared, arg.name)]


def may_be_strided(declared):
    engines = {"lockstep", "gloo"} <= set(declared.engines)
    return engines and bool(views(declared)) and "strided" not in declared.excluded_conditions


SAMPLE = {declared.key: declared for declared in [d for d in built_in() if may_be_strided(d)][::EACH]}


def stored(declared, kind):
    """The conditions of `CaseSpec.conditions` for tensors that are all stored so; an expanded input is one row."""
    cotangents = [COTANGENT + arg.name for arg in declared.outputs if arg.differentiable]
    if kind != "expanded":
        return {"strided": dict.fromkeys([*views(declared), *cotangents], kind)}
    return {"expanded": [arg.name for arg in declared.inputs if may_be_expanded(declared, arg)] + cotangents}


def case_of(declared, kind):
    """One on several ranks, where the scheme has such a mesh."""
    mesh = max(
        (mesh for mesh in meshes(declared, {}, None)), key=lambda mesh: (min(mesh.values()), -sum(mesh.values()))
    )
    case = draw_case(declared, seeded_chooser(3), mesh, seed=3, limit=1)
    return case.replace(conditions=stored(declared, kind))


# `make test` stores the tensors of each scheme in one of the ways.
KEPT = set(zip(SAMPLE, itertools.cycle(STORED)))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("key", "kind"), slow_unless(KEPT.__contains__, itertools.product(SAMPLE, STORED)))
def test_a_scheme_is_equal_on_both(key, kind):
    declared, case = SAMPLE[key], case_of(SAMPLE[key], kind)
    reference = evaluate(declared, Program.of(declared), case)
    for engine in ("lockstep", "gloo"):
        report = verify_case(declared, case.replace(engine=engine), reference=reference)
        assert report.ok, str(report)


@pytest.mark.parametrize("kind", STORED)
def test_reading_a_tensor_as_if_dense_is_wrong_on_both(kind):
    def dense(x):
        """The first numbers of its storage, which an expanded view has too few of."""
        flat = x.detach().new_empty(0).set_(x.untyped_storage())
        return torch.cat([flat, flat.new_zeros(x.numel())])[: x.numel()].view(x.shape)

    def doubled(mesh, x):
        return 2 * x + (dense(x) - x).detach()

    declared = scheme(
        reference=lambda x: 2.0 * x, mesh={"tp": (2,)}, inputs={"x": "b v/tp"}, outputs="b v/tp",
        draw={"x": values("normal", "ones")}, dtypes=("float32",),
    )(doubled)  # fmt: skip
    case = declared.case(b=3, v=6, tp=2)
    for engine in ("lockstep", "gloo"):
        assert verify_case(declared, case.replace(engine=engine)).verdict == "equal"
        assert (
            verify_case(declared, case.replace(engine=engine, conditions=stored(declared, kind))).verdict == "mismatch"
        )
