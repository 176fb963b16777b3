"""An invalid batch, mesh or tensor is rejected by its name on every rank before any collective."""

import torch

from parity_tests.rejections import check_rejection, rejected
from torch_impl import context_parallel as cp

LENGTHS = torch.tensor([[4]])
ROWS = {"input_ids": torch.zeros(3, 4, dtype=torch.int64)}
PACKED = {"input_ids": torch.arange(4)[None], "seq_lens": LENGTHS, "seq_lens_padded": LENGTHS}
STREAM = {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 8])}
NO_BATCH = "batch is None; pass a dict of tensors by name"


def make(mesh, loss_mask=None, **options):
    return cp.make_cp_batch_and_ctx(mesh, ROWS | options, loss_mask)


def shard(batch, mesh):
    return cp._shard_thd_chunk_for_te(batch, mesh, "thd", -1000, 0)


REJECTED = [
    (lambda m: cp.make_cp_batch_and_ctx(m, None), f"batch: {NO_BATCH}"),
    (lambda m: cp.make_cp_batch_and_ctx(None, None), f"batch: {NO_BATCH}"),
    (lambda m: cp._build_position_ids(None, "cpu"), f"batch: {NO_BATCH}"),
    (
        lambda m: cp.make_cp_batch_and_ctx(5, {"input_ids": torch.zeros(1, 4)}),
        "batch: device_mesh is an int; pass a DeviceMesh with a dim named cp, or None",
    ),
    (lambda m: cp.make_cp_batch_and_ctx(m, {"input_ids": [[1, 2]]}), "batch: input_ids is a list; pass a Tensor"),
    (lambda m: make(m, labels=[[1]]), "batch: labels is a list; pass a Tensor"),
    (lambda m: make(m, loss_mask=[[1]]), "batch: loss_mask is a list; pass a Tensor"),
    (lambda m: cp.make_cp_batch_and_ctx(None, {}, [[1]], use_te=True), "batch: loss_mask is a list; pass a Tensor"),
    (lambda m: make(m, attention_mask=[[1]]), "batch: attention_mask is a list; pass a Tensor"),
    (lambda m: make(m, seq_lens_padded=[[4]]), "batch: seq_lens_padded is a list; pass a Tensor"),
    (
        lambda m: cp.make_cp_batch_for_te(5, PACKED),
        "te: cp_mesh is an int; pass the DeviceMesh that shards the sequence, mesh['cp']",
    ),
    (lambda m: cp.make_cp_batch_for_te(m, None), f"te: {NO_BATCH}"),
    (lambda m: shard(None, m), f"te: {NO_BATCH}"),
    (lambda m: shard(STREAM | {"input_ids": [1]}, m), "te: input_ids is a list; pass a Tensor"),
    (lambda m: shard(STREAM | {"max_seqlen": 4}, m), "te: max_seqlen is an int; pass a Tensor"),
    (
        lambda m: shard(STREAM | {"cu_seqlens": torch.tensor([0.0, 8.0])}, m),
        "te: cu_seqlens: dtype is float32; offsets are integers",
    ),
    (
        lambda m: shard(STREAM | {"cu_seqlens_padded": "ab"}, m),
        "te: cu_seqlens_padded='ab' are not offsets; pass a row of integers",
    ),
]


test_rejection = rejected(
    {"cp": 2},
    [
        (text[:60], lambda mesh, call=call: call(mesh.device_mesh["cp"]), f"context_parallel.{text}", TypeError)
        for call, text in REJECTED
    ],
)


def test_an_empty_batch_is_rejected():
    message = (
        "context_parallel.batch: batch has neither input_ids nor inputs_embeds; it has nothing; add one of the two"
    )
    check_rejection({"cp": 2}, "empty", lambda mesh: cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], {}), message)
