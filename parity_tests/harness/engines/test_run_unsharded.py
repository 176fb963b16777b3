"""Scheme.run: full arrays in, full arrays out, by the given layouts and lengths."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import offsets, scheme


@scheme(
    reference=lambda params, x: x @ params["w"],
    mesh={"tp": (1, 2, 4)},
    inputs={"params": {"w": "d f/tp"}, "x": "b d tp=R"},
    outputs="b f/tp",
)
def linear(mesh, params, x):
    return x @ params["w"]


@scheme(
    reference=lambda x, cu: x,
    mesh={"cp": (1, 2)},
    inputs={"x": "t/cp:packed", "cu": "m"},
    outputs="t/cp:packed",
    draw={"cu": offsets("t", padded=True)},
)
def first_of_each_rank(mesh, x, cu):
    """Each rank marks its part with its number."""
    return x * 0 + mesh.rank("cp")


W, X = np.arange(12.0).reshape(3, 4), np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, jnp.asarray])
def test_outputs_and_gradients(convert):
    arrays = {"w": convert(W)}, convert(X)
    assert linear.run(*arrays, tp=2).tolist() == (X @ W).tolist()
    out, gradients = linear.run(*arrays, grad=np.ones((2, 4)), tp=4)
    assert out.tolist() == (X @ W).tolist()
    assert gradients["x"].tolist() == (np.ones((2, 4)) @ W.T).tolist()
    assert gradients["params.w"].tolist() == (X.T @ np.ones((2, 4))).tolist()


def test_the_dtype_follows_the_inputs():
    seen = []

    def noted(mesh, x):
        seen.append(x.dtype)
        return x * 1

    declaration = scheme(reference=lambda x: x, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp")(noted)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert declaration.run(torch.ones(4, dtype=dtype), tp=1).tolist() == [1.0] * 4
    assert seen == [torch.float32, torch.bfloat16, torch.float64]


def test_the_form_of_the_outputs():
    def three(mesh, x) -> tuple[Tensor, Int[Tensor, "b"]]:
        return x * 2, x.long()

    declaration = scheme(
        reference=lambda x: (x, x), mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs=("b/tp", "b/tp")
    )(three)  # fmt: skip
    assert [array.tolist() for array in declaration.run(np.arange(4.0), tp=2)] == [[0, 2, 4, 6], [0, 1, 2, 3]]

    def named(mesh, x):
        return {"double": x * 2}

    declaration = scheme(reference=lambda x: x, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs={"double": "b/tp"})(
        named
    )
    assert declaration.run(np.arange(2.0), tp=2)["double"].tolist() == [0, 2]


def test_sequences_are_sharded_at_the_offsets_of_the_argument():
    x = np.zeros(12)
    assert first_of_each_rank.run(x, np.array([0, 4, 12]), cp=2).tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert first_of_each_rank.run(x, np.array([0, 8, 12]), cp=2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    assert first_of_each_rank.run(x, np.array([0, 12]), cp=2).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def rejection(declaration, *arrays, **more):
    with pytest.raises(ValueError) as caught:
        declaration.run(*arrays, **more)
    return str(caught.value)


def test_unusable_arrays_are_rejected():
    params = {"w": W}
    assert rejection(linear, params) == "scheme 'linear': takes (params, x), got 1 arrays"
    assert rejection(linear, params, X[0]) == "scheme 'linear': 'x' is (3,), its spec is 'b d tp=R'"
    assert rejection(linear, params, X.T) == "scheme 'linear': d is 3 and 2 ('x')"
    assert rejection(linear, params, X, tp=3) == (
        "scheme 'linear': f=4 cannot be sharded by contiguous over tp=3 (needs a multiple of 3); pad to 6"
    )
    assert rejection(linear, params, X, tp=2, grad=(1, 2)) == "scheme 'linear': grad has 2 cotangents for 1 outputs"
    assert rejection(linear, params, X, tp=2, grad=np.ones(4)) == (
        "scheme 'linear': grad of 'out' is (4,), 'b f/tp' says (2, 4)"
    )
