"""Parity of vocab_parallel.tokens_ahead: the tokens that follow each token inside its document, over every layout."""

from itertools import accumulate, pairwise

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Int
from torch import Tensor

from jax_ref.vocab_parallel import tokens_ahead
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import CaseSpec, check_cases, integers, offsets, scheme
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.collectives.plain import all_gather_stack
from torch_impl.layouts import TokenLayout

WIDE_OUTPUTS = False
DEPTHS = (1, 2, 3, 6)
COMMON = dict(
    contract=vp.tokens_ahead,
    options={"fill": (0, -100)},
    dtypes=("float32", "bfloat16", "float64", "float16"),
    roundings=7,  # a value occurs at most six times in the output; its cotangents are added in its dtype
)


def documents_ahead(x, cu_padded, cu_real, depths, fill):
    return tokens_ahead(x, cu_padded, cu_real, len(depths), fill)


def one_document_ahead(x, depths, fill):
    return documents_ahead(x, jnp.array([0, x.shape[1]]), jnp.array([0, x.shape[1]]), depths, fill)


DOCUMENTS = dict(
    draw={"cu_padded": offsets("t", padded=True), "cu_real": offsets("t"), "depths": integers(1, 6)}, **COMMON
)


def ahead(mesh, x, cu_padded, cu_real, depth, fill, kind):
    layout = TokenLayout.packed(cu_padded, cu_real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), kind=kind)
    return vp.tokens_ahead(x, layout, mesh["cp"], depth, fill)


@scheme(
    reference=documents_ahead,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b t/cp:packed d", "cu_padded": "n", "cu_real": "n", "depths": "k"},
    outputs="k b t/cp:packed d",
    dims={"t": (24, 40, 16, 0), "n": (4, 6, 2), "k": DEPTHS},
    **DOCUMENTS,
)
def rows_ahead_of_packed(
    mesh, x, cu_padded: Int[Tensor, "n"], cu_real: Int[Tensor, "n"], depths: Int[Tensor, "k"], fill
):
    return ahead(mesh, x, cu_padded, cu_real, len(depths), fill, "packed")


@scheme(
    reference=documents_ahead,
    mesh={"cp": (1, 2, 3, 8)},
    inputs={"x": "b t/cp d", "cu_padded": "n", "cu_real": "n", "depths": "k"},
    outputs="k b t/cp d",
    dims={"t": (24, 48, 0), "n": (4, 6, 2), "k": DEPTHS},
    **DOCUMENTS,
)
def rows_ahead_of_contiguous(
    mesh, x, cu_padded: Int[Tensor, "n"], cu_real: Int[Tensor, "n"], depths: Int[Tensor, "k"], fill
):
    return ahead(mesh, x, cu_padded, cu_real, len(depths), fill, "contiguous")


@scheme(
    reference=documents_ahead,
    mesh={"cp": (1, 2, 3)},
    inputs={"x": "b t/cp:striped d", "cu_padded": "n", "cu_real": "n", "depths": "k"},
    outputs="k b t/cp:striped d",
    dims={"t": (24, 12, 0), "n": (4, 2), "k": DEPTHS},
    **DOCUMENTS,
)
def rows_ahead_of_striped(
    mesh, x, cu_padded: Int[Tensor, "n"], cu_real: Int[Tensor, "n"], depths: Int[Tensor, "k"], fill
):
    return ahead(mesh, x, cu_padded, cu_real, len(depths), fill, "striped")


def dense(mesh, x, depth, fill, kind):
    counts = all_gather_stack(torch.tensor(x.shape[1]), mesh["cp"]).tolist()
    unequal = {"counts": counts} if kind == "ragged" else {}
    layout = TokenLayout.dense(kind, sum(counts), cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), **unequal)
    return vp.tokens_ahead(x, layout, mesh["cp"], depth, fill)


@scheme(
    reference=one_document_ahead,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b s/cp:dual_chunk_swap d", "depths": "k"},
    outputs="k b s/cp:dual_chunk_swap d",
    dims={"s": (16, 8, 24), "k": DEPTHS},
    draw={"depths": integers(1, 6)},
    **COMMON,
)
def rows_ahead_of_dual_chunk_swap(mesh, x, depths: Int[Tensor, "k"], fill):
    return dense(mesh, x, len(depths), fill, "dual_chunk_swap")


@scheme(
    reference=one_document_ahead,
    mesh={"cp": (1, 2, 3, 4)},
    inputs={"x": "b s/cp:ragged d", "depths": "k"},
    outputs="k b s/cp:ragged d",
    dims={"s": (1, 2, 5, 9, 13), "k": DEPTHS},
    draw={"depths": integers(1, 6)},
    **COMMON,
)
def rows_ahead_of_ragged(mesh, x, depths: Int[Tensor, "k"], fill):
    """Ranks have unequally many tokens, or none."""
    return dense(mesh, x, len(depths), fill, "ragged")


@scheme(
    reference=documents_ahead,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b t/cp:packed", "cu_padded": "n", "cu_real": "n", "depths": "k"},
    outputs="k b t/cp:packed",
    dims={"t": (24, 40, 16), "n": (4, 6, 2), "k": DEPTHS},
    draw={
        "x": integers(-3, 9),
        "cu_padded": offsets("t", padded=True),
        "cu_real": offsets("t"),
        "depths": integers(1, 6),
    },
    options={"fill": (0, -100, 2**53 + 1)},
    contract=vp.tokens_ahead,
)
def ids_ahead(
    mesh, x, cu_padded: Int[Tensor, "n"], cu_real: Int[Tensor, "n"], depths: Int[Tensor, "k"], fill
) -> Int[Tensor, "k b t"]:
    """A call for each depth, all with one layout."""
    layout = TokenLayout.packed(cu_padded, cu_real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    ids = x.long()  # int64 holds every fill
    calls = [vp.tokens_ahead(ids, layout, mesh["cp"], depth, fill) for depth in range(1, len(depths) + 1)]
    return torch.stack([results[-1] for results in calls])


SCHEMES = (
    rows_ahead_of_packed,
    rows_ahead_of_contiguous,
    rows_ahead_of_striped,
    rows_ahead_of_dual_chunk_swap,
    rows_ahead_of_ragged,
    ids_ahead,
)


@pytest.mark.parametrize(
    "declared", slow_but([rows_ahead_of_contiguous, ids_ahead], SCHEMES), ids=lambda declared: declared.name
)
def test_parity(declared):
    check_cases(declared, 30)


test_parity_on_processes = pytest.mark.slow(parity([rows_ahead_of_packed, ids_ahead], gloo=5))


def runs(positions):
    """The number of runs of consecutive positions."""
    return sum(after != before + 1 for before, after in pairwise([-2, *positions]))


@settings(max_examples=few(30))
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["packed", "contiguous", "striped"]),
    st.sampled_from(DEPTHS),
)
def test_a_rank_receives_at_most_depth_rows_for_each_run(chunks, cp, kind, depth):
    """Ranks that lack no row exchange nothing."""
    padded = [0, *accumulate(2 * cp * chunk for chunk in chunks)]
    ids = torch.arange(padded[-1])[None]

    def body(mesh, case):
        layout = TokenLayout.packed(padded, cp_size=cp, cp_rank=mesh.rank("cp"), kind=kind)
        vp.tokens_ahead(layout.shard(ids, 1), layout, mesh["cp"], depth)
        return layout.local_index.tolist()

    done = run(body, CaseSpec(scheme="ahead", mesh={"cp": cp}))
    received = [sum(row.bytes_out // ids.itemsize for row in done.ledger.of(rank)) for rank in range(cp)]
    assert all(rows <= depth * runs(positions) for rows, positions in zip(received, done.results, strict=True))
    rank_of = {p: rank for rank, positions in enumerate(done.results) for p in positions}
    is_cut = any(rank_of[p] != rank_of[q] for start, end in pairwise(padded) for p, q in pairwise(range(start, end)))
    assert any(done.ledger.of(rank) for rank in range(cp)) == is_cut


def test_prefixes_are_documents_of_their_own():
    """The last token of a prompt has no next token, since its responses begin with different ones."""

    def body(mesh, case):
        layout = TokenLayout.packed([0, 2, 4, 6], cp_size=1, cp_rank=0, prefix_of=[-1, 0, 0])
        return vp.tokens_ahead(torch.arange(6)[None], layout, mesh["cp"], 2, -1).tolist()

    assert run(body, CaseSpec(scheme="ahead", mesh={"cp": 1})).results == (
        [[[1, -1, 3, -1, 5, -1]], [[-1] * 6]],
    )  # fmt: skip


def on_packed(tensor, depth=1, fill=0, cp=2, rank=None):
    """A call on each of two ranks with a layout of 8 tokens."""

    def call(mesh):
        own = mesh.rank("cp") if rank is None else rank
        layout = TokenLayout.packed([0, 8], cp_size=cp, cp_rank=own)
        return vp.tokens_ahead(tensor, layout, mesh["cp"], depth, fill)

    return call


IDS = torch.zeros(1, 4, dtype=torch.int64)
test_rejection = rejected(
    {"cp": 2},
    [
        (
            "a layout of another size",
            on_packed(IDS, cp=4, rank=0),
            tuple(
                f"vocab_parallel.tokens_ahead: cp_group has cp=2 and rank {rank}, "
                "the layout is for cp=4 and rank 0; rebind it"
                for rank in range(2)
            ),
        ),
        (
            "a tensor of other rows",
            on_packed(IDS[:, :3]),
            "vocab_parallel.tokens_ahead: tensor has 3 rows along dim 1 but the layout has 4 local rows",
        ),
        ("no depth", on_packed(IDS, 0), "vocab_parallel.tokens_ahead: depth=0 must be at least 1"),
        (
            "a fill of another dtype",
            on_packed(IDS.to(torch.uint8), fill=-100),
            "vocab_parallel.tokens_ahead: fill_value=-100 is not a value of uint8; pass one, or convert the tensor",
        ),
        (
            "one dim",
            on_packed(IDS[0]),
            "vocab_parallel.tokens_ahead: tensor is [4]; its dims must be [b t/cp:LAYOUT ...]; reshape it to these",
        ),
        (
            "no layout",
            lambda mesh: vp.tokens_ahead(IDS, "packed", mesh["cp"], 1),
            "vocab_parallel.tokens_ahead: layout is a str; pass a TokenLayout",
            TypeError,
        ),
    ],
)
