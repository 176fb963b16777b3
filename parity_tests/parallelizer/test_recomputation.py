"""Parity of what backward recomputes and what is gathered ahead, counted for each block."""

from types import SimpleNamespace

import jax.numpy as jnp
import torch
from hypothesis import given, settings
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shardproof import check, every_case, scheme, token_below
from torch_impl.parallelizer import fsdp2_strategy_parallelize
from torch_impl.parallelizer.blocks import units

BLOCKS, FROZEN = 6, 2


def save_nothing(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


# Of each scope: the options, each how many-th block is recomputed, and whether its product is computed again.
SCOPES = {
    "none": ({}, None, False),
    "full": ({"activation_checkpointing": "full"}, 1, True),
    "every": ({"activation_checkpointing": True}, 1, True),
    "second": ({"activation_checkpointing": "selective", "selective_ac_option": 2}, 2, True),
    "third": ({"activation_checkpointing": "selective", "selective_ac_option": 3}, 3, True),
    "by operation": ({"activation_checkpointing": "selective"}, 1, False),
    "nothing saved": ({"activation_checkpointing": "selective", "selective_ac_option": save_nothing}, 1, True),
    "not selective": ({"activation_checkpointing": True, "selective_ac_option": 2}, 1, True),
}


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return x @ self.weight


class Cosine(nn.Module):
    """A cosine of a cosine, of which backward needs both arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).cos().cos()


class Block(nn.Module):
    """A product, by one of the names that attention has, and the rest; of one block the product is frozen."""

    def __init__(self, number):
        super().__init__()
        self.attention = ("self_attn", "cross_attention")[number % 2]
        self.add_module(self.attention, Product())
        self.mlp = Cosine()
        getattr(self, self.attention).weight.requires_grad_(number != FROZEN)

    def forward(self, x):
        return x + self.mlp(getattr(self, self.attention)(x))


class Tower(nn.Module):
    def __init__(self, has_shared_keys):
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.config = SimpleNamespace(use_cache=True, num_kv_shared_layers=int(has_shared_keys))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Count(TorchDispatchMode):
    """How often an operation runs."""

    def __init__(self):
        super().__init__()
        self.products = self.cosines = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function is torch.ops.aten.mm.default
        self.cosines += function is torch.ops.aten.cos.default
        return function(*args, **(kwargs or {}))


def expected(ids, scope, shares_keys, forward, backward):
    """Cosines and products of a step, and whether keys are cached; then the blocks that each gathers ahead."""
    _, every, is_product_again = SCOPES[scope]
    again = 0 if every is None else len(range(0, BLOCKS, every))
    # 1. Backward takes the weight's gradient of every block but one, and the input's of all but the first.
    products = BLOCKS + (BLOCKS - 1) + (BLOCKS - 1)
    # Attention is not recomputed where layers share keys.
    products += 0 if shares_keys else again * is_product_again
    # The second cosine of a block is the last of what backward needs from it, so that it is not computed again.
    rows = [[2 * BLOCKS + again, products, int(every is None), *[0] * (BLOCKS - 3)]]
    # 2. A block gathers those behind it in forward, those before it in backward.
    places = range(BLOCKS)
    rows += [[int(forward is not None and 0 < other - place <= forward) for other in places] for place in places]
    rows += [[int(backward is not None and 0 < place - other <= backward) for other in places] for place in places]
    return jnp.asarray(rows, ids.dtype) + 0 * ids


@scheme(
    reference=expected,
    mesh={"dp_shard": (1, 2)},
    inputs={"ids": "k r/dp_shard"},
    outputs="k r/dp_shard",
    dims={"k": (1 + 2 * BLOCKS,), "r": (BLOCKS,)},
    draw={"ids": token_below("r")},
    options={
        "scope": tuple(SCOPES),
        "shares_keys": (False, True),
        "forward": (None, 0, 1, 3),
        "backward": (None, 2, 1, 9),
    },
)
def work_of_blocks(mesh, ids, scope, shares_keys, forward, backward) -> Int[Tensor, "k r/dp_shard"]:
    model = fsdp2_strategy_parallelize(
        Tower(shares_keys),
        mesh.device_mesh,
        MixedPrecisionPolicy(),
        fsdp2_forward_prefetch_depth=forward,
        fsdp2_backward_prefetch_depth=backward,
        **SCOPES[scope][0],
    )
    with Count() as count:
        model(torch.eye(3, device=ids.device)).sum().backward()
    states = [unit[0]._get_fsdp_state() for unit in units(model)]
    rows = [[count.cosines, count.products, int(model.config.use_cache), *[0] * (BLOCKS - 3)]]
    for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
        rows += [[int(any(each is other for each in getattr(state, name))) for other in states] for state in states]
    return torch.tensor(rows, dtype=ids.dtype, device=ids.device)[:, mesh.global_ids("r")]


@settings(max_examples=20)
@given(every_case(work_of_blocks))
def test_parity(case):
    check(case)
