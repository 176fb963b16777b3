"""Every message with which attention rejects its arguments, in full, on every rank and before anything is sent."""

import gc
import weakref

import pytest
import torch

from parity_tests.rejections import rejected
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import attention, context_parallel_attention
from torch_impl.context_parallel.block_schedule import schedule_of
from torch_impl.layouts import TokenLayout

NAME = "context_parallel.context_parallel_attention"
Q, KV = torch.zeros(1, 4, 8, 2), torch.zeros(1, 2, 8, 2)


def attend(ranks, q=Q, k=KV, v=None, layout="dual_chunk_swap", **options):
    options = {"group": ranks["cp"], **options} if "mesh" not in options else options
    return context_parallel_attention(q, k, k if v is None else v, layout=layout, **options)


def dense_layout(mesh, length=16, kind="dual_chunk_swap", rank=None, **options):
    rank = mesh.rank("cp") if rank is None else rank
    return TokenLayout.dense(kind, length, cp_size=mesh.size("cp"), cp_rank=rank, **options)


def packed_layout(mesh):
    return TokenLayout.packed(torch.tensor([0, 4, 16]), cp_size=2, cp_rank=mesh.rank("cp"))


VALUE_ERRORS = [
    (
        lambda m: attend(m, exchange="tree"),
        "exchange='tree' is not one of ring, all_gather, ulysses, usp",
    ),
    (lambda m: attend(m, group=None), "neither mesh nor group is given; pass one of them"),
    (lambda m: attend(m, mesh=m.device_mesh, group=m["cp"]), "mesh and group are both given; pass one of them"),
    (lambda m: attend(m, exchange="usp"), "exchange='usp' needs a mesh of 2 dims, ring and heads; pass mesh"),
    (
        lambda m: attend(m, exchange="usp", mesh=m.device_mesh),
        "mesh has ndim=1, but exchange='usp' needs ndim=2; pass such a mesh",
    ),
    (lambda m: attend(m, q=Q[0]), "q is [4, 8, 2]; its dims must be [b h s/cp:LAYOUT p]; reshape it to these"),
    (
        lambda m: attend(m, v=KV[:, :1]),
        "v is [1, 1, 8, 2] but k has hk=2: hk differs, 1 and 2",
    ),
    (
        lambda m: attend(m, q=Q[:, :, :6]),
        "k is [1, 2, 8, 2] but q has s/cp:LAYOUT=6: s/cp:LAYOUT differs, 8 and 6",
    ),
    (lambda m: attend(m, q=Q[:, :3]), "h=3 query heads cannot share hk=2 KV heads (needs a multiple)"),
    (lambda m: attend(m, window=0), "window=0 must be at least 1, or None to see all"),
    *[
        (
            lambda m, scale=scale: attend(m, scale=scale),
            f"scale={scale} must be positive and finite; negate q for a negative scale",
        )
        for scale in (0.0, -1, float("inf"), float("nan"))
    ],
    (
        lambda m: attend(m, q=Q[..., :0], k=KV[..., :0]),
        "q is [1, 4, 8, 0]; p must be at least 1",
    ),
    *[
        (lambda m, cu=cu: attend(m, layout=packed_layout(m), cu_seqlens=cu), f"cu_seqlens: {wrong}")
        for cu, wrong in (
            ([0, 16, 4], "sequence 1 runs from 16 back to 4; offsets never decrease"),
            ([0, -5, 4, 16], "sequence 0 runs from 0 back to -5; offsets never decrease"),
            ([[0, 4, 16]], "shape is (1, 3); offsets are one row that starts at 0"),
        )
    ],
    (
        lambda m: attend(m, layout=packed_layout(m), cu_seqlens=[0, 16]),
        "cu_seqlens differ from the layout's; pass one of them",
    ),
    (
        lambda m: attend(m, layout="zigzag"),
        "layout='zigzag' is not one of contiguous, dual_chunk_swap, striped, or a TokenLayout",
    ),
    (
        lambda m: attend(m, layout="packed"),
        "layout='packed' is not one of contiguous, dual_chunk_swap, striped, or a TokenLayout; pass cu_seqlens",
    ),
    (
        lambda m: attend(m, layout=dense_layout(m, 20)),
        "q, k, v have s=8 rows here, the layout gives this rank 10 of 20; shard them by layout.shard",
    ),
    (
        lambda m: attend(m, layout=dense_layout(m, rank=0).rebind(4, 3)),
        "the layout is for rank 3 of cp=4, this is rank {rank} of cp=2; rebind it",
    ),
    (
        lambda m: attend(m, q=Q.repeat(2, 1, 1, 1), k=KV.repeat(2, 1, 1, 1), layout=packed_layout(m)),
        "b=2 but packed sequences are one stream; pass b=1",
    ),
    (
        lambda m: attend(m, layout=packed_layout(m), cu_seqlens=torch.tensor([0, 8, 16])),
        "cu_seqlens differ from the layout's; pass one of them",
    ),
    (lambda m: attend(m, k=KV.to("meta")), "k is on meta but q on cpu; pass one device"),
    (lambda m: attend(m, v=KV.to("meta")), "v is on meta but q on cpu; pass one device"),
    (
        lambda m: attend(m, layout=dense_layout(m, kind="ragged", counts=[8, 8]), exchange="ulysses"),
        "exchange='ulysses' needs the same number of rows on each rank, unlike ragged; use ring or all_gather",
    ),
    (
        lambda m: attend(m, q=Q[:, :3], k=KV[:, :1], exchange="ulysses"),
        "exchange='ulysses' cannot shard h=3, hk=1 over 2 ranks (needs h % n == 0, and hk % n == 0 or n % hk == 0); "
        "use ring or all_gather",
    ),
    (
        lambda m: attend(m, q=torch.zeros(1, 6, 8, 2), k=torch.zeros(1, 3, 8, 2), exchange="ulysses"),
        "exchange='ulysses' cannot shard h=6, hk=3 over 2 ranks (needs h % n == 0, and hk % n == 0 or n % hk == 0); "
        "use ring or all_gather",
    ),
]
ONE_DTYPE = "pass one dtype of float16, bfloat16, float32, float64"
TYPE_ERRORS = [
    (
        lambda m: attend(m, group="cp"),
        "group is a str; pass a ProcessGroup (a group of size 1 for no context parallelism)",
    ),
    (lambda m: attend(m, mesh="cp"), "mesh is a str; pass a torch DeviceMesh"),
    (lambda m: attend(m, k=KV.double()), f"q, k, v are float32, float64, float64; {ONE_DTYPE}"),
    (lambda m: attend(m, v=KV.double()), f"q, k, v are float32, float32, float64; {ONE_DTYPE}"),
    (lambda m: attend(m, q=Q.int(), k=KV.int()), "q is int32; it must be floating"),
    (
        lambda m: attend(m, q=Q.to(torch.float8_e4m3fn)),
        "q is float8_e4m3fn, for which torch has few operations; convert it",
    ),
    (lambda m: attend(m, q=Q.numpy()), "q is a ndarray; pass a Tensor"),
    (lambda m: attend(m, window=2.5), "window=2.5 is a float; pass an int, or None to see all"),
    (lambda m: attend(m, window=True), "window=True is a bool; pass an int, or None to see all"),
    (lambda m: attend(m, causal=None), "causal=None is None; pass True or False"),
    (lambda m: attend(m, causal=1), "causal=1 is an int; pass True or False"),
    (lambda m: attend(m, scale="1"), "scale is a str; pass a float, or None for p ** -0.5"),
    (
        lambda m: attend(m, layout=packed_layout(m), cu_seqlens=[0.0, 4.0, 16.0]),
        "cu_seqlens: dtype is float32; offsets are integers",
    ),
    (
        lambda m: attend(m, layout=packed_layout(m), cu_seqlens="ab"),
        "cu_seqlens='ab' are not offsets; pass a row of integers",
    ),
    (
        lambda m: attend(m, layout="contiguous", cu_seqlens=torch.tensor([0.0, 16.0])),
        "cu_seqlens: dtype is float32; offsets are integers",
    ),
    (
        lambda m: attend(m, layout=None),
        "layout is None; pass a TokenLayout, or one of contiguous, dual_chunk_swap, striped",
    ),
]


test_rejection = rejected(
    {"cp": 2},
    [
        (text[:40], call, tuple(f"{NAME}: {text.format(rank=rank)}" for rank in range(2)), kind)
        for kind, rows in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
        for call, text in rows
    ],
)


USP = [
    (
        dict(layout="striped"),
        "exchange='usp' cannot join striped rows; use ring, all_gather or ulysses, or another layout",
    ),
    (
        dict(q=Q[:, :3], k=KV[:, :1]),
        "exchange='usp' cannot shard h=3, hk=1 over 2 ranks (needs h % n == 0, and hk % n == 0 or n % hk == 0); "
        "use ring or all_gather",
    ),
]


test_rejection_over_two_axes = rejected(
    {"ring": 2, "heads": 2},
    [
        (
            text[:40],
            lambda mesh, options=options: attend(mesh, mesh=mesh.device_mesh, exchange="usp", **options),
            f"{NAME}: {text}",
        )
        for options, text in USP
    ],
)


def test_in_a_mesh_of_two_dims_heads_are_the_inner_dim():
    """A layout that numbers the ranks in the other order is rejected on each rank whose number differs."""

    def body(mesh, case):
        rank = 2 * mesh.rank("heads") + mesh.rank("ring")
        layout = TokenLayout.dense("contiguous", 32, cp_size=4, cp_rank=rank)
        if rank in (0, 3):
            return None  # both counts agree
        try:
            attend(mesh, mesh=mesh.device_mesh, exchange="usp", layout=layout)
        except ValueError as error:
            return str(error)

    outcome = run(body, CaseSpec(scheme="context_parallel", mesh={"ring": 2, "heads": 2}))
    sentence = f"{NAME}: the layout is for rank {{}} of cp=4, this is rank {{}} of cp=4; rebind it"
    assert outcome.results == (None, sentence.format(2, 1), sentence.format(1, 2), None)


@pytest.mark.parametrize("order", ["contiguous", "striped", "dual_chunk_swap"])
def test_a_name_with_offsets_shards_the_stream_in_its_order(order):
    def body(mesh, case):
        cu, kind = torch.tensor([0, 4, 16]), {"dual_chunk_swap": "packed"}.get(order, order)
        layout = TokenLayout.packed(cu, cp_size=2, cp_rank=mesh.rank("cp"), kind=kind)
        rows = torch.linspace(-2, 3, 6 * 16 * 2).sin().view(1, 6, 16, 2)
        shards = dict(zip("qkv", layout.shard(rows, 2).split([2, 2, 2], 1), strict=True))
        named, by_layout = (
            attend(mesh, **shards, **options) for options in (dict(layout=order, cu_seqlens=cu), dict(layout=layout))
        )
        return torch.equal(named, by_layout), bool(named.any())

    assert run(body, CaseSpec(scheme="context_parallel", mesh={"cp": 2})).results == ((True, True),) * 2


def test_attention_has_no_dropout():
    def body(mesh, case):
        try:
            attend(mesh, dropout=0.1)
        except TypeError as error:
            return str(error)

    (text,) = set(run(body, CaseSpec(scheme="context_parallel", mesh={"cp": 2})).results)
    assert text.endswith("unexpected keyword argument 'dropout'")


@pytest.mark.slow
def test_masks_are_freed_with_their_layout():
    layout = TokenLayout.dense("contiguous", 64, cp_size=1, cp_rank=0)
    mask = weakref.ref(schedule_of(layout, True, 5).blocks[0][0].mask)
    assert mask() is not None
    del layout
    gc.collect()
    assert mask() is None


@pytest.mark.slow
def test_a_copy_on_another_device_is_freed_with_its_layout():
    layout = TokenLayout.dense("contiguous", 64, cp_size=1, cp_rank=0)
    weak = weakref.ref(layout), weakref.ref(attention._on_device(layout, torch.device("meta")))
    assert attention._on_device(layout, torch.device("meta")) is weak[1]()
    del layout
    gc.collect()
    assert [ref() for ref in weak] == [None, None]
