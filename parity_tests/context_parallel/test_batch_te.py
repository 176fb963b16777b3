"""Parity of context_parallel.batch_te."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_ref.context_parallel import packed_batch
from jax_ref.layouts import inverse
from jax_ref.layouts import packed as packed_reference
from parity_tests.context_parallel.drawn_rows import batch_of, drawn_rows
from parity_tests.parity import parity
from parity_tests.rejections import check_rejection, rejected
from shardproof import CaseSpec, Cost, integers, lengths, scheme
from shardproof.engines.engines import run
from torch_impl import context_parallel as cp

FILL = -1000


def with_scores(x, labels, padded, real):
    """Each row's first label is its score, which is not by token."""
    return *packed_batch(x, labels, padded, real), labels[:, 0]


DECLARED = dict(
    reference=with_scores,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b t d cp=R", "labels": "b t", "padded": "q", "real": "q"},
    outputs=("b t/cp:packed d",) + 3 * ("b t/cp:packed",) + 2 * ("b q",) + ("b",),
    dims={"b": (2, 4), "q": (3, 5, 2), "t": (24, 40, 16), "d": (2, 1, 5)},
    draw={
        "labels": integers(-100, 9),
        "padded": lengths("t", padded=True),
        "real": lengths("t"),
    },
    rank_options={"num_chunks": (2, 1), "tail": (True, False)},
    dtypes=("float32", "bfloat16", "float64"),
    cost=lambda c: Cost(),
)
ByToken = Int[Tensor, "b l"]
Lengths = Int[Tensor, "b q"]
Returned = tuple[Float[Tensor, "b l d"], ByToken, ByToken, Bool[Tensor, "b l"], Lengths, Lengths, Int[Tensor, " b"]]


def given_rows(x, labels, padded, real, tail, fill=FILL):
    """Rows with a filled entry; with `tail` the last slot is as short as it may be, and the row longer."""
    slots = torch.cat([padded[:-1], real[-1:]]) if tail else padded
    filled = [torch.cat([each, each.new_tensor([fill])]).expand(len(x), -1) for each in (real, slots)]
    scores = labels[:, 0].clone()
    return {"input_ids": x, "labels": labels, "scores": scores, "seq_lens": filled[0], "seq_lens_padded": filled[1]}


def rows_of(out, b):
    """Rows again, from rows that were stacked or laid end to end; offsets as the lengths that they sum up."""
    names = ("input_ids", "labels", "position_ids", "padding_mask")
    flat = [out[name].flatten(0, int(out["cu_seqlens"].ndim > 1) and 1) for name in names]
    flat += [out[name].long().diff().flatten() for name in ("cu_seqlens", "cu_seqlens_padded")]
    return *(each.unflatten(0, (b, len(each) // b)) for each in flat), out["scores"].flatten()


WAYS = {"as_context": (False, True), "fill": (FILL, -1)}


@scheme(**{**DECLARED, "rank_options": {**DECLARED["rank_options"], **WAYS}})
def share_of_a_batch(mesh, x, labels, padded, real, num_chunks, tail, as_context, fill) -> Returned:
    """In the words of dense batches, labels come as their loss mask; in the other words tokens are read by index."""
    batch = given_rows(x, labels, padded, real, tail, fill)
    options = {"num_chunks": num_chunks, "seq_lens_padding_value": fill}
    if as_context:
        loss_mask = batch.pop("labels")
        factory, out = cp.make_cp_batch_and_ctx(mesh.device_mesh, batch, loss_mask, use_te=True, **options)
        with factory():
            return rows_of({**out, "labels": out["loss_mask"]}, len(x))
    cp_mesh = mesh.device_mesh["cp"] if mesh.size("cp") > 1 else None
    out, index = cp.make_cp_batch_for_te(cp_mesh, batch, return_local_indices=True, **options)
    return rows_of({**out, "input_ids": x.flatten(0, 1)[index]}, len(x))


@scheme(**{**DECLARED, "rank_options": {**DECLARED["rank_options"], "narrow": (False, True)}})
def shares_of_chunks(mesh, x, labels, padded, real, num_chunks, tail, narrow) -> Returned:
    """Labels are int64 in the result, whatever integers they are in the batch."""
    rows = given_rows(x, labels.int() if narrow else labels, padded, real, tail)
    stacked = cp.split_batch_into_thd_chunks(rows, num_chunks)
    chunks = [stacked] if num_chunks == 1 else [{k: v[i] for k, v in stacked.items()} for i in range(num_chunks)]
    shares = [cp._shard_thd_chunk_for_te(chunk, mesh.device_mesh["cp"], "thd", FILL, 0) for chunk in chunks]
    assert all(share["labels"].dtype == torch.int64 for share in shares)
    names = ("input_ids", "labels", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "scores")
    return rows_of({name: torch.stack([share[name] for share in shares]) for name in names}, len(x))


def stream_by_hand(ids, kinds, padded, real):
    return ids, kinds, padded.max()[None]


@scheme(
    reference=stream_by_hand,
    mesh={"cp": (1, 2, 3)},
    inputs={"ids": "1 t", "kinds": "k 1 t", "padded": "q", "real": "q"},
    outputs=("1 t/cp:packed", "k 1 t/cp:packed", "1"),
    dims={"k": (3, 2), "q": (3, 5, 2), "t": (24, 60, 36)},
    draw={
        "ids": integers(0, 9),
        "kinds": integers(0, 99),
        "padded": lengths("t", padded=True),
        "real": lengths("t"),
    },
    rank_options={"less": ((), ("max_seqlen",), ("max_seqlen", "cu_seqlens_padded"))},
    cost=lambda c: Cost(),
)
def share_of_a_stream(
    mesh, ids, kinds, padded, real, less
) -> tuple[Int[Tensor, "1 l"], Int[Tensor, "k 1 l"], Int[Tensor, "1"]]:
    """Positions of several kinds are sharded too; keys in `less` are left out, and follow from the other offsets."""
    written = padded if "cu_seqlens_padded" in less else real
    batch = {"input_ids": ids, "position_ids": kinds, "seq_lens": written[None], "seq_lens_padded": padded[None]}
    stream = {name: x for name, x in cp.process_input_for_thd(batch).items() if name not in less}
    out = cp._shard_thd_chunk_for_te(stream, mesh.device_mesh["cp"], "thd", FILL, 0)
    assert "prefix_of" not in out
    return out["input_ids"][None].clone(), out["position_ids"].clone(), out["max_seqlen"].long()[None]


@scheme(
    reference=lambda ids, kinds, padded: (ids, kinds),
    mesh={"cp": (1, 2, 4)},
    inputs={"ids": "b t", "kinds": "k b t", "padded": "q"},
    outputs=("b t/cp:packed", "k b t/cp:packed"),
    dims={"b": (2, 4), "k": (3, 2), "q": (3, 5, 2), "t": (24, 40, 16)},
    draw={"ids": integers(0, 9), "kinds": integers(0, 99), "padded": lengths("t", padded=True)},
    rank_options={"num_chunks": (2, 1)},
    cost=lambda c: Cost(),
)
def kinds_of_positions_in_chunks(
    mesh, ids, kinds, padded, num_chunks
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "k b l"]]:
    slots = padded.expand(len(ids), -1)
    batch = {"input_ids": ids, "position_ids": kinds, "seq_lens": slots, "seq_lens_padded": slots}
    out = cp.make_cp_batch_for_te(mesh.device_mesh["cp"], batch, num_chunks=num_chunks)
    positions = out["position_ids"].movedim(0, 1) if num_chunks > 1 else out["position_ids"]
    shares = out["input_ids"].flatten(), positions.flatten(1)
    return tuple(share.unflatten(-1, (len(ids), -1)) for share in shares)


SCHEMES = (share_of_a_batch, shares_of_chunks, share_of_a_stream, kinds_of_positions_in_chunks)
test_parity = parity(SCHEMES, lockstep=15, gloo=3)


class Mesh:
    """The part of a mesh that is read: its size, and the rank in its group."""

    def __init__(self, size, rank):
        self.size, self.get_group, self.rank = lambda: size, lambda: self, lambda: rank


def test_the_page_without_a_mesh():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "labels": torch.tensor([[2, 3, 4, 5]]),
        "seq_lens": torch.tensor([[4]]),
        "seq_lens_padded": torch.tensor([[4]]),
    }
    result = cp.make_cp_batch_for_te(None, batch)
    assert result["input_ids"].shape == torch.Size([4])


def test_the_page_in_chunks():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "labels": torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]]),
        "seq_lens": torch.tensor([[4], [4]]),
        "seq_lens_padded": torch.tensor([[4], [4]]),
    }

    def body(mesh, case):
        result = cp.make_cp_batch_for_te(mesh.device_mesh["cp"], batch, num_chunks=2)
        return tuple(result["input_ids"].shape), result["input_ids"].tolist(), result["labels"].tolist()

    ranks = run(body, CaseSpec(scheme="batch_te", mesh={"cp": 2}))
    assert ranks.results == (
        ((2, 2), [[1, 4], [5, 8]], [[2, 5], [6, 9]]),
        ((2, 2), [[2, 3], [6, 7]], [[3, 4], [7, 8]]),
    )
    assert ranks.ledger.rows == []


KEYS = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "padding_mask": torch.bool,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "max_seqlen": torch.int32,
}


@given(drawn_rows(), st.sampled_from([1, 2, 3]), st.booleans())
def test_the_ranks_together_are_the_full_stream(rows, n, has_positions):
    """For every key the ranks' shares, put together, equal the stream on one rank, for any lengths and chunks."""
    batch = batch_of(rows, n)
    if has_positions:
        batch["position_ids"] = torch.arange(3 * batch["labels"].numel()).view(3, *batch["labels"].shape)
    batch["loss_mask"], batch["name"] = batch["labels"] % 2 == 0, "any"
    before = {key: value.clone() for key, value in batch.items() if key != "name"}
    m = rows.chunks
    full = cp.make_cp_batch_for_te(None, batch, num_chunks=m)
    shares = [cp.make_cp_batch_for_te(Mesh(n, rank), batch, num_chunks=m) for rank in range(n)]
    assert [share.keys() for share in shares] == [full.keys()] * n
    assert full.keys() == cp.make_cp_batch_for_te(None, batch).keys()
    assert {key: full[key].dtype for key in KEYS} == {key: shares[0][key].dtype for key in KEYS} == KEYS
    assert [(share["cp_size"], share["cp_rank"], share["name"]) for share in shares] == [
        (n, r, "any") for r in range(n)
    ]
    for chunk in range(m):
        view = lambda out, key, chunk=chunk: (out[key] if m == 1 else out[key][chunk]).numpy()  # noqa: E731
        cu = view(full, "cu_seqlens_padded")
        cu = cu[cu >= 0]
        total = int(cu[-1])
        back = inverse(packed_reference(total, n, cu))
        for key in ("input_ids", "labels", "position_ids", "padding_mask", "loss_mask"):
            along = -1 if key == "position_ids" else 0
            together = np.concatenate([view(share, key) for share in shares], along).take(back, along)
            np.testing.assert_array_equal(together, view(full, key))
        for key in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
            for share in shares:
                np.testing.assert_array_equal(view(share, key), view(full, key))
    for key, value in before.items():
        assert torch.equal(batch[key], value)


@given(drawn_rows(), st.sampled_from([1, 2, 3]), st.booleans())
def test_a_row_of_a_stack_is_sharded_as_the_stack_is(rows, n, has_positions):
    batch, m = batch_of(rows, n), rows.chunks
    if has_positions:
        batch["position_ids"] = torch.arange(3 * batch["labels"].numel()).view(3, *batch["labels"].shape)
    stacked = cp.split_batch_into_thd_chunks(batch, m)
    for rank in range(n):
        together = cp.make_cp_batch_for_te(Mesh(n, rank), batch, num_chunks=m)
        for i in range(m):
            chunk = stacked if m == 1 else {key: value[i] for key, value in stacked.items()}
            alone = cp._shard_thd_chunk_for_te(chunk, Mesh(n, rank), "thd", FILL, 0)
            assert alone.keys() == together.keys()
            for key in KEYS:
                expected = together[key] if m == 1 else together[key][i]
                if key.startswith("cu_"):
                    expected = expected[expected >= 0]
                assert torch.equal(alone[key], expected) and alone[key].dtype == KEYS[key]


STREAM = {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 3, 6, FILL])}
PADDED = {"cu_seqlens_padded": torch.tensor([0, 4, 8, FILL])}


def shard(batch, mesh=None, qkv_format="thd"):
    return cp._shard_thd_chunk_for_te(batch, mesh or Mesh(2, 0), qkv_format, FILL, 0)


def test_a_mask_comes_from_the_offsets_unless_passed():
    assert shard(STREAM | PADDED)["padding_mask"].tolist() == [False, True, False, True]
    given_mask = torch.arange(8) == 0
    assert shard(STREAM | PADDED | {"padding_mask": given_mask})["padding_mask"].tolist() == [True, False, False, False]
    alone = {"input_ids": torch.arange(12), "cu_seqlens": torch.tensor([0, 4, 12])}
    assert shard(alone)["padding_mask"].tolist() == [False] * 6
    assert shard(alone)["max_seqlen"].tolist() == 8 and shard(alone | {"name": "any"})["name"] == "any"
    assert shard({"input_ids": torch.arange(0), "cu_seqlens": torch.tensor([0])})["max_seqlen"].tolist() == 0


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_nothing_in_a_stream(shape):
    none = torch.full((shape[0], 1), FILL)
    batch = {"input_ids": torch.zeros(shape), "seq_lens": none, "seq_lens_padded": none}
    out = cp.make_cp_batch_for_te(Mesh(2, 1), batch)
    assert (out["cu_seqlens"].tolist(), out["max_seqlen"].tolist(), out["position_ids"].tolist()) == ([0], 0, [])


def test_one_rank_takes_odd_and_single_tokens():
    lengths = torch.tensor([[3, 0, 1]])
    batch = {"input_ids": torch.tensor([[7, 0, 9, 8]]), "seq_lens": lengths, "seq_lens_padded": lengths}
    out = cp.make_cp_batch_for_te(Mesh(1, 0), batch, padding_token_id=0)
    assert out["input_ids"].tolist() == [7, 0, 9, 8]
    assert out["padding_mask"].tolist() == [False] * 4  # token 0 is no padding
    assert out["position_ids"].tolist() == [0, 1, 2, 0]
    assert (out["cu_seqlens_padded"].tolist(), int(out["max_seqlen"])) == ([0, 3, 3, 4], 3)


def test_embeddings_of_width_one_keep_their_bits_and_gradient():
    x = torch.rand(1, 8, 1, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([[8]])
    out = cp.make_cp_batch_for_te(Mesh(2, 1), {"input_ids": x, "seq_lens": lengths, "seq_lens_padded": lengths})
    assert torch.equal(out["input_ids"], x[0, 2:6]) and out["padding_mask"].shape == (4,)
    out["input_ids"].sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def make(mesh=None, qkv_format="thd", **options):
    six = torch.tensor([[4, 6]])
    batch = {"input_ids": torch.arange(10)[None], "seq_lens": six, "seq_lens_padded": six}
    return cp.make_cp_batch_for_te(mesh, batch, qkv_format, **options)


def test_a_mesh_of_several_dims_is_rejected():
    sentence = "context_parallel.te: cp_mesh has 2 dims; pass the DeviceMesh that shards the sequence, mesh['cp']"
    check_rejection({"cp": 2, "tp": 1}, "two dims", lambda mesh: make(mesh.device_mesh), sentence)


REJECTED = [
    (lambda m: make(m, "bshd"), "context_parallel.te: qkv_format='bshd' is not supported; pass 'thd'"),
    (
        lambda m: cp.make_cp_batch_for_te(m, {}, "bshd"),
        "context_parallel.te: qkv_format='bshd' is not supported; pass 'thd'",
    ),
    (
        lambda m: make(m),
        "cu_seqlens: sequence 1 has padded length 6, dual_chunk_swap over cp=2 needs a multiple of 4; pad it to 8",
    ),
    (
        lambda m: make(m, num_chunks=2),
        "context_parallel.te: num_chunks=2 does not divide the batch of 1 rows; drop or add a row",
    ),
    (lambda m: shard(STREAM, m, "sbhd"), "context_parallel.te: qkv_format='sbhd' is not supported; pass 'thd'"),
    (
        lambda m: shard({"input_ids": torch.arange(8)}, m),
        "context_parallel.te: batch has no 'cu_seqlens'; pass a result of process_input_for_thd",
    ),
    (
        lambda m: shard(PADDED | {"cu_seqlens": torch.tensor([0, 8])}, m),
        "context_parallel.te: batch has no 'input_ids'; pass a result of process_input_for_thd",
    ),
    (
        lambda m: shard(STREAM, m),
        "cu_seqlens ends at 6 but the stream holds 8 tokens; pass the padded offsets",
    ),
    (
        lambda m: shard(STREAM | {"cu_seqlens_padded": torch.tensor([0, 2, 8])}, m),
        "cu_seqlens: sequence 0 has padded length 2, dual_chunk_swap over cp=2 needs a multiple of 4; pad it to 4",
    ),
    (
        lambda m: shard(PADDED | {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 5, 8])}, m),
        "cu_real: sequence 0: real length 5 exceeds its padded length 4",
    ),
]


test_rejection_on_every_rank_before_any_collective = rejected(
    {"cp": 2}, [(text[:70], lambda mesh, call=call: call(mesh.device_mesh["cp"]), text) for call, text in REJECTED]
)
