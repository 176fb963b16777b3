"""The notes on a function of a full dim that each rank computes on its own shard instead."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import summed
from shardproof import mask, scheme, values
from shardproof.declare.case import CaseSpec
from shardproof.experiments.notes import check_notes
from shardproof.experiments.own_shards import ADDED, AVERAGED, OWN, SIDE_BY_SIDE, name_own_shards
from shardproof.verify_one_case import verify_case

NORMAL = {"kind": "normal"}


def declare(function, reference, inputs, outputs, **more):
    draws = {name: values("normal") for name in inputs if name != "keep"}
    defaults = {"mesh": {"tp": (1, 2)}, "draw": draws, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs=inputs, outputs=outputs, **{**defaults, **more})(function)


def first_notes(declaration, **dims):
    """The first note on each wrong tensor of a case, tested on another seed."""
    names = {arg.name: NORMAL for arg in declaration.inputs}
    names |= {name: {"kind": "mask", "keep": "half"} for name in names if name == "keep"}
    case = CaseSpec(declaration.key, {"tp": 2}, dims, values=names)
    case = case.replace(layouts={"d/tp": {"name": "contiguous"}})
    report, larger = (verify_case(declaration, case.replace(seed=seed)) for seed in (1, 2))
    assert not report.ok, str(report)
    notes = name_own_shards(declaration, report, [larger], report.notes)
    return {label: str(of_tensor[0]) for label, of_tensor in notes.items()}


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt(), lambda x: x / jnp.sqrt((x**2).mean(-1, keepdims=True))),
        (lambda x: torch.softmax(x, -1), lambda x: jax.nn.softmax(x, -1)),
        (lambda x: (x - x.mean()) / x.std(unbiased=False), lambda x: (x - x.mean()) / x.std()),
    ],
)
def test_a_function_of_the_full_dim_on_each_shard(function, reference):
    declaration = declare(lambda mesh, x: function(x), reference, {"x": "b d/tp"}, "b d/tp")
    assert first_notes(declaration, b=3, d=8) == {"out": OWN, "d/d x": OWN}


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1)),
        (lambda x: x.sigmoid().cumprod(-1), lambda x: jnp.exp(jnp.cumsum(jnp.log(jax.nn.sigmoid(x)), -1))),
    ],
)
def test_shards_that_are_gathered_after_a_function_of_each(function, reference):
    """A product that starts again at each shard has larger elements than the reference at the same places."""

    def gathered(mesh, x):
        parts = [torch.empty_like(x) for _ in range(mesh.size("tp"))]
        dist.all_gather(parts, function(x).contiguous(), group=mesh["tp"])
        return torch.cat(parts, -1)

    declaration = declare(gathered, reference, {"x": "b d/tp"}, "b d tp=I", nograd=("x",))
    assert first_notes(declaration, b=3, d=8) == {"out": f"{SIDE_BY_SIDE}d"}


def masked_mean(x, keep):
    keep = keep.astype(x.dtype)
    return (x * keep).sum() / jnp.maximum(keep.sum(), 1.0)


@pytest.mark.parametrize(("share", "sentence"), [(lambda n: 1, ADDED), (lambda n: n, AVERAGED)])
def test_a_mean_that_divides_by_a_local_count(share, sentence):
    """The factor depends on the mask, so that larger cases refute it."""

    def mean(mesh, x, keep):
        loss = (x * keep).sum() / keep.sum().clamp(min=1) / share(mesh.size("tp"))
        return summed(loss, mesh["tp"])

    inputs = {"x": "b d/tp", "keep": "b d/tp"}
    declaration = declare(mean, masked_mean, inputs, "tp=I", draw={"x": values("normal"), "keep": mask("d")})
    assert first_notes(declaration, b=3, d=8)["out"] == sentence


def test_another_mistake_gets_none_of_these_notes():
    def halved(mesh, x):
        total = (x.detach() ** 2).sum(-1, keepdim=True)
        dist.all_reduce(total, group=mesh["tp"])
        return x / (2 * total.sqrt())

    declaration = declare(halved, lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True)), {"x": "b d/tp"}, "b d/tp")
    assert not {OWN, ADDED, AVERAGED} & set(first_notes(declaration, b=3, d=8).values())


def test_a_gradient_alone_lacks_a_sum():
    """Each rank has the gradient of its own shard, but the outputs are right."""

    def scaled(mesh, x, w):
        return x * w

    wrong = declare(scaled, lambda x, w: x * w, {"x": "d/tp", "w": "tp=I"}, "d/tp")
    notes = first_notes(wrong, d=8)
    assert list(notes) == ["d/d w"]
    assert notes["d/d w"].startswith("gradient missing a sum over tp")


def test_a_number_that_another_case_refutes_is_said_of_this_case_alone():
    """x over the rank's own count of kept rows is off by tp if all are kept, else by another factor on each rank."""

    def share(x, keep):
        return x / jnp.maximum(keep.astype(x.dtype).sum(), 1.0)

    declaration = declare(
        lambda mesh, x, keep: x / keep.sum().clamp(min=1), share, {"x": "b/tp d", "keep": "b/tp"}, "b/tp d",
        mesh={"tp": (2,)}, draw={"x": values("normal"), "keep": mask("b")},
    )  # fmt: skip
    case = declaration.case(b=6, d=3)
    report = verify_case(declaration, case.replace(values={**case.values, "keep": {"kind": "mask", "keep": "all"}}))
    assert "(= tp)" in report.notes["out"][0]
    tested = check_notes(declaration, report).notes["out"]
    assert "off by the constant factor 2 (= tp) in this case" in tested
    assert any(note.startswith("off by a constant factor at each") for note in tested)
