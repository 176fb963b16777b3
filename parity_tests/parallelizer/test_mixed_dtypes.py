"""Parity of FSDP2 over blocks with modules of a rarer dtype, which are units of their own; and their rejections."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from parity_tests.parallelizer.steps import reduced_loss
from parity_tests.parallelizer.test_dry_run import measured, promised
from shardproof import CaseSpec, check_cases, scheme, values
from shardproof.declare.declared import flat
from shardproof.engines.engines import run
from torch_impl.parallelizer import dry_run, fsdp2_strategy_parallelize
from torch_impl.parallelizer.mesh_axes import mesh_axes

RARER = {"router", "scale", "head"}  # in a wider dtype than all other parameters
# In the wider dtype too: it has most of a block's parameters, but fewer of its numbers.
GAINS = ("gain", "other_gain")


class Gain(nn.Module):
    """Multiplies its input by one number."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


class Block(nn.Module):
    """x + scale * other_gain * gain * down(sigmoid(router(x)) * silu(up(x))) with a frozen scale."""

    def __init__(self, d, f, dtype, wide):
        super().__init__()
        self.up, self.down = nn.Linear(d, f, bias=False, dtype=dtype), nn.Linear(f, d, bias=False, dtype=dtype)
        self.router = nn.Linear(d, f, bias=False, dtype=wide)
        self.scale = nn.Parameter(torch.ones(d, dtype=wide), requires_grad=False)
        self.gain, self.other_gain = Gain(wide), Gain(wide)

    def forward(self, x):
        gates = self.router(x.to(self.router.weight.dtype)).sigmoid().to(x.dtype)
        return x + self.scale.to(x.dtype) * self.other_gain(self.gain(self.down(gates * F.silu(self.up(x)))))


class Net(nn.Module):
    """An input layer, two blocks and a head."""

    def __init__(self, d, f, o, dtype, wide):
        super().__init__()
        self.embed = nn.Linear(d, d, bias=False, dtype=dtype)
        self.blocks = nn.ModuleList(Block(d, f, dtype, wide) for _ in range(2))
        self.head = nn.Linear(d, o, bias=False, dtype=wide)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def net_of(parameters, is_frozen):
    """A net with these parameters, in their dtypes; its routers are trained unless they are frozen."""
    up, head = parameters["blocks.0.up.weight"], parameters["head.weight"]
    with torch.device("meta"):
        net = Net(up.shape[1], len(up), len(head), up.dtype, head.dtype)
    net.load_state_dict({name: nn.Parameter(value.clone()) for name, value in parameters.items()}, assign=True)
    for block in net.blocks:
        block.scale.requires_grad_(False)
        block.router.requires_grad_(not is_frozen)
    return net


BLOCK = {name: {"weight": f"{spec} dp_shard=I"} for name, spec in (("up", "f d"), ("router", "f d"), ("down", "d f"))}
BLOCK |= {"scale": "d dp_shard=I", **{name: {"weight": "one dp_shard=I"} for name in GAINS}}
TREE = {
    "embed": {"weight": "c d dp_shard=I"},
    "blocks": {"0": BLOCK, "1": BLOCK},
    "head": {"weight": "o d dp_shard=I"},
}


def mean_square(x, parameters, is_frozen, is_cast):
    """The mean square; for each router and the head, the bits of the dtype it computes in over the bits of x's dtype.

    A frozen router is in its block's unit, so a policy casts it like the rest of the unit.
    """
    x = x @ parameters["embed"]["weight"].T
    for number in ("0", "1"):
        names = "up", "router", "down", *GAINS
        up, router, down, gain, other = (parameters["blocks"][number][name]["weight"] for name in names)
        router = jax.lax.stop_gradient(router) if is_frozen else router
        scale = jax.lax.stop_gradient(parameters["blocks"][number]["scale"])
        y = (jax.nn.sigmoid(x @ router.T) * jax.nn.silu(x @ up.T)) @ down.T
        x = x + scale[None] * other[None] * gain[None] * y
    router_width = 1.0 if is_frozen and is_cast else 2.0
    widths = jnp.asarray([router_width, router_width, 2.0], x.dtype)
    return jnp.mean((x @ parameters["head"]["weight"].T) ** 2), widths


def note_widths(net, width):
    """By name of each router and the head: the bits of its product's dtype over `width`, noted in every forward."""
    widths = {}
    for name, module in net.named_modules():
        if RARER & set(name.split(".")):
            note = lambda module, args, y, name=name: widths.update({name: torch.finfo(y.dtype).bits / width})  # noqa: E731
            module.register_forward_hook(note)
    return widths


@scheme(
    reference=mean_square,
    mesh={"dp_shard": (1, 2, 3)},
    inputs={"x": "b/dp_shard d", "parameters": TREE},
    outputs=("dp_shard=I", "k dp_shard=I"),
    dims={"d": (4, 3), "c": "d", "f": (5, 2), "o": (2,), "k": (3,), "one": (1,)},
    draw={name: values("normal") for name in ("x", *(f"parameters.{leaf}" for leaf in flat(TREE)))},
    options={"is_frozen": (False, True), "is_cast": (False, True)},
    rank_options={
        "resharded": (None, True, False),
        "recomputed": (False, True),
        "microbatches": (1, 2),
        "has_policy": (True, False),
    },
    nograd=("x",),
    dtypes=("float32", "bfloat16"),
    roundings=16,
    reduction=("b", "d", "f"),
)
def step_of_two_dtypes(mesh, x, parameters, is_frozen, is_cast, resharded, recomputed, microbatches, has_policy):
    """Routers, scales, gains and head are float64 beside float32, and float32 beside bfloat16.

    Beside float64 the default policy keeps dtypes too.
    """
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    wide_names = {*RARER, *GAINS}
    leaves = {
        name: w.to(wide if wide_names & set(name.split(".")) else w.dtype) for name, w in flat(parameters).items()
    }
    numbers, widths = mesh.total("b") * parameters["head"]["weight"].shape[0], {}

    def local_loss(*weights):
        nonlocal widths
        net = net_of(dict(zip(leaves, weights, strict=True)), is_frozen)
        switches = {"reshard_after_forward": resharded, "activation_checkpointing": recomputed}
        policy = MixedPrecisionPolicy(param_dtype=x.dtype if is_cast else None, reduce_dtype=wide)
        keeps = not is_cast and wide == torch.float64
        fsdp2_strategy_parallelize(net, mesh.device_mesh, policy if has_policy or not keeps else None, **switches)
        widths = note_widths(net, torch.finfo(x.dtype).bits)
        return net, [net(rows).square().sum() / numbers for rows in x.tensor_split(microbatches)]

    loss = reduced_loss(mesh_axes(mesh.device_mesh), leaves, local_loss).to(x.dtype)
    return loss, x.new_tensor([*widths.values()])


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(step_of_two_dtypes, 12 if engine == "lockstep" else 3, engine=engine)


def mixed_net():
    torch.manual_seed(0)
    return Net(4, 6, 2, torch.bfloat16, torch.float32)


def test_a_rarer_dtype_is_a_unit_that_computes_in_it():
    """Also under a policy that casts the other modules to a third dtype."""

    def body(mesh, case):
        net = fsdp2_strategy_parallelize(mixed_net(), mesh.device_mesh)
        seen = {}
        for name, module in net.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, _, y, name=name: seen.update({name: (m.weight.dtype, y.dtype)}))
        net(torch.ones(2, 4, dtype=torch.bfloat16))
        units = [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]
        return units, {name: dtypes for name, dtypes in seen.items() if set(dtypes) != {torch.bfloat16}}

    units, seen = run(body, CaseSpec("mixed", {"dp_shard": 2})).results[0]
    of_blocks = [[f"blocks.{k}{leaf}" for leaf in ("", ".router", ".gain", ".other_gain")] for k in range(2)]
    assert units == ["", *of_blocks[0], *of_blocks[1], "head"]
    assert seen == dict.fromkeys(("blocks.0.router", "blocks.1.router", "head"), (torch.float32, torch.float32))


def test_the_dry_run_counts_units_of_a_rarer_dtype():
    def body(mesh, case):
        net = fsdp2_strategy_parallelize(mixed_net(), mesh.device_mesh)
        torch.distributed.barrier()
        net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()

    ranks = run(body, CaseSpec("mixed", {"dp_shard": 2}))
    assert promised(dry_run(mixed_net().to("meta"), {"dp_shard": 2})) == measured(ranks.ledger)


class WithScale(nn.Module):
    """A linear layer, and a parameter of its own in float32."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16), nn.Parameter(torch.ones(1))


def tied_net():
    net = mixed_net()
    net.blocks[0].router.weight = net.blocks[1].router.weight
    return net


def test_two_dtypes_in_one_module_are_rejected():
    sentence = "model: '0.scale' is float32 in a module of bfloat16 parameters, and FSDP shards one dtype"

    def body(mesh, case):
        with pytest.raises(ValueError) as raised:
            fsdp2_strategy_parallelize(nn.Sequential(WithScale(), WithScale()), mesh.device_mesh)
        return str(raised.value).startswith(sentence)

    ranks = run(body, CaseSpec("mixed", {"dp_shard": 2}))
    assert ranks.results == (True, True) and ranks.ledger.rows == []


def test_a_frozen_parameter_may_have_any_dtype():
    def body(mesh, case):
        net = mixed_net()
        for block in net.blocks:
            for wide in (block.router, block.gain, block.other_gain):
                wide.requires_grad_(False)
        fsdp2_strategy_parallelize(net, mesh.device_mesh)
        return [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]

    assert run(body, CaseSpec("mixed", {"dp_shard": 2})).results == (["", "blocks.0", "blocks.1", "head"],) * 2


def net_with_one_router():
    net = mixed_net()
    net.blocks[0].router = net.blocks[1].router
    return net


@pytest.mark.parametrize("shared_net", [tied_net, net_with_one_router])
def test_routers_that_two_blocks_share(shared_net):
    """The two blocks are one unit, and the shared router is a unit inside it."""

    def body(mesh, case):
        net = fsdp2_strategy_parallelize(shared_net(), mesh.device_mesh)
        net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        router = net.blocks[0].router.weight
        return router is net.blocks[1].router.weight, router.grad.dtype

    assert run(body, CaseSpec("mixed", {"dp_shard": 2})).results == ((True, torch.float32),) * 2
