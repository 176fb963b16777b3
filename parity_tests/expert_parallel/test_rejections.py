"""Every message with which routers, experts and capacity reject arguments, on every rank, before anything is sent."""

import torch

from parity_tests.rejections import rejected
from torch_impl import expert_parallel as ep

X, LOGITS, BIAS = torch.zeros(5, 8), torch.zeros(5, 8), torch.zeros(8)
GATES, EXPERTS = torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int64)
GATE_UP, DOWN = torch.zeros(4, 8, 12), torch.zeros(4, 6, 8)
COUNTS = torch.tensor([2, 3, 0, 0])
KEPT = torch.ones(5, 2, dtype=torch.bool)


def routed(m, x=X, gates=GATES, experts=EXPERTS, gate_up=GATE_UP, down=DOWN, group=None, **options):
    return ep.routed_experts(x, gates, experts, gate_up, down, m["ep"] if group is None else group, **options)


def shared(m, x=X, gate_up=GATE_UP[0], down=DOWN[0], **options):
    return ep.shared_experts(x, gate_up, down, m["ep"], **options)


def sigmoid(bias=BIAS, k=2, **options):
    return ep.sigmoid_top_k(LOGITS, bias, k, **options)


def kept(m, experts=EXPERTS, gates=GATES, num_experts=8, capacity=2, by="position"):
    return ep.kept_choices(experts, gates, num_experts, capacity, m["ep"], by=by)


ROUTED, SHARED, GROUPED = "routed_experts", "shared_experts", "grouped_product"
SIDE_BY_SIDE = "pass gate and up side by side, twice as many columns as rows"
NO_GROUP = "ep_group is a str; pass a ProcessGroup (a group of size 1 for no expert parallelism)"
REJECTED = [
    (ROUTED, lambda m: routed(m, down=DOWN[:, :5]), f"gate_up has 12 columns, down 5 rows; {SIDE_BY_SIDE}"),
    (ROUTED, lambda m: routed(m, down=DOWN[:3]), "down is [3, 6, 8] but gate_up has e/ep=4: e/ep differs, 3 and 4"),
    (ROUTED, lambda m: routed(m, x=X[:, :7]), "gate_up is [4, 8, 12] but x has d=7: d differs, 8 and 7"),
    (
        ROUTED,
        lambda m: routed(m, gates=GATES[:4]),
        "gates is [4, 2] but x has t/ep/tp=5: t/ep/tp differs, 4 and 5",
    ),
    (ROUTED, lambda m: routed(m, experts=EXPERTS[:, :1]), "experts is [5, 1] but gates has k=2: k differs, 1 and 2"),
    (ROUTED, lambda m: routed(m, kept=KEPT[:, :1]), "kept is [5, 1] but gates has k=2: k differs, 1 and 2"),
    (ROUTED, lambda m: routed(m, exchange="ring"), "exchange='ring' is not one of all_to_all, all_gather"),
    (ROUTED, lambda m: routed(m, backend="triton"), "backend='triton' is not one of auto, grouped_mm, eager"),
    (ROUTED, lambda m: routed(m, down=DOWN.to("meta")), "down is on meta but x on cpu; pass one device"),
    (ROUTED, lambda m: routed(m, gates=GATES.to("meta")), "gates is on meta but x on cpu; pass one device"),
    (ROUTED, lambda m: routed(m, experts=EXPERTS.to("meta")), "experts is on meta but x on cpu; pass one device"),
    (ROUTED, lambda m: routed(m, kept=KEPT.to("meta")), "kept is on meta but x on cpu; pass one device"),
    (
        ROUTED,
        lambda m: routed(m, gates=GATES[:, :0], experts=EXPERTS[:, :0]),
        "experts has k=0 choices of a token; pass one or more",
    ),
    (
        ROUTED,
        lambda m: routed(m, gate_up=GATE_UP[:0], down=DOWN[:0]),
        "gate_up is [0, 8, 12] and has no expert; give each rank one or more",
    ),
    (
        ROUTED,
        lambda m: routed(m, backend="grouped_mm"),
        "backend='grouped_mm' needs rows of a multiple of 16 bytes, weight is [4, 6, 8]; use 'auto' or 'eager'",
    ),
    (
        ROUTED,
        lambda m: routed(m, X.double(), GATES, EXPERTS, GATE_UP.double(), DOWN.double(), backend="grouped_mm"),
        "backend='grouped_mm' has no float64; use 'auto' or 'eager'",
    ),
    (SHARED, lambda m: shared(m, down=DOWN[0, :5]), f"gate_up has 12 columns, down 5 rows; {SIDE_BY_SIDE}"),
    (
        SHARED,
        lambda m: shared(m, gate_up=GATE_UP),
        "gate_up is [4, 8, 12]; its dims must be [d 2f/tp]; reshape it to these",
    ),
    (
        SHARED,
        lambda m: shared(m, backend="grouped_mm"),
        "backend='grouped_mm' needs rows of a multiple of 16 bytes, weight is [1, 6, 8]; use 'auto' or 'eager'",
    ),
    (
        GROUPED,
        lambda m: ep.grouped_product(X, GATE_UP, COUNTS[:3]),
        "counts is [3] but weight has e=4: e differs, 3 and 4",
    ),
    (
        GROUPED,
        lambda m: ep.grouped_product(X, GATE_UP, torch.tensor([2, 1, 0, 3])),
        "counts=[2, 1, 0, 3] must be at least 0 and add up to n=5, the rows of x",
    ),
    (
        GROUPED,
        lambda m: ep.grouped_product(X, GATE_UP, torch.tensor([6, -1, 0, 0])),
        "counts=[6, -1, 0, 0] must be at least 0 and add up to n=5, the rows of x",
    ),
    ("softmax_top_k", lambda m: ep.softmax_top_k(LOGITS, 9), "k=9 of e=8 experts; choose at most e"),
    ("softmax_top_k", lambda m: ep.softmax_top_k(LOGITS, 0), "k=0 must be at least 1"),
    ("top_k_softmax", lambda m: ep.top_k_softmax(LOGITS, 9), "k=9 of e=8 experts; choose at most e"),
    ("sigmoid_top_k", lambda m: sigmoid(bias=BIAS[:7]), "bias is [7] but logits has e=8: e differs, 7 and 8"),
    ("sigmoid_top_k", lambda m: sigmoid(groups=3), "groups=3 must divide e=8 experts"),
    ("sigmoid_top_k", lambda m: sigmoid(chosen_groups=2), "chosen_groups=2 of groups=1; choose at most all"),
    (
        "sigmoid_top_k",
        lambda m: sigmoid(k=3, groups=4),
        "k=3 of 2 experts in chosen_groups=1; choose more groups",
    ),
    (
        "balanced_bias",
        lambda m: ep.balanced_bias(BIAS, COUNTS, 0.1),
        "counts is [4] but bias has e=8: e differs, 4 and 8",
    ),
    ("kept_choices", lambda m: kept(m, by="gate"), "by='gate' is not one of position, probability"),
    ("kept_choices", lambda m: kept(m, capacity=-1), "capacity=-1 must be at least 0"),
    ("kept_choices", lambda m: kept(m, gates=GATES[:, :1]), "gates is [5, 1] but experts has k=2: k differs, 1 and 2"),
    ("expert_capacity", lambda m: ep.expert_capacity(8, 2, 4, 0.0), "factor=0.0 must be positive"),
    ("z_loss", lambda m: ep.z_loss(LOGITS, 0), "tokens=0 must be at least 1"),
    (
        "z_loss",
        lambda m: ep.z_loss(LOGITS, 5, EXPERTS[:3]),
        "experts is [3, 2] but logits has t/data=5: t/data differs, 3 and 5",
    ),
    ("token_count", lambda m: ep.token_count(EXPERTS, 0, m["ep"]), "num_experts=0 must be at least 1"),
]
OF_ANOTHER_TYPE = [
    (ROUTED, lambda m: routed(m, group="ep"), NO_GROUP),
    (ROUTED, lambda m: routed(m, down=DOWN.double()), "down is float64 but x is float32; pass one dtype"),
    (ROUTED, lambda m: routed(m, experts=GATES), "experts is float32; it must be integers"),
    (ROUTED, lambda m: routed(m, kept=EXPERTS), "kept is int64; it must be bool"),
    (
        GROUPED,
        lambda m: ep.grouped_product(X.double(), GATE_UP, COUNTS),
        "weight is float32 but x is float64; pass one dtype",
    ),
    ("softmax_top_k", lambda m: ep.softmax_top_k(EXPERTS, 1), "logits is int64; logits must be floating"),
    (
        "softmax_top_k",
        lambda m: ep.softmax_top_k(LOGITS, 2, experts=GATES),
        "experts is float32; ids must be int32 or int64",
    ),
    (
        "load_counts",
        lambda m: ep.load_counts(GATES, 8, m["ep"]),
        "experts is float32; it must be integers",
    ),
    ("z_loss", lambda m: ep.z_loss(LOGITS, 2.0), "tokens=2.0 is a float; pass an int"),
]


test_rejection = rejected(
    {"ep": 2},
    [
        (f"{function} {text[:40]}", call, f"expert_parallel.{function}: {text}", kind)
        for kind, rows in ((ValueError, REJECTED), (TypeError, OF_ANOTHER_TYPE))
        for function, call, text in rows
    ],
)
