"""Recomputation in backward and gathering ahead, counted for each block."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize
from torch_impl.parallelizer.blocks import units

BLOCKS, FROZEN = 6, 2


def save_nothing(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


# Name -> (options, the step between recomputed blocks (None: none is), whether their products are computed again).
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
    """A cosine of a cosine: backward needs both arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).cos().cos()


class Block(nn.Module):
    """A product under one of attention's names, and an MLP. In one block the product is frozen."""

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


def expected_work(scope, shares_keys, forward, backward):
    """The operations of a step, whether keys are cached, and the blocks that each block gathers ahead."""
    _, every, is_product_again = SCOPES[scope]
    again = 0 if every is None else len(range(0, BLOCKS, every))
    # 1. Backward computes the weight's gradient in all blocks but the frozen one, the input's in all but the first.
    products = BLOCKS + (BLOCKS - 1) + (BLOCKS - 1)
    # Attention is not recomputed where layers share keys.
    products += 0 if shares_keys else again * is_product_again
    # 2. A block gathers the next blocks in forward, and the previous blocks in backward.
    places = range(BLOCKS)
    return {
        # The second cosine of a block is the last result that backward needs from it, so it is not computed again.
        "cosines": 2 * BLOCKS + again,
        "products": products,
        "caches keys": every is None,
        "forward": [[p for p in places if forward is not None and 0 < p - place <= forward] for place in places],
        # In the order of their use: the nearest first.
        "backward": [
            [p for p in places[::-1] if backward is not None and 0 < place - p <= backward] for place in places
        ],
    }


def work(mesh, scope, shares_keys, forward, backward):
    model = fsdp2_strategy_parallelize(
        Tower(shares_keys),
        mesh.device_mesh,
        MixedPrecisionPolicy(),
        fsdp2_forward_prefetch_depth=forward,
        fsdp2_backward_prefetch_depth=backward,
        **SCOPES[scope][0],
    )
    with Count() as count:
        model(torch.eye(3)).sum().backward()
    states = [unit[0]._get_fsdp_state() for unit in units(model)]

    def ahead(name):
        return [
            [next(p for p, other in enumerate(states) if each is other) for each in getattr(of, name)] for of in states
        ]

    return {
        "cosines": count.cosines,
        "products": count.products,
        "caches keys": model.config.use_cache,
        "forward": ahead("_states_to_forward_prefetch"),
        "backward": ahead("_states_to_backward_prefetch"),
    }


OPTIONS = st.tuples(
    st.sampled_from(tuple(SCOPES)), st.booleans(), st.sampled_from((None, 0, 1, 3)), st.sampled_from((None, 2, 1, 9))
)


@settings(max_examples=few(20))
@given(st.sampled_from((1, 2)), OPTIONS)
def test_work_of_blocks(ranks, options):
    """Scope, whether layers share keys, and how far is gathered ahead in forward and in backward."""
    seen = run(lambda mesh, case: work(mesh, *options), CaseSpec(scheme="blocks", mesh={"dp_shard": ranks})).results
    assert seen == (expected_work(*options),) * ranks
