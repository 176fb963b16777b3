"""The dry run of experts over ep and of Conv1D layers: bytes that a rank stores and sends, added up by hand."""

from itertools import combinations
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parity_tests.parallelizer.styled import Stacks
from parity_tests.parallelizer.test_dry_run_counts import facts_of
from torch_impl.parallelizer import translate_to_torch_parallel_style as named
from torch_impl.parallelizer.dry_run import dry_run

E, F, D, H, OUT = 4, 6, 8, 6, 5  # experts, their columns, the width, the Conv1D layers' width and the head's
GATE_UP, DOWN = "layers.*.experts.gate_up_proj", "layers.*.experts.down_proj"
SHAPES = {GATE_UP: (E, 2 * F, D), DOWN: (E, D, F)}
SHAPES |= {"layers.*.fc.weight": (D, H), "layers.*.fc.bias": (H,)}
SHAPES |= {"layers.*.proj.weight": (H, D), "layers.*.proj.bias": (D,), "head.weight": (OUT, D)}
LAYERS = 3


class Conv1D(nn.Module):
    """As transformers writes it: a linear layer with a transposed weight."""

    def __init__(self, width, inner, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))


class Mixed(nn.Module):
    """Blocks of experts and of two Conv1D layers, and a head; `k` choices of each token, if the model says so."""

    def __init__(self, dtype, k, is_bias_frozen):
        super().__init__()
        with torch.device("meta"):
            gate_up, down = (torch.empty(*SHAPES[name], dtype=dtype) for name in (GATE_UP, DOWN))
            self.layers = nn.ModuleList(
                nn.ModuleDict(
                    {"experts": Stacks(gate_up, down), "fc": Conv1D(H, D, dtype), "proj": Conv1D(D, H, dtype)}
                )
                for _ in range(LAYERS)
            )
            self.head = nn.Linear(D, OUT, bias=False, dtype=dtype)
        for layer in self.layers:
            layer["fc"].bias.requires_grad_(not is_bias_frozen)
        self.config = SimpleNamespace(num_experts_per_tok=k) if k else SimpleNamespace()


# For each Conv1D style: the sharded dims of the weight and of the bias, and into how many packed parts they divide.
STYLES = {"conv1d_colwise": (1, 0, 1), "conv1d_packed_colwise": (1, None, 3), "conv1d_rowwise": (0, None, 1)}
COLWISE = {"layers.*.fc": "conv1d_colwise", "layers.*.proj": "conv1d_rowwise"}
COLWISE["layers.*.experts"] = "all_reduce"  # has no effect beside an axis ep
PACKED = {"layers.*.fc": "conv1d_packed_colwise", "layers.*.proj": "conv1d_rowwise"}
# The names of three axes: tp, the axis over which FSDP shards experts, and its axis for the rest.
RUNS = (
    # axes, names, plan, dtype, tokens, choices, whether the bias of the first Conv1D is frozen
    ({"ep": 2}, (None, "dp_shard_cp", "ep"), {}, torch.float64, 5, 2, False),
    ({"dp_shard": 3, "ep": 2}, (None, "dp_shard", "dp_shard_cp_ep"), {}, torch.float32, 6, 3, False),
    ({"dp_shard": 2, "ep": 2, "tp": 1}, ("tp", "dp_shard", "dp_shard_cp_ep"), {}, torch.float32, 6, None, False),
    ({"ep": 2, "tp": 2}, ("tp", "dp_shard_cp", "ep"), COLWISE, torch.float32, 5, 3, True),
    ({"ep": 1, "tp": 2}, ("tp", "dp_shard_cp", "dp_shard_cp"), PACKED, torch.float64, 7, 1, False),
    ({"tp": 2}, ("tp", "dp_shard_cp", "dp_shard_cp"), PACKED, torch.float32, 7, 1, True),
    (
        {"data_parallel": 2, "ep": 4, "tensor_parallel": 2},
        ("tensor_parallel", "data_parallel", "dp_cp_ep"),
        PACKED,
        torch.float64,
        3,
        2,
        False,
    ),
    (
        {"dp_replicate": 3, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2},
        ("tp", "dp_shard_cp", "dp_shard_cp_ep"),
        COLWISE,
        torch.float64,
        9,
        2,
        False,
    ),
)
AXES = ("dp_replicate", "dp_shard_cp", "dp_shard", "data_parallel", "dp_shard_cp_ep", "dp_cp_ep", "ep")
AXES = (*AXES, "tp", "tensor_parallel")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SENT = [(phase, op, axis) for phase in ("forward", "backward") for op in OPS for axis in AXES]


def is_stack(name):
    return ".experts." in name


def local_part(name, tp, ep, edp, plan, has_tp_axis):
    """A parameter's shape before FSDP, FSDP's dim, and how tp shards it, in words."""
    shape, style = list(SHAPES[name]), plan.get(name.rpartition(".")[0])
    if is_stack(name) and ep is not None:
        dim, parts = (1, 2) if name == GATE_UP else (2, 1)
        shape[0] //= ep
        if has_tp_axis:
            shape[dim] //= tp
        words = f"Shard({dim})" + " of each half" * (parts == 2)
        width = {GATE_UP: 2, DOWN: 1}[name]
        return shape, width if D % edp == 0 else 0, words
    dim, parts = None, 1
    if style:
        weight, bias, parts = STYLES[style]
        dim = bias if name.endswith("bias") else weight
    if dim is not None:
        shape[dim] //= tp
    return shape, 0, "Replicate()" if dim is None else f"Shard({dim})" + " of each third" * (parts == 3)


def expected_shards(mesh, names, plan, size, edp):
    """Each parameter as the first rank stores it; and the number of its elements, padded for FSDP."""
    tp_axis, edp_axis, dense_axis = names
    tp, ep, rows, padded = mesh.get(tp_axis, 1), mesh.get("ep"), {}, {}
    for name, full in SHAPES.items():
        is_expert = is_stack(name) and ep is not None
        over = edp if is_expert else edp * (ep or 1)
        local, dim, words = local_part(name, tp, ep, edp, plan, tp_axis is not None)
        padded[name] = prod(local) // local[dim] * -(-local[dim] // over) * over
        local[dim] = -(-local[dim] // over)
        placed = ["dp_replicate Replicate()"] if mesh.get("dp_replicate", 1) > 1 else []
        placed += [f"{edp_axis if is_expert else dense_axis} Shard({dim})"] + ["ep Shard(0)"] * is_expert
        placed += [f"{tp_axis} {words}"] if tp_axis else []
        count = LAYERS if "*" in name else 1
        rows[name] = count, full, ", ".join(placed), tuple(local), count * prod(local) * size
    return rows, padded


def fsdp_units(ep, names, edp):
    """(parameters, number of ranks that shard them, axis that shards them, number of such units) for FSDP's units."""
    _, edp_axis, dense_axis = names
    experts = [name for name in SHAPES if is_stack(name)]
    rest = [name for name in SHAPES if "layers" in name and not is_stack(name)]
    blocks = [(experts + rest, edp, dense_axis, LAYERS)]
    if ep is not None:
        blocks = [(experts, edp, edp_axis, LAYERS), (rest, edp * ep, dense_axis, LAYERS)]
    return [*blocks, (["head.weight"], edp * (ep or 1), dense_axis, 1)]


def expected_report(mesh, names, plan, dtype, tokens, k, is_bias_frozen):
    tp_axis, tp, ep = names[0], mesh.get(names[0], 1), mesh.get("ep")
    edp = prod(mesh.get(axis, 1) for axis in ("data_parallel", "dp_shard", "cp"))
    size, compute, summed = (8, 8, 8) if dtype is torch.float64 else (4, 2, 4)
    sent = {key: [0, 0] for key in SENT}

    def add(phase, op, axis, *sizes):
        sent[phase, op, axis][0] += len(sizes)
        sent[phase, op, axis][1] += sum(sizes)

    # 1. The first rank's bytes of each parameter.
    rows, padded = expected_shards(mesh, names, plan, size, edp)
    total = sum((LAYERS if "*" in name else 1) * prod(shape) * size for name, shape in SHAPES.items())
    # 2. FSDP: the experts of each block, the rest of it, the head. The last block stays gathered into backward.
    frozen = ["layers.*.fc.bias"] if is_bias_frozen else []
    for parameters, over, axis, count in fsdp_units(ep, names, edp):
        gathered = sum(padded[name] for name in parameters) // over * compute
        reduced = sum(padded[name] for name in parameters if name not in frozen) * summed
        if over > 1:
            add("forward", "all_gather", axis, *[gathered] * count)
            add("backward", "all_gather", axis, *[gathered] * (count - 1 if count > 1 else 1))
            add("backward", "reduce_scatter", axis, *[reduced] * count)
        if mesh.get("dp_replicate", 1) > 1:
            add("backward", "all_reduce", "dp_replicate", *[reduced // over] * count)
    # 3. Experts: a rank of tp sends its part of the tokens, each once to every rank of ep with any of its k experts.
    own, wide = -(-tokens // tp), max(compute, 4)
    if k and ep is not None:
        sets = list(combinations(range(E), k))
        sent_rows = -(-own * sum(len({e * ep // E for e in each}) for each in sets) // len(sets))
        row_bytes, gates, choices = sent_rows * D * compute, sent_rows * k * wide, sent_rows * k * 4
        counts, outputs, sums = 2 * ep * 8, own * D * compute, tp * sent_rows * D * wide
        for _ in range(LAYERS):
            if ep > 1:
                add("forward", "all_to_all", "ep", counts, row_bytes, gates, choices, row_bytes)
                add("backward", "all_to_all", "ep", row_bytes, gates, row_bytes)
            if tp > 1:
                add("forward", "all_gather", tp_axis, counts, row_bytes, gates, choices, outputs)
                add("forward", "reduce_scatter", tp_axis, sums)
                add("backward", "all_gather", tp_axis, row_bytes, outputs, own * k * wide)
                add("backward", "reduce_scatter", tp_axis, sums, tp * gates)
    # 4. Conv1D layers: the gradient of the input, of a replicated bias, and the output.
    for _ in range(LAYERS if plan and tp > 1 else 0):
        of_bias = [H * compute] if plan is PACKED and not is_bias_frozen else []
        add("backward", "all_reduce", tp_axis, tokens * D * compute, *of_bias)
        add("forward", "all_reduce", tp_axis, tokens * D * compute)
    return {
        "parameters": rows,
        "sent": {key: tuple(each) for key, each in sent.items() if each[0]},
        "bytes on a rank, and in all": (sum(nbytes for *_, nbytes in rows.values()), total),
        "unknown": int(ep is not None and not k),
        "unmatched": 0,
    }


def report_facts(mesh, names, plan, dtype, tokens, k, is_bias_frozen):
    styles = {key: named(style) for key, style in plan.items()}
    return facts_of(dry_run(Mixed(dtype, k, is_bias_frozen), mesh, styles, tokens=tokens))


@pytest.mark.parametrize("arguments", RUNS, ids=lambda run: str(run[0]).replace("'", ""))
def test_bytes_of_experts_and_conv1d_layers_match_sums_by_hand(arguments):
    assert report_facts(*arguments) == expected_report(*arguments)


class Attention(nn.Module):
    """Four query heads of 2, which share two heads of keys."""

    num_key_value_groups = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(6, 8, bias=False), nn.Linear(6, 4)
        self.v_proj, self.o_proj = nn.Linear(6, 4, bias=False), nn.Linear(8, 6, bias=False)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)


def two_blocks():
    """Two blocks of different sizes and dtypes."""
    layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 4, bias=False)])
    layers[0].double()
    return nn.ModuleDict({"layers": layers})


# Whole reports: of blocks that FSDP pads and gathers again, except the last; of heads that two ranks replicate.
PRINTED = [
    (
        (two_blocks, {"dp_shard": 2, "tp": 2}, {"layers.0": "colwise"}, {"tokens": 3}),
        """\
dp_shard=2 tp=2: 4 ranks; 120 of 280 bytes of parameters on each

parameter         of   shape   placements                          on a rank   bytes
layers.*.weight   1    5 x 4   dp_shard Shard(0), tp Shard(0)      2 x 4       64
layers.*.bias     1    5       dp_shard Shard(0), tp Shard(0)      2           16
layers.*.weight   1    4 x 5   dp_shard Shard(0), tp Replicate()   2 x 5       40

each microbatch   collective       axis       calls   bytes passed in
forward           all_gather       dp_shard   2       120
backward          all_gather       dp_shard   1       80
backward          reduce_scatter   dp_shard   2       240
backward          all_reduce       tp         1       96""",
    ),
    (
        (
            Attending,
            {"tp": 4},
            {f"attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"},
            {},
        ),
        """\
tp=4: 4 ranks; 304 of 592 bytes of parameters on each

parameter            of   shape   placements                             on a rank   bytes
attn.q_proj.weight   1    8 x 6   dp_shard_cp Shard(0), tp Shard(0)      2 x 6       48
attn.k_proj.weight   1    4 x 6   dp_shard_cp Shard(0), tp Replicate()   4 x 6       96
attn.k_proj.bias     1    4       dp_shard_cp Shard(0), tp Replicate()   4           16
attn.v_proj.weight   1    4 x 6   dp_shard_cp Shard(0), tp Replicate()   4 x 6       96
attn.o_proj.weight   1    6 x 8   dp_shard_cp Shard(0), tp Shard(1)      6 x 2       48

each microbatch   collective   axis   calls   bytes passed in
forward           all_reduce   tp     1       12
backward          all_reduce   tp     6       140""",
    ),
]


def print_report(make, mesh, plan, options):
    with torch.device("meta"):
        model = make()
    return str(dry_run(model, mesh, {key: named(style) for key, style in plan.items()}, **options))


@pytest.mark.parametrize(("arguments", "text"), PRINTED, ids=lambda value: getattr(value[0], "__name__", ""))
def test_a_printed_report_is_as_typed(arguments, text):
    assert print_report(*arguments) == text
