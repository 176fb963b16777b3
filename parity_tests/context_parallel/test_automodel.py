"""Parity of NeMo Automodel's names for sharding over cp: by the positions of a rank, and by a sharder of a batch."""

from contextlib import nullcontext
from functools import partial

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn

from jax_ref.context_parallel import padded_batch, shard_and_squares
from parity_tests.context_parallel.drawn_rows import FILL
from parity_tests.context_parallel.test_batch_layout import (
    DTYPES,
    PACKED_ROWS,
    Rows,
    gather_cost,
    rows_without_the_last,
)
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, integers, scheme
from shardproof.engines.engines import run
from torch_impl.context_parallel.adapters import automodel

ByToken = Int[Tensor, "b l"]


def unpadded(x):
    return shard_and_squares(x, x.shape[1])


def positions_and_rows(c):
    """One gather of the rows and one of their positions, and the sum of the rows' gradients."""
    if c.cp == 1:
        return Cost()
    numbers = c.b * c.s * c.d
    return Cost(
        forward={"all_gather": (2, numbers // c.cp * c.itemsize + c.s // c.cp * 8)},
        backward={"reduce_scatter": (1, numbers * c.accumulator_itemsize)},
    )


BY_POSITIONS = dict(
    reference=unpadded,
    mesh={"cp": (2, 1, 3, 4)},
    inputs={"x": "b s d cp=R"},
    rank_options={"from_end": (False, True)},
    dtypes=DTYPES,
    cost=positions_and_rows,
)


def there_and_back(mesh, x, indices_of, from_end) -> tuple[Rows, Rows]:
    index = indices_of(mesh.device_mesh["cp"], x.shape[1])
    dim = -2 if from_end else 1
    shard = automodel.shard_token_tensor_by_indices(x, index, dim)
    return shard, automodel.gather_token_tensor_by_indices(mesh.device_mesh["cp"], shard.square(), index, dim)


@scheme(**BY_POSITIONS, outputs=("b s/cp d", "b s d cp=R"))
def contiguous_positions(mesh, x, from_end) -> tuple[Rows, Rows]:
    return there_and_back(mesh, x, automodel.contiguous_local_indices, from_end)


@scheme(**BY_POSITIONS, outputs=("b s/cp:dual_chunk_swap d", "b s d cp=R"))
def round_robin_positions(mesh, x, from_end) -> tuple[Rows, Rows]:
    return there_and_back(mesh, x, automodel.round_robin_local_indices, from_end)


PADDED = dict(
    reference=rows_without_the_last,
    mesh={"cp": (2, 1, 3, 4)},
    inputs={"x": "b s d cp=R"},
    outputs=("b s/cp:dual_chunk_swap d", "b s d cp=R"),
    options={"less": (3, 2, 1, 0)},
    dtypes=DTYPES,
    assume=lambda c: c.less < c.s,
)


PAD_VALUES = {"pad_value": (0.0, 2.5, -torch.inf)}


def without_padding(shard, index, length, pad_value):
    """The shard with zeros at its padding; a padding that is not `pad_value` stays."""
    is_padding = (index >= length)[:, None] & (shard == pad_value)
    return shard.masked_fill(is_padding, 0.0)


def filled(mesh, x, shard, full, length) -> tuple[Rows, Rows]:
    """A shard and rows of `length` columns, with zeros in place of the last columns of `x` that they lack."""
    local = x.shape[1] // mesh.size("cp")
    return F.pad(shard, (0, 0, 0, local - shard.shape[1])), F.pad(full, (0, 0, 0, x.shape[1] - length))


@scheme(**PADDED, rank_options=PAD_VALUES)
def padded_sequence(mesh, x, less, pad_value) -> tuple[Rows, Rows]:
    """The last `less` columns are padding."""
    rows = x[:, : x.shape[1] - less]
    cp_mesh = mesh.device_mesh["cp"]
    shard, index, length = automodel.shard_sequence_for_cp_round_robin(cp_mesh, rows, pad_value=pad_value)
    shard = without_padding(shard, index, rows.shape[1], pad_value)
    full = automodel.gather_token_tensor_by_indices(cp_mesh, shard.square(), index)
    return filled(mesh, x, shard, full, length)


@scheme(**PADDED, rank_options={"is_owned": (False, True), "is_padded": (False, True), **PAD_VALUES})
def padded_rows(mesh, x, less, is_owned, is_padded, pad_value) -> tuple[Rows, Rows]:
    """The last `less` columns are padding, which a tensor of the batch may have already."""
    rows = x[:, : x.shape[1] - less]
    cp_mesh, batch = mesh.device_mesh["cp"], {"input_ids": rows.new_zeros(rows.shape[:2], dtype=torch.int64)}
    if is_owned:
        own = {"shard_batch": automodel.shard_batch_load_balanced}
        sharder = automodel.ContextParallelSharder(device_mesh=cp_mesh, **own)
    else:
        sharder = automodel.ContextParallelSharder(None, mesh.device_mesh, batch)
    sharder.shard(batch)
    padding = sharder.shard_layout.padded_seq_len - rows.shape[1]
    given = F.pad(rows, (0, 0, 0, padding), value=pad_value) if is_padded else rows
    shard = sharder.shard_token_tensor(given, fill=pad_value)
    index = sharder.positions(sharder.shard_layout.padded_seq_len)
    shard = without_padding(shard, index, rows.shape[1], pad_value)
    return filled(mesh, x, shard, sharder.gather_token_tensor(shard.square(), trim=True), rows.shape[1])


@scheme(
    **PACKED_ROWS,
    rank_options={"num_chunks": (2, 1), "trim": (True, False)},
    cost=lambda c: gather_cost(c, c.t),
)
def packed_rows(mesh, x, padded, real, num_chunks, trim) -> tuple[Rows, Rows]:
    seq_lens, seq_lens_padded = (F.pad(each, (0, 1), value=FILL).expand(len(x), -1) for each in (real, padded))
    ids = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2])
    batch = {"input_ids": ids, "seq_lens": seq_lens, "seq_lens_padded": seq_lens_padded, "qkv_format": "thd"}
    sharder = automodel.ContextParallelSharder(None, mesh.device_mesh, batch, num_chunks=num_chunks)
    _, sharded = sharder.shard(batch)
    assert torch.equal(sharder.shard_token_tensor(ids), sharded["input_ids"])
    shard = sharder.shard_token_tensor(x)
    full = sharder.gather_token_tensor(shard.square(), seq_dim=0, trim=trim)
    tokens = shard.flatten(0, 1) if num_chunks > 1 else shard
    return tokens.unflatten(0, (len(x), -1)), full if trim else full.unflatten(0, x.shape[:2])


PAD_ID, GROUP_FILL = 11, -2
LABEL_FILLS = (-100, -7)  # the fill of labels by default, and one that a caller names


def blocks_by_hand(x, ids, groups, less, mask, label_fill):
    """Columns from s - `less` on are padding; with `mask` one more of each row is."""
    real = ids.shape[1] - less
    embeddings, _, labels, positions, padding = padded_batch(x, ids, 3 * ids, real)
    added = positions >= real
    hidden = padding | (positions >= real - 1) if mask else padding
    labels = jnp.where(added, label_fill, labels)
    tokens = jnp.where(added, PAD_ID, ids), labels, positions, hidden
    return embeddings, *tokens, jnp.where(added.T, GROUP_FILL, groups), embeddings**2


def padded_length(c):
    multiple = 1 if c.cp == 1 else c.cp * max(c.pad_multiple, 2)
    return -(-(c.s - c.less) // multiple) * multiple


@scheme(
    reference=blocks_by_hand,
    mesh={"cp": (2, 1, 3, 4, 8)},
    inputs={"x": "b s d cp=R", "ids": "b s", "groups": "s b"},
    outputs=("b s/cp d", *4 * ("b s/cp",), "s/cp b", "b s d cp=R"),
    dims={"b": (2, 1, 3), "s": (24, 48), "d": (2, 1)},
    draw={"ids": integers(1, 9), "groups": integers(0, 5)},
    options={"less": (1, 0, 3, 5), "mask": (True, False), "label_fill": LABEL_FILLS},
    rank_options={"pad_multiple": (1, 3, 2), "is_sharded_here": (True, False)},
    dtypes=DTYPES,
    assume=lambda c: padded_length(c) == c.s,
    cost=lambda c: gather_cost(c, c.s),
)
def contiguous_batch(
    mesh, x, ids, groups, less, mask, label_fill, pad_multiple, is_sharded_here
) -> tuple[Rows, ByToken, ByToken, ByToken, Bool[Tensor, "b l"], Int[Tensor, "l b"], Rows]:
    """Embeddings, ids, labels, positions, padding and an entry of another dim; squares of the embeddings, gathered."""
    real, cp_mesh = ids.shape[1] - less, mesh.device_mesh["cp"]
    batch = {"inputs_embeds": x[:, :real], "input_ids": ids[:, :real], "labels": 3 * ids[:, :real]}
    batch |= {"attention_mask": (torch.arange(real) < real - mask).int().expand(len(ids), -1), "groups": groups[:real]}
    keys, fills = {"groups": 0, "images": 0}, {"groups": GROUP_FILL, "images": 0}
    if label_fill != LABEL_FILLS[0]:
        keys, fills = {**keys, "labels": 1}, {**fills, "labels": label_fill}
    shard_blocks = partial(
        automodel.shard_batch_contiguous, pad_multiple=pad_multiple, shard_primary=is_sharded_here,
        extra_seq_keys=keys, extra_pad_values=fills,
    )  # fmt: skip
    sharder = automodel.ContextParallelSharder(device_mesh=cp_mesh, shard_batch=shard_blocks, padding_token_id=PAD_ID)
    factory, sharded = sharder.shard(batch)
    with factory():
        of_model = {"inputs_embeds": 0, "input_ids": PAD_ID}
        if not is_sharded_here:  # as the model does then
            for name, fill in of_model.items():
                sharded[name], *_ = automodel.shard_sequence_for_cp_contiguous(
                    cp_mesh, sharded[name].clone(), pad_value=fill, pad_multiple=pad_multiple
                )  # a copy: one rank would get the caller's own tensor back
    full = sharder.gather_token_tensor(sharded["inputs_embeds"].square(), trim=True)
    tokens = (sharded[name] for name in ("inputs_embeds", "input_ids", "labels", "position_ids", "padding_mask"))
    return *tokens, sharded["groups"], F.pad(full, (0, 0, 0, less))


SCHEMES = (contiguous_positions, round_robin_positions, padded_sequence, padded_rows, packed_rows, contiguous_batch)
test_parity = parity(SCHEMES, lockstep=15, gloo=3)


def on_ranks(n, body):
    return run(body, CaseSpec(scheme="automodel", mesh={"cp": n})).results


class Owner(nn.Module):
    """A model that shards its batches itself, in blocks, and adds an entry to them."""

    def prepare_model_inputs_for_cp(self, batch, num_chunks):
        own = automodel.ContextParallelSharder(
            shard_batch=self.shard_blocks, local_token_global_indices=automodel.contiguous_local_indices
        )
        return {"cp_sharder": own, "chunks": num_chunks}

    def shard_blocks(self, cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0):
        ids, _, padded = automodel.shard_sequence_for_cp_contiguous(
            cp_mesh, batch["input_ids"], pad_value=padding_token_id, pad_multiple=3
        )
        layout = automodel.ShardLayout(original_seq_len=batch["input_ids"].shape[1], padded_seq_len=padded)
        return nullcontext, {**batch, "input_ids": ids}, layout


def test_a_model_may_own_the_sharder():
    def body(mesh, case):
        batch = {"input_ids": torch.arange(1, 11).view(1, 10)}
        sharder = automodel.ContextParallelSharder(Owner(), mesh.device_mesh, batch, padding_token_id=-7)
        _, sharded = sharder.shard(batch)
        gathered = sharder.gather_token_tensor(sharded["input_ids"], trim=True)
        return sharded["input_ids"].tolist(), sharded["chunks"], gathered.tolist()

    full = [[*range(1, 11)]]
    assert on_ranks(2, body) == (([[*range(1, 7)]], 1, full), ([[7, 8, 9, 10, -7, -7]], 1, full))


def test_rows_of_a_function_that_packs():
    """Its ShardLayout has the shape of the rows and each rank's positions of their stream."""

    def body(mesh, case):
        rows = torch.arange(8).view(2, 4)
        index = torch.tensor([[0, 3, 4, 7], [1, 2, 5, 6]])[mesh.rank("cp")]
        layout = automodel.ShardLayout(index, padded_seq_len=8, input_row_shape=(2, 4))
        sharder = automodel.ContextParallelSharder(
            device_mesh=mesh.device_mesh, shard_batch=lambda *_, **__: (nullcontext, {}, layout)
        )
        sharder.shard({})
        shard = sharder.shard_token_tensor(rows)
        return shard.tolist(), sharder.gather_token_tensor(shard, seq_dim=0, trim=True).tolist()

    full = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert on_ranks(2, body) == (([0, 3, 4, 7], full), ([1, 2, 5, 6], full))


def sharded_by(mesh):
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}
    sharder = automodel.ContextParallelSharder(None, mesh.device_mesh, batch)
    sharder.shard(batch)
    return sharder


def blocks_of(mesh, **more):
    options = {
        name: more.pop(name) for name in [*more] if name in ("pad_multiple", "extra_seq_keys", "extra_pad_values")
    }
    return automodel.shard_batch_contiguous(mesh.device_mesh["cp"], None, {"input_ids": X.long(), **more}, **options)


X = torch.zeros(2, 8)
REMEDY = "pass one, or convert the tensor"
REJECTED = [
    (
        "length",
        lambda m: automodel.contiguous_local_indices(m.device_mesh["cp"], 7),
        "context_parallel.contiguous_local_indices: padded_seq_len=7 cannot be sharded by contiguous over cp=2 "
        "(needs a multiple of 2); pad to 8",
    ),
    (
        "index",
        lambda m: automodel.shard_token_tensor_by_indices(X, torch.tensor([0, 8])),
        "context_parallel.shard_token_tensor_by_indices: local_indices are 0 to 8, "
        "but tensor has 8 positions along dim 1",
    ),
    (
        "negative index",
        lambda m: automodel.shard_token_tensor_by_indices(X, torch.tensor([-1, 3])),
        "context_parallel.shard_token_tensor_by_indices: local_indices are -1 to 3, "
        "but tensor has 8 positions along dim 1",
    ),
    (
        "number of indices",
        lambda m: automodel.gather_token_tensor_by_indices(m.device_mesh["cp"], X, torch.arange(4)),
        "context_parallel.gather_token_tensor_by_indices: local_indices has 4 "
        "and tensor has 8 positions along dim 1; pass one for each",
    ),
    (
        "neither",
        lambda m: automodel.ContextParallelSharder(None, m.device_mesh),
        "ContextParallelSharder: has neither batch nor shard_batch; pass the batch to shard, or a function that "
        "shards it",
        TypeError,
    ),
    (
        "no fill",
        lambda m: sharded_by(m).shard_token_tensor(torch.zeros(2, 6)),
        "ContextParallelSharder.shard_token_tensor: the batch is padded from 6 to 8 positions; pass the fill of tensor",
    ),
    (
        "fill of another dtype",
        lambda m: sharded_by(m).shard_token_tensor(torch.zeros(2, 6, dtype=torch.int64), fill=0.5),
        f"ContextParallelSharder.shard_token_tensor: fill=0.5 is not a value of int64; {REMEDY}",
    ),
    (
        "negative fill of bytes",
        lambda m: automodel.shard_sequence_for_cp_contiguous(
            m.device_mesh["cp"], torch.zeros(2, 6, dtype=torch.uint8), pad_value=-1
        ),
        f"context_parallel.shard_sequence_for_cp_contiguous: pad_value=-1 is not a value of uint8; {REMEDY}",
    ),
    (
        "other length",
        lambda m: sharded_by(m).shard_token_tensor(torch.zeros(2, 5), fill=0),
        "ContextParallelSharder.shard_token_tensor: tensor has 5 along dim 1, but the batch 6 positions, padded to 8; "
        "pass one of these",
    ),
    (
        "other shard",
        lambda m: sharded_by(m).gather_token_tensor(torch.zeros(2, 3)),
        "ContextParallelSharder: the tensor has 6 positions on all ranks, the batch 8; pass a tensor of this batch",
    ),
    (
        "before a batch",
        lambda m: automodel.ContextParallelSharder(None, m.device_mesh, {}).shard_token_tensor(X),
        "ContextParallelSharder: no batch is sharded yet; call shard(batch) first",
    ),
    (
        "mesh of another name",
        lambda m: automodel.shard_batch_load_balanced(m.device_mesh["tp"], None, {"input_ids": X.long()}),
        "context_parallel.shard_batch_load_balanced: cp_mesh has the dims ('tp',); pass mesh['cp']",
    ),
    (
        "mesh of two axes",
        lambda m: automodel.shard_batch_contiguous(m.device_mesh, None, {"input_ids": X.long()}),
        "context_parallel.shard_batch_contiguous: cp_mesh has 2 dims; pass the DeviceMesh that shards the sequence, "
        "mesh['cp']",
    ),
    (
        "left padding",
        lambda m: blocks_of(m, attention_mask=torch.arange(8).expand(2, 8) > 0),
        "context_parallel.shard_batch_contiguous: attention_mask: row 0 starts with 1 zeros; left padding is lost "
        "under cp; pad on the right",
    ),
    (
        "no multiple",
        lambda m: blocks_of(m, pad_multiple=0),
        "context_parallel.shard_batch_contiguous: pad_multiple=0 must be at least 1",
    ),
    (
        "fill without a key",
        lambda m: blocks_of(m, extra_pad_values={"group": 0}, extra_seq_keys={"groups": 0}),
        "context_parallel.shard_batch_contiguous: extra_pad_values names 'group'; extra_seq_keys has groups",
    ),
    (
        "fill of another dtype of an entry",
        lambda m: blocks_of(m, groups=X.T.long(), extra_pad_values={"groups": 0.5}, extra_seq_keys={"groups": 0}),
        f"context_parallel.shard_batch_contiguous: extra_pad_values['groups']=0.5 is not a value of int64; {REMEDY}",
    ),
    (
        "dim of an entry",
        lambda m: blocks_of(m, groups=X, extra_seq_keys={"groups": 7}),
        "context_parallel.shard_batch_contiguous: extra_seq_keys['groups']=7 is outside a tensor of 2 dims",
    ),
    (
        "length of an entry",
        lambda m: blocks_of(m, groups=X, extra_seq_keys={"groups": 0}),
        "context_parallel.shard_batch_contiguous: groups has 2 positions along dim 0, the rows have 8; name the dim of "
        "its sequence",
    ),
    (
        "fills that are no dict",
        lambda m: blocks_of(m, extra_pad_values=0),
        "context_parallel.shard_batch_contiguous: extra_pad_values=0; pass a dict of a number by name of an entry",
        TypeError,
    ),
]
test_rejection = rejected({"cp": 2, "tp": 1}, REJECTED)


def test_positions_of_two_ranks_that_overlap_are_rejected():
    """On every rank; the positions have to be gathered first."""

    def body(mesh, case):
        with pytest.raises(ValueError, match="local_indices of all ranks are not 0 to 7, each once"):
            automodel.gather_token_tensor_by_indices(mesh.device_mesh["cp"], X[:, :4], torch.arange(4))

    on_ranks(2, body)
