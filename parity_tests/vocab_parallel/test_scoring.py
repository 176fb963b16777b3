"""Rejections in scoring next tokens: every sentence in full, on every rank, before anything is sent."""

from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor, Shard

from parity_tests.rejections import rejected
from torch_impl import vocab_parallel as vp

IDS = torch.arange(16).view(2, 8)
PREFIX = "vocab_parallel.from_parallel_logits_to_logprobs"
ROUTE = "vocab_parallel.get_next_token_logprobs_from_logits"
NO_CP = "pass a ProcessGroup (a group of size 1 for no context parallelism)"
NO_TP = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"
LOCAL = torch.zeros(2, 4, 3)


def plain(mesh, logits=LOCAL, target=IDS, start=0, end=3, tp="tp", cp="cp", **options):
    """The scores, with groups by their axis or as they are."""
    tp, cp = (mesh[group] if isinstance(group, str) else group for group in (tp, cp))
    return vp.from_parallel_logits_to_logprobs(logits, target, start, end, tp, cp_group=cp, **options)


def routed(mesh, logits=LOCAL, ids=IDS, rank=None, cp="cp", tp="tp", **options):
    return vp.get_next_token_logprobs_from_logits(
        ids,
        logits,
        vocab_parallel_rank=rank,
        vocab_parallel_group=mesh[tp] if tp else None,
        context_parallel_group=mesh[cp] if cp else None,
        **options,
    )


def params(**values):
    return {"sampling_params": SimpleNamespace(**{"top_k": None, "top_p": None, "temperature": 1.0, **values})}


def as_dtensor(mesh):
    return DTensor.from_local(LOCAL, mesh.device_mesh["tp"], [Shard(2)])


REJECTED = [
    (lambda m: plain(m, tp=None), TypeError, f"{PREFIX}: tp_group is None; {NO_TP}"),
    (lambda m: plain(m, cp=3), TypeError, f"{PREFIX}: cp_group is an int; {NO_CP}"),
    (
        lambda m: plain(m, target=IDS.float()),
        TypeError,
        f"{PREFIX}: target is float32; ids must be int32 or int64",
    ),
    (
        lambda m: plain(m, logits=LOCAL.int()),
        TypeError,
        f"{PREFIX}: vocab_parallel_logits is int32; logits must be floating",
    ),
    (
        lambda m: plain(m, end=8),
        ValueError,
        f"{PREFIX}: vocab range [0, 8) has 8 ids but vocab_parallel_logits has 3 columns",
    ),
    (
        lambda m: plain(m, target=IDS[:1]),
        ValueError,
        f"{PREFIX}: target is [1, 8] but vocab_parallel_logits has b=2: b differs, 1 and 2",
    ),
    (
        lambda m: plain(m, logits=LOCAL[:, :2]),
        ValueError,
        f"{PREFIX}: target has 8 positions but vocab_parallel_logits covers 4 (2 per rank, cp=2)",
    ),
    (
        lambda m: plain(m, logits=LOCAL, cp=None),
        ValueError,
        f"{PREFIX}: target has 8 positions but vocab_parallel_logits covers 4",
    ),
    (
        lambda m: plain(m, logits=torch.zeros(2, 5, 3)),
        ValueError,
        f"{PREFIX}: s=10 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 12",
    ),
    (
        lambda m: plain(m, chunk_size=0),
        ValueError,
        f"{PREFIX}: chunk_size=0 must be at least 1, or None for automatic blocks",
    ),
    (
        lambda m: plain(m, **params(top_p=90)),
        ValueError,
        f"{PREFIX}: top_p=90 must lie in [0, 1] (1.0 turns it off)",
    ),
    (lambda m: plain(m, **params(temperature=0.0)), ValueError, f"{PREFIX}: temperature=0.0 must be positive"),
    (
        routed,
        ValueError,
        f"{ROUTE}: vocab_parallel_rank is None but vocab_parallel_group is given; pass both",
    ),
    (
        lambda m: routed(m, rank=2),
        ValueError,
        f"{ROUTE}: vocab_parallel_rank=2 but this is rank 0 of vocab_parallel_group",
    ),
    (
        lambda m: routed(m, rank=0, seq_index=torch.arange(8)),
        ValueError,
        f"{ROUTE}: seq_index is given but next_token_logits is not a DTensor; drop it or pass a DTensor",
    ),
    (
        lambda m: routed(m, rank=0, logits=LOCAL.long()),
        TypeError,
        f"{ROUTE}: next_token_logits is int64; logits must be floating",
    ),
    (
        lambda m: routed(m, rank=0, logits=LOCAL[:, :2]),
        ValueError,
        f"{ROUTE}: input_ids has 8 positions but next_token_logits covers 4 (2 per rank, cp=2)",
    ),
    (
        lambda m: routed(m, as_dtensor(m), rank=0, cp=None),
        ValueError,
        f"{ROUTE}: next_token_logits is a DTensor, whose mesh has the groups; drop vocab_parallel_group",
    ),
    (
        lambda m: routed(m, as_dtensor(m), tp=None),
        ValueError,
        f"{ROUTE}: next_token_logits is a DTensor, whose mesh has the groups; drop context_parallel_group",
    ),
]


test_rejection = rejected({"cp": 2, "tp": 1}, [(text[15:90], call, text, kind) for call, kind, text in REJECTED])
