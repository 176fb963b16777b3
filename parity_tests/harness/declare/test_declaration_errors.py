"""All errors of a declaration at once, each in its own sentence and none that only follows from another."""

import pytest

from parity_tests.specimens.small_scheme import declared
from shardproof.declare.declaration_errors import DeclarationErrors


def test_several_errors_are_one_list():
    with pytest.raises(ValueError) as caught:
        declared(
            lambda mesh, x, y: x, lambda x, z: x, {"x": "b/tq", "y": "b"}, "b/tp tp=I", draw={"x": 3},
            dtypes=("float31",), replicas="near", dims={"c": (1,)}, nograd=("w",),
        )  # fmt: skip
    nothing_follows = str(caught.value).splitlines()
    assert nothing_follows[0] == "scheme '<lambda>': 8 errors"
    starts = [
        "draw['x'] is int; use ",
        "nograd has 'w', the inputs are (x, y)",
        "spec 'b/tq' (input 'x'): axis 'tq' is not in mesh (tp); did you mean 'tp'?",
        "spec 'b' (input 'y'): axis 'tp' shards no dim and has no type; ",
        "spec 'b/tp tp=I' (output 'out'): axis 'tp' shards b and is typed tp=I; ",
        "takes (x, y) but reference <lambda> takes (x, z); ",
        "dtype 'float31' is not one of ",
        "replicas is 'near'; ",
    ]
    for number, (line, start) in enumerate(zip(nothing_follows[1:], starts, strict=True), 1):
        assert line.startswith(f"  {number}. {start}")


def test_ids_without_a_draw_are_taken_for_floats():
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x, i: x, lambda x, i: x, {"x": "b/tp", "i": "b"}, "b/tp")
    assert str(caught.value).endswith("(values add up); if it has integers, give draw={'i': token_below(...)}")


def test_references_to_dims_are_checked_after_all_tensors():
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x: x, mesh={"tp": (2,), "cp": (2,)}, inputs={"x": "b/tp cp=I"}, outputs="b/tp cp=I",
                 dims={"c": (1,), "b": ()}, modifies=("z",), draw={"z": lambda g, shape: g.random(shape)})  # fmt: skip
    assert str(caught.value) == (
        "scheme '<lambda>': 4 errors\n"
        "  1. modifies has 'z', the inputs are (x)\n"
        "  2. draw has 'z', the inputs are (x)\n"
        "  3. dims has 'c', the dims are (b)\n"
        "  4. dims['b'] is (); give a tuple of sizes or a formula such as '2*g'"
    )


@pytest.mark.parametrize("name", ["dtypes", "engines", "nograd"])
def test_a_text_in_place_of_a_tuple_is_one_error(name):
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x: x, **{name: "float32"})
    assert str(caught.value) == f"scheme '<lambda>': {name} is the text 'float32'; write ('float32',)"


def test_a_size_in_place_of_a_tuple():
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x: x, dims={"b": 4})
    assert str(caught.value) == "scheme '<lambda>': dims['b'] is 4; write (4,)"


def test_one_error_is_a_sentence():
    errors = DeclarationErrors("f")
    with errors.collected():
        raise errors("has no name")
    with pytest.raises(ValueError) as caught:
        errors.raise_all()
    assert str(caught.value) == "scheme 'f': has no name"


def test_an_argument_that_both_functions_take_is_to_be_added_to_the_inputs():
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x, w: x * w, lambda x, w: x * w, {"x": "b/tp"}, "b/tp")
    sentence = "takes 'w', as reference <lambda> does, but it is not among the inputs: add it"
    assert str(caught.value) == f"scheme '<lambda>': {sentence}"


def test_no_error():
    DeclarationErrors("f").raise_all()
