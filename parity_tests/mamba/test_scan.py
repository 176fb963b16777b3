"""Parity of mamba.scan."""

import math

import jax.numpy as jnp
import pytest
import torch

from jax_ref.mamba import scan as reference
from shardproof import offsets, scheme, values
from torch_impl.collectives import accumulator
from torch_impl.layouts import TokenLayout
from torch_impl.mamba.scan import chunked_scan

SHAPES = [(2, 7, 4, 3), (2, 7, 4), (4,), (2, 7, 2, 2), (2, 7, 2, 2)]  # of x, dt, A, B, C
ORDINARY = values("normal", "ties", "ones")


def packed_reference(x, dt, A, B, C, D, entering, cu):
    first = jnp.zeros(x.shape[1], bool).at[cu[:-1]].set(True, mode="drop")
    y, state = reference(x, jnp.exp(dt), -jnp.exp(A), B, C, 0.0 * A, first, entering)
    skips = D[:, None] if D.ndim == 1 else D  # of a head, or of each of its channels
    return y + skips[None, None] * x, state


TENSORS = {
    "x": "b s h p cp=R",
    "dt": "b s h cp=R",
    "A": "h cp=R",
    "B": "b s g n cp=R",
    "C": "b s g n cp=R",
    "D": "h cp=R",
    "entering": "b h p n cp=R",
}
DECLARED = dict(
    reference=packed_reference,
    mesh={"cp": (1,)},
    inputs={**TENSORS, "cu": "q"},
    outputs=("b s h p cp=R", "b h p n cp=R"),
    dims={"b": (2,), "s": (9, 2), "h": "2*g", "g": (2, 1), "p": (2,), "n": (3,), "q": (4,)},
    draw={
        **dict.fromkeys(("x", "B", "C", "D", "entering"), ORDINARY),
        "dt": values("normal", "zeros"),
        "A": values("normal", "zeros"),
        "cu": offsets("s", padded=True),
    },
    reduction=("s", "n"),
    wide=("out[1]",),
    roundings=4,  # the step, its logarithm, the state that enters a chunk, the result
)


@scheme(
    rank_options={"chunk_size": (1, 2, 3, 4, 9, 256), "split": (0, 1, 2, 3), "is_rising": (True, False)},
    dtypes=("float32", "float64", "bfloat16"),
    sums="float32",
    wider_inputs=("dt", "A", "D", "entering"),
    **{
        **DECLARED,
        "inputs": {**DECLARED["inputs"], "D": "h c cp=R"},
        "dims": {**DECLARED["dims"], "c": (1, 2)},
    },
)
@pytest.mark.cases(30)
def scanned(mesh, x, dt, A, B, C, D, entering, cu, chunk_size, split, is_rising):
    """The sequence at once, or in two parts: the second begins with the first's last state.

    Numbers of sequences may rise or fall: only which are equal counts.
    """
    ids = TokenLayout.packed(cu, cp_size=1, cp_rank=0).sequence_ids.expand(x.shape[:2])
    ids = ids if is_rising else -1 - ids
    wide = accumulator(x.dtype)
    dt, A, D, entering = (part.to(wide) for part in (dt, A, D, entering))  # two parts use A and D
    state, pieces, cut = entering, [], x.shape[1] * split // 3
    for part in (slice(cut), slice(cut, None)) if split else (slice(None),):
        if part.start and not torch.equal(ids[:, cut - 1 : cut], ids[:, cut : cut + 1]):
            state = torch.where(torch.tensor(cut < x.shape[1]), 0.0, state)  # another sequence begins there
        tokens = x[:, part], dt[:, part].exp(), -A.exp(), B[:, part], C[:, part], D
        y, state = chunked_scan(*tokens, chunk_size=chunk_size, seq_idx=ids[:, part], initial_states=state)
        pieces.append(y)
    return torch.cat(pieces, 1), state


PARTS = [torch.linspace(-1, k, math.prod(shape)).sin().view(shape) for k, shape in enumerate(SHAPES, 1)]


def called(x=PARTS[0], dt=PARTS[1], A=PARTS[2], B=PARTS[3], C=PARTS[4], **options):
    return chunked_scan(x, dt.exp(), -A.exp(), B, C, **options)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("border", [0, 3, 4, 7])
def test_a_token_changes_only_later_tokens_of_its_sequence(chunk_size, border):
    ids = (torch.arange(7) >= border).long().expand(2, 7)
    y, _ = called(chunk_size=chunk_size, seq_idx=ids)
    for t in range(7):
        for name, part in (("x", PARTS[0]), ("dt", PARTS[1]), ("B", PARTS[3])):
            edited = part.clone()
            edited[:, t] += 0.5
            moved = (called(chunk_size=chunk_size, seq_idx=ids, **{name: edited})[0] != y).any(0).any(-1).any(-1)
            expected = [t <= u and (u >= border) == (t >= border) for u in range(7)]
            assert moved.tolist() == expected


def test_long_decays_are_neither_lost_nor_undefined():
    """A decay by a hundred thousand nepers in all: distant tokens are forgotten, near ones as without it."""
    dt, A = torch.full((1, 1000, 1), 10.0), torch.full((1,), -10.0)
    one = torch.ones(1, 1000, 1, 1, requires_grad=True)
    y, final = chunked_scan(one, dt, A, one, one, chunk_size=16)
    assert (y == 10).all() and (final == 10).all()
    y.sum().backward()
    assert one.grad is not None and torch.isfinite(one.grad).all()


def test_no_token_gives_the_state_back():
    x, dt, B, C = (PARTS[i][:, :0] for i in (0, 1, 3, 4))
    state = torch.ones(2, 4, 3, 2)
    y, final = called(x, dt, B=B, C=C, initial_states=state)
    assert y.shape == (2, 0, 4, 3) and torch.equal(final, state)


def test_the_state_is_wider_than_the_tokens():
    parts = [part.bfloat16() for part in PARTS]
    y, final = chunked_scan(parts[0], parts[1].exp(), -parts[2].exp(), parts[3], parts[4])
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)


REJECTED = [
    (lambda: called(chunk_size=0), "chunk_size=0 must be at least 1"),
    (
        lambda: called(dt=PARTS[1][:, :6]),
        "dt is [2, 6, 4] but x has s=7: s differs, 6 and 7",
    ),
    (
        lambda: called(B=PARTS[3][:, :6]),
        "B is [2, 6, 2, 2] but x has s=7: s differs, 6 and 7",
    ),
    (
        lambda: called(B=PARTS[0][..., :3, :2], C=PARTS[0][..., :3, :2]),
        "num_heads=4 must be divisible by n_groups=3",
    ),
    (lambda: called(seq_idx=torch.zeros(7).long()), "seq_idx is [7]; its dims must be [b s]; reshape it to these"),
    (lambda: called(initial_states=PARTS[0]), "initial_states is [2, 7, 4, 3] but x has h=4: h differs, 7 and 4"),
]


@pytest.mark.parametrize(("call", "text"), REJECTED)
def test_rejection(call, text):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"mamba.chunked_scan: {text}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype):
    """A state of 300 steps without decay is a sum that no narrow float can go on adding to."""
    x, dt, B, C = (
        torch.ones(shape, dtype=dtype) for shape in [(1, 300, 2, 3), (1, 300, 2), (1, 300, 1, 2), (1, 300, 1, 2)]
    )
    A = torch.full((2,), -1e-6)
    y, state = chunked_scan(x, dt.float(), A, B, C, chunk_size=7)
    with torch.autocast("cpu", torch.bfloat16):
        again, as_well = chunked_scan(x, dt.float(), A, B, C, chunk_size=7)
    assert (again.dtype, as_well.dtype) == (dtype, torch.float32)
    assert torch.equal(y, again) and torch.equal(state, as_well)
