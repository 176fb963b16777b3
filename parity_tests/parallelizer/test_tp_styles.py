"""Each style against the plain module: output and gradients, in one, two and three accumulated backwards."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from parity_tests import check, every_case, scheme, token_below, values
from parity_tests.parallelizer import plain_modules as plain
from parity_tests.parallelizer.styled import Gated, Norm, Stacks, accumulated, ceil_rule, given, styled
from torch_impl.parallelizer import translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_styles import REFUSED, STYLES

WHOLE_OUTPUTS = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "replicate")
ORDINARY = values("normal", "ties")
DECLARED = dict(
    mesh={"tp": (1, 2, 4)},
    layouts={"ceil": ceil_rule},
    dtypes=("float64", "float32"),
    roundings=4,  # partial sums, products and norms are stored in the tested dtype on their way
)


def declared(reference, inputs, outputs, dims, options, **further):
    """A scheme whose gradients are outputs: they are those that `.grad` holds after all backwards."""
    floats = {name: ORDINARY for name in inputs if name not in ("ids", "chosen")}
    return scheme(
        reference=reference,
        inputs={**inputs, "weights": "n tp=I"},
        outputs=outputs,
        dims={**dims, "n": (3,)},
        rank_options={"times": (1, 2, 3), **options},
        nograd=(*floats, "weights"),
        draw={**floats, "weights": ORDINARY, **further},
        **DECLARED,
    )


LINEAR = {"x": "b i tp=I", "weight": "o i tp=I", "bias": "o tp=I"}


@declared(
    plain.linear,
    {**LINEAR, "cotangent": "b o/tp:ceil"},
    ("b o/tp:ceil", "b i tp=I", "o i tp=I", "o tp=I"),
    {"b": (2,), "i": (3,), "o": (7, 4)},
    {},
)
def colwise_linear(mesh, x, weight, bias, cotangent, weights, times):
    layer = styled(mesh, given(weight, bias), {"": "colwise"})
    y, moved, found = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, found["weight"], found["bias"]


@declared(
    plain.linear,
    {**LINEAR, "cotangent": "b o tp=I"},
    ("b o tp=I", "b i tp=I", "o i tp=I", "o tp=I"),
    {"b": (2,), "i": (5, 4), "o": (7,)},
    {"style": WHOLE_OUTPUTS},
)
def linear_whole_to_whole(mesh, x, weight, bias, cotangent, weights, times, style):
    layer = styled(mesh, given(weight, bias), {"": style})
    y, moved, found = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, found["weight"], found["bias"]


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
)
def gated_mlp(mesh, x, gate, up, down, bias, cotangent, weights, times, is_packed):
    plan = {"gate_up": "packed_colwise"} if is_packed else {"gate": "colwise", "up": "colwise"}
    module = styled(mesh, Gated(gate, up, given(down, bias), is_packed), {**plan, "down": "rowwise"})
    y, moved, found = accumulated(module, (x,), cotangent, weights, times)
    both = found["gate_up.weight"].chunk(2) if is_packed else (found["gate.weight"], found["up.weight"])
    return y, *moved, *both, found["down.weight"], found["down.bias"]


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
    {},
)
def packed_rowwise_linear(mesh, left, right, weight, bias, cotangent, weights, times):
    layer = styled(mesh, given(weight, bias), {"": "packed_rowwise"})
    packed = torch.cat([left, right], -1)
    y, (moved,), found = accumulated(layer, (packed,), cotangent, weights, times)
    return y, *moved.chunk(2, -1), found["weight"], found["bias"]


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
    y, _, found = accumulated(styled(mesh, table, {"": style}), (ids,), cotangent, weights, times)
    return y, found["weight"]


@declared(
    plain.norm,
    {"x": "b h/tp p", "weight": "p tp=I", "cotangent": "b h/tp p"},
    ("b h/tp p", "b h/tp p", "p tp=I"),
    {"b": (2,), "h": (4,), "p": (3,)},
    {},
)
def norm_of_heads(mesh, x, weight, cotangent, weights, times):
    module = styled(mesh, Norm(weight), {"": "replicated_with_grad_allreduce"})
    y, moved, found = accumulated(module, (x,), cotangent, weights, times)
    return y, *moved, found["weight"]


@declared(
    plain.norm,
    {"x": "b s/tp d", "weight": "d tp=I", "cotangent": "b s/tp d"},
    ("b s/tp d", "b s/tp d", "d tp=I"),
    {"b": (2,), "s": (4,), "d": (3,)},
    {},
)
def norm_of_a_sequence(mesh, x, weight, cotangent, weights, times):
    module = styled(mesh, Norm(weight), {"": "sequence_parallel"})
    y, moved, found = accumulated(module, (x,), cotangent, weights, times)
    return y, *moved, found["weight"]


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
    {},
    chosen=token_below("e"),
)
def stacked_experts(mesh, x, router, gate, up, down, chosen, cotangent, weights, times):
    plan = {"": "moe_tp_experts", ":gate_up_proj": "packed_colwise", ":down_proj": "rowwise"}
    module = styled(mesh, Stacks(gate, up, down), plan)
    y, moved, found = accumulated(module, (x, chosen, router), cotangent, weights, times)
    return y, *moved, *found["gate_up_proj"].chunk(2, 1), found["down_proj"]


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


@pytest.mark.parametrize("made", SCHEMES, ids=lambda made: made.name)
def test_parity(made):
    @settings(max_examples=30)
    @drawn(every_case(made))
    def example(case):
        check(case)

    example()


def test_every_name_that_transformers_registers_is_a_style_or_a_refusal():
    assert set(ALL_PARALLEL_STYLES.keys()) <= {*STYLES, *REFUSED}
    assert not set(STYLES) & set(REFUSED)


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
    found, wanted = translate_to_torch_parallel_style(name), TORCH[name]
    assert isinstance(found, type(wanted)) and vars(found) == vars(wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_is_told_why(name):
    with pytest.raises(ValueError, match=rf"style='{name}' {REFUSED[name][:20]}"):
        translate_to_torch_parallel_style(name)


@drawn(st.text().filter(lambda text: text not in STYLES and text not in REFUSED))
def test_any_other_text_is_not_known(text):
    with pytest.raises(ValueError, match="is not known; nearest: '") as caught:
        translate_to_torch_parallel_style(text)
    assert f"style={text!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["Colwise", "colwise ", "colwize", "COLWISE"])
def test_names_are_exact_and_the_nearest_is_told(name):
    with pytest.raises(ValueError) as caught:
        translate_to_torch_parallel_style(name)
    said = f"parallelizer.translate_to_torch_parallel_style: style={name!r} is not known; nearest: 'colwise'"
    assert str(caught.value) == said if name != "COLWISE" else str(caught.value).startswith(said[:70])


@pytest.mark.parametrize("style", [None, 3, b"colwise", ["colwise"], ColwiseParallel()])
def test_what_is_no_string(style):
    with pytest.raises(TypeError, match=r"style=.* is a .*; pass the name of a style, a string"):
        translate_to_torch_parallel_style(style)
