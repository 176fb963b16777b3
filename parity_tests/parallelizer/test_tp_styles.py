"""Tensor-parallel styles: values, gradients, bytes sent, modules left behind, and modules they cannot shard."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from parity_tests.parallelizer import plain_modules as plain
from parity_tests.parallelizer.styled import Gated, Norm, Stacks, accumulated, ceil_rule, linear_layer, styled
from parity_tests.parity import parity
from shardproof import CaseSpec, scheme, token_below, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import translate_to_torch_parallel_style
from torch_impl.parallelizer.hf_plan import REJECTED, STYLES
from torch_impl.parallelizer.tp_styles import Experts

WHOLE_OUTPUTS = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "replicate")
ORDINARY = values("normal", "ties")
DECLARED = dict(
    mesh={"tp": (1, 2, 4)},
    layouts={"ceil": ceil_rule},
    dtypes=("float64", "float32"),
    roundings=4,  # partial sums, products and norms are stored in the tested dtype on their way
)


def declared(reference, inputs, outputs, dims, options, can_freeze=False, **changes):
    """A scheme whose gradients are outputs: they are those that `.grad` holds after all backwards."""
    floats = {name: ORDINARY for name in inputs if name not in ("ids", "chosen")}
    return scheme(
        reference=reference,
        inputs={**inputs, "weights": "n tp=I"},
        outputs=outputs,
        dims={**dims, "n": (3,)},
        options={"is_frozen": (False, True)} if can_freeze else {},
        rank_options={"times": (1, 2, 3), **options},
        nograd=(*floats, "weights"),
        draw={**floats, "weights": ORDINARY, **changes},
        **DECLARED,
    )


LINEAR = {"x": "b i tp=I", "weight": "o i tp=I", "bias": "o tp=I"}


@declared(
    plain.linear,
    {**LINEAR, "cotangent": "b o/tp:ceil"},
    ("b o/tp:ceil", "b i tp=I", "o i tp=I", "o tp=I"),
    {"b": (2,), "i": (3,), "o": (7, 4)},
    {},
    can_freeze=True,
)
def colwise_linear(mesh, x, weight, bias, cotangent, weights, is_frozen, times):
    layer = styled(mesh, linear_layer(weight, bias), {"": "colwise"}, "weight" if is_frozen else None)
    y, moved, outcome = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, outcome["weight"], outcome["bias"]


@declared(
    plain.linear,
    {**LINEAR, "cotangent": "b o tp=I"},
    ("b o tp=I", "b i tp=I", "o i tp=I", "o tp=I"),
    {"b": (2,), "i": (5, 4), "o": (7,)},
    {"style": WHOLE_OUTPUTS},
    can_freeze=True,
)
def linear_whole_to_whole(mesh, x, weight, bias, cotangent, weights, is_frozen, times, style):
    layer = styled(mesh, linear_layer(weight, bias), {"": style}, "weight" if is_frozen else None)
    y, moved, outcome = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, outcome["weight"], outcome["bias"]


@declared(
    plain.gated,
    {
        "x": "b d tp=I",
        "gate": "f d tp=I",
        "up": "f d tp=I",
        "down": "d f tp=I",
        "bias": "d tp=I",
        "cotangent": "b d tp=I",
    },
    ("b d tp=I", "b d tp=I", "f d tp=I", "f d tp=I", "d f tp=I", "d tp=I"),
    {"b": (2,), "d": (3,), "f": (5, 8)},
    {"is_packed": (True, False)},
    can_freeze=True,
)
def gated_mlp(mesh, x, gate, up, down, bias, cotangent, weights, is_frozen, times, is_packed):
    plan = {"gate_up": "packed_colwise"} if is_packed else {"gate": "colwise", "up": "colwise"}
    frozen = "down.weight" if is_frozen else None
    module = styled(mesh, Gated(gate, up, linear_layer(down, bias), is_packed), {**plan, "down": "rowwise"}, frozen)
    y, moved, outcome = accumulated(module, (x,), cotangent, weights, times, fails=True)
    both = outcome["gate_up.weight"].chunk(2) if is_packed else (outcome["gate.weight"], outcome["up.weight"])
    return y, *moved, *both, outcome["down.weight"], outcome["down.bias"]


@declared(
    plain.of_two_halves,
    {
        "left": "b f/tp:ceil",
        "right": "b f/tp:ceil",
        "weight": "o g tp=I",
        "bias": "o tp=I",
        "cotangent": "b o tp=I",
    },
    ("b o tp=I", "b f/tp:ceil", "b f/tp:ceil", "o g tp=I", "o tp=I"),
    {"b": (2,), "o": (3,), "f": (5, 4), "g": "2*f"},
    {"by_torch": (False, True)},
    can_freeze=True,
)
def packed_rowwise_linear(mesh, left, right, weight, bias, cotangent, weights, is_frozen, times, by_torch):
    layer = styled(mesh, linear_layer(weight, bias), {"": "packed_rowwise"}, "weight" if is_frozen else None, by_torch)
    packed = torch.cat([left, right], -1)
    y, (moved,), outcome = accumulated(layer, (packed,), cotangent, weights, times, fails=True)
    return y, *moved.chunk(2, -1), outcome["weight"], outcome["bias"]


@declared(
    plain.lookup,
    {"weight": "v d tp=I", "ids": "b", "cotangent": "b d tp=I"},
    ("b d tp=I", "v d tp=I"),
    {"b": (5,), "v": (7, 8), "d": (3,)},
    {"style": ("embedding_rowwise", "embedding_colwise", "replicate")},
    ids=token_below("v"),
)
def embedding(mesh, weight, ids, cotangent, weights, times, style):
    table = nn.Embedding(*weight.shape, dtype=weight.dtype, _weight=weight.clone())
    y, _, outcome = accumulated(styled(mesh, table, {"": style}), (ids,), cotangent, weights, times)
    return y, outcome["weight"]


@declared(
    plain.norm,
    {"x": "b h/tp p", "weight": "p tp=I", "cotangent": "b h/tp p"},
    ("b h/tp p", "b h/tp p", "p tp=I"),
    {"b": (2,), "h": (4,), "p": (3,)},
    {"by_torch": (False, True)},
    can_freeze=True,
)
def norm_of_heads(mesh, x, weight, cotangent, weights, is_frozen, times, by_torch):
    module = styled(
        mesh, Norm(weight), {"": "replicated_with_grad_allreduce"}, "weight" if is_frozen else None, by_torch
    )
    y, moved, outcome = accumulated(module, (x,), cotangent, weights, times, fails=True)
    return y, *moved, outcome["weight"]


@declared(
    plain.norm,
    {"x": "b s/tp d", "weight": "d tp=I", "cotangent": "b s/tp d"},
    ("b s/tp d", "b s/tp d", "d tp=I"),
    {"b": (2,), "s": (4,), "d": (3,)},
    {},
    can_freeze=True,
)
def norm_of_a_sequence(mesh, x, weight, cotangent, weights, is_frozen, times):
    module = styled(mesh, Norm(weight), {"": "sequence_parallel"}, "weight" if is_frozen else None)
    y, moved, outcome = accumulated(module, (x,), cotangent, weights, times)
    return y, *moved, outcome["weight"]


@declared(
    plain.identity,
    {"x": "b d tp=P", "cotangent": "b d tp=I"},
    ("b d tp=I", "b d tp=I"),
    {"b": (2,), "d": (3,)},
    {},
)
def summed_output(mesh, x, cotangent, weights, times):
    y, moved, _ = accumulated(styled(mesh, nn.Identity(), {"": "all_reduce"}), (x,), cotangent, weights, times)
    return y, *moved


@declared(
    plain.identity,
    {"x": "b d tp=I", "cotangent": "b d tp=I"},
    ("b d tp=I", "b d tp=P"),
    {"b": (2,), "d": (3,)},
    {},
)
def identity_expert(mesh, x, cotangent, weights, times):
    """An expert that does nothing, before the sum over the ranks that stands behind all experts."""
    module = styled(mesh, nn.Sequential(nn.Identity()), {"0": "moe_identity_expert", "": "all_reduce"})
    y, moved, _ = accumulated(module, (x,), cotangent, weights, times)
    return y, *moved


@declared(
    plain.experts,
    {
        "x": "t d tp=I",
        "router": "t k tp=I",
        "gate": "e f d tp=I",
        "up": "e f d tp=I",
        "down": "e d f tp=I",
        "chosen": "t k",
        "cotangent": "t d tp=I",
    },
    ("t d tp=I", "t d tp=I", "t k tp=I", "e f d tp=I", "e f d tp=I", "e d f tp=I"),
    {"t": (4,), "k": (2,), "e": (3,), "d": (2,), "f": (5, 4)},
    {"named": (0, 3, 1)},
    chosen=token_below("e"),
    can_freeze=True,
)
def stacked_experts(mesh, x, router, gate, up, down, chosen, cotangent, weights, is_frozen, times, named):
    """The last `named` arguments are passed by name, as models do with some or all of them."""
    plan = {"": "moe_tp_experts", ":gate_up_proj": "packed_colwise", ":down_proj": "rowwise"}
    module = styled(mesh, Stacks(torch.cat([gate, up], 1), down), plan, "down_proj" if is_frozen else None)
    names = ("hidden_states", "top_k_index", "top_k_weights")[3 - named :]
    y, moved, outcome = accumulated(module, (x, chosen, router), cotangent, weights, times, fails=True, names=names)
    return y, *moved, *outcome["gate_up_proj"].chunk(2, 1), outcome["down_proj"]


SCHEMES = (
    colwise_linear,
    linear_whole_to_whole,
    gated_mlp,
    packed_rowwise_linear,
    embedding,
    norm_of_heads,
    norm_of_a_sequence,
    summed_output,
    identity_expert,
    stacked_experts,
)
test_parity = parity(SCHEMES, lockstep=30)


def test_every_name_that_transformers_registers_is_a_style_or_a_rejection():
    assert set(ALL_PARALLEL_STYLES.keys()) <= {*STYLES, *REJECTED}
    assert not set(STYLES) & set(REJECTED)


@pytest.mark.parametrize("name", STYLES)
def test_each_call_makes_an_object(name):
    first, second = translate_to_torch_parallel_style(name), translate_to_torch_parallel_style(name)
    assert first is not second and type(first) is type(second) and isinstance(first, ParallelStyle)


TORCH = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel(),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_name_that_torch_has_a_style_for(name):
    outcome, expected = translate_to_torch_parallel_style(name), TORCH[name]
    assert isinstance(outcome, type(expected)) and vars(outcome) == vars(expected)


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_name_is_rejected_with_the_reason(name):
    with pytest.raises(ValueError, match=rf"style='{name}' {REJECTED[name][:20]}"):
        translate_to_torch_parallel_style(name)


@drawn(st.text().filter(lambda text: text not in STYLES and text not in REJECTED))
def test_any_other_text_is_rejected(text):
    with pytest.raises(ValueError, match="is not known; nearest: '") as caught:
        translate_to_torch_parallel_style(text)
    assert f"style={text!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["Colwise", "colwise ", "colwize", "COLWISE"])
def test_names_are_exact_and_the_nearest_is_reported(name):
    with pytest.raises(ValueError) as caught:
        translate_to_torch_parallel_style(name)
    message = f"parallelizer.translate_to_torch_parallel_style: style={name!r} is not known; nearest: 'colwise'"
    assert str(caught.value) == message if name != "COLWISE" else str(caught.value).startswith(message[:70])


@pytest.mark.parametrize("style", [None, 3, b"colwise", ["colwise"], ColwiseParallel()])
def test_styles_that_are_no_string(style):
    with pytest.raises(TypeError, match=r"style=.* is .*; pass a str"):
        translate_to_torch_parallel_style(style)


ROWS, IN, OUT = 2, 4, 8
AR = "all_reduce"
COSTS = {
    "colwise": ({}, {AR: (1, 8 * ROWS * IN)}),
    "rowwise": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "colwise_gather_output": ({"all_gather": (1, 8 * ROWS * OUT // 2)}, {AR: (1, 8 * ROWS * IN)}),
    "packed_colwise": ({}, {AR: (1, 8 * ROWS * IN)}),
    "packed_rowwise": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "replicate": ({}, {}),
    "replicated_with_grad_allreduce": ({}, {AR: (2, 8 * (IN * OUT + OUT))}),
    "all_reduce": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "moe_identity_expert": ({}, {}),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost(name):
    """The collectives of one forward and one backward, in addition to the module's construction."""

    def passes(count):
        def body(mesh, case):
            width = {"rowwise": IN * 2, "packed_rowwise": IN * 2}.get(name, IN)
            local = width // 2 if "rowwise" in name else width
            layer = linear_layer(torch.ones(OUT, width, dtype=torch.float64), torch.ones(OUT, dtype=torch.float64))
            module = styled(mesh, layer, {"": name})
            x = torch.ones(ROWS, local, dtype=torch.float64, requires_grad=True)
            for _ in range(count):
                y = module(x)
                y.backward(torch.ones_like(y))

        ledger = run(body, CaseSpec(scheme="cost", mesh={"tp": 2})).ledger
        return [{op: ledger.cost(0, phase).get(op, (0, 0)) for op in (AR, "all_gather")} for phase in ("fwd", "bwd")]

    once, twice = passes(1), passes(2)
    for expected, before, after in zip(COSTS[name], once, twice, strict=True):
        added = {op: (after[op][0] - before[op][0], after[op][1] - before[op][1]) for op in after}
        assert {op: cost for op, cost in added.items() if cost != (0, 0)} == expected


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_a_distributed_input_stands_for_its_full_tensor(placement):
    """Of a style that takes its input whole; the gradient comes back as the input is sharded."""
    x, weight = torch.arange(8.0).view(ROWS, IN), (torch.arange(32.0) % 5).view(OUT, IN)

    def body(mesh, case):
        module = styled(mesh, linear_layer(weight), {"": "packed_colwise"})
        local = distribute_tensor(x.clone(), mesh.device_mesh["tp"], [placement]).requires_grad_()
        y = module(local)
        y.backward(torch.ones_like(y))
        rows = torch.cat([half.chunk(2)[mesh.rank("tp")] for half in weight.chunk(2)])
        same = torch.equal(y, x @ rows.T) and torch.equal(local.grad.full_tensor(), weight.sum(0).expand(ROWS, IN))
        return same and local.grad.placements == (placement,)

    assert run(body, CaseSpec(scheme="distributed", mesh={"tp": 2})).results == (True, True)


def test_a_distributed_input_of_rowwise_is_sharded_where_its_placement_says():
    x, weight = torch.arange(8.0).view(ROWS, IN), (torch.arange(32.0) % 5).view(OUT, IN)

    def body(mesh, case):
        module = styled(mesh, linear_layer(weight), {"": "rowwise"})
        outcome = [
            module(distribute_tensor(x.clone(), mesh.device_mesh["tp"], [cut])) for cut in (Shard(-1), Replicate())
        ]
        return all(torch.equal(y, x @ weight.T) for y in outcome)

    assert run(body, CaseSpec(scheme="distributed", mesh={"tp": 2})).results == (True, True)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        raise ArithmeticError(f"weight is a {type(self.weight).__name__}")


def test_a_forward_that_raises_leaves_the_parameters_as_they_were():
    def body(mesh, case):
        module = styled(mesh, Broken(), {"": "replicate"})
        with pytest.raises(ArithmeticError, match="weight is a Tensor"):
            module(torch.ones(2))
        return type(module.weight).__name__, sorted(module.state_dict())

    assert run(body, CaseSpec(scheme="raises", mesh={"tp": 2})).results == (("DTensor", ["weight"]),) * 2


def test_the_values_of_a_style_come_from_the_first_rank():
    def body(mesh, case):
        layer = linear_layer(torch.full((4, 2), float(mesh.rank("tp"))))
        module = styled(mesh, layer, {"": "packed_colwise"})
        return module.weight.to_local().abs().max().item()

    assert run(body, CaseSpec(scheme="values", mesh={"tp": 2})).results == (0.0, 0.0)


@pytest.mark.parametrize(
    ("entry", "local"), [("colwise", (3, 2, 8)), ("rowwise", (3, 4, 4)), ("packed_rowwise", (3, 4, 4))]
)
def test_which_dim_of_a_stack_is_sharded(entry, local):
    def body(mesh, case):
        module = type("Stack", (nn.Module,), {"forward": lambda self, x: x})()
        module.up = nn.Parameter(torch.ones(3, 4, 8))
        return tuple(styled(mesh, module, {"": "moe_tp_experts", ":up": entry}).up.to_local().shape)

    assert run(body, CaseSpec(scheme="stacks", mesh={"tp": 2})).results == (local,) * 2


@pytest.mark.parametrize(
    ("shape", "entries", "message"),
    [
        ((3, 4, 2), {"up": "colwise", "down": "rowwise"}, "entry 'down' has no parameter in Stack"),
        ((3, 4, 2), {"up": "gather"}, "entry 'gather' of 'up' is not one of colwise, rowwise, packed_colwise"),
        ((3, 4), {"up": "colwise"}, r"'up' is \[3, 4\]; only stacks \[experts, out, in\] can be sharded"),
        ((3, 5, 2), {"up": "packed_colwise"}, r"'up' is \[3, 5, 2\]; packed_colwise needs two equal halves"),
    ],
)
def test_stacks_that_cannot_be_sharded(shape, entries, message):
    module = type("Stack", (nn.Module,), {})()
    module.up = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=f"moe_tp_experts: {message}"):
        Experts(entries).placements(module)
