"""The output layer's rejections: every sentence in full, on every rank, before anything is sent."""

import torch

from parity_tests.rejections import rejected
from torch_impl import vocab_parallel as vp

HIDDEN, WEIGHT = torch.zeros(8, 2, 4), torch.zeros(3, 4)
IDS = torch.zeros(2, 16, dtype=torch.int64)
FACE = "vocab_parallel.from_parallel_hidden_states_to_logprobs"
FUNCTION = "vocab_parallel.ChunkedDistributedHiddenStatesToLogprobs"
NO_TP = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"
NO_CP = "pass a ProcessGroup (a group of size 1 for no context parallelism)"


def face(mesh, hidden=HIDDEN, weight=WEIGHT, target=IDS, end=3, tp="tp", cp="cp", **options):
    tp, cp = (mesh[group] if isinstance(group, str) else group for group in (tp, cp))
    return vp.from_parallel_hidden_states_to_logprobs(
        hidden, weight, None, True, target, 0, end, tp, cp_group=cp, **options
    )


def function(mesh, hidden=HIDDEN, weight=WEIGHT, target=IDS, chunk_size=2):
    return vp.ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, target, weight, 0, 3, chunk_size, mesh["tp"])


REJECTED = [
    (lambda m: face(m, tp=None), TypeError, f"{FACE}: tp_group is None; {NO_TP}"),
    (lambda m: face(m, cp=1), TypeError, f"{FACE}: cp_group is an int; {NO_CP}"),
    (lambda m: face(m, target=IDS.bool()), TypeError, f"{FACE}: target is bool; ids must be int32 or int64"),
    (
        lambda m: face(m, hidden=HIDDEN.long()),
        TypeError,
        f"{FACE}: tensor_parallel_hidden_states is int64; it must be floating",
    ),
    (
        lambda m: face(m, weight=None),
        ValueError,
        f"{FACE}: output_weight_layer and output_weight are both None; pass the [v, d] weight",
    ),
    (
        lambda m: face(m, weight=torch.zeros(3, 5)),
        ValueError,
        f"{FACE}: output_weight_layer is [3, 5] but tensor_parallel_hidden_states has d=4: d differs, 5 and 4",
    ),
    (
        lambda m: face(m, weight=WEIGHT.bfloat16()),
        ValueError,
        f"{FACE}: output_weight_layer is bfloat16 but hidden states are float32",
    ),
    (
        lambda m: face(m, target=IDS[:1]),
        ValueError,
        f"{FACE}: target is [1, 16] but tensor_parallel_hidden_states has b=2: b differs, 1 and 2",
    ),
    (
        lambda m: face(m, end=4),
        ValueError,
        f"{FACE}: vocab range [0, 4) has 4 ids but output_weight_layer has 3 rows",
    ),
    (
        lambda m: face(m, chunk_size=0),
        ValueError,
        f"{FACE}: chunk_size=0 must be at least 1, or None for automatic blocks",
    ),
    (
        lambda m: face(m, target=IDS[:, :10]),
        ValueError,
        f"{FACE}: s=10 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 12",
    ),
    (
        lambda m: face(m, hidden=HIDDEN[:6]),
        ValueError,
        f"{FACE}: tensor_parallel_hidden_states has 6 positions; with s=16, cp=2, tp=2 it must have "
        "8 (replicated) or 4 (sequence-parallel)",
    ),
    (
        lambda m: face(m, cu_seqlens_padded=torch.tensor([0, 6])),
        ValueError,
        f"{FACE}: cu_seqlens_padded[1] - cu_seqlens_padded[0] = 6 is not a multiple of 2*cp = 4; pad sequence 0 to 8",
    ),
    (
        lambda m: face(m, cu_seqlens_padded=torch.tensor([0, 20])),
        ValueError,
        f"{FACE}: cu_seqlens_padded ends at 20 but target covers 16",
    ),
    (
        lambda m: function(m, target=IDS[:, :7], hidden=HIDDEN[:5]),
        ValueError,
        f"{FUNCTION}: tensor_parallel_hidden_states has 5 positions; with s=7, cp=1, tp=2 it must have "
        "7 (replicated); 7 is not a multiple of tp=2, so they cannot be sequence-parallel",
    ),
    (
        lambda m: function(m, target=IDS[:, :8], chunk_size=-1),
        ValueError,
        f"{FUNCTION}: chunk_size=-1 must be at least 1, or None for automatic blocks",
    ),
]


test_rejection = rejected({"cp": 2, "tp": 2}, [(text[15:100], call, text, kind) for call, kind, text in REJECTED])
