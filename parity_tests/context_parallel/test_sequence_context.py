"""Parity of attention inside a context, and its buffers: shards inside, full after, entered any number of times."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

from jax_ref.context_parallel import dense_attention
from parity_tests.rejections import check_rejection, rejected
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.context_parallel import create_context_parallel_ctx, make_cp_batch_and_ctx

BOUND = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)  # before any context is entered


def attended(q, k, v, causal, scale):
    return dense_attention(q, k, v, causal, None, scale)


@scheme(
    reference=attended,
    mesh={"cp": (1, 2, 4)},
    inputs={"q": "b h s/cp:dual_chunk_swap p", **{x: "b g s/cp:dual_chunk_swap p" for x in ("k", "v")}},
    outputs="b h s/cp:dual_chunk_swap p",
    dims={"b": (1, 2), "g": (2, 1), "h": (2, 4), "p": (4, 8), "s": (16, 8)},
    draw={name: values("normal", "ties") for name in ("q", "k", "v")},
    options={"causal": (True, False), "scale": (None, 0.375)},
    rank_options={"rotate": ("allgather", "alltoall", "addtoall", None)},
    reduction=("s", "p"),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "autocast"),  # torch's own attention follows autocast
)
@pytest.mark.cases(3, engine="gloo")
@pytest.mark.cases(15)
def attention_inside(mesh, q, k, v, causal, scale, rotate):
    buffer = torch.zeros(q.shape[2] * mesh.size("cp"), device=q.device)
    with create_context_parallel_ctx(mesh.device_mesh["cp"], [buffer], [0], set(), rotate):
        return BOUND(q, k, v, is_causal=causal, scale=scale)


def on_ranks(n, body):
    return run(body, CaseSpec(scheme="train_context", mesh={"cp": n}))


def context(mesh, buffers, dims=None, no_restore=(), rotate="allgather"):
    dims = [0] * len(buffers) if dims is None else dims
    return create_context_parallel_ctx(mesh.device_mesh["cp"], buffers, dims, set(no_restore), rotate)


def test_buffers_are_shards_inside_and_full_after():
    def body(mesh, case):
        ids, wide = torch.arange(16).view(2, 8), torch.arange(24.0).view(3, 8).T  # not contiguous
        unrestored = torch.arange(8)
        before = [(x.clone(), x.stride()) for x in (ids, wide, unrestored)]
        manager, seen = context(mesh, [ids, wide, unrestored], [1, 0, -1], {unrestored}), []
        for _ in range(2):
            with manager as entered:
                layout = entered.layout
                expected = [layout.shard(x, dim) for (x, _), dim in zip(before, [1, 0, 0], strict=True)]
                assert all(torch.equal(x, y) for x, y in zip((ids, wide, unrestored), expected, strict=True))
                seen.append([x.tolist() for x in (ids, wide, unrestored)])
                ids.fill_(0)  # the context restores ids, so this is lost
            for x, (value, stride) in zip((ids, wide), before, strict=False):
                assert torch.equal(x, value) and x.stride() == stride
            assert torch.equal(unrestored, expected[2])
        assert seen[0] == seen[1]
        return seen[0][0]

    ranks = on_ranks(2, body)
    assert ranks.results == ([[0, 1, 6, 7], [8, 9, 14, 15]], [[2, 3, 4, 5], [10, 11, 12, 13]])
    assert ranks.ledger.rows == []


def test_an_unrestored_buffer_with_new_data_is_not_sharded_again():
    def body(mesh, case):
        unrestored = torch.arange(8)
        manager = context(mesh, [unrestored], no_restore={unrestored})
        with manager:
            pass
        unrestored.data = torch.arange(8) + 100
        with manager:
            return unrestored.tolist()

    assert on_ranks(2, body).results[0] == [100, 101, 106, 107]


@pytest.mark.parametrize("where", ["inside", "between"])
def test_values_written_into_an_unrestored_buffer_stay(where):
    """It is a share, then and when the context is entered again: the next write is on top of the last."""

    def body(mesh, case):
        unrestored, restored = torch.arange(8), torch.arange(8)
        manager = context(mesh, [unrestored, restored], no_restore={unrestored})
        for _ in range(2):
            with manager:
                if where == "inside":
                    unrestored.add_(100)
            if where == "between":
                unrestored.add_(100)
        with manager:
            return unrestored.tolist(), restored.tolist()

    expected = tuple(([x + 200 for x in share], share) for share in ([0, 1, 6, 7], [2, 3, 4, 5]))
    assert on_ranks(2, body).results == expected


def test_backward_outside_of_the_context_is_rejected():
    def body(mesh, case):
        weight, cosine = torch.ones(4, requires_grad=True), torch.arange(8.0)
        with context(mesh, [cosine]):
            y = (weight * cosine).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    on_ranks(2, body)


def test_after_an_exception_buffers_and_attention_are_restored():
    def body(mesh, case):
        ids, q = torch.arange(8), torch.rand(1, 1, 8, 4)
        plain = F.scaled_dot_product_attention(q, q, q)
        manager = context(mesh, [ids])
        with pytest.raises(KeyError), manager:
            raise KeyError
        assert ids.tolist() == list(range(8))
        with manager:
            pass
        return torch.equal(F.scaled_dot_product_attention(q, q, q), plain)

    assert on_ranks(2, body).results == (True, True)


@pytest.mark.parametrize(
    ("rotate", "used"),
    [
        ("allgather", {"all_gather"}),
        ("alltoall", {"send", "recv"}),
        ("addtoall", {"send", "recv"}),
        (None, {"all_gather"}),
    ],
)
def test_how_keys_travel_and_torchs_setting_stays(rotate, used):
    before = _cp_options.rotate_method

    def body(mesh, case):
        x = torch.rand(1, 1, 4, 4)
        with context(mesh, [torch.zeros(8)], rotate=rotate):
            BOUND(x, x, x, is_causal=True)
            assert _cp_options.rotate_method == before

    assert {row.op for row in on_ranks(2, body).ledger.rows} == used
    assert _cp_options.rotate_method == before


def padded(mesh):
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "attention_mask": torch.tensor([[1] * 6 + [0] * 2])}
    return make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)[0]()


def attend(manager, heads=1, **options):
    x = torch.rand(1, 1, 4, 4)
    with manager:
        F.scaled_dot_product_attention(x.expand(1, heads, 4, 4), x, x, **options)


def tensors(*sizes):
    return [torch.zeros(size) for size in sizes]


CREATE = "context_parallel.create_context_parallel_ctx: "
REJECTED = [
    (lambda m: context(m, []), CREATE + "cp_buffers is empty; pass the tensors to shard"),
    (
        lambda m: context(m, tensors(8), [0, 0]),
        CREATE + "cp_seq_dims has 2 entries for 1 buffers; give one for each",
    ),
    (
        lambda m: context(m, tensors(8), no_restore=tensors(8)),
        CREATE + "cp_no_restore_buffers has a tensor that is not in cp_buffers; add it there",
    ),
    (
        lambda m: context(m, tensors(8, 16)),
        CREATE + "cp_buffers[1] has 16 positions along dim 0, cp_buffers[0] has 8; pass whole tensors of one length",
    ),
    (lambda m: context(m, tensors(8), [1]), CREATE + "cp_seq_dims[0]=1 is outside a tensor of 1 dims"),
    (
        lambda m: context(m, tensors(18)),
        CREATE + "s=18 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 20",
    ),
    (
        lambda m: context(m, tensors(8), rotate="ring"),
        CREATE + "cp_rotate_method='ring' is not one of allgather, alltoall, addtoall",
    ),
    (
        lambda m: context(m, [torch.zeros(8, requires_grad=True)]),
        CREATE + "cp_buffers[0] requires a gradient; shard it with layout.shard instead",
    ),
    (
        lambda m: context(m, [torch.zeros(8), torch.nn.Parameter(torch.zeros(8))]),
        CREATE + "cp_buffers[1] is an nn.Parameter; shard it with layout.shard instead",
    ),
    (
        lambda m: context(m, [torch.zeros(1, 8).expand(2, 8)], [1]),
        CREATE
        + "cp_buffers[0] is an expanded view, which cannot be written in place; shard it with layout.shard instead",
    ),
    (
        lambda m: context(m, [torch.zeros(9).as_strided((8, 2), (1, 1))]),
        CREATE + "cp_buffers[0] is a view whose entries overlap, which cannot be written in place; "
        "shard it with layout.shard instead",
    ),
    (
        lambda m: context(m, 2 * tensors(8)),
        CREATE + "cp_buffers[1] is cp_buffers[0] again; give each tensor once",
    ),
    (
        lambda m: attend(context(m, tensors(8)), attn_mask=torch.zeros(4, 4)),
        "context_parallel.sdpa: attn_mask is [4, 4], whose columns are not sharded over cp; "
        "pass is_causal=True and no mask; adapt_model_to_context drops a Hugging Face model's masks; "
        "attention over other tokens (a vision tower, an encoder, cross attention) goes into local_attention()",
    ),
    (
        lambda m: attend(context(m, tensors(8)), dropout_p=0.1),
        "context_parallel.sdpa: dropout_p=0.1 would differ over cp; pass 0.0",
    ),
    (
        lambda m: attend(context(m, tensors(8)), heads=2, is_causal=True),
        "context_parallel.sdpa: query has 2 heads and key 1; pass enable_gqa=True",
    ),
    (
        lambda m: attend(padded(m)),
        "context_parallel.sdpa: is_causal=False would see the padding of a dropped attention_mask; pass is_causal=True",
    ),
]


test_rejection_on_every_rank_before_any_collective = rejected(
    {"cp": 2}, [(text[:80], call, text) for call, text in REJECTED]
)


def test_a_strided_view_is_sharded():
    def body(mesh, case):
        apart = torch.arange(48).view(2, 8, 3)[:, :, ::2].transpose(0, 2)
        full = apart.clone()
        row = torch.arange(8).as_strided((1, 8), (0, 1))  # a dim of one entry may have any stride
        with context(mesh, [apart, torch.zeros(8, 0), row], [1, 0, 1]) as entered:
            cut = torch.equal(apart, entered.layout.shard(full, 1))
        return cut and torch.equal(apart, full)

    assert on_ranks(2, body).results == (True, True)


def test_no_mesh_is_rejected():
    with pytest.raises(TypeError) as caught:
        create_context_parallel_ctx(None, tensors(8), [0], set())  # pyright: ignore
    assert str(caught.value) == CREATE + "cp_mesh is None; pass the DeviceMesh that shards the sequence, mesh['cp']"


def test_a_context_is_not_entered_inside_itself():
    def call(mesh):
        manager = context(mesh, tensors(8))
        with manager, manager:
            pass

    sentence = "context_parallel: this context is entered already; leave it first, or make another"
    check_rejection({"cp": 2}, "entered twice", call, sentence, RuntimeError)
