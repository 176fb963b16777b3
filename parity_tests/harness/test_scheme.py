"""@scheme: rejections at declaration and on the first run, with their messages, and entries of the table."""

from dataclasses import FrozenInstanceError
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardproof import check_cases, integers, mask, offsets, scheme, token_below, verify


def logprob(logits, target):
    return jnp.take_along_axis(logits, target[..., None], -1)[..., 0]


def identity(x):
    return x * 1.0


GOOD = dict(
    reference=logprob,
    mesh={"cp": (1, 4), "tp": (1, 2)},
    inputs={"logits": "b s/cp v/tp", "target": "b s/cp"},
    outputs="b s/cp tp=I",
    draw={"target": token_below("v")},
)


def declare(function=None, **changes):
    """A declaration that is right but for the changes; an Ellipsis takes an argument away."""

    def logprob_over_tp(mesh, logits, target):
        return logits[..., 0]

    arguments = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return scheme(**arguments)(function or logprob_over_tp)


def rejection(function=None, **changes):
    with pytest.raises(ValueError) as caught:
        declare(function, **changes)
    return str(caught.value)


def test_a_scheme_is_frozen_and_calls_its_function():
    declaration = declare()
    assert declaration(None, torch.ones(2, 3), None).tolist() == [1.0, 1.0]
    assert repr(declaration) == "<scheme logprob_over_tp: logits 'b s/cp v/tp', target 'b s/cp' -> 'b s/cp tp=I'>"
    with pytest.raises(FrozenInstanceError):
        declaration.name = "other"


def test_integer_inputs_are_recognized():
    def annotated(mesh, x: Float[Tensor, "n"], y: Int[Tensor, "n"]) -> Int[Tensor, "n"]: ...

    declaration = scheme(
        reference=lambda x, y: y, mesh={"tp": (1,)}, inputs={"x": "n/tp", "y": "n/tp"}, outputs="n/tp",
        draw={"y": integers(0, 3)},
    )(annotated)  # fmt: skip
    assert [arg.is_integer for arg in (*declaration.inputs, *declaration.outputs)] == [False, True, True]
    assert [declare(draw={"target": how}).inputs[1].is_integer for how in (mask("s"), integers(0, 3))] == [True, True]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"reference": lambda logits, target, mask: logits},
            "takes (logits, target) but reference <lambda> takes (logits, target, mask); "
            "its argument 'mask' is not an input of the scheme (logits, target): rename it or add it",
        ),
        (
            {"reference": lambda logits: logits},
            "takes (logits, target) but reference <lambda> takes (logits); it has no 'target' of inputs",
        ),
        (
            {"inputs": {"logits": "b s/cp v/tp", "labels": "b s/cp"}},
            "inputs has 'labels', the function has (logits, target)",
        ),
        ({"reference": 3}, "reference is int; pass a JAX function"),
        (
            {"reference": lambda logits, target, /: logits},
            "reference <lambda> has positional-only arguments; wrap it in a function that names them",
        ),
        ({"inputs": {}}, "inputs must be a dict of argument -> spec"),
        ({"outputs": ()}, "outputs is empty; a scheme returns at least one tensor"),
        ({"mesh": {"cp": (1, 4), "tp": (2, 0)}}, "mesh['tp'] has 0; sizes are integers >= 1"),
        ({"mesh": {"cp": (1, 4), "tp": (True,)}}, "mesh['tp'] has True; sizes are integers >= 1"),
        ({"mesh": {"cp": (1, 4), "tp": 2}}, "mesh['tp'] is 2; give a tuple of sizes, such as (1, 2, 4)"),
        ({"mesh": {}}, "mesh must be a dict of axis -> sizes, such as {'tp': (1, 2, 4)}"),
        (
            {"draw": {"target": token_below("w")}},
            "draw['target'] = token_below('w'): no input has dim w",
        ),
        ({"draw": {"target": offsets("w")}}, "draw['target'] = offsets('w'): no input has dim w"),
        (
            {"draw": {"target": 3}},
            "draw['target'] is int; use token_below, ids, mask, offsets, lengths, integers, values, exactly, "
            "permutation or block_table, a function of (generator, shape), or a Hypothesis strategy",
        ),
        (
            {"draw": {"target": token_below("v"), "labels": token_below("v")}},
            "draw has 'labels', the inputs are (logits, target)",
        ),
        ({"dims": {"v": "2*s", "s": "v//2"}}, "dims: v -> s -> v is a cycle"),
        ({"dims": {"v": "b*s", "s": "2*v"}}, "dims: v -> s -> v is a cycle"),
        ({"dims": {"v": "v+1"}}, "dims: v -> v is a cycle"),
        ({"dims": {"v": "2*w"}}, "dims['v'] = '2*w': no input has dim w, nor is it an axis (cp, tp)"),
        ({"dims": {"v": "2*"}}, "dims['v'] = '2*' is not a formula; write for example '2*g'"),
        ({"dims": {"v": "s**2"}}, "dims['v'] = 's**2': a formula has dims, integers and + - * //"),
        ({"dims": {"v": "s*1.5"}}, "dims['v'] = 's*1.5': a formula has dims, integers and + - * //"),
        ({"dims": {"v": ()}}, "dims['v'] is (); give a tuple of sizes or a formula such as '2*g'"),
        ({"dims": {"w": (2, 4)}}, "dims has 'w', the dims are (b, s, v)"),
        ({"dtypes": ("float8",)}, "dtype 'float8' is not one of float64, float32, bfloat16, float16"),
        ({"engines": ("mpi",)}, "engine 'mpi' is not one of lockstep, gloo, nccl, torchrun"),
        ({"replicas": "close"}, "replicas is 'close'; write 'bitwise' or 'budget'"),
        ({"roundings": -1}, "roundings is -1; count the times an intermediate is stored in the dtype"),
        ({"reduction": ("w",)}, "reduction has 'w'; the dims are (b, s, v)"),
        ({"nograd": ("labels",)}, "nograd has 'labels', the inputs are (logits, target)"),
        ({"layouts": {"striped": lambda size, world: []}}, "layout 'striped' is built in; give yours another name"),
        ({"options": {"chunk": (1, 2)}}, "option 'chunk' is not an argument of the function (logits, target)"),
        ({"options": {"target": (1, 2)}}, "option 'target' is declared twice"),
        ({"options": {"chunk": (1,)}, "rank_options": {"chunk": (1,)}}, "option 'chunk' is declared twice"),
    ],
)
def test_rejected_at_declaration(changes, sentence):
    assert rejection(**changes) == f"scheme 'logprob_over_tp': {sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"options": {"s": (0, 1)}}, "option 's' is also a dim; rename one of them, as verify(s=...) names either"),
        (
            {"rank_options": {"v": (0, 1)}},
            "option 'v' is also a dim; rename one of them, as verify(v=...) names either",
        ),
        (
            {"options": {"tp": (0, 1)}},
            "option 'tp' is also a mesh axis; rename one of them, as verify(tp=...) names either",
        ),
        (
            {"inputs": {"logits": "b cp/cp v/tp", "target": "b cp/cp"}, "outputs": "b cp/cp tp=I"},
            "'cp' is both a dim and a mesh axis; rename one, as verify(cp=...) names either",
        ),
    ],
)
def test_a_name_of_two_things_is_rejected(changes, sentence):
    def function(mesh, logits, target, s=0, v=0, tp=0):
        return logits

    assert rejection(function, reference=lambda logits, target, **options: logits, **changes).endswith(f": {sentence}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"inputs": {"logits": "b s/xp v/tp", "target": "b s/cp"}},
            "spec 'b s/xp v/tp' (input 'logits'): axis 'xp' is not in mesh (cp, tp); did you mean 'cp'?",
        ),
        (
            {"outputs": "b s/cp"},
            "spec 'b s/cp' (output 'out'): axis 'tp' shards no dim and has no type; write tp=R (gradients add up), "
            "tp=I (same gradient) or tp=P (values add up)",
        ),
        (
            {"inputs": {"logits": "b s/cp v/tp", "target": "b s/cp tp=R"}},
            "spec 'b s/cp tp=R' (input 'target'): 'target' is an integer and has no gradient; drop tp=R",
        ),
    ],
)
def test_a_mistake_in_a_spec_is_reported_with_the_scheme(changes, sentence):
    assert rejection(**changes) == f"scheme 'logprob_over_tp': {sentence}"


def test_a_spec_is_a_string():
    with pytest.raises(TypeError) as caught:
        declare(inputs={"logits": ["b", "s"], "target": "b s/cp"})
    assert str(caught.value) == "spec of input 'logits' is a list; a spec is a string"


def test_an_axis_in_no_spec():
    def ranks(mesh, x: Int[Tensor, "n"]) -> Int[Tensor, "n"]: ...

    message = rejection(
        ranks, reference=identity, mesh={"tp": (1,), "cp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp",
        draw={"x": integers(0, 1)},
    )  # fmt: skip
    assert message == "scheme 'ranks': axis 'cp' is in mesh and in no spec; drop it"


async def coroutine(mesh, logits, target): ...


def generator(mesh, logits, target):
    yield logits


class Methods:
    def method(self, logits, target): ...


def starred(mesh, *arguments): ...


def meshless(logits, target): ...


def one_more(mesh, logits, target, scale): ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (coroutine, "must be a plain function; got a coroutine function"),
        (generator, "must be a plain function; got a generator function"),
        (Methods().method, "must be a plain function; got a method"),
        (Methods, "must be a plain function; got a class"),
        (torch.exp, "must be a plain function; got builtin_function_or_method"),
        (starred, "must name its arguments; *args, **kwargs and positional-only arguments cannot be matched"),
        (meshless, "must take the mesh first: def f(mesh, ...)"),
        (one_more, "takes 'scale', which is neither an input nor an option; add it to inputs"),
    ],
)
def test_only_plain_functions_are_accepted(function, sentence):
    assert rejection(function) == f"scheme '{function.__name__}': {sentence}"


def test_an_integer_needs_a_draw():
    def ranks(mesh, x: Int[Tensor, "n"]): ...

    message = rejection(ranks, reference=identity, mesh={"tp": (1,)}, inputs={"x": "n/tp"}, outputs="n/tp", draw=...)
    assert message == (
        "scheme 'ranks': 'x' is an integer and has no draw; give draw={'x': token_below(...)} or integers(...)"
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("output", "scheme has no keyword 'output'; did you mean outputs=?"),
        ("refrence", "scheme has no keyword 'refrence'; did you mean reference=?"),
        ("xyz", "scheme has no keyword 'xyz'; it has reference, mesh, inputs, outputs, contract, draw,"),
    ],
)
def test_a_keyword_that_is_nearly_right_is_answered_with_the_right_one(word, sentence):
    with pytest.raises(TypeError) as caught:
        scheme(**{word: "b"})
    assert str(caught.value).startswith(sentence)


def test_a_misspelt_keyword_of_verify():
    with pytest.raises(TypeError) as caught:
        verify(declare(), example=3)
    assert str(caught.value) == "verify has no keyword 'example'; did you mean examples=?"
    with pytest.raises(ValueError) as caught:
        declare().verify(example=3)
    assert str(caught.value).endswith("is not a mesh axis, dim or option (cp, tp, b, s, v); did you mean examples=?")


def test_unknown_names_of_sizes_and_axes_are_rejected():
    declaration = declare()
    with pytest.raises(ValueError) as caught:
        declaration.case(cp=4, k=3)
    assert str(caught.value) == "scheme 'logprob_over_tp': 'k' is not a mesh axis, dim or option (cp, tp, b, s, v)"
    with pytest.raises(ValueError) as caught:
        declaration.case(cp=0)
    assert str(caught.value) == "scheme 'logprob_over_tp': cp=0; sizes are integers >= 1"
    with pytest.raises(ValueError) as caught:
        declaration.verify(engine="mpi")
    assert str(caught.value) == ("scheme 'logprob_over_tp': engine 'mpi' is not one of lockstep, gloo, nccl, torchrun")
    with pytest.raises(ValueError) as caught:
        declare(engines=("gloo",)).verify()
    assert str(caught.value) == "scheme 'logprob_over_tp': is declared for gloo only, not lockstep"


COUNT, SEED = "give 1 or more", "give a whole number from 0 to 4294967295"
ARGUMENTS = [("examples", value, COUNT) for value in (0, -1, True, 1.5, "2")]
ARGUMENTS += [("seed", value, SEED) for value in (-1, 2**32, True, 1.5, "2", None)]
ARGUMENTS += [("inside_subgroup", value, "give True, False or None") for value in ("no", 1)]


@pytest.mark.parametrize(("name", "value", "remedy"), ARGUMENTS)
def test_an_argument_that_is_wrong_is_named_with_its_remedy(name, value, remedy):
    calls = [declare().verify]
    calls += [partial(check_cases, declare())] if name != "seed" else [declare().case]
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call(**{name: value})
        assert str(caught.value) == f"scheme 'logprob_over_tp': {name}={value!r}; {remedy}"


def test_a_whole_number_of_numpy_is_a_seed():
    assert declare().case(seed=np.int64(3)) == declare().case(seed=3)
