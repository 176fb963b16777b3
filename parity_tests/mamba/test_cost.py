"""mamba.cost: which strategy sends less, and from how many tokens on."""

from fractions import Fraction

import pytest

from torch_impl.mamba import mamba_cp_bytes

LARGE = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "d_state": 128, "d_conv": 4, "element_size": 2}
SMALL = {"num_heads": 8, "head_dim": 2, "n_groups": 4, "d_state": 4, "d_conv": 4, "element_size": 8}


def test_the_worked_examples():
    swapped = mamba_cp_bytes(tokens=131072, cp_size=8, **LARGE)
    contiguous = mamba_cp_bytes(tokens=131072, cp_size=8, segments=1, **LARGE)
    assert swapped.hidden_parallel == contiguous.hidden_parallel == 7 * 131072 * 2 * 26752 // 64
    assert swapped.state_passing == 2 * contiguous.state_passing == 2 * 7 * (3 * 10240 * 2 + 128 * 8193 * 4)
    assert (swapped.cheaper, swapped.crossover_tokens) == ("state_passing", 1272)
    assert mamba_cp_bytes(tokens=32, cp_size=2, **SMALL).hidden_parallel == 5632


@pytest.mark.parametrize(("cp", "segments"), [(2, 1), (2, 6), (4, 2), (8, 2)])
def test_state_passing_is_cheaper_just_above_the_crossover(cp, segments):
    at = mamba_cp_bytes(tokens=cp, cp_size=cp, segments=segments, **SMALL).crossover_tokens
    cheaper = [mamba_cp_bytes(tokens=cp * t, cp_size=cp, segments=segments, **SMALL).cheaper for t in (at, at + 1)]
    assert cheaper == ["hidden_parallel", "state_passing"]


def test_many_sequences_want_hidden_parallel():
    cheaper = [mamba_cp_bytes(tokens=131072, cp_size=8, segments=2 * q, **LARGE).cheaper for q in (1, 12, 13, 1000)]
    assert cheaper == ["state_passing"] * 2 + ["hidden_parallel"] * 2


def test_where_heads_cannot_be_sharded_one_strategy_is_left():
    cost = mamba_cp_bytes(tokens=3, cp_size=3, **SMALL)
    assert (cost.hidden_parallel, cost.cheaper, cost.crossover_tokens) == (None, "state_passing", 0)
    assert cost.state_passing == 2 * 2 * (3 * 48 * 8 + 8 * 9 * 8)


def test_one_rank_sends_nothing_however_many_tokens_it_has():
    cost = mamba_cp_bytes(tokens=7, cp_size=1, **SMALL)
    assert (cost.hidden_parallel, cost.state_passing, cost.cheaper) == (0, 0, "hidden_parallel")
    assert cost.crossover_tokens is None


REJECTED = [
    ({"tokens": 7}, "tokens=7 must be divisible by cp_size=2; pad them"),
    ({"segments": 0}, "segments=0 must be at least 1"),
    ({"n_groups": 3}, "num_heads=8 must be divisible by n_groups=3"),
]


@pytest.mark.parametrize(("options", "text"), REJECTED)
def test_rejection(options, text):
    with pytest.raises(ValueError) as caught:
        mamba_cp_bytes(**{"tokens": 8, "cp_size": 2, **SMALL, **options})
    assert str(caught.value) == f"mamba.mamba_cp_bytes: {text}"


TABLE = [
    {**sizes, "cp_size": n, "tokens": n * tokens, "segments": segments}
    for sizes in (
        LARGE,
        SMALL,
        {**SMALL, "n_groups": 1, "d_conv": 1, "element_size": 2},
        {**SMALL, "head_dim": 3, "n_groups": 8, "d_conv": 2, "element_size": 4},
    )
    for n in (1, 2, 3, 4, 8, 16)
    for tokens in (1, 4, 24, 4096)
    for segments in (1, 2, 5)
]
TABLE += [{key: value for key, value in sizes.items() if key != "segments"} for sizes in TABLE[1::3]]  # the default, 2
TABLE += [{**SMALL, "cp_size": 2, "tokens": 8, **wrong} for wrong, _ in REJECTED]
REJECTION = "rejected"


def counted(tokens, cp_size, num_heads, head_dim, n_groups, d_state, d_conv, element_size, segments=2):
    """Bytes of both strategies, which is cheaper and the crossover, added up message by message."""
    n, channels = cp_size, num_heads * head_dim + 2 * n_groups * d_state
    if tokens % n or not segments or num_heads % n_groups:
        return REJECTION
    # 1. One segment passes on its last d_conv - 1 rows of x, B and C; each head its state and its decay, never rounded.
    rows = sum(channels * element_size for _ in range(d_conv - 1))
    states = sum((head_dim * d_state + 1) * (element_size if element_size > 4 else 4) for _ in range(num_heads))
    passing = sum(segments * (rows + states) for _ in range(n - 1))
    shared = num_heads % n == 0 and 0 in (n_groups % n, n % n_groups)
    if not shared:
        return None, passing, "state_passing", 0
    # 2. Each token's columns: z, x and the result, B and C of each group or copy of one, dt; an n-th goes to each rank.
    groups = n_groups if n_groups > n else n
    columns = num_heads * head_dim * 3 + groups * d_state * 2 + num_heads
    one_token = Fraction(columns * element_size, n) * (n - 1)
    hidden = one_token * tokens / n
    # 3. The most local tokens for which it does not send more.
    crossover = passing // one_token if n > 1 else None
    return hidden, passing, "state_passing" if passing < hidden else "hidden_parallel", crossover


def reported(**sizes):
    try:
        cost = mamba_cp_bytes(**sizes)
    except ValueError:
        return REJECTION
    return cost.hidden_parallel, cost.state_passing, cost.cheaper, cost.crossover_tokens


@pytest.mark.parametrize("sizes", TABLE, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_costs_match_each_message(sizes):
    """Bytes of both strategies, the cheaper one, and the crossover."""
    assert reported(**sizes) == counted(**sizes)
