"""A mistake that equal shards hide is named by the shards that show it."""

import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared, summed
from shardproof.experiments.unequal_shards import TAKEN_FOR_EQUAL


def sum_over(number, group):
    return summed(torch.tensor(float(number)), group)


def of_own_rows(rows, group):
    return max(rows, 1) * dist.get_world_size(group)


def of_rows_at_least_one(rows, group):
    return sum_over(max(rows, 1), group)


def of_twice_all_rows(rows, group):
    return 2.0 * sum_over(rows, group)


class Centred(torch.autograd.Function):
    """Rows without their mean over all ranks; the backward divides each rank's sum by `divisor(rows, group)`."""

    @staticmethod
    def forward(ctx, x, group, divisor):
        ctx.group, ctx.divisor = group, divisor
        return x - summed(x.sum(0), group) / sum_over(x.shape[0], group)

    @staticmethod
    def backward(ctx, cotangent):
        mean = cotangent.sum(0) / ctx.divisor(cotangent.shape[0], ctx.group)
        return cotangent - summed(mean, ctx.group), None, None


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize(
    ("divisor", "note"),
    [
        (of_own_rows, f"wrong only where ranks of tp have unequally many of b: {TAKEN_FOR_EQUAL}"),
        (of_rows_at_least_one, "wrong only where a rank of tp has none of b"),
        (of_twice_all_rows, None),
    ],
)
def test_the_shards_that_show_a_mistake_are_named(divisor, note):
    wrong_scheme = declared(
        lambda mesh, x: Centred.apply(x, mesh["tp"], divisor), lambda x: x - x.mean(0), {"x": "b/tp:ragged"},
        "b/tp:ragged",
    )  # fmt: skip
    first = wrong_scheme.verify().notes["d/d x"][0]
    assert first == note if note else not first.startswith("wrong only where")
