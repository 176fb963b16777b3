"""Parity of context_parallel.batch_ctx."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jax_ref.context_parallel import padded_batch
from jax_ref.layouts import dual_chunk_swap
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, integers, lengths, scheme
from shardproof.engines.engines import run
from torch_impl import context_parallel as cp

KEYS = ("inputs_embeds", "input_ids", "labels", "position_ids", "padding_mask")


def filled(x, ids, labels, less):
    return padded_batch(x, ids, labels, ids.shape[1] - less)


@scheme(
    reference=filled,
    mesh={"cp": (2, 3, 4)},
    inputs={"x": "b s d cp=R", "ids": "b s", "labels": "b s"},
    outputs=("b s/cp:dual_chunk_swap d",) + 4 * ("b s/cp:dual_chunk_swap",),
    draw={"ids": integers(0, 9), "labels": integers(-100, 9)},
    options={"less": (3, 1, 0)},
    dtypes=("float32", "bfloat16", "float64"),
    cost=lambda c: Cost(),
)
def share_of_a_dense_batch(
    mesh, x, ids, labels, less
) -> tuple[Float[Tensor, "b l d"], Int[Tensor, "b l"], Int[Tensor, "b l"], Int[Tensor, "b l"], Bool[Tensor, "b l"]]:
    """The last `less` columns are not given, and padded."""
    length = ids.shape[1] - less
    batch = {"inputs_embeds": x[:, :length], "input_ids": ids[:, :length], "labels": labels[:, :length]}
    batch["attention_mask"] = torch.ones_like(batch["labels"])
    factory, padded = cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)
    with factory():
        return tuple(padded[key].clone() for key in KEYS)


def positions_in_slots(ids, padded):
    """Positions counted from the slot's start, and from the row's; tokens after the row's last slot join that slot."""
    start = jnp.concatenate([jnp.zeros(1, padded.dtype), jnp.cumsum(padded)[:-1]])
    start = jnp.where(start < ids.shape[1], start, 0)
    place = jnp.arange(ids.shape[1])
    behind = jnp.where(start[None] <= place[:, None], place[:, None] - start[None], ids.shape[1])
    return jnp.broadcast_to(behind.min(1), ids.shape), jnp.broadcast_to(place, ids.shape)


@scheme(
    reference=positions_in_slots,
    mesh={"cp": (1, 2)},
    inputs={"ids": "b t/cp:packed", "padded": "q"},
    outputs=("b t", "b t"),
    dims={"b": (2, 1, 3), "q": (3, 5, 2), "t": (24, 40, 16)},
    draw={"ids": integers(0, 9), "padded": lengths("t", padded=True)},
)
def positions_of_a_batch(mesh, ids, padded) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    full = padded.new_zeros(len(ids), mesh.total("t"))
    slots = torch.cat([padded, padded.new_tensor([-1])]).expand(len(ids), -1)
    batches = {"input_ids": full, "seq_lens_padded": slots}, {"input_ids": full, "position_ids": None}
    built = [cp._build_position_ids(dict(batch), "cpu")["position_ids"] for batch in batches]
    assert cp._build_position_ids({"position_ids": built[0]}, "cpu")["position_ids"] is built[0]
    return tuple(built)


test_parity = parity([share_of_a_dense_batch, positions_of_a_batch], lockstep=15, gloo=3)


def on_ranks(n, body):
    ranks = run(body, CaseSpec(scheme="batch_ctx", mesh={"cp": n}))
    assert ranks.ledger.rows == []
    return ranks.results


def mesh_of(mesh):
    return mesh.device_mesh["cp"]


def lists(batch):
    return {name: x.tolist() for name, x in batch.items() if isinstance(x, Tensor)}


def test_the_worked_example():
    def body(mesh, case):
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 4]]), "labels": torch.tensor([[6, 7, 8, 9, 4, -100]])}
        factory, padded = cp.make_cp_batch_and_ctx(mesh_of(mesh), batch)
        with factory():
            inside = lists(padded)
        sizes = factory.original_length, factory.padded_length, factory.layout.draw()
        return inside, sizes, padded["input_ids"].tolist(), batch["input_ids"].tolist()

    full = [[5, 6, 7, 8, 9, 4, 0, 0]]
    for rank, (inside, sizes, outside, given_ids) in enumerate(on_ranks(2, body)):
        assert (sizes, outside, given_ids) == ((6, 8, "00111100"), full, [[5, 6, 7, 8, 9, 4]])
        assert (
            inside
            == [
                {
                    "input_ids": [[5, 6, 0, 0]],
                    "labels": [[6, 7, -100, -100]],
                    "position_ids": [[0, 1, 6, 7]],
                    "padding_mask": [[False, False, True, True]],
                },
                {
                    "input_ids": [[7, 8, 9, 4]],
                    "labels": [[8, 9, 4, -100]],
                    "position_ids": [[2, 3, 4, 5]],
                    "padding_mask": [[False] * 4],
                },
            ][rank]
        )


def every_key(b, s):
    """A batch of every kind of tensor, with padding on the right of the second row."""
    mask = torch.ones(b, s, dtype=torch.int64)
    mask[1:, max(s - 2, 1) :] = 0
    return {
        "input_ids": torch.arange(b * s).view(b, s),
        "labels": torch.arange(b * s).view(b, s) + 1,
        "attention_mask": mask,
        "position_ids": torch.arange(3 * b * s).view(3, b, s),
        "weights": torch.arange(2.0 * b * s).view(b, s, 2),
        "rewards": torch.arange(b),
        "name": "any",
    }


@given(st.sampled_from([2, 3, 4]), st.integers(1, 9), st.integers(2, 3))
def test_the_ranks_together_are_the_padded_batch(n, s, b):
    more = -s % (2 * n)
    mask = np.pad(every_key(b, s)["attention_mask"].numpy() == 0, ((0, 0), (0, more)), constant_values=True)

    def body(mesh, case):
        batch, weighed = every_key(b, s), torch.arange(1.0, b * s + 1).view(b, s)
        before = {name: x.clone() for name, x in batch.items() if isinstance(x, Tensor)}
        factory, padded = cp.make_cp_batch_and_ctx(mesh_of(mesh), batch, weighed, padding_token_id=77)
        outside = {name: x.clone() for name, x in padded.items() if isinstance(x, Tensor)}
        seen = []
        for _ in range(2):
            with factory():
                seen.append({name: x.numpy().copy() for name, x in padded.items() if isinstance(x, Tensor)})
                seen[-1]["the caller's"] = weighed.numpy().copy()
            assert all(torch.equal(padded[name], x) for name, x in outside.items())
            assert weighed.tolist() == torch.arange(1.0, b * s + 1).view(b, s).tolist()
        for name in seen[0]:
            np.testing.assert_array_equal(seen[0][name], seen[1][name])
        assert all(torch.equal(batch[name], x) for name, x in before.items()) and padded["name"] == "any"
        assert "attention_mask" not in padded and padded["rewards"] is batch["rewards"]
        return seen[0], {name: x.numpy() for name, x in outside.items()}

    results = on_ranks(n, body)
    outside = results[0][1]
    ids, weights = every_key(b, s)["input_ids"].numpy(), np.arange(1.0, b * s + 1).reshape(b, s)
    expected = {
        "input_ids": np.pad(ids, ((0, 0), (0, more)), constant_values=77),
        "labels": np.pad(ids + 1, ((0, 0), (0, more)), constant_values=-100),
        "loss_mask": np.pad(weights, ((0, 0), (0, more))),
        "padding_mask": mask,
        "weights": np.pad(every_key(b, s)["weights"].numpy(), ((0, 0), (0, more), (0, 0))),
        "position_ids": every_key(b, s)["position_ids"].numpy()[..., :1] + np.arange(s + more),
    }
    for name, full in expected.items():
        np.testing.assert_array_equal(outside[name], full)
        along = 2 if name == "position_ids" else 1
        for positions, (inside, _) in zip(dual_chunk_swap(s + more, n), results, strict=True):
            np.testing.assert_array_equal(inside[name], full.take(positions, along))
            np.testing.assert_array_equal(inside["the caller's"], inside["loss_mask"])


@pytest.mark.parametrize("mesh", [None, "nameless", "without cp", "one"])
def test_one_rank_gets_its_batch_unchanged(mesh):
    def body(view, case):
        full_mesh = view.device_mesh
        given_mesh = {
            None: None,
            "nameless": DeviceMesh("cpu", [0], _init_backend=False),
            "without cp": full_mesh["tp"],
            "one": full_mesh,
        }[mesh]
        batch = {"input_ids": torch.arange(5)[None], "attention_mask": torch.tensor([[0, 1, 0, 1, 1]])}
        keys = list(batch)
        factory, same = cp.make_cp_batch_and_ctx(given_mesh, batch)
        with factory(), factory():
            return same is batch and list(batch) == keys and factory is nullcontext

    assert run(body, CaseSpec(scheme="batch_ctx", mesh={"cp": 1, "tp": 1})).results == (True,)


def test_with_te_the_batch_matches_te():
    def body(mesh, case):
        lengths = torch.tensor([[8]])
        batch = {"input_ids": torch.arange(8)[None], "seq_lens": lengths, "seq_lens_padded": lengths}
        factory, te_batch = cp.make_cp_batch_and_ctx(mesh.device_mesh, batch, torch.ones(1, 8), use_te=True)
        with factory():
            return te_batch["input_ids"].tolist(), te_batch["loss_mask"].tolist(), factory is nullcontext

    assert on_ranks(2, body) == (([0, 1, 6, 7], [1.0] * 4, True), ([2, 3, 4, 5], [1.0] * 4, True))


def test_a_result_comes_back_without_the_padding():
    def body(mesh, case):
        ids = torch.arange(6)[None]
        factory, padded = cp.make_cp_batch_and_ctx(mesh_of(mesh), {"input_ids": ids})
        with factory():
            scores = padded["input_ids"] * 2
        return factory.layout.unshard(scores, 1, mesh["cp"], trim=True).tolist()

    ranks = run(body, CaseSpec(scheme="batch_ctx", mesh={"cp": 2}))
    assert ranks.results == ([[0, 2, 4, 6, 8, 10]],) * 2


def test_embeddings_that_need_a_gradient_are_sharded_at_the_call():
    def body(mesh, case):
        x = torch.rand(1, 6, 2, requires_grad=True)
        factory, padded = cp.make_cp_batch_and_ctx(mesh_of(mesh), {"inputs_embeds": x})
        with factory():
            padded["inputs_embeds"].sum().backward()
        return tuple(padded["inputs_embeds"].shape), x.grad[0, :, 0].tolist()

    assert on_ranks(2, body) == (((1, 4, 2), [1, 1, 0, 0, 0, 0]), ((1, 4, 2), [0, 0, 1, 1, 1, 1]))


def test_one_row_of_positions_serves_every_row():
    def body(mesh, case):
        batch = {"input_ids": torch.zeros(3, 4, dtype=torch.int64), "position_ids": torch.tensor([[2, 3, 4, 5]])}
        return cp.make_cp_batch_and_ctx(mesh_of(mesh), batch)[1]["position_ids"].tolist()

    assert on_ranks(2, body) == ([[2, 3, 4, 5]] * 3,) * 2


def test_positions_are_built_once_and_cached():
    batch = {"input_ids": torch.zeros(2, 3)}
    assert cp._build_position_ids(batch, "cpu") is batch
    assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert batch["position_ids"].is_contiguous() and batch["position_ids"].dtype == torch.int64
    before = batch["position_ids"]
    assert cp._build_position_ids(batch, "cpu")["position_ids"] is before
    embedded = cp._build_position_ids({"inputs_embeds": torch.zeros(1, 2, 4)}, "cpu")
    assert embedded["position_ids"].tolist() == [[0, 1]]


def test_positions_start_anew_in_each_slot():
    slots = torch.tensor([[2, 3], [4, -1]])
    batch = {"input_ids": torch.zeros(2, 6), "seq_lens_padded": slots}
    assert cp._build_position_ids(batch, "cpu")["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def make(mesh, loss_mask=None, **entries):
    batch = {"input_ids": torch.zeros(3, 4, dtype=torch.int64), **entries}
    return cp.make_cp_batch_and_ctx(mesh_of(mesh), batch, loss_mask)


def make_twice(mesh):
    batch = {"input_ids": torch.zeros(1, 4), "loss_mask": torch.zeros(1, 4)}
    return cp.make_cp_batch_and_ctx(mesh_of(mesh), batch, torch.zeros(1, 4))


REJECTED = [
    (
        lambda m: make(m, labels=torch.zeros(3, 3)),
        "labels is [3, 3], the batch has [3, 4] tokens; give one for each",
    ),
    (
        lambda m: make(m, loss_mask=torch.zeros(3, 3)),
        "loss_mask is [3, 3], the batch has [3, 4] tokens; give one for each",
    ),
    (
        lambda m: make_twice(m),
        "loss_mask is given and another is in the batch; leave one out",
    ),
    (
        lambda m: cp.make_cp_batch_and_ctx(mesh_of(m), {"labels": torch.zeros(1, 4)}),
        "batch has neither input_ids nor inputs_embeds; it has labels; add one of the two",
    ),
    (
        lambda m: cp.make_cp_batch_and_ctx(mesh_of(m), {"input_ids": torch.arange(8)}),
        "input_ids is [8]; it is [b, s], one row for each sequence",
    ),
    (
        lambda m: cp._build_position_ids({"inputs_embeds": torch.zeros(8, 2)}, "cpu"),
        "inputs_embeds is [8, 2]; it is [b, s, d], one row for each sequence",
    ),
]
test_rejection = rejected({"cp": 2}, [(text[:60], call, f"context_parallel.batch: {text}") for call, text in REJECTED])


@pytest.mark.parametrize("use_te", [False, True])
def test_a_mesh_of_several_ranks_without_names_is_rejected(use_te):
    def body(mesh, case):
        batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
        with pytest.raises(ValueError) as caught:
            cp.make_cp_batch_and_ctx(DeviceMesh("cpu", [0, 1], _init_backend=False), batch, use_te=use_te)
        factory, same = cp.make_cp_batch_and_ctx(DeviceMesh("cpu", [mesh.rank("cp")], _init_backend=False), batch)
        return str(caught.value), same is batch and factory is nullcontext

    sentence = (
        "context_parallel.batch: the mesh of 2 ranks has no names, so that none of its dims shards the sequence; "
        'pass one with mesh_dim_names=("cp",)'
    )
    assert on_ranks(2, body) == ((sentence, True),) * 2
