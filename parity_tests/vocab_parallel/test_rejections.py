"""Rejections by entropy, cross entropy, top-k, distillation and log-probability at several ids, in full sentences."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from parity_tests.rejections import rejected
from torch_impl import vocab_parallel as vp

LOGITS, TEACHER = torch.zeros(2, 8, 8), torch.zeros(2, 8, 3)
IDS = torch.zeros(2, 8, 3, dtype=torch.int64)
RANGE = dict(vocab_start_index=0, vocab_end_index=8)
HINT = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"


def gather(group, logits=LOGITS, ids=IDS, start=0, end=8, chunk_size=None):
    return vp.ChunkedDistributedGatherLogprob.apply(logits, ids, start, end, chunk_size, group)


def entropy(group, logits=LOGITS, chunk_size=None):
    return vp.ChunkedDistributedEntropy.apply(logits, chunk_size, group)


def cross_entropy(group, student=LOGITS, target=LOGITS):
    return vp.DistributedCrossEntropy.apply(student, target, group)


def topk(group, k=2, logits=LOGITS, **options):
    return vp.distributed_vocab_topk(logits, k, group, **{**RANGE, **options})


def logits_at(tp_group, cp_group=None, logits=LOGITS, ids=IDS, **options):
    return vp.gather_logits_at_global_indices(logits, ids, tp_group, cp_group, **{**RANGE, **options})


def distillation(*groups, student=LOGITS, teacher=TEACHER, ids=IDS):
    return vp.get_distillation_topk_logprobs_from_logits(student, teacher, ids, True, True, *groups)


def as_dtensor(mesh, placements, shape=(2, 16, 16)):
    return DTensor.from_local(LOGITS, mesh.device_mesh, placements, run_check=False, shape=shape, stride=(1, 1, 1))


def logits_without_tp(mesh):
    """Logits of a mesh that has cp and no tp."""
    return DTensor.from_local(LOGITS, mesh.device_mesh["cp"], [Shard(1)], run_check=False)


GATHER, ENTROPY = "vocab_parallel.ChunkedDistributedGatherLogprob", "vocab_parallel.ChunkedDistributedEntropy"
CROSS, TOPK = "vocab_parallel.DistributedCrossEntropy", "vocab_parallel.distributed_vocab_topk"
AT = "vocab_parallel.gather_logits_at_global_indices"
DISTILLATION = "vocab_parallel.get_distillation_topk_logprobs_from_logits"
CP_HINT = "pass a ProcessGroup (a group of size 1 for no context parallelism)"
BLOCKS = "must be at least 1, or None for automatic blocks"
WIDE = "vocab range [0, 16) has 16 ids but vocab_parallel_logits has 8 columns"

REJECTED = [
    # E1: an argument that is not a group
    (TypeError, lambda m: gather(None), f"{GATHER}: tp_group is None; {HINT}"),
    (TypeError, lambda m: entropy(None), f"{ENTROPY}: tp_group is None; {HINT}"),
    (TypeError, lambda m: cross_entropy(None), f"{CROSS}: group is None; {HINT}"),
    (TypeError, lambda m: topk(None), f"{TOPK}: tp_group is None; {HINT}"),
    (TypeError, lambda m: logits_at("tp"), f"{AT}: tp_group is a str; {HINT}"),
    (TypeError, lambda m: logits_at(None, 2), f"{AT}: cp_group is an int; {CP_HINT}"),
    (TypeError, lambda m: distillation(0, "tp"), f"{DISTILLATION}: vocab_parallel_group is a str; {HINT}"),
    (TypeError, lambda m: distillation(None, None, 2), f"{DISTILLATION}: context_parallel_group is an int; {CP_HINT}"),
    # E2: a range that does not fit
    (ValueError, lambda m: gather(m["tp"], end=16), f"{GATHER}: {WIDE}"),
    (
        ValueError,
        lambda m: gather(m["tp"], start=-1),
        f"{GATHER}: vocab range [-1, 8) starts below 0; vocab_start_index is its first id",
    ),
    (ValueError, lambda m: topk(m["tp"], vocab_end_index=16), f"{TOPK}: {WIDE}"),
    (ValueError, lambda m: logits_at(None, vocab_end_index=16), f"{AT}: {WIDE}"),
    (
        ValueError,
        lambda m: logits_at(None, vocab_end_index=-1),
        f"{AT}: vocab range [0, -1) is reversed; vocab_end_index is one past its last id",
    ),
    # E3: shapes that disagree
    (
        ValueError,
        lambda m: gather(m["tp"], ids=IDS[:, :7]),
        f"{GATHER}: global_indices is [2, 7, 3] but vocab_parallel_logits has leading shape [2, 8]",
    ),
    (
        ValueError,
        lambda m: gather(m["tp"], ids=IDS[..., 0]),
        f"{GATHER}: global_indices is [2, 8] but vocab_parallel_logits has leading shape [2, 8]; it needs k after them",
    ),
    (
        ValueError,
        lambda m: cross_entropy(m["tp"], target=LOGITS[..., :5]),
        f"{CROSS}: target_logits is [2, 8, 5] but student_logits has v/tp=8: v/tp differs, 5 and 8",
    ),
    (
        ValueError,
        lambda m: logits_at(None, m["cp"], ids=IDS.repeat(1, 3, 1)),
        f"{AT}: global_indices has 24 positions but vocab_parallel_logits covers 16 (8 per rank, cp=2)",
    ),
    (
        ValueError,
        lambda m: logits_at(m["tp"], ids=IDS.repeat(1, 2, 1)),
        f"{AT}: global_indices has 16 positions but vocab_parallel_logits covers 8",
    ),
    (
        ValueError,
        lambda m: logits_at(m["tp"], ids=IDS[0]),
        f"{AT}: global_indices is [8, 3]; its dims must be [b s k]; reshape it to these",
    ),
    (
        ValueError,
        lambda m: distillation(ids=IDS[:, :7]),
        f"{DISTILLATION}: teacher_topk_indices is [2, 7, 3] but teacher_topk_logits has s=8: s differs, 7 and 8",
    ),
    (
        ValueError,
        lambda m: distillation(student=LOGITS[:, :6]),
        f"{DISTILLATION}: teacher_topk_indices has 8 positions but student_logits covers 6",
    ),
    (
        ValueError,
        lambda m: distillation(m.rank("tp"), m["tp"], student=LOGITS[:1]),
        f"{DISTILLATION}: teacher_topk_logits is [2, 8, 3] but student_logits has b=1: b differs, 2 and 1",
    ),
    # E4: dtypes
    (
        TypeError,
        lambda m: gather(m["tp"], ids=IDS.float()),
        f"{GATHER}: global_indices is float32; ids must be int32 or int64",
    ),
    (
        TypeError,
        lambda m: entropy(m["tp"], LOGITS.long()),
        f"{ENTROPY}: vocab_parallel_logits is int64; logits must be floating",
    ),
    (
        TypeError,
        lambda m: cross_entropy(m["tp"], target=LOGITS.int()),
        f"{CROSS}: target_logits is int32; logits must be floating",
    ),
    (
        TypeError,
        lambda m: topk(m["tp"], logits=LOGITS.bool()),
        f"{TOPK}: vocab_parallel_logits is bool; logits must be floating",
    ),
    (
        TypeError,
        lambda m: logits_at(None, logits=LOGITS.int()),
        f"{AT}: vocab_parallel_logits is int32; logits must be floating",
    ),
    (
        TypeError,
        lambda m: logits_at(None, ids=IDS.bool()),
        f"{AT}: global_indices is bool; ids must be int32 or int64",
    ),
    (
        TypeError,
        lambda m: distillation(student=LOGITS.short()),
        f"{DISTILLATION}: student_logits is int16; logits must be floating",
    ),
    (
        TypeError,
        lambda m: distillation(teacher=IDS),
        f"{DISTILLATION}: teacher_topk_logits is int64; logits must be floating",
    ),
    (
        TypeError,
        lambda m: distillation(ids=IDS.double()),
        f"{DISTILLATION}: teacher_topk_indices is float64; ids must be int32 or int64",
    ),
    # E5: chunks
    (ValueError, lambda m: gather(m["tp"], chunk_size=0), f"{GATHER}: chunk_size=0 {BLOCKS}"),
    (ValueError, lambda m: entropy(m["tp"], chunk_size=-1), f"{ENTROPY}: chunk_size=-1 {BLOCKS}"),
    (ValueError, lambda m: topk(m["tp"], chunk_size=0), f"{TOPK}: chunk_size=0 {BLOCKS}"),
    (ValueError, lambda m: logits_at(None, chunk_size=-2), f"{AT}: chunk_size=-2 {BLOCKS}"),
    # E6: sequences that cannot be sharded
    (
        ValueError,
        lambda m: logits_at(None, m["cp"], LOGITS[:, :7]),
        f"{AT}: s=14 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 16",
    ),
    (
        ValueError,
        lambda m: distillation(None, None, m["cp"], student=LOGITS[:, :5]),
        f"{DISTILLATION}: s=10 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 12",
    ),
    (
        ValueError,
        lambda m: distillation(student=as_dtensor(m, [Shard(1), Shard(2)], (2, 15, 16))),
        f"{DISTILLATION}: s=15 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 16",
    ),
    # E7: errors of a single function
    (ValueError, lambda m: topk(m["tp"], -1), f"{TOPK}: k=-1 must be at least 0"),
    (
        ValueError,
        lambda m: distillation(m.rank("tp"), m["tp"], teacher=TEACHER[..., :0], ids=IDS[..., :0]),
        f"{DISTILLATION}: teacher_topk_indices has k=0; top-k distillation needs at least one id",
    ),
    (
        ValueError,
        lambda m: distillation(None, m["tp"]),
        f"{DISTILLATION}: vocab_parallel_rank is None but vocab_parallel_group is given; pass both",
    ),
    (
        ValueError,
        lambda m: distillation(student=as_dtensor(m, [Shard(1), Replicate()])),
        f"{DISTILLATION}: student_logits is Replicate over tp; redistribute to Shard(-1)",
    ),
    (
        ValueError,
        lambda m: distillation(student=as_dtensor(m, [Shard(2), Shard(2)])),
        f"{DISTILLATION}: student_logits is Shard(dim=2) over cp; redistribute to Shard(1) or Replicate",
    ),
    (
        ValueError,
        lambda m: distillation(0, m["tp"], student=as_dtensor(m, [Shard(1), Shard(2)])),
        f"{DISTILLATION}: student_logits is a DTensor, whose mesh has the groups; drop vocab_parallel_group",
    ),
    (
        ValueError,
        lambda m: distillation(None, None, m["cp"], student=as_dtensor(m, [Shard(1), Shard(2)])),
        f"{DISTILLATION}: student_logits is a DTensor, whose mesh has the groups; drop context_parallel_group",
    ),
    (
        ValueError,
        lambda m: distillation(student=logits_without_tp(m)),
        f"{DISTILLATION}: student_logits has no mesh dim 'tp' (mesh dims: cp); name the one that shards the "
        "vocabulary 'tp'",
    ),
]


test_rejection_on_every_rank_before_anything_is_sent = rejected(
    {"cp": 2, "tp": 2}, [(text[15:90], call, text, kind) for kind, call, text in REJECTED]
)


def test_a_rank_without_its_group():
    with pytest.raises(ValueError, match="vocab_parallel_rank=1 but vocab_parallel_group is None; pass both"):
        distillation(1, None)


test_a_rank_that_is_not_this_rank_of_the_group = rejected(
    {"tp": 2},
    [
        (
            "the other rank",
            lambda mesh: distillation(1 - mesh.rank("tp"), mesh["tp"]),
            tuple(
                f"{DISTILLATION}: vocab_parallel_rank={1 - rank} but this is rank {rank} of vocab_parallel_group"
                for rank in range(2)
            ),
        )
    ],
)


PLAIN_TENSORS = {
    "vocab_parallel.logprob: vocab_parallel_logits": lambda x, m: vp.vocab_parallel_logprob(
        x, IDS[..., 0], m["tp"], **RANGE
    ),
    "vocab_parallel.logprob: target": lambda x, m: vp.vocab_parallel_logprob(LOGITS, x, m["tp"], **RANGE),
    f"{ENTROPY}: vocab_parallel_logits": lambda x, m: entropy(m["tp"], x),
    f"{CROSS}: student_logits": lambda x, m: cross_entropy(m["tp"], student=x),
    f"{CROSS}: target_logits": lambda x, m: cross_entropy(m["tp"], target=x),
    f"{AT}: global_indices": lambda x, m: logits_at(m["tp"], ids=x),
    f"{DISTILLATION}: teacher_topk_logits": lambda x, m: distillation(0, None, m["cp"], teacher=x),
    "vocab_parallel.group_all_reduce_sum: tensor": lambda x, m: vp.group_all_reduce_sum(x, m["tp"]),
    "vocab_parallel.cp_shift_next: tensor": lambda x, m: vp.cp_shift_next(x, m["cp"]),
}


test_a_dtensor_in_place_of_a_plain_tensor_is_rejected = rejected(
    {"cp": 2, "tp": 2},
    [
        (
            label,
            lambda mesh, call=call: call(as_dtensor(mesh, [Shard(1), Shard(2)]), mesh),
            f"{label} is a DTensor; pass {label.split()[-1]}.to_local()",
            TypeError,
        )
        for label, call in PLAIN_TENSORS.items()
    ],
)


def next_tokens_with_dtensor_ids(mesh):
    ids = DTensor.from_local(IDS[..., 0], mesh.device_mesh, [Replicate(), Replicate()], run_check=False)
    return vp.get_next_token_logprobs_from_logits(ids, LOGITS, None, mesh.rank("tp"), mesh["tp"])


test_ids_of_plain_logits_are_plain = rejected(
    {"cp": 1, "tp": 2},
    [
        (
            "input_ids",
            next_tokens_with_dtensor_ids,
            "vocab_parallel.get_next_token_logprobs_from_logits: input_ids is a DTensor; pass input_ids.to_local()",
            TypeError,
        )
    ],
)
