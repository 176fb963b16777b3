"""The border of a row's kept tokens, judged by mass: where rounding decides, sets of tokens cannot be compared."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parity_tests.vocab_parallel.decided_rows import is_undecided, mass_before, mass_budget
from shardproof import CaseSpec
from shardproof.engines.engines import run
from shardproof.judge.compare import K
from shardproof.judge.reference import UNIT_ROUNDOFF
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.filter_bounds import room_for, ties_within

SIZE, ROWS = 24, 3
WIDTHS = {1: [24], 2: [17, 7], 3: [0, 1, 23], 4: [6, 0, 10, 8]}


def drawn_rows(seed, kind, temperature):
    """[rows, SIZE] permutations of one row of float32 logits."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
    row = {
        "normal": rng.standard_normal(SIZE),
        "ties": np.rint(rng.standard_normal(SIZE)),
        "dyadic": -np.log(2.0) * rng.integers(0, 5, SIZE) * temperature,
        "equal": np.zeros(SIZE),
        "peaked": np.where(np.arange(SIZE) == 3, 6.0, rng.standard_normal(SIZE)),
    }[kind]
    return np.stack([rng.permutation(row) for _ in range(ROWS)]).astype(np.float32).astype(np.float64)


def scores_and_shares(rows, tp, options, dtype):
    """(log p of each row's largest logit, p of every kept token and 0 of the others), as all ranks agree on them."""
    logits, target = torch.from_numpy(rows).to(dtype), torch.from_numpy(rows.argmax(-1))

    def body(mesh, case):
        start = sum(WIDTHS[tp][: mesh.rank("tp")])
        shard = logits[:, start : start + WIDTHS[tp][mesh.rank("tp")]].clone().requires_grad_()
        limits = options["top_k"], options["top_p"], False, options["temperature"]
        y = vp.DistributedLogprobWithSampling.apply(shard, target, mesh["tp"], *limits)
        (slope,) = torch.autograd.grad(y, shard, torch.ones_like(y))
        return y.detach().double().numpy(), slope.double().numpy()

    results = run(body, CaseSpec(scheme="prefix", mesh={"tp": tp})).results
    assert all((y == results[0][0]).all() for y, _ in results)
    slopes = np.concatenate([slope for _, slope in results], axis=-1)
    return results[0][0], np.eye(SIZE)[rows.argmax(-1)] - slopes * options["temperature"]


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["normal", "ties", "dyadic", "equal", "peaked"]),
    place=st.integers(1, SIZE - 1),
    top_k=st.sampled_from([None, 5, SIZE]),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    tp=st.sampled_from([1, 2, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(seed=0, kind="equal", place=8, top_k=None, temperature=1.0, tp=4, dtype=torch.float32)
def test_at_the_border_the_sampled_tokens_are_right_by_mass(seed, kind, place, top_k, temperature, tp, dtype):
    rows = drawn_rows(seed, kind, temperature)
    options = {"top_k": top_k, "top_p": 0.5, "temperature": temperature}
    before, _ = mass_before(rows, options)
    options["top_p"] = float(before[0, place])  # the mass before one of the tokens: the border itself
    budget = mass_budget(SIZE, str(dtype).removeprefix("torch."))
    scores, shares = scores_and_shares(rows, tp, options, dtype)
    order = np.argsort(-rows, axis=-1, kind="stable")
    for row, score, share, in_order, masses in zip(rows, scores, shares, order, before, strict=True):
        is_kept = share != 0
        count = int(is_kept.sum())
        assert is_kept[in_order[:count]].all()  # the largest logits, and among equal ones the lowest ids
        assert count == 1 or masses[count - 1] < options["top_p"] + budget  # not enough without the last one
        mass = masses[count] if count < SIZE else 1.0
        assert mass >= options["top_p"] - budget
        weights = np.where(is_kept, np.exp((row - row.max()) / temperature), 0.0)
        assert abs(score + np.log(weights.sum())) <= budget
        assert (np.abs(share - weights / weights.sum()) <= budget).all()


def test_drawn_rows_keep_away_from_the_border():
    rows = drawn_rows(1, "normal", 1.0)
    options = {"top_k": None, "top_p": 0.5, "temperature": 1.0}
    assert not is_undecided(rows, options, "float32").any()
    on_it = {**options, "top_p": float(mass_before(rows, options)[0][0, 7])}
    assert is_undecided(rows, on_it, "float32").all()
    equal = np.zeros((1, 8))
    assert not is_undecided(equal, options, "float32").any()  # counts are exact, and so is a half of them
    assert is_undecided(equal, {**options, "top_p": 0.1 + 0.2 + 0.075}, "float32").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_room_keeps_its_digits_near_one(dtype):
    tiny, top_p = torch.tensor([1e-12], dtype=dtype), 1.0 - 5e-13
    want = Fraction(top_p) * Fraction(tiny.item()) - (1 - Fraction(top_p))
    u = UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")]
    assert abs(Fraction(room_for(tiny, top_p).item()) - want) <= K * u * want
    assert room_for(torch.tensor([7.0], dtype=dtype), 0.5).item() == 3.0


def test_ties_within_a_room():
    room = torch.tensor([3.0, 3.5, 0.0, -1.0, 9.0, 1.0, torch.nan])
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    got = ties_within(room, weight, torch.full_like(room, 5.0))
    np.testing.assert_array_equal(got.numpy(), [3.0, 4.0, 0.0, 0.0, 5.0, 0.0, np.nan])
