"""Parity of the layer of routed experts over ep and tp, by both exchanges, and of shared experts over tp."""

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from jax_ref import expert_parallel as on_one_device
from jax_ref.expert_parallel import swiglu
from parity_tests.expert_parallel.choices import chosen_experts
from parity_tests.expert_parallel.costs import cost_by_all_gather, cost_by_all_to_all, cost_of_shared
from parity_tests.expert_parallel.stored_mixture import (
    by_all_gather,
    by_all_to_all,
    kept_by_all_gather,
    kept_by_all_to_all,
)
from parity_tests.parity import parity
from shardproof import CaseSpec, mask, scheme, values
from shardproof.engines.engines import run
from torch_impl.expert_parallel import routed_experts, shared_experts, softmax_top_k

# Stored in the dtype and used again: the hidden columns, their product with the gate, an expert's output, each tp
# rank's addend of the output, and the gradients of these.
ROUNDINGS = 6
NUMBERS = values("normal", "ties", "zeros", "normal")
WEIGHTS = {"gate_up": "e/ep d two f", "down": "e/ep f d"}
SIZES = {"k": (1, 2, 3), "e": (4, 8), "d": (4, 3, 8), "f": (4, 8, 2), "two": (2,)}
RANKS = (1, 2, 3, 4, 5, 7)
ON_EACH = {**SIZES, "e": "h*ep", "h": (4, 1, 2)}  # h experts on each rank, so that ep may be prime
MANY = {**ON_EACH, "h": (4, 1, 2, 128, 256)}  # more experts than 8 bits can number, signed or not


def are_possible(c):
    """Whether a token has k experts to choose from; many experts are on one rank."""
    return c.k <= c.e and (c.h < 128 or (c.ep == 1 and c.d == 4 and c.f == 4))


DRAW = {
    **dict.fromkeys(("x", "gates", "gate_up", "down"), NUMBERS),
    "experts": chosen_experts(),
    "kept": mask(),
}
DECLARED = dict(
    dims=SIZES,
    draw=DRAW,
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    roundings=ROUNDINGS,
    reduction=("k", "d", "f"),
    wider_inputs=("gates",),
    rank_options={"backend": ("auto", "eager")},
)
RAGGED = {
    "x": "t/ep:ragged d",
    "gates": "t/ep:ragged k",
    "experts": "t/ep:ragged k",
    "kept": "t/ep:ragged k",
    **WEIGHTS,
}


def flat(gate_up):
    """This rank's columns of gate and of up side by side, as production takes them."""
    return gate_up.flatten(2)


@scheme(
    reference=kept_by_all_to_all,
    mesh={"ep": RANKS},
    contract=routed_experts,
    inputs=RAGGED,
    outputs="t/ep:ragged d",
    cost=lambda c: cost_by_all_to_all(routed_over_ep, c),
    assume=are_possible,
    **{**DECLARED, "dims": MANY},
)
def routed_over_ep(mesh, x, gates, experts: Int[Tensor, "t k"], kept: Bool[Tensor, "t k"], gate_up, down, backend):
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], kept=kept, backend=backend)


@scheme(
    reference=kept_by_all_gather,
    mesh={"ep": RANKS},
    contract=routed_experts,
    inputs=RAGGED,
    outputs="t/ep:ragged d",
    cost=lambda c: cost_by_all_gather(routed_by_all_gather, c),
    assume=lambda c: c.k <= c.e,
    **{**DECLARED, "dims": ON_EACH},
)
def routed_by_all_gather(
    mesh, x, gates, experts: Int[Tensor, "t k"], kept: Bool[Tensor, "t k"], gate_up, down, backend
):
    options = {"kept": kept, "exchange": "all_gather", "backend": backend}
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], **options)


def token_specs(axes, replicated):
    """Specs of tokens sharded over all axes, and of experts over ep and tp and replicated over the others."""
    cut = "/".join(axes)
    types = "".join(f" {axis}=R" for axis in replicated)
    tensors = {"x": f"t/{cut} d", "gates": f"t/{cut} k", "experts": f"t/{cut} k"}
    return {**tensors, "gate_up": f"e/ep d two f/tp{types}", "down": f"e/ep f/tp d{types}"}


@scheme(
    reference=by_all_to_all,
    mesh={"ep": (1, 2), "tp": (1, 2, 4)},
    contract=routed_experts,
    inputs=token_specs(("ep", "tp"), ()),
    cost=lambda c: cost_by_all_to_all(routed_over_ep_and_tp, c),
    **{**DECLARED, "draw": {name: draw for name, draw in DRAW.items() if name != "kept"}},
)
def routed_over_ep_and_tp(mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, backend):
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], mesh["tp"], backend=backend)


@scheme(
    reference=by_all_gather,
    mesh={"ep": (1, 2), "tp": (1, 2)},
    contract=routed_experts,
    inputs=token_specs(("ep", "tp"), ()),
    cost=lambda c: cost_by_all_gather(gathered_over_ep_and_tp, c),
    **{**DECLARED, "draw": {name: draw for name, draw in DRAW.items() if name != "kept"}},
)
def gathered_over_ep_and_tp(mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, backend):
    options = {"exchange": "all_gather", "backend": backend}
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], mesh["tp"], **options)


MULTIPLES_OF_THREE = {**SIZES, "e": (3, 6), "f": (6, 12)}


@scheme(
    reference=by_all_to_all,
    mesh={"ep": (1, 3), "tp": (1, 2, 3)},
    contract=routed_experts,
    inputs=token_specs(("ep", "tp"), ()),
    cost=lambda c: cost_by_all_to_all(routed_over_threes, c),
    **{**DECLARED, "dims": MULTIPLES_OF_THREE, "draw": {name: draw for name, draw in DRAW.items() if name != "kept"}},
)
def routed_over_threes(mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, backend):
    """Sizes that are no powers of 2, over ep, over tp and over both."""
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], mesh["tp"], backend=backend)


@scheme(
    reference=by_all_to_all,
    mesh={"dp": (1, 2), "cp": (1, 2), "ep": (1, 2), "tp": (1, 2)},
    contract=routed_experts,
    inputs=token_specs(("dp", "cp", "ep", "tp"), ("dp", "cp")),
    **{**DECLARED, "draw": {name: draw for name, draw in DRAW.items() if name != "kept"}},
)
def routed_with_replicated_experts(mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, backend):
    """dp=R, cp=R: the gradients of replicas are addends, over edp = dp x cp alone."""
    return routed_experts(x, gates, experts, flat(gate_up), down, mesh["ep"], mesh["tp"], backend=backend)


@scheme(
    reference=swiglu,
    mesh={"dp": (1, 2), "tp": (1, 2, 3)},
    contract=shared_experts,
    inputs={"x": "t/dp/tp d", "gate_up": "d two f/tp dp=R", "down": "f/tp d dp=R"},
    dims={"d": (4, 3), "f": (6, 12), "two": (2,)},
    draw=dict.fromkeys(("x", "gate_up", "down"), NUMBERS),
    dtypes=("float32", "bfloat16", "float64"),
    roundings=ROUNDINGS,
    reduction=("d", "f"),
    rank_options={"backend": ("auto", "eager")},
    cost=cost_of_shared,
)
def shared_over_tp(mesh, x, gate_up, down, backend):
    return shared_experts(x, gate_up.flatten(1), down, mesh["tp"], backend=backend)


SCHEMES = (
    routed_over_ep,
    routed_by_all_gather,
    routed_over_ep_and_tp,
    gathered_over_ep_and_tp,
    routed_over_threes,
    routed_with_replicated_experts,
    shared_over_tp,
)
test_parity = parity(SCHEMES, lockstep=30)


test_parity_on_processes = pytest.mark.fast_values(2)(parity(SCHEMES, gloo=4))


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_experts_may_be_of_any_integer_dtype(exchange):
    x = torch.linspace(-1, 2, 24).sin().view(6, 4)
    gate_up, down = torch.linspace(-1, 1, 4 * 4 * 8).view(4, 4, 8), torch.linspace(-1, 2, 4 * 4 * 4).view(4, 4, 4)
    experts = torch.tensor([[0, 1], [3, 2], [1, 0], [2, 3], [0, 3], [-1, 2]])

    def body(mesh, case):
        rank = mesh.rank("ep")
        own, here = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
        gates, others = torch.ones(3, 2), (gate_up[here], down[here], mesh["ep"])
        return [
            routed_experts(x[own], gates, experts[own].to(dtype), *others, exchange=exchange)
            for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        ]

    for wide, *narrow in run(body, CaseSpec(scheme="dtypes", mesh={"ep": 2})).results:
        assert all(torch.equal(wide, other) for other in narrow) and wide.abs().sum() > 0


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(("gate", "size", "scale"), [(16.0, 10.0, 1e-3), (1e-6, 0.01, 100.0), (1e-4, 0.01, 100.0)])
def test_float16_multiplies_gates_with_outputs_not_with_hidden_columns(exchange, gate, size, scale):
    """A gate times a hidden column would overflow or vanish, although the gate times the output does not."""
    hidden = torch.tensor(8 * size).sigmoid() * (8 * size) ** 2
    expected = gate * 8 * hidden * scale

    def body(mesh, case):
        x, down = torch.full((1, 8), size).half(), torch.full((1, 8, 8), scale).half()
        gates, experts = torch.full((1, 1), gate), torch.zeros(1, 1, dtype=torch.int64)
        return routed_experts(x, gates, experts, torch.ones(1, 8, 16).half(), down, mesh["ep"], exchange=exchange)

    (y,) = run(body, CaseSpec(scheme="float16", mesh={"ep": 1})).results
    least = 2.0**-24  # the smallest number of float16, which rounds the result
    assert (y.float() - expected).abs().max() <= 4e-3 * expected + least


def test_the_gradient_of_a_narrow_gate_is_rounded_once():
    """Over tp the gradient is a sum of addends, and no addend is rounded to the dtype of the gates before the sum."""
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    gate_up = torch.randn(2, 4, 2, 8, generator=generator, dtype=torch.float64)
    down = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    experts = torch.arange(8)[:, None] % 2

    def body(mesh, case):
        rank, size = mesh.rank("tp"), mesh.size("tp")
        own, columns = slice(rank * 8 // size, (rank + 1) * 8 // size), 8 // size
        gates = torch.full((8 // size, 1), 0.3).requires_grad_()
        shards = gate_up.narrow(3, rank * columns, columns).flatten(2), down.narrow(1, rank * columns, columns)
        y = routed_experts(x[own], gates, experts[own], *shards, mesh["ep"], mesh["tp"])
        return torch.autograd.grad(y, gates, cotangent[own])[0]

    (alone,), ranks = (run(body, CaseSpec(scheme="gates", mesh={"ep": 1, "tp": tp})).results for tp in (1, 4))
    assert alone.dtype == torch.float32 and torch.equal(torch.cat(ranks), alone)


# A choice that rounding decides is undecided: neither equal nor a mismatch. A mistake beside it is a mismatch.

TIE_SIZES = {"t": 4, "d": 2, "e": 2, "f": 4, "two": 2}


def nearly_equal_columns(generator, shape):
    """For a token of ones, the second logit is larger by 2^-26, which float64 keeps and float32 rounds away."""
    return np.array([[1.0, 1.0], [0.0, 2.0**-26]])


def routed_in_float64(x, router, gate_up, down):
    gates, experts, _ = on_one_device.softmax_top_k(x @ router, 1)
    return on_one_device.mixture(x, gates, experts, gate_up, down)


def scaled_report(scale):
    @scheme(
        reference=routed_in_float64,
        mesh={"ep": (1, 2)},
        inputs={"x": "t/ep d", "router": "d e ep=R", "gate_up": "e/ep d two f", "down": "e/ep f d"},
        outputs="t/ep d",
        dims={name: (size,) for name, size in TIE_SIZES.items() if name != "t"},
        draw={
            "x": values("ones"),
            "router": nearly_equal_columns,
            **dict.fromkeys(("gate_up", "down"), values("normal")),
        },
        dtypes=("float32",),
        roundings=6,
    )
    def nearly_tied(mesh, x, router, gate_up, down):
        gates, experts, _ = softmax_top_k(x @ router, 1)
        return scale * routed_experts(x, gates, experts, gate_up.flatten(2), down, mesh["ep"])

    return nearly_tied.verify(ep=2, **TIE_SIZES, inside_subgroup=False, examples=1)


@pytest.mark.slow
def test_a_choice_that_rounding_decides_is_undecided():
    report = scaled_report(1.0)
    assert report.verdict == "undecided" and not report.failed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_a_mistake_beside_an_undecided_choice_is_a_mismatch(scale):
    report = scaled_report(scale)
    assert report.failed and report.verdict != "undecided", str(report)
