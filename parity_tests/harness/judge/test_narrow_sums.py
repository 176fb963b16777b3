"""`sums="float32"` makes a running sum in bfloat16 a mismatch; `inside` allows intermediates narrower than tested."""

import jax
import pytest
import torch

from parity_tests.specimens.small_scheme import declared
from shardproof import scheme, values
from shardproof.verification import verify

NAMES = ("x", "weight", "target")


def gradient_of_weight(x, weight, target):
    return jax.grad(lambda w: 0.5 * ((x @ w.T - target) ** 2).sum())(weight)


def accumulated(dtype):
    """The sum of a weight's gradient over micro-batches, kept in `dtype`, by default the weight's own."""

    def gradient(mesh, x, weight, target):
        total = torch.zeros(weight.shape, dtype=dtype or weight.dtype)
        for rows, wanted in zip(x.float(), target.float(), strict=True):
            total += ((rows @ weight.float().T - wanted).T @ rows).to(total.dtype)
        return total.to(x.dtype)

    return gradient


def over_micro_batches(dtype=None, **more):
    return scheme(
        reference=gradient_of_weight,
        mesh={"tp": (1, 2)},
        inputs={"x": "m b i", "weight": "o/tp i", "target": "m b o/tp"},
        outputs="o/tp i",
        nograd=NAMES,
        draw=dict.fromkeys(NAMES, values("normal")),
        dims={"m": (1, 2, 4, 8, 16, 32)},
        reduction=("m", "b", "i"),
        **more,
    )(accumulated(dtype))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_in_the_dtype_of_the_weight_breaks_the_promise(seed, tmp_path):
    report = verify(over_micro_batches(sums="float32"), seed=seed, replay_folder=str(tmp_path))
    assert (report.verdict, report.case.dtype) == ("mismatch", "bfloat16")
    assert report.notes["out"][0].endswith("to bfloat16 may do: sums='float32' promises none")


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("seed", range(10))
def test_a_sum_in_float32_keeps_it(seed):
    assert verify(over_micro_batches(torch.float32, sums="float32"), seed=seed).ok


def test_without_the_promise_a_budget_allows_the_rounding():
    assert verify(over_micro_batches()).ok


@pytest.mark.fast_values(1)
@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("roundings", [1, 3])
def test_roundings_of_float32_excuse_none_to_bfloat16(roundings, tmp_path):
    kept, broken = (over_micro_batches(dtype, sums="float32", roundings=roundings) for dtype in (torch.float32, None))
    assert verify(kept).ok
    assert verify(broken, replay_folder=str(tmp_path)).verdict == "mismatch"


def tripled(mesh, x):
    return (x.to(torch.bfloat16) * 3.0).to(x.dtype)


@pytest.mark.usefixtures("unexplained")
def test_inside_allows_a_dtype_narrower_than_the_tested_one(tmp_path):
    only = {"reference": lambda x: x * 3.0, "dtypes": ("float32",)}
    assert declared(tripled, **only, inside="bfloat16").verify().ok
    assert verify(declared(tripled, **only), replay_folder=str(tmp_path)).verdict == "mismatch"


@pytest.mark.parametrize(
    ("promises", "sentence"),
    [
        ({"sums": "bfloat16"}, "sums is 'bfloat16'; write 'float32', or leave it out"),
        ({"inside": "float32"}, "inside is 'float32'; write 'bfloat16' or 'float16', or leave it out"),
        ({"sums": "float32", "inside": "bfloat16"}, "sums='float32' rounds no intermediate, inside="),
    ],
)
def test_promises_that_cannot_be(promises, sentence):
    with pytest.raises(ValueError, match=sentence):
        declared(tripled, **promises)
