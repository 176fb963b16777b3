"""The bytes that the two exchanges send to other ranks, by `fewest_exchange_bytes` and by the ledger."""

from itertools import combinations

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int
from torch import Tensor

from parity_tests.expert_parallel.choices import chosen_experts
from shardproof import CaseSpec, integers, scheme, values
from shardproof.engines.engines import run
from torch_impl.expert_parallel import fewest_exchange_bytes, routed_experts

COUNT, EXPERT = 8, 4  # bytes of a number of rows, and of the number of an expert


def bytes_by_pairs(experts, logits, each, width, element_size, rows_known, mesh):
    """The bytes that every rank sends to every other, added up; then which exchange sends less."""
    (tokens, k), e, ep = experts.shape, len(logits), mesh["ep"]
    wide, pairs = max(element_size, 4), [(a, b) for a in range(ep) for b in range(ep) if a != b]
    home, owner = jnp.arange(tokens) // max(tokens // ep, 1), experts // (e // ep)
    rows = sum(((home == a) & (owner == b).any(-1)).sum() for a, b in pairs)
    if not rows_known:  # the mean over all sets of k experts of the ranks that a set has, but for one of them
        sets = list(combinations(range(e), k))
        ranks = sum(sum(b in {each // (e // ep) for each in chosen} for b in range(1, ep)) for chosen in sets)
        rows = -(-tokens * ranks // len(sets))
    # 1. A row goes to a rank with its gates and choices, and a sum comes back; a rank sends two counts to each other.
    all_to_all = rows * ((width + width) * element_size + k * (wide + EXPERT)) + sum(COUNT + COUNT for _ in pairs)
    # 2. A token goes to every other rank with its gates and experts, and a sum comes back from each; so does a length.
    shard = tokens // ep
    out, back = shard * (width * element_size + k * wide + k * EXPERT), shard * width * wide
    all_gather = sum(out + back + COUNT for _ in pairs)
    numbers = [all_to_all, all_gather, jnp.where(jnp.asarray(all_gather) < all_to_all, 1, 0)]
    return jnp.stack([jnp.asarray(number, each.dtype) for number in numbers])


@scheme(
    reference=bytes_by_pairs,
    mesh={"ep": (1, 2, 3, 4, 5, 7)},
    inputs={"experts": "t k", "logits": "e ep=R", "each": "c"},
    outputs="c",
    dims={"t": "r*ep", "r": (3, 1, 0, 2, 5), "k": (1, 2, 3), "e": "h*ep", "h": (4, 3, 8), "c": (3,)},
    draw={"experts": chosen_experts(), "logits": values("zeros"), "each": integers(0, 0)},
    options={"width": (1, 4, 16), "element_size": (2, 4, 1, 8), "rows_known": (False, True)},
    dtypes=("float32",),
    nograd=("logits",),
)
@pytest.mark.cases
def fewest_bytes_of_experts(
    mesh, experts: Int[Tensor, "t k"], logits, each, width, element_size, rows_known
) -> Int[Tensor, " c"]:
    """Bytes by all_to_all and by all_gather, and 1 where all_gather sends fewer."""
    (tokens, k), e, ep = experts.shape, len(logits), mesh.size("ep")
    home = torch.arange(tokens, device=experts.device) // max(tokens // ep, 1)
    rows = rows_to_others(experts, home, ep, e // ep) if rows_known else None
    sizes = dict(tokens=tokens, k=k, width=width, num_experts=e, ep_size=ep, element_size=element_size)
    cost = fewest_exchange_bytes(**sizes, rows_sent=rows)
    numbers = [cost.all_to_all, cost.all_gather, ("all_to_all", "all_gather").index(cost.fewest)]
    return torch.tensor(numbers, dtype=each.dtype, device=each.device)


def rows_to_others(experts, home, ep, local):
    """One for each token and each rank, other than its home, that has any of its experts."""
    return sum(int(((experts // local == rank).any(1) & (home != rank)).sum()) for rank in range(ep))


def sent_to_others(row):
    """Bytes of one ledger row that leave the rank, by an algorithm that sends each only where it is needed."""
    world, here = len(row.group), row.group.index(row.rank)
    if row.op == "all_to_all":
        rows = sum(row.splits[0]) if row.splits else 0
        kept = row.splits[0][here] / rows if rows else 1 / world if not row.splits else 0
        return round(row.bytes_in * (1 - kept))
    return row.bytes_in * (world - 1) // (1 if row.op == "all_gather" else world)


def measured(experts, ep, exchange, d, size):
    """Bytes that all ranks send to others forward, of a layer of these choices."""
    k = experts.shape[1]

    def body(mesh, case):
        rank = mesh.rank("ep")
        own = experts.chunk(ep)[rank]
        x, gates = torch.ones(len(own), d), torch.ones(len(own), k)
        here = size // ep
        weights = torch.ones(here, d, 8), torch.ones(here, 4, d)
        routed_experts(x, gates, own, *weights, mesh["ep"], exchange=exchange)

    ledger = run(body, CaseSpec(scheme="exchange", mesh={"ep": ep})).ledger
    return sum(map(sent_to_others, ledger.rows))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("ep", [1, 2, 4])
@given(data=st.data())
def test_bytes_match_the_ledger(ep, data):
    size, k, tokens, d = 8, data.draw(st.integers(1, 3)), ep * data.draw(st.integers(0, 4)), 4
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    experts = torch.rand(tokens, size, generator=generator).argsort(-1)[:, :k]
    home = torch.arange(tokens) // max(tokens // ep, 1)
    rows = rows_to_others(experts, home, ep, size // ep)
    cost = fewest_exchange_bytes(
        tokens=tokens, k=k, width=d, num_experts=size, ep_size=ep, element_size=4, rows_sent=rows
    )
    assert cost.all_to_all == measured(experts, ep, "all_to_all", d, size)
    assert cost.all_gather == measured(experts, ep, "all_gather", d, size)
    assert cost.fewest == ("all_gather" if cost.all_gather < cost.all_to_all else "all_to_all")


SIZES = dict(tokens=64, k=2, width=16, num_experts=8, ep_size=4, element_size=2)


def test_equal_loads_are_the_default():
    # Of the 28 pairs of 8 experts a rank with 2 has one in 28 - 15: 64 * 3 * 13 / 28 = 89.1.
    assert fewest_exchange_bytes(**SIZES) == fewest_exchange_bytes(**SIZES, rows_sent=90)
    uneven = {**SIZES, "tokens": 3, "k": 1, "ep_size": 2}
    assert fewest_exchange_bytes(**uneven) == fewest_exchange_bytes(**uneven, rows_sent=2)


def test_one_rank_sends_nothing():
    cost = fewest_exchange_bytes(**{**SIZES, "ep_size": 1})
    assert (cost.all_to_all, cost.all_gather, cost.fewest) == (0, 0, "all_to_all")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep_size": 3}, "num_experts=8 must be divisible by ep_size=3"),
        ({"rows_sent": 129}, "rows_sent=129 must be at most 128; count a token once for each other rank"),
        ({"rows_sent": 65, "ep_size": 2}, "rows_sent=65 must be at most 64; count a token once for each other rank"),
        ({"k": 9}, "k=9 must be at most num_experts=8"),
        ({"rows_sent": -1}, "rows_sent=-1 must be at least 0, or None for equal loads"),
        ({"k": 0}, "k=0 must be at least 1"),
    ],
)
def test_rejected(changes, message):
    with pytest.raises(ValueError) as caught:
        fewest_exchange_bytes(**{**SIZES, **changes})
    assert str(caught.value) == f"expert_parallel.fewest_exchange_bytes: {message}"


@given(num_experts=st.integers(1, 16), ep_size=st.integers(1, 8))
def test_experts_that_ranks_cannot_share_are_rejected_and_no_others(num_experts, ep_size):
    sizes = {**SIZES, "k": 1, "num_experts": num_experts, "ep_size": ep_size}
    if num_experts % ep_size == 0:
        assert fewest_exchange_bytes(**sizes).all_to_all >= 0
        return
    with pytest.raises(ValueError, match=f"num_experts={num_experts} must be divisible by ep_size={ep_size}"):
        fewest_exchange_bytes(**sizes)
