"""Parity of rotary positions and of a mixture of experts whose experts are all on this rank."""

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Int
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from jax_ref.expert_parallel import mixture, sequence_balance_loss, softmax_top_k, z_loss
from jax_ref.models import rotated as reference
from shardproof import CaseSpec, integers, offsets, scheme, values
from shardproof.engines.engines import run
from torch_impl.expert_parallel import sum_gradients
from torch_impl.layouts import TokenLayout
from torch_impl.models import HybridConfig, Placement
from torch_impl.models.layers import Experts, Moe, rotated


def at_base(x, places, base):
    return reference(x, places, base)


@scheme(
    reference=at_base,
    mesh={"cp": (1, 2, 3)},
    inputs={"x": "b h s/cp p", "places": "s/cp"},
    outputs="b h s/cp p",
    dims={"b": (2,), "h": (3,), "s": (6,), "p": (2, 8)},
    draw={"x": values("normal", "ties", "large"), "places": integers(0, 4095)},
    options={"base": (10000.0, 10.0)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
)
@pytest.mark.cases(20)
def rotary(mesh, x, places, base):
    return rotated(x, places, base)


def all_experts(x, router, gate_up, down, k):
    tokens = x.reshape(-1, x.shape[-1])
    gates, experts, _ = softmax_top_k(tokens @ router.T, k, norm_topk_prob=True)
    return mixture(tokens, gates, experts, gate_up.transpose(0, 3, 1, 2), down.transpose(0, 2, 1)).reshape(x.shape)


@scheme(
    reference=all_experts,
    mesh={"dp": (1, 2)},
    inputs={"x": "b/dp s d", "router": "e d dp=R", "gate_up": "e two f d dp=R", "down": "e d f dp=R"},
    outputs="b/dp s d",
    dims={"b": (2,), "s": (1, 5), "d": (4, 3), "e": (4, 3), "f": (6, 4), "two": (2,)},
    draw={name: values("normal") for name in ("x", "router", "gate_up", "down")},
    options={"k": (1, 2, 3)},
    dtypes=("float32", "bfloat16", "float64"),
    roundings=8,
    reduction=("s", "d", "f"),
)
@pytest.mark.cases(30)
def layer_of_experts(mesh, x, router, gate_up, down, k):
    e, d, f = down.shape
    config = HybridConfig(hidden_size=d, num_experts=e, num_experts_per_tok=k, moe_intermediate_size=f)
    weights = {
        "router.weight": router,
        "experts.gate_up_proj": gate_up.flatten(1, 2),
        "experts.down_proj": down,
    }
    layer = Moe(config, Placement(mesh["dp"], mesh["dp"]), device="meta", dtype=x.dtype)
    return functional_call(layer, weights, (x,), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_of_no_expert_counts_as_zero(dtype):
    config = HybridConfig(hidden_size=8, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=4)
    experts = Experts(config, dtype=dtype)
    x, gates = torch.ones(2, 8, dtype=dtype), torch.ones(2, 2, dtype=dtype)
    chosen = torch.tensor([[0, -1], [2, -1]])
    first, second = experts(x, chosen, gates)
    (alone,) = experts(x[:1], chosen[:1, :1], gates[:1, :1])
    assert torch.equal(first, alone)
    assert torch.equal(second, torch.zeros_like(second)) and first.abs().sum() > 0


def step_of_layer(x, parameters, k, balance, z, steps):
    """In each step the mean square of all micro-batches, and the mean over all sequences of the losses of the router.

    The mean square outside of a step is added.
    """
    router, stacks = parameters["router"]["weight"], parameters["experts"]
    e, d, f = stacks["down_proj"].shape
    gate_up = stacks["gate_up_proj"].reshape(e, 2, f, d)
    logits = x @ router.T
    _, experts, probabilities = softmax_top_k(logits, k)
    y = jnp.stack([all_experts(each, router, gate_up, stacks["down_proj"], k) for each in x])
    of_balance = jnp.stack([sequence_balance_loss(*each) for each in zip(probabilities, experts, strict=True)])
    return (steps + 1) * jnp.mean(y**2) + steps * (balance * of_balance.mean() + z * z_loss(logits))


OF_LAYER = {
    "router": {"weight": "e d dp=I cp=I"},
    "experts": {"gate_up_proj": "e u d dp=I cp=I", "down_proj": "e d f dp=I cp=I"},
}


LEAVES_OF_LAYER = tuple(f"parameters.{part}.{leaf}" for part, leaves in OF_LAYER.items() for leaf in leaves)


def moe_of(parameters, placement, k, balance, z):
    """A `Moe` with these weights and losses of the router."""
    down = parameters["experts"]["down_proj"]
    e, d, f = down.shape
    config = HybridConfig(
        hidden_size=d, num_experts=e, num_experts_per_tok=k, moe_intermediate_size=f,
        balance_coefficient=balance, z_coefficient=z,
    )  # fmt: skip
    layer = Moe(config, placement, device=down.device, dtype=down.dtype)
    layer.load_state_dict({f"{part}.{leaf}": x for part, leaves in parameters.items() for leaf, x in leaves.items()})
    return layer


@scheme(
    reference=step_of_layer,
    mesh={"dp": (1, 2), "cp": (1, 2, 3)},
    inputs={"x": "m b/dp s/cp:dual_chunk_swap d", "parameters": OF_LAYER},
    outputs="dp=P cp=P",
    dims={"m": (2, 1), "d": (4, 3), "e": (4, 3), "f": (6, 4), "u": "2*f"},
    draw={name: values("normal") for name in ("x", *LEAVES_OF_LAYER)},
    options={"k": (1, 2, 3), "balance": (0.5, 0.0), "z": (0.25, 0.0), "steps": (1, 2)},
    rank_options={"forward": ("recomputed", "dropped first", "once")},
    nograd=("x",),
    module="parameters",
    dtypes=("float32", "float64"),
    roundings=8,
    reduction=("b", "s", "d", "f"),
)
@pytest.mark.cases(20)
def step_with_router_losses(mesh, x, parameters, k, balance, z, steps, forward):
    """Steps, and a forward and backward outside of one.

    Backward may compute the layer again, and a forward may have no backward.
    """
    layer = moe_of(parameters, Placement(mesh["cp"], mesh["cp"]), k, balance, z)
    numbers, shares = len(x) * mesh.total("b") * mesh.total("s") * x.shape[-1], []

    def of_microbatches():
        for batch in x:
            if forward == "dropped first":
                layer(batch)
            y = checkpoint(layer, batch, use_reentrant=False) if forward == "recomputed" else layer(batch)
            loss = y.square().sum() / numbers
            loss.backward()
            shares.append(loss.detach())

    for _ in range(steps):
        layer.begin_step(shards=len(x) * mesh.total("b") * mesh.size("cp"), averaged_over=1)
        of_microbatches()
        shares += layer.end_step()
    of_microbatches()
    sum_gradients(list(layer.parameters()), [mesh["dp"], mesh["cp"]])
    return torch.stack(shares).sum(), layer


def step_of_packed_layer(x, cu_padded, cu_real, parameters, k, balance, z):
    """As `step_of_layer` of each stream's real tokens alone, with an output of 0 for padding."""
    token, end = jnp.arange(x.shape[1]), cu_padded[:-1] + jnp.diff(cu_real)
    is_real = ((token[:, None] >= cu_padded[None, :-1]) & (token[:, None] < end[None])).any(-1)
    router, stacks = parameters["router"]["weight"], parameters["experts"]
    e, d, f = stacks["down_proj"].shape
    y = all_experts(x, router, stacks["gate_up_proj"].reshape(e, 2, f, d), stacks["down_proj"], k)
    logits = x @ router.T
    _, experts, probabilities = softmax_top_k(logits, k)
    experts = jnp.where(is_real[None, :, None], experts, -1)
    of_z = jnp.stack([z_loss(*each) for each in zip(logits, experts, strict=True)])
    routed = balance * sequence_balance_loss(probabilities, experts).mean() + z * of_z.mean()
    return jnp.mean(jnp.where(is_real[None, :, None], y, 0.0) ** 2) + routed


@scheme(
    reference=step_of_packed_layer,
    mesh={"dp": (1, 2), "cp": (1, 2, 4)},
    inputs={"x": "b/dp t/cp:packed d", "cu_padded": "q", "cu_real": "q", "parameters": OF_LAYER},
    outputs="dp=P cp=P",
    dims={"t": (16,), "q": (4, 5), "d": (4, 3), "e": (4, 3), "f": (6, 4), "u": "2*f"},
    draw={
        **{name: values("normal") for name in ("x", *LEAVES_OF_LAYER)},
        "cu_padded": offsets("t", padded=True),
        "cu_real": offsets("t"),
    },
    options={"k": (1, 2, 3), "balance": (0.5, 0.0), "z": (0.25, 0.0)},
    rank_options={"rows": (2, 1)},
    nograd=("x",),
    module="parameters",
    dtypes=("float32", "float64"),
    roundings=8,
    reduction=("b", "t", "d", "f"),
)
@pytest.mark.cases(20)
def step_of_packed_streams(
    mesh, x, cu_padded: Int[Tensor, "q"], cu_real: Int[Tensor, "q"], parameters, k, balance, z, rows
):
    """Streams of the same documents, up to `rows` of them in each micro-batch."""
    layer = moe_of(parameters, Placement(mesh["cp"], mesh["cp"]), k, balance, z)
    layout = TokenLayout.packed(cu_padded, cu_real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    layer.begin_step(shards=mesh.total("b") * mesh.size("cp"), averaged_over=1)
    total = x.new_zeros(())
    for streams in x.split(rows):
        loss = layer(streams, layout).square().sum() / (mesh.total("b") * mesh.total("t") * x.shape[-1])
        loss.backward()
        total = total + loss.detach()
    sum_gradients(list(layer.parameters()), [mesh["dp"], mesh["cp"]])
    return total + sum(layer.end_step()), layer


def test_router_losses_are_added_in_a_step_alone_and_once():
    """Computed again for a backward, a layer has noted its losses once; evaluated, none."""

    def body(mesh, case):
        config = HybridConfig(hidden_size=4, balance_coefficient=0.5)
        layer, x = Moe(config, Placement(mesh["cp"], mesh["cp"])), torch.linspace(-1, 2, 24).sin().view(1, 6, 4)
        layer(x).sum().backward()
        plain = layer.router.weight.grad.clone()
        layer.begin_step(shards=1, averaged_over=1)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(x)
        learned = layer.router.weight.grad.clone()
        shares = layer.end_step()
        layer(x).sum().backward()
        return len(shares), torch.equal(learned, 2 * plain), torch.equal(layer.router.weight.grad, learned + plain)

    assert run(body, CaseSpec("router_losses", {"cp": 1})).results == ((1, False, True),)


def test_a_score_knows_the_distance_alone():
    """Turning both by as much again changes no digit that float64 keeps of an angle of thousands."""
    q, k = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 1, 1, 1, 4)
    far = torch.arange(0, 3000, 500)
    near_pair = (rotated(q, torch.tensor([7]), 10.0) * rotated(k, torch.tensor([3]), 10.0)).sum()
    moved = torch.stack([(rotated(q, 7 + each[None], 10.0) * rotated(k, 3 + each[None], 10.0)).sum() for each in far])
    assert moved.round(decimals=9).tolist() == [near_pair.round(decimals=9).item()] * len(far)


def test_place_zero_turns_nothing():
    x = torch.linspace(-1, 2, 8).view(1, 1, 1, 8)
    assert torch.equal(rotated(x, torch.tensor([0]), 10000.0), x)
