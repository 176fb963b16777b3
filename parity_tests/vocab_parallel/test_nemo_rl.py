"""NeMo-RL's newer functions, with its names and order of arguments: parity with a temperature, and equal calls."""

import pytest
import torch

from jax_ref.vocab_parallel import log_softmax
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.test_columns import sums_over_tp, widths
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as ours
from torch_impl.vocab_parallel.adapters import nemo_rl


def log_softmax_at_temperature(logits, temperature):
    return log_softmax(logits / temperature)


DECLARED = dict(
    reference=log_softmax_at_temperature,
    mesh={"tp": (1, 2, 3, 8)},
    inputs={"logits": "b s v/tp:ragged"},
    options={"temperature": (1.0, 0.7, 2.5)},
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v",),
    sums="float32",
)


@scheme(
    contract=nemo_rl.vocab_parallel_log_softmax,
    outputs="b s v/tp:ragged",
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 2 * c.b * c.s)), backward=sums_over_tp(c)),
    **DECLARED,
)
def tempered_log_softmax(mesh, logits, temperature):
    return nemo_rl.vocab_parallel_log_softmax(logits, temperature, mesh["tp"])


def full_rows_cost(case):
    """The cost of the log-softmax, then of gathering the widths and the results, padded to the widest shard."""
    several, widest = case.mesh["tp"] > 1, max(case.layouts["v/tp"]["lengths"])
    rows = several, several * case.b * case.s * widest * case.accumulator_itemsize
    return Cost(
        forward=all_gathers(over_tp(case, 2 * case.b * case.s), widths(case), rows), backward=sums_over_tp(case)
    )


@scheme(contract=nemo_rl.vocab_parallel_full_log_softmax, cost=full_rows_cost, **DECLARED)
def tempered_full_log_softmax(mesh, logits, temperature):
    return nemo_rl.vocab_parallel_full_log_softmax(logits, temperature, tp_group=mesh["tp"])


test_parity = parity([tempered_log_softmax, tempered_full_log_softmax], lockstep=30, gloo=3)


CALLS = {  # NeMo-RL's call, and the same of torch_impl.vocab_parallel
    "vocab_parallel_gather_columns": (
        lambda g, x: nemo_rl.vocab_parallel_gather_columns(logits=x, column_indices=torch.tensor([3, 0]), tp_group=g),
        lambda g, x: ours.vocab_parallel_gather_columns(x, torch.tensor([3, 0]), g),
    ),
    "vocab_parallel_argmax": (
        lambda g, x: nemo_rl.vocab_parallel_argmax(logits=x, tp_group=g),
        lambda g, x: ours.vocab_parallel_argmax(x, g),
    ),
    "cp_load_balanced_to_contiguous": (
        lambda g, x: nemo_rl.cp_load_balanced_to_contiguous(x=x, cp_group=g, seq_dim=2),
        lambda g, x: ours.cp_load_balanced_to_contiguous(x, g, 2),
    ),
    "cp_shift_next": (
        lambda g, x: nemo_rl.cp_shift_next(x, g, fill=-7.0),
        lambda g, x: ours.cp_shift_next(x, g, 1, -7.0),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_passed_on(name):
    there, here = CALLS[name]

    def body(mesh, case):
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(mesh.rank("tp")))
        return torch.equal(there(mesh["tp"], x), here(mesh["tp"], x))

    assert run(body, CaseSpec(scheme="passed_on", mesh={"tp": 2})).results == (True, True)


test_a_temperature_of_zero_is_rejected = rejected(
    {"tp": 2},
    [
        (
            f"temperature {value}",
            lambda mesh, value=value: nemo_rl.vocab_parallel_log_softmax(torch.zeros(1, 2, 3), value, mesh["tp"]),
            f"vocab_parallel.vocab_parallel_log_softmax: temperature={value} must be positive",
        )
        for value in (0.0, -1.0)
    ],
)

test_a_fill_is_rejected_under_its_own_name = rejected(
    {"cp": 2},
    [
        (
            f"fill {fill}",
            lambda mesh, fill=fill: nemo_rl.cp_shift_next(torch.zeros(1, 2, dtype=torch.uint8), mesh["cp"], fill=fill),
            f"vocab_parallel.cp_shift_next: fill={fill!r} {problem}",
            kind,
        )
        for fill, problem, kind in (
            (-100, "is not a value of uint8; pass one, or convert the tensor", ValueError),
            ("x", "is a str; pass a number", TypeError),
        )
    ],
)
