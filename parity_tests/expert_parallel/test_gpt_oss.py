"""Experts with biases and the clamped unit of gpt-oss: parity over ep and tp, and the layer of transformers."""

import pytest
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from parity_tests.expert_parallel.choices import chosen_experts
from parity_tests.expert_parallel.costs import cost_by_all_gather, cost_by_all_to_all
from parity_tests.expert_parallel.stored_mixture import pairs_by_all_gather, pairs_by_all_to_all
from parity_tests.expert_parallel.test_routed_experts import NUMBERS, ROUNDINGS
from parity_tests.parity import parity
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce
from torch_impl.expert_parallel import ClampedSwiGLU, routed_experts, top_k_softmax

TENSORS = {
    "x": "t/ep/tp d",
    "gates": "t/ep/tp k",
    "experts": "t/ep/tp k",
    "gate_up": "e/ep d g/tp",
    "down": "e/ep f/tp d",
    "gate_up_bias": "e/ep g/tp",
    "down_bias": "e/ep d tp=I",
}


DECLARED = dict(
    mesh={"ep": (1, 2, 4), "tp": (1, 2, 3)},
    contract=routed_experts,
    inputs=TENSORS,
    outputs="t/ep/tp d",
    dims={"k": (1, 2, 3), "e": (4, 8), "d": (4, 3, 8), "f": (6, 12), "g": "2*f"},
    draw={
        **dict.fromkeys(("x", "gates", "gate_up", "down"), NUMBERS),
        "gate_up_bias": values("normal"),
        "down_bias": values("normal"),
        "experts": chosen_experts(),
    },
    options={"limit": (0.7137, 7.0, 1e4)},
    rank_options={"backend": ("auto", "eager")},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    roundings=ROUNDINGS,
    reduction=("k", "d", "f"),
)


def biased_experts(mesh, x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, **options):
    options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "activation": ClampedSwiGLU(limit=limit)}
    return routed_experts(x, gates, experts, gate_up, down, mesh["ep"], mesh["tp"], **options)


@scheme(reference=pairs_by_all_to_all, cost=lambda c: cost_by_all_to_all(gpt_oss_experts, c), **DECLARED)
def gpt_oss_experts(
    mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, gate_up_bias, down_bias, limit, backend
):
    return biased_experts(mesh, x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, backend=backend)


@scheme(reference=pairs_by_all_gather, cost=lambda c: cost_by_all_gather(gathered_gpt_oss_experts, c), **DECLARED)
def gathered_gpt_oss_experts(
    mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, gate_up_bias, down_bias, limit, backend
):
    options = {"exchange": "all_gather", "backend": backend}
    return biased_experts(mesh, x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, **options)


RAGGED = {name: spec.replace("/ep/tp", "/ep:ragged").replace("/tp", "") for name, spec in TENSORS.items()}


@scheme(
    reference=pairs_by_all_to_all,
    cost=lambda c: cost_by_all_to_all(ragged_gpt_oss_experts, c),
    **DECLARED
    | {
        "mesh": {"ep": (1, 2, 3, 5, 8)},
        "inputs": {**RAGGED, "down_bias": "e/ep d"},
        "outputs": "t/ep:ragged d",
        "dims": {**DECLARED["dims"], "e": "h*ep", "h": (4, 1, 2)},
        "assume": lambda c: c.k <= c.e,
    },
)
def ragged_gpt_oss_experts(
    mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, gate_up_bias, down_bias, limit, backend
):
    """Ranks have different numbers of tokens, or none."""
    options = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "activation": ClampedSwiGLU(limit=limit)}
    return routed_experts(x, gates, experts, gate_up, down, mesh["ep"], backend=backend, **options)


SCHEMES = (gpt_oss_experts, gathered_gpt_oss_experts, ragged_gpt_oss_experts)
test_parity = parity(SCHEMES, lockstep=30)


test_parity_on_processes = pytest.mark.fast_values(1)(parity(SCHEMES, gloo=3))


HIDDEN, HIDDEN_COLUMNS, EXPERTS, CHOICES, TOKENS = 6, 12, 4, 2, 16


def numbers(shape, seed):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer():
    """The mixture of transformers' gpt-oss, with random weights: gates and ups on both sides of the limit."""
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN_COLUMNS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        num_hidden_layers=1,
    )
    mixture = GptOssMLP(config).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixture.parameters()):
            parameter.copy_(numbers(parameter.shape, seed))
    return mixture


def on_one_device():
    """Outputs, and the gradients of x and of every parameter."""
    mixture, x = layer(), numbers((TOKENS, HIDDEN), 10).requires_grad_()
    y, _ = mixture(x[None])
    y.backward(numbers(y.shape, 11))
    return {"y": y[0].detach(), "x": x.grad, **{name: p.grad for name, p in mixture.named_parameters()}}


def shard_of(name, x, mesh):
    """Experts over ep, their columns over tp, tokens over both."""
    if name in ("y", "x"):
        return x.chunk(mesh.size("ep"))[mesh.rank("ep")].chunk(mesh.size("tp"))[mesh.rank("tp")]
    if name.startswith("router"):
        return x
    x = x.chunk(mesh.size("ep"))[mesh.rank("ep")]
    if name.endswith("down_proj_bias"):
        return x
    dim = 1 if name.endswith("down_proj") else -1
    return x.chunk(mesh.size("tp"), dim)[mesh.rank("tp")]


def on_this_rank(mesh, exchange):
    """One rank's output and gradients; the router's gradient is summed over the ranks."""
    own = {name: shard_of(name, p.detach(), mesh).clone().requires_grad_() for name, p in layer().named_parameters()}
    x = shard_of("x", numbers((TOKENS, HIDDEN), 10), mesh).clone().requires_grad_()
    gates, experts, _ = top_k_softmax(x @ own["router.weight"].T + own["router.bias"], CHOICES)
    y = routed_experts(
        x,
        gates,
        experts,
        own["experts.gate_up_proj"],
        own["experts.down_proj"],
        mesh["ep"],
        mesh["tp"],
        exchange=exchange,
        gate_up_bias=own["experts.gate_up_proj_bias"],
        down_bias=own["experts.down_proj_bias"],
        activation=ClampedSwiGLU(),
    )
    y.backward(shard_of("y", numbers((TOKENS, HIDDEN), 11), mesh))
    for name in ("router.weight", "router.bias"):
        for axis in ("ep", "tp"):
            own[name].grad = all_reduce(own[name].grad, mesh[axis], out="I")
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in own.items()}}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("sizes", "exchange"),
    [
        ({"ep": 2, "tp": 2}, "all_to_all"),
        ({"ep": 2, "tp": 4}, "all_gather"),
        ({"ep": 4, "tp": 2}, "all_to_all"),
        ({"ep": 1, "tp": 3}, "all_to_all"),
    ],
)
def test_the_layer_of_transformers(sizes, exchange):
    """Every output and gradient within 1e-10 of one device, in float64."""

    def body(mesh, case):
        expected = on_one_device()
        return {
            name: (x - shard_of(name, expected[name], mesh)).abs().max().item()
            for name, x in on_this_rank(mesh, exchange).items()
        }

    for errors in run(body, CaseSpec(scheme="gpt_oss", mesh=sizes)).results:
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
        assert len(errors) == 8


def test_the_layer_has_numbers_beyond_the_limit():
    mixture, x = layer(), numbers((TOKENS, HIDDEN), 10)
    _, _, experts = mixture.router(x)
    weight, bias = (
        mixture.experts.gate_up_proj[experts[:, 0]],
        mixture.experts.gate_up_proj_bias[experts[:, 0]],
    )
    columns = torch.einsum("td,tdm->tm", x, weight) + bias
    assert (columns > 7).sum() > 10 and (columns[:, 1::2] < -7).sum() > 10 and (columns.abs() < 7).sum() > 10


def test_the_gradient_of_a_narrow_bias_is_rounded_once():
    """The sum of 255 numbers slightly below 1 + 2^-8 is near 256, but each of them alone rounds to 1."""
    rows, gate = 255, 1.0 + 0.99 * 2.0**-8

    def body(mesh, case):
        x, experts = torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(rows, 1, dtype=torch.int64)
        gate_up, down = (torch.zeros(1, *sizes, dtype=torch.bfloat16) for sizes in ((8, 16), (8, 8)))
        biases = [torch.zeros(1, size, dtype=torch.bfloat16, requires_grad=True) for size in (16, 8)]
        y = routed_experts(
            x,
            torch.full((rows, 1), gate),
            experts,
            gate_up,
            down,
            mesh["ep"],
            gate_up_bias=biases[0],
            down_bias=biases[1],
            activation=ClampedSwiGLU(),
        )
        return torch.autograd.grad(y, biases[1], torch.ones_like(y))[0].tolist()

    (gradient,) = run(body, CaseSpec(scheme="gpt_oss", mesh={"ep": 1})).results
    assert gradient == [[256.0] * 8]


def test_a_limit_that_is_not_positive_is_rejected():
    with pytest.raises(ValueError, match="ClampedSwiGLU: limit=0 must be positive"):
        ClampedSwiGLU(limit=0)
    with pytest.raises(TypeError, match="ClampedSwiGLU: alpha='a' is a str; pass a number"):
        ClampedSwiGLU(alpha="a")
