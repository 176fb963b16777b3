"""The dry run: shards and communication of a small model, added up parameter by parameter."""

from math import prod

import pytest
import torch
from torch import nn

from torch_impl.parallelizer import translate_to_torch_parallel_style as named
from torch_impl.parallelizer.dry_run import dry_run

VOCAB, D, F = 10, 12, 8
SHAPES = {"embed.weight": (VOCAB, D), "layers.*.up.weight": (F, D), "layers.*.up.bias": (F,)}
SHAPES |= {"layers.*.down.weight": (D, F), "layers.*.down.bias": (D,), "head.weight": (VOCAB, D)}
FROZEN = "layers.*.up.bias"
OWN_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.absent": "replicate"}


class Model(nn.Module):
    """Ids to vectors, two blocks and a head; one bias of each block does not move."""

    _tp_plan = OWN_PLAN

    def __init__(self, dtype):
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(VOCAB, D, dtype=dtype)
            self.layers = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(D, F, dtype=dtype), "down": nn.Linear(F, D, dtype=dtype)})
                for _ in range(2)
            )
            self.head = nn.Linear(D, VOCAB, bias=False, dtype=dtype)
        for layer in self.layers:
            layer["up"].bias.requires_grad_(False)

    def get_input_embeddings(self):
        return self.embed


INPUT_GRADIENT = ("backward", "all_reduce", lambda i, o, n: i)
OUTPUT = ("forward", "all_reduce", lambda i, o, n: o)
# For each style: the sharded dim of a weight and of a bias, the number of parts, and the bytes sent for one token.
STYLES = {
    "colwise": (0, 0, 1, [INPUT_GRADIENT]),
    "rowwise": (1, None, 1, [OUTPUT]),
    "colwise_gather_output": (0, 0, 1, [INPUT_GRADIENT, ("forward", "all_gather", lambda i, o, n: -(-o // n))]),
    "rowwise_split_input": (1, None, 1, [OUTPUT, ("backward", "all_gather", lambda i, o, n: -(-i // n))]),
    "packed_colwise": (0, 0, 2, [INPUT_GRADIENT]),
    "packed_rowwise": (1, None, 2, [OUTPUT]),
    "embedding_rowwise": (0, None, 1, [OUTPUT]),
    "embedding_colwise": (1, None, 1, [("forward", "all_gather", lambda i, o, n: -(-o // n))]),
    "replicate": (None, None, 1, []),
    "replicated_with_grad_allreduce": (None, None, 1, None),  # each gradient that there is
    "all_reduce": (None, None, 1, None),  # without a rule
}
PLANS = (
    {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
    {"embed": "embedding_rowwise", "layers.*.up": "colwise_gather_output", "head": "colwise_gather_output"},
    {"layers.*.up": "packed_colwise", "layers.*.down": "packed_rowwise", "head": "replicate"},
    {"embed": "embedding_colwise", "layers.*.down": "rowwise_split_input"},
    {"layers.*.up": "replicated_with_grad_allreduce", "head": "all_reduce"},
    None,
)
# For each mesh: its axes, and those that tp shards over, that FSDP shards over, and that replicate.
MESHES = (
    ({"dp_shard": 1}, (None, "dp_shard", None)),
    ({"tp": 2}, ("tp", "dp_shard_cp", None)),
    ({"dp_shard": 3, "tp": 2}, ("tp", "dp_shard", None)),
    ({"dp_replicate": 2, "dp_shard": 4, "tp": 1}, ("tp", "dp_shard", "dp_replicate")),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, ("tp", "dp_shard_cp", "dp_replicate")),
    ({"data_parallel": 2, "tensor_parallel": 3}, ("tensor_parallel", "data_parallel", None)),
)
DTYPES = (torch.float64, torch.float32)
RUNS = [
    (mesh, axes, plan, DTYPES[(i + j) % 2], 1 + 4 * (i % 2))
    for i, (mesh, axes) in enumerate(MESHES)
    for j, plan in enumerate(PLANS)
    if (plan is not PLANS[2] or i == 1) and (plan is None or (i + j) % 2 or i > 3)  # FSDP takes no packed halves
]
SENT = [
    (phase, op, role)
    for phase in ("forward", "backward")
    for op in ("all_gather", "reduce_scatter", "all_reduce")
    for role in range(3)
]


def dims_of(style, name):
    """The dim of a parameter that a style shards, and the parts that it has."""
    weight, bias, parts, _ = STYLES[style] if style else (None, None, 1, [])
    return (bias if name.endswith("bias") else weight), parts


def add_of_styles(add, keys, tp, tokens, compute):
    """Add the bytes that each module sends by its style; return the number of modules without a rule."""
    unknown = 0
    for key, style in keys.items() if tp > 1 else ():
        count, weight = 2 if "*" in key else 1, SHAPES.get(f"{key}.weight")
        if weight is None:
            continue
        if style == "all_reduce":
            unknown += 1
        elif style == "replicated_with_grad_allreduce":
            moving = [name for name in SHAPES if name.startswith(key) and name != FROZEN]
            add(
                "backward", "all_reduce", 0, count * sum(prod(SHAPES[n]) for n in moving) * compute, count * len(moving)
            )
        else:
            out, inner = weight if key != "embed" else (D, 0)
            for phase, op, numbers in STYLES[style][3]:
                add(phase, op, 0, count * tokens * numbers(inner, out, tp) * compute, count)
    return unknown


def expected_report(mesh, axes, plan, dtype, tokens):
    tp, replicas = (mesh.get(axis, 1) for axis in (axes[0], axes[2]))
    shards = prod(size for axis, size in mesh.items() if axis not in (axes[0], axes[2]))
    # 1. Each rank's bytes of a parameter: by tp each part in ceil shards, then its first dim by FSDP.
    keys = plan if plan is not None else {**OWN_PLAN, "embed": "embedding_rowwise"} if tp > 1 else {}
    size = 8 if dtype is torch.float64 else 4
    stored, parameters, total = {}, {}, 0
    for name, shape in SHAPES.items():
        dim, parts = dims_of(keys.get(name.rpartition(".")[0]), name)
        local = [parts * -(-n // (tp * parts)) if at == dim else n for at, n in enumerate(shape)]
        stored[name] = local
        count, first = 2 if "*" in name else 1, -(-local[0] // shards)
        how = "Replicate()" if dim is None else f"Shard({dim})" + " of each half" * (parts == 2)
        placed = ([f"{axes[2]} Replicate()"] if replicas > 1 else []) + ([f"{axes[1]} Shard(0)"] if axes[1] else [])
        placed += [f"{axes[0]} {how}"] if axes[0] else []
        local_shape = (first, *local[1:])
        parameters[name] = count, shape, ", ".join(placed), local_shape, count * prod(local_shape) * size
        total += count * prod(shape) * size
    sent = {key: [0, 0] for key in SENT}

    def add(phase, op, role, nbytes, calls=1):
        sent[phase, op, role][0] += calls
        sent[phase, op, role][1] += nbytes

    # 2. FSDP: each block, then all that is in none; in bfloat16 and summed in float32, but all of float64 in it.
    compute, summed = (8, 8) if size == 8 else (2, 4)
    for number, unit in enumerate(("layers", "layers", "root")):
        names = [name for name in SHAPES if name.startswith("layers") == (unit == "layers")]
        padded = {name: -(-stored[name][0] // shards) * shards * prod(stored[name][1:]) for name in names}
        reduced = sum(padded[name] for name in names if name != FROZEN) * summed
        if shards > 1:
            for phase in ("forward", "backward")[
                : 2 if number != 1 else 1
            ]:  # the last block stays from one to the other
                add(phase, "all_gather", 1, sum(padded.values()) // shards * compute)
            add("backward", "reduce_scatter", 1, reduced)
        if replicas > 1:
            add("backward", "all_reduce", 2, reduced // shards)
    # 3. tp: each module by its style.
    unknown = add_of_styles(add, keys, tp, tokens, compute)
    unmatched = int(plan is None and tp > 1)
    sent = {(phase, op, axes[role]): tuple(each) for (phase, op, role), each in sent.items() if each[0]}
    return {
        "parameters": parameters,
        "sent": sent,
        "order": sorted(sent, key=lambda key: (key[0] == "backward", key[2], key[1])),
        "bytes on a rank, and in all": (sum(nbytes for *_, nbytes in parameters.values()), total),
        "unmatched": unmatched,
        "unknown": unknown,
    }


def facts_of(report):
    """A report's facts as this file and `test_dry_run_experts` compute them by hand."""
    return {
        "parameters": {
            p.name: (p.count, p.shape, p.placements, p.local_shape, p.local_bytes) for p in report.parameters
        },
        "sent": {(each.phase, each.op, each.axis): (each.calls, each.bytes_in) for each in report.collectives},
        "bytes on a rank, and in all": (report.local_bytes, report.total_bytes),
        "unmatched": len(report.unmatched),
        "unknown": len(report.unknown),
    }


def reported(mesh, axes, plan, dtype, tokens):
    styles = None if plan is None else {key: named(style) for key, style in plan.items()}
    report = dry_run(Model(dtype), mesh, styles, tokens=tokens)
    order = [(each.phase, each.op, each.axis) for each in report.collectives]
    return {**facts_of(report), "order": order}


@pytest.mark.parametrize("arguments", RUNS, ids=lambda run: f"{run[0]}-{PLANS.index(run[2])}-{run[3]}".replace("'", ""))
def test_shards_and_counts_match_each_parameter(arguments):
    assert reported(*arguments) == expected_report(*arguments)
