"""A vocab-parallel embedding without its mask is named; an embedding with another mistake is not."""

import pytest
import torch.distributed as dist

from parity_tests.specimens.small_scheme import summed
from shardproof import scheme, token_below, values, verify


def declared(rows_of, offset=0):
    """`rows_of` makes the rank's terms from its table and the ids less its first one, plus `offset`."""

    def embedding(mesh, weight, ids):
        first = dist.get_rank(mesh["tp"]) * len(weight)
        return summed(rows_of(weight, ids - first + offset), mesh["tp"])

    return scheme(
        reference=lambda weight, ids: weight[ids],
        mesh={"tp": (2, 4)},
        inputs={"weight": "v/tp d", "ids": "b s"},
        outputs="b s d tp=I",
        draw={"weight": values("normal"), "ids": token_below("v")},
        dtypes=("float32",),
        nograd=("weight",),
    )(embedding)


def clamped(weight, ids):
    return weight[ids.clamp(0, len(weight) - 1)]


def wrapped(weight, ids):
    return weight[ids % len(weight)]


def masked(weight, ids):
    other = (ids < 0) | (ids >= len(weight))
    return weight[ids.masked_fill(other, 0)].masked_fill(other[..., None], 0.0)


@pytest.mark.parametrize("rows_of", [clamped, wrapped])
def test_a_missing_mask_is_named(rows_of, tmp_path):
    report = verify(declared(rows_of), replay_folder=str(tmp_path))
    named = "for ids of another tp rank a row of its own weight is added: no mask, or a wrong one"
    assert report.notes["out"][0] == named


def test_a_wrong_offset_is_no_missing_mask(tmp_path):
    report = verify(declared(masked, offset=1), replay_folder=str(tmp_path))
    assert report.verdict == "mismatch" and "mask" not in "".join(report.notes["out"])
