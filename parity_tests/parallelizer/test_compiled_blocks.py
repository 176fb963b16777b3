"""Compiled blocks over tp: all gradients equal one device's, including the gradient of the uncompiled embedding."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from parity_tests.parallelizer import small_net
from parity_tests.parallelizer.steps import reduced_loss
from parity_tests.parallelizer.styled import EPS, Norm, linear_layer
from parity_tests.specimens.engine_agreement import named
from shardproof import CaseSpec, scheme, token_below, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize, translate_to_torch_parallel_style
from torch_impl.parallelizer._torch_compat import waited
from torch_impl.parallelizer.blocks import checkpoint_blocks, compile_blocks, save_products
from torch_impl.parallelizer.mesh_axes import mesh_axes

# This backend traces and differentiates, and needs no C compiler, which a machine may lack.
COMPILED = {"enable_compile": True, "compile_backend": "aot_eager"}
PLAN = {"embedding": "embedding_rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
RECOMPUTATIONS = (True, False, 0.0, 0.5)  # a number is a memory budget
LEAVES = {"norm": "l d", "up": "l f d", "down": "l d f"}
NAMES = {"norm": "norm", "up": "mlp.up", "down": "mlp.down"}


class Mlp(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = linear_layer(up), linear_layer(down)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, norm, up, down):
        super().__init__()
        self.norm, self.mlp = Norm(norm), Mlp(up, down)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """An embedding and blocks. The embedding's sum over tp is still running when the first block begins."""

    def __init__(self, table, *block_weights):
        super().__init__()
        self.embedding = nn.Embedding(*table.shape, _weight=table.clone())
        self.blocks = nn.ModuleList(Block(*weights) for weights in block_weights)

    def forward(self, token):
        x = self.embedding(token)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of_blocks(token, table, norm, up, down):
    x = table[token]
    for scale, into, back in zip(norm, up, down, strict=True):
        normed = scale[None, None] * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        x = x + jax.nn.silu(normed @ into.T) @ back.T
    return (x**3).sum()


@scheme(
    reference=loss_of_blocks,
    mesh={"tp": (2, 1)},
    inputs={"token": "b s", "table": "v d tp=I", **{leaf: f"{spec} tp=I" for leaf, spec in LEAVES.items()}},
    outputs="tp=I",
    rank_options={"recomputed": RECOMPUTATIONS, "in_sequence_shards": (False, True)},
    draw={"token": token_below("v"), **dict.fromkeys(("table", *LEAVES), values("normal"))},
    dims={"b": (2,), "s": (4,), "v": (7,), "d": (4,), "f": (6,), "l": (1,)},
    dtypes=("float64",),
    reduction=("b", "s", "d", "f"),
    roundings=10,
)
@pytest.mark.cases(1, engine="gloo")
@pytest.mark.cases(4)
def step_of_compiled_blocks(mesh, token, table, norm, up, down, recomputed, in_sequence_shards):
    switches = {"activation_checkpointing": recomputed if isinstance(recomputed, bool) else "memory_budget"}
    if not isinstance(recomputed, bool):
        switches["memory_budget"] = recomputed
    leaves = dict(zip(LEAVES, (norm, up, down), strict=True))
    named = {"embedding.weight": table.contiguous()} | {
        f"blocks.{block}.{NAMES[leaf]}.weight": x[block].contiguous()
        for leaf, x in leaves.items()
        for block in range(len(x))
    }
    plan = {key: translate_to_torch_parallel_style(name) for key, name in PLAN.items()}
    torch.compiler.reset()  # the compiler runs a function uncompiled after eight compilations, here for meshes

    def local_loss(*tensors):
        weights = dict(zip(named, tensors, strict=True))
        block_weights = (
            [weights[f"blocks.{block}.{NAMES[leaf]}.weight"] for leaf in LEAVES] for block in range(len(norm))
        )
        model = fsdp2_strategy_parallelize(
            Net(weights["embedding.weight"], *block_weights), mesh.device_mesh, MixedPrecisionPolicy(), plan,
            sequence_parallel=in_sequence_shards, **switches, **COMPILED,
        )  # fmt: skip
        return model, [(model(token) ** 3).sum()]

    return reduced_loss(mesh_axes(mesh.device_mesh), named, local_loss)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, save_products], ids=["full", "by op"])
def test_recomputed_blocks_are_compiled_and_change_no_bit(policy):
    """On one device. The compiler accepts a checkpoint with a policy's contexts, and one without a policy."""

    def gradients(is_compiled):
        torch.manual_seed(0)
        net = small_net.Net(4, 6, 2).double()
        checkpoint_blocks(net, policy=policy)
        if is_compiled:
            compile_blocks(net, COMPILED["compile_backend"])
        net(torch.linspace(-1, 2, 12).double().view(3, 4)).square().sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_blocks_are_compiled_on_ranks_that_are_recorded(engine):
    """torch compiles nothing inside a dispatch mode, unless the mode allows it."""

    def body(view, case):
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        torch.compile(lambda x: x.square() + 1, backend=counter)(torch.ones(2))
        return counter.frame_count

    assert min(run(body, CaseSpec("compiles", {"tp": 2}), engine, quiet_s=60).results) == 1


def test_a_collectives_result_is_waited_for_with_its_gradient():
    def body(view, case):
        from torch.distributed import _functional_collectives as functional

        gather = named(functional, "all_gather_single_autograd", "all_gather_tensor_autograd")
        x = torch.ones(2, requires_grad=True)
        y = gather(x, 0, view["tp"])
        z = waited(y)
        (gradient,) = torch.autograd.grad(z, x, torch.ones_like(z))  # torch 2.11 takes no expanded cotangent here
        is_waited = isinstance(y, functional.AsyncCollectiveTensor) and type(z) is torch.Tensor
        return is_waited, gradient.tolist(), waited("any")

    ranks = run(body, CaseSpec("waited", {"tp": 2})).results
    assert ranks == ((True, [2.0, 2.0], "any"),) * 2
