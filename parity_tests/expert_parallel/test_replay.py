"""Routing replay: a recompute uses the experts of the forward, and only the scores have a gradient."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jax_ref import expert_parallel as reference
from parity_tests.expert_parallel.choices import padding
from shardproof import Cost, check_cases, drawn, integers, scheme, values
from torch_impl.expert_parallel import RoutingReplay, sigmoid_top_k, softmax_top_k, top_k_softmax

ROUTERS = {
    "softmax": softmax_top_k,
    "top_k": lambda logits, k, *, norm_topk_prob, experts: top_k_softmax(logits, k, experts=experts),
    "sigmoid": lambda logits, k, **options: sigmoid_top_k(logits, logits.new_zeros(logits.shape[-1]), k, **options),
}


def given_experts(generator, shape, case):
    """k experts for each token, no two alike; some rows without any, and some choices left out."""
    experts = generator.random((*shape[:-1], case.e)).argsort(-1)[..., : shape[-1]]
    is_left_out = (generator.random((*shape[:-1], 1)) < 0.3) | (generator.random(shape) < 0.1)
    return np.where(is_left_out, generator.choice((-1, -2, case.e, case.e + 1), shape), experts).astype(np.int64)


@scheme(
    reference=reference.replayed,
    mesh={"ep": (1, 2, 4, 8)},
    inputs={"logits": "t/ep:ragged e", "experts": "t/ep:ragged k"},
    outputs="t/ep:ragged k",
    draw={
        "logits": values("normal", "ties", "zeros", nan_rows=padding),
        "experts": drawn(given_experts, integer=True),
    },
    dims={"k": (1, 2, 3), "e": (4, 8)},
    options={"router": tuple(ROUTERS), "norm_topk_prob": (False, True)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("e",),
    sums="float32",
    wide=True,
    cost=lambda c: Cost(),
)
def replayed_gates(mesh, logits, experts: Int[Tensor, "t k"], router, norm_topk_prob) -> Float[Tensor, "t k"]:
    return ROUTERS[router](logits, experts.shape[-1], norm_topk_prob=norm_topk_prob, experts=experts)[0]


def reference_choices(logits, k, router, norm_topk_prob):
    if router == "softmax":
        return reference.softmax_top_k(logits, k, norm_topk_prob)
    if router == "top_k":
        return reference.top_k_softmax(logits, k)
    return reference.sigmoid_top_k(logits, jnp.zeros(logits.shape[-1]), k, norm_topk_prob=norm_topk_prob)


def mixture(logits, table, each, router, norm_topk_prob, is_full, is_nested):
    """Each token's rows of the table, weighted by its gates; choices of a full expert are left out."""
    gates, experts, _ = reference_choices(logits, len(each), router, norm_topk_prob)
    is_kept = experts != 0 if is_full else jnp.ones(experts.shape, bool)
    return (jnp.where(is_kept, gates, 0.0)[..., None] * table[experts]).sum(-2)


class Rounding:
    """The block of `mixture` with another rounding of the logits in each run, which breaks ties in another way."""

    def __init__(self, replay, route, is_full):
        self.replay, self.route, self.is_full, self.runs = replay, route, is_full, 0

    def __call__(self, logits, table):
        places = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        logits = logits + self.runs * torch.finfo(logits.dtype).eps * places
        self.runs += 1
        gates, experts, _ = self.replay.route(self.route, logits)
        if self.is_full:
            experts.masked_fill_(experts == 0, -1)
        is_kept = experts >= 0
        return (gates.where(is_kept, 0.0)[..., None] * table[experts.where(is_kept, 0)]).sum(-2)


@scheme(
    reference=mixture,
    mesh={"ep": (1, 2)},
    inputs={"logits": "t/ep:ragged e", "table": "e d ep=R", "each": "k"},
    outputs="t/ep:ragged d",
    draw={"logits": values("ties", "zeros", "normal"), "table": values("normal"), "each": integers(0, 0)},
    dims={"k": (2, 1, 3), "e": (4, 8), "d": (3,)},
    options={
        "router": tuple(ROUTERS),
        "norm_topk_prob": (True, False),
        "is_full": (True, False),
        "is_nested": (False, True),
    },
    nograd=("each",),
    dtypes=("float32", "float64"),
    reduction=("e", "k"),
    roundings=16,  # a recompute changes a logit by up to 7 roundings, inside another block by 7 more
)
def recomputed_choices(mesh, logits, table, each: Int[Tensor, "k"], router, norm_topk_prob, is_full, is_nested):
    """A checkpointed block, alone or inside another. A first backward through it is not compared."""
    replay, k = RoutingReplay(), len(each)
    block = Rounding(replay, partial(ROUTERS[router], k=k, norm_topk_prob=norm_topk_prob, experts=None), is_full)
    run = partial(checkpoint, use_reentrant=False, context_fn=replay.contexts)
    y = run(partial(run, block), logits, table) if is_nested else run(block, logits, table)
    if trained := [x for x in (logits, table) if x.requires_grad and y.requires_grad]:
        torch.autograd.grad(y.sum(), trained, retain_graph=True)
    return y


@pytest.mark.parametrize("declared", [replayed_gates, recomputed_choices], ids=lambda declared: declared.name)
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(declared, engine):
    check_cases(declared, 40 if engine == "lockstep" else 3, engine=engine)


LOGITS = torch.tensor([[1.0, 3.0, 2.0], [2.0, 2.0, 5.0], [0.0, -1.0, 1.0]])


@pytest.mark.parametrize("router", ROUTERS)
def test_giving_a_router_its_own_choice_changes_nothing(router):
    bias = torch.tensor([0.0, 9.0, 0.0])
    call = {
        "softmax": lambda **given: softmax_top_k(LOGITS, 2, norm_topk_prob=True, **given),
        "top_k": lambda **given: top_k_softmax(LOGITS, 2, **given),
        "sigmoid": lambda **given: sigmoid_top_k(LOGITS, bias, 2, routed_scaling_factor=2.5, **given),
    }[router]
    expected = call()
    assert all(torch.equal(a, b) for a, b in zip(call(experts=expected[1].int()), expected, strict=True))


def test_padding_has_gates_of_zero_and_no_gradient():
    for router in ROUTERS.values():
        logits = LOGITS.clone().requires_grad_()
        experts = torch.tensor([[-1, -1], [0, -1], [1, 3]])
        gates = router(logits, 2, norm_topk_prob=True, experts=experts)[0]
        assert gates.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
        (gradient,) = torch.autograd.grad(gates.square().sum(), logits)
        assert gradient[0].tolist() == [0.0, 0.0, 0.0]
        assert gradient.isfinite().all()


class Drifting:
    """A block whose logits differ in each run, as another kernel's would: the choice changes between runs."""

    def __init__(self, replay):
        self.replay, self.runs, self.chosen = replay, 0, []

    def __call__(self, x, weight):
        self.runs += 1
        logits = x @ weight + (1e3 if self.runs > 1 else 0.0) * torch.tensor([1.0, 0.0, 0.0])
        routed = self.replay.route if self.replay else lambda router, *args: router(*args)
        gates, experts, _ = routed(softmax_top_k, logits, 1)
        self.chosen.append(experts.flatten().tolist())
        return gates.sum() + (x * x).sum()


@pytest.mark.parametrize("replays", [True, False])
def test_a_recompute_takes_the_experts_of_the_forward(replays):
    replay = RoutingReplay()
    block = Drifting(replay if replays else None)
    x, weight = torch.eye(3).requires_grad_(), torch.tensor([[0.0, 2.0, 1.0]]).expand(3, 3).clone().requires_grad_()
    checkpoint(block, x, weight, use_reentrant=False, context_fn=replay.contexts).backward()
    forward, *recomputed = block.chosen
    assert forward == [1, 1, 1]
    assert recomputed == [[1, 1, 1] if replays else [0, 0, 0]]


def test_blocks_and_microbatches_share_an_object():
    """Backwards in another order than forwards, one of them twice."""
    replay = RoutingReplay()
    blocks = [Drifting(replay) for _ in range(3)]
    weight = torch.eye(3)
    xs = [LOGITS.roll(i, 1).clone().requires_grad_() for i in range(3)]
    losses = [
        checkpoint(block, x, weight, use_reentrant=False, context_fn=replay.contexts)
        for block, x in zip(blocks, xs, strict=True)
    ]
    losses[1].backward(retain_graph=True)
    losses[2].backward()
    losses[0].backward()
    losses[1].backward()
    for block, runs in zip(blocks, (2, 3, 2), strict=True):
        assert len(block.chosen) == runs
        assert all(chosen == block.chosen[0] for chosen in block.chosen)
    assert len({tuple(block.chosen[0]) for block in blocks}) == 3
    assert replay.route(softmax_top_k, LOGITS, 1)[1].flatten().tolist() == [1, 2, 2]


def test_a_recompute_that_routes_more_often_is_an_error():
    replay, runs = RoutingReplay(), []

    def block(x):
        runs.append(x)
        for _ in runs:
            x = x * replay.route(softmax_top_k, x, 1)[0]
        return x.sum()

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        loss = checkpoint(block, LOGITS.clone().requires_grad_(), use_reentrant=False, context_fn=replay.contexts)
    with pytest.raises(RuntimeError, match="calls a router more often than the forward, which did 1 times"):
        loss.backward()


def test_ids_that_are_not_k_are_rejected():
    with pytest.raises(ValueError, match="experts has 1 ids of a token, k=2; pass k ids of each token"):
        softmax_top_k(LOGITS, 2, experts=torch.zeros(3, 1, dtype=torch.int64))
