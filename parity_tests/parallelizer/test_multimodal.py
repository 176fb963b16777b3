"""FSDP2 and recomputation of models with a frozen vision part, which runs only on ranks with images."""

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from parity_tests.parallelizer.steps import reduced_loss
from parity_tests.parallelizer.test_dry_run import measured, promised
from parity_tests.rejections import rejected
from shardproof import CaseSpec, check_cases, mask, scheme, values
from shardproof.declare.declared import flat
from shardproof.engines.engines import run
from torch_impl.parallelizer import dry_run, fsdp2_strategy_parallelize
from torch_impl.parallelizer.blocks import checkpoint_blocks
from torch_impl.parallelizer.mesh_axes import mesh_axes


class Net(nn.Module):
    """A language model of two layers, which adds the output of two vision layers to rows with an image."""

    def __init__(self, d, dtype=torch.float32):
        super().__init__()
        self.visual, self.language = nn.Module(), nn.Module()
        for part in (self.visual, self.language):
            part.layers = nn.ModuleList(nn.Linear(d, d, bias=False, dtype=dtype) for _ in range(2))
        self.visual.requires_grad_(False)

    def forward(self, x, has_image):
        if has_image.any():
            seen = x
            for layer in self.visual.layers:
                seen = layer(seen).tanh()
            x = x + seen * has_image[:, None]
        for layer in self.language.layers:
            x = x + layer(x)
        return x


LAYERS = {"layers": {number: {"weight": "e d dp_shard=I"} for number in ("0", "1")}}


def mean_square(x, has_image, visual, language):
    seen = x
    for number in ("0", "1"):
        seen = jnp.tanh(seen @ visual["layers"][number]["weight"].T)
    x = x + jnp.where(has_image[:, None], seen, 0.0)
    for number in ("0", "1"):
        x = x + x @ language["layers"][number]["weight"].T
    return jnp.mean(x**2)


@scheme(
    reference=mean_square,
    mesh={"dp_shard": (1, 2, 3)},
    inputs={"x": "b/dp_shard d", "has_image": "b/dp_shard", "visual": LAYERS, "language": LAYERS},
    outputs="dp_shard=I",
    dims={"d": (4, 3), "e": "d"},
    draw={"has_image": mask("b")}
    | {name: values("normal") for name in ("x", *flat({"visual": LAYERS, "language": LAYERS}))},
    rank_options={"recomputed": (False, True)},
    nograd=("x", *flat({"visual": LAYERS})),
    roundings=8,
    reduction=("b", "d"),
)
def step_with_images_on_some_ranks(mesh, x, has_image: Bool[Tensor, " b"], visual, language, recomputed):
    """A rank without images does not run the frozen part, so that it must not be a unit."""
    leaves = {f"language.{name}": weight for name, weight in flat(language).items()}
    numbers = mesh.total("b") * x.shape[1]

    def local_loss(*weights):
        with torch.device("meta"):
            net = Net(x.shape[1], x.dtype)
        frozen = {f"visual.{name}": nn.Parameter(w.clone(), requires_grad=False) for name, w in flat(visual).items()}
        trained = {name: nn.Parameter(w.clone()) for name, w in zip(leaves, weights, strict=True)}
        net.load_state_dict(frozen | trained, assign=True)
        policy = MixedPrecisionPolicy()
        fsdp2_strategy_parallelize(net, mesh.device_mesh, policy, activation_checkpointing=recomputed)
        return net, [net(x, has_image).square().sum() / numbers]

    return reduced_loss(mesh_axes(mesh.device_mesh), leaves, local_loss).to(x.dtype)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(step_with_images_on_some_ranks, 12 if engine == "lockstep" else 3, engine=engine)


def unit_names(net, mesh):
    fsdp2_strategy_parallelize(net, mesh.device_mesh)
    return [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]


def test_a_part_that_is_trained_has_units():
    def body(mesh, case):
        return unit_names(Net(2), mesh), unit_names(Net(2).requires_grad_(True), mesh)

    language = ["", "language.layers.0", "language.layers.1"]
    both = ["", "visual.layers.0", "visual.layers.1", *language[1:]]
    assert run(body, CaseSpec("multimodal", {"dp_shard": 2})).results == ((language, both),) * 2


def test_the_dry_run_counts_a_frozen_part_in_the_root():
    def body(mesh, case):
        net = fsdp2_strategy_parallelize(Net(4), mesh.device_mesh)
        torch.distributed.barrier()
        net(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool)).sum().backward()

    ranks = run(body, CaseSpec("multimodal", {"dp_shard": 2}))
    assert promised(dry_run(Net(4).to("meta"), {"dp_shard": 2})) == measured(ranks.ledger)


@pytest.mark.parametrize(
    ("scopes", "forwards"),
    [(("all",), 8), (("language",), 6), (("vision",), 6), (("multimodal",), 6), (("audio",), 4)],
)
def test_blocks_of_a_scope_are_computed_again(scopes, forwards):
    net, calls = Net(2).requires_grad_(True), []
    for layer in (*net.visual.layers, *net.language.layers):
        layer.forward = lambda x, forward=layer.forward: calls.append(1) or forward(x)
    checkpoint_blocks(net, scopes=scopes)
    net(torch.ones(1, 2), torch.ones(1, dtype=torch.bool)).sum().backward()
    assert len(calls) == forwards


def parallelized(**options):
    return lambda mesh: fsdp2_strategy_parallelize(Net(2), mesh.device_mesh, activation_checkpointing=True, **options)


NAME = "parallelizer.fsdp2_strategy_parallelize: activation_checkpointing_scope"
WORDS = "pass 'all' alone, or some of 'language', 'vision', 'audio', 'multimodal'"
REJECTED = [
    (
        "unknown",
        parallelized(activation_checkpointing_scope="vision,text"),
        f"{NAME}='vision,text' has 'text'; {WORDS}",
    ),
    (
        "all and another",
        parallelized(activation_checkpointing_scope=["all", "vision"]),
        f"{NAME}=['all', 'vision']; {WORDS}",
    ),
    ("none", parallelized(activation_checkpointing_scope=[]), f"{NAME}=[]; {WORDS}"),
    ("number", parallelized(activation_checkpointing_scope=2), f"{NAME}=2 is an int; {WORDS}", TypeError),
]
test_rejection = rejected({"dp_shard": 2}, REJECTED)
