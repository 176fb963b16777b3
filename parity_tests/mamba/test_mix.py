"""Parity of the convolution in mamba.mix."""

import jax.numpy as jnp
import pytest
import torch

from jax_ref.mamba import causal_conv as reference
from shardproof import offsets, scheme, values
from torch_impl.collectives import accumulator
from torch_impl.layouts import TokenLayout
from torch_impl.mamba.mix import causal_conv


def packed_reference(x, weight, bias, cu, has_wide_taps):
    weight = weight / 3 if has_wide_taps else weight
    first = jnp.zeros(x.shape[1], bool).at[cu[:-1]].set(True, mode="drop")
    return reference(x, weight.T, bias, first)


@scheme(
    reference=packed_reference,
    mesh={"cp": (1,)},
    inputs={"x": "b s c cp=R", "weight": "c k cp=R", "bias": "c cp=R", "cu": "q"},
    outputs="b s c cp=R",
    dims={"b": (2,), "s": (9, 2), "c": (3,), "k": (4, 1), "q": (4,)},
    draw={
        "x": values("normal", "iota"),
        "weight": values("normal"),
        "bias": values("normal", "zeros"),
        "cu": offsets("s", padded=True),
    },
    options={"has_wide_taps": (True, False)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("k",),
    sums="float32",
    roundings=2,
)
@pytest.mark.cases(20)
def convolved(mesh, x, weight, bias, cu, has_wide_taps):
    """Taps may have more digits than the rows."""
    weight = weight.to(accumulator(x.dtype)) / 3 if has_wide_taps else weight
    ids = TokenLayout.packed(cu, cp_size=1, cp_rank=0).sequence_ids
    return causal_conv(x, weight, bias, ids.expand(x.shape[:2]))


X = torch.linspace(-1, 2, 2 * 7 * 3, dtype=torch.float64).sin().view(2, 7, 3)
WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def test_one_sequence_needs_no_index():
    one = torch.zeros(2, 7, dtype=torch.long)
    assert torch.equal(causal_conv(X, WEIGHT), causal_conv(X, WEIGHT, seq_idx=one))
    assert torch.equal(causal_conv(X, WEIGHT), causal_conv(X, WEIGHT, torch.zeros(3, dtype=torch.float64)))


@pytest.mark.parametrize("cut", range(8))
def test_a_token_is_seen_by_itself_and_after_it_in_its_sequence(cut):
    ids = (torch.arange(7) >= cut).long().expand(2, 7)
    for t in range(7):
        edited = X.clone()
        edited[:, t] += 1
        moved = (causal_conv(X, WEIGHT, seq_idx=ids) != causal_conv(edited, WEIGHT, seq_idx=ids)).any(0).any(-1)
        expected = [t <= u < t + 4 and (u >= cut) == (t >= cut) for u in range(7)]
        assert moved.tolist() == expected


def test_no_token_gives_none():
    assert causal_conv(X[:, :0], WEIGHT).shape == (2, 0, 3)


REJECTED = [
    (lambda: causal_conv(X[0], WEIGHT), "x is [7, 3]; its dims must be [b s c]; reshape it to these"),
    (lambda: causal_conv(X, WEIGHT[:, None]), "weight is [3, 1, 4]; its dims must be [c k]; reshape it to these"),
    (lambda: causal_conv(X, WEIGHT[:2]), "weight is [2, 4] but x has c=3: c differs, 2 and 3"),
    (lambda: causal_conv(X, WEIGHT, WEIGHT[:, :2]), "bias is [3, 2]; its dims must be [c]; reshape it to these"),
    (
        lambda: causal_conv(X, WEIGHT, seq_idx=torch.zeros(7).long()),
        "seq_idx is [7]; its dims must be [b s]; reshape it to these",
    ),
]


@pytest.mark.parametrize(("call", "text"), REJECTED)
def test_rejection(call, text):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"mamba.causal_conv: {text}"
