"""Which elements are wrong, and who holds them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from parity_tests.specimens.evidence_by_hand import columns_of, evidence, headline, numbers
from shardproof import offsets, scheme, token_below, values
from shardproof.engines.program import Program
from shardproof.explain.clues import explain
from shardproof.explain.collect_evidence import id_marks
from shardproof.verify_one_case import verify_case


def test_not_finite_names_the_first_element_and_its_rank():
    want = numbers(2, 8)
    got = want.copy()
    got[0, 5] = np.nan
    got[1, 6] = np.inf
    owners = {"tp": columns_of((2, 8), 4)}
    assert headline(got, want, owners=owners, axes={"tp": 4}) == "not finite first at (0,5), rank 2"
    assert headline(got, want, owners=owners) == "not finite first at (0,5), tp rank 2"
    assert headline(got, want, owners=owners, at={"cp": 1}) == "not finite first at (0,5), rank 6"
    assert headline(got, want) == "not finite first at (0,5)"


def test_a_mask_that_was_lost():
    assert headline([0.0, 1.0], [-np.inf, 1.0]).startswith("finite where the reference is -inf, first at (0)")


def test_wrong_where_one_rank_owns():
    want, other = numbers(2, 8), numbers(2, 8, seed=1)
    owners = columns_of((2, 8), 4)
    got = np.where(owners == 2, other, want)
    assert headline(got, want, owners={"tp": owners}) == "wrong only where tp rank 2 owns (all elements there)"
    got[1] = want[1]
    assert headline(got, want, owners={"tp": owners}) == "wrong only where tp rank 2 owns (2 of 4 elements there)"


def test_one_ranks_other_constant():
    want = numbers(2, 8)
    owners = columns_of((2, 8), 4)
    got = np.where(owners == 2, 4 * want, want)
    assert headline(got, want, owners={"tp": owners}) == (
        "wrong only where tp rank 2 owns (all elements there); there off by the constant factor 4 (= tp): "
        "a reduction is missing or repeated, or a mean divides by a local count"
    )


def test_some_elements_of_a_joined_vector_have_another_factor():
    want = numbers(24)
    got = want.copy()
    got[[3, 4, 5, 6, 20, 21]] *= 1.5
    assert headline(got, want) == (
        "right except 6 of 24 elements, first at (3); there off by the constant factor 1.5: a scale is missing or wrong"
    )


@pytest.mark.parametrize("places", [slice(3, 6), slice(3, 10)])
def test_few_elements_or_most_are_no_exception(places):
    want = numbers(12)
    got = want.copy()
    got[places] *= 1.5
    assert headline(got, want).startswith("no pattern")


def test_elements_near_their_budgets_are_no_exception():
    want = numbers(12)
    got = want.copy()
    got[3:7] *= 1 + 1.5 * 2.0**-8
    assert headline(got, want, relative=2.0**-8).startswith("no pattern")


def test_elements_with_other_numbers_have_no_pattern():
    want = numbers(12)
    assert headline(np.concatenate([want[:8], numbers(4, seed=1)]), want).startswith("no pattern")


def test_wrong_where_a_pair_of_ranks_owns():
    want, other = numbers(4, 8), numbers(4, 8, seed=1)
    tp, cp = columns_of((4, 8), 4), columns_of((8, 4), 2).T
    got = np.where((tp == 1) & (cp == 0), other, want)
    assert headline(got, want, owners={"cp": cp, "tp": tp}) == (
        "wrong only where cp rank 0 and tp rank 1 own (all elements there)"
    )


def test_wrong_where_several_ranks_own():
    want, other = numbers(2, 15), numbers(2, 15, seed=1)
    owners = columns_of((2, 15), 5)
    borders = {"shard borders": owners < 4}
    got = np.where((owners == 1) | (owners == 3), other, want)
    (note,) = explain(evidence(got, want, owners={"tp": owners}, borders=borders))
    assert note == "wrong only where tp ranks 1 and 3 own (all elements there)"
    got[:, 3] = want[:, 3]
    assert headline(got, want, owners={"tp": owners}, borders=borders).startswith("wrong only at shard borders")


def test_right_where_one_rank_owns():
    want, other = numbers(3, 8), numbers(3, 8, seed=1)
    owners = columns_of((3, 8), 4)
    got = np.where(owners == 0, want, other)
    assert headline(got, want, owners={"tp": owners}) == "right only where tp rank 0 owns"


def test_a_tensor_of_one_rank_is_no_pattern():
    want, other = numbers(4), numbers(4, seed=1)
    owners = np.full(4, 1)
    assert headline(other, want, owners={"tp": owners}).startswith("no pattern; worst at (")


@pytest.mark.parametrize("name", ["sequence boundaries", "padding", "shard borders"])
def test_wrong_at_borders(name):
    want, other = numbers(2, 9), numbers(2, 9, seed=1)
    mask = np.zeros((2, 9), bool)
    mask[:, [2, 3, 7]] = True
    got = np.where(mask, other, want)
    assert headline(got, want, borders={name: mask}) == f"wrong only at {name} (all elements there)"
    everywhere = {name: np.ones((2, 9), bool)}
    assert headline(got, want, borders=everywhere).startswith("no pattern")


def test_a_wider_place_adds_nothing():
    want, other = numbers(8), numbers(8, seed=1)
    owners = columns_of((8,), 4)
    got = np.where(owners == 2, other, want)
    wide, narrow = np.arange(8) < 7, np.arange(8) == 4
    assert explain(evidence(got, want, owners={"tp": owners}, borders={"shard borders": wide})) == (
        "wrong only where tp rank 2 owns (all elements there)",
    )
    got[5] = want[5]
    assert explain(evidence(got, want, owners={"tp": owners}, borders={"padding": narrow})) == (
        "wrong only where tp rank 2 owns (1 of 2 elements there)",
        "wrong only at padding (all elements there)",
    )


def test_a_border_between_sequences_that_is_not_read():
    """The sums of the first sequence are right, and all later ones begin too high."""

    def sums_of_sequences(x, cu):
        token = jnp.arange(len(x))
        sequence = (token[:, None] >= cu[None, 1:-1]).sum(-1)
        is_added = (token[:, None] >= token[None]) & (sequence[:, None] == sequence[None])
        return jnp.where(is_added, x[None], 0.0).sum(-1)

    @scheme(
        reference=sums_of_sequences,
        mesh={"cp": (1,)},
        inputs={"x": "t", "cu": "q"},
        outputs="t",
        dims={"t": (24,), "q": (4,)},
        draw={"x": values("positive"), "cu": offsets("t", empty=False)},
        dtypes=("float64",),
        nograd=("x",),
    )
    def sums_of_everything(mesh, x, cu: Int[Tensor, "q"]):
        return x.cumsum(0)

    report = verify_case(sums_of_everything, sums_of_everything.case(seed=1, cp=1, dtype="float64"))
    assert report.notes["out"][0] == "wrong only at sequences behind the first of t (all elements there)"


@pytest.mark.parametrize("tp", [1, 2])
def test_the_ids_of_a_rank_are_a_place_where_there_are_other_ranks(tp):
    """Of a single rank they are all ids of the vocabulary."""

    @scheme(
        reference=lambda weight, ids: weight[ids],
        mesh={"tp": (1, 2)},
        inputs={"weight": "v/tp", "ids": "b"},
        outputs="b tp=P",
        draw={"ids": token_below("v")},
    )
    def own_rows(mesh, weight, ids):
        is_own = torch.isin(ids, mesh.global_ids("v"))
        return weight[torch.where(is_own, ids - mesh.global_ids("v")[0], 0)] * is_own

    case = own_rows.case(tp=tp, b=64, v=4, dtype="float32", seed=1)
    report = verify_case(own_rows, case)
    marks = id_marks(own_rows, Program.of(own_rows), case, report.tensors[0])
    ranks = [f"positions where ids belongs to tp rank {rank}" for rank in range(tp)]
    assert [name for name in marks if "belongs" in name] == (ranks if tp > 1 else [])
