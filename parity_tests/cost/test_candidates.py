"""Candidates of schemes on large meshes against the closed forms of production, which count bytes by other formulas."""

import dataclasses
import time

import pytest

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import Cost, integers
from shardproof.cost import sheet
from shardproof.cost.candidates import PHASES, Setting, candidates
from shardproof.cost.exchanges import compared
from torch_impl.context_parallel import attention_bytes
from torch_impl.mamba import mamba_cp_bytes

H100 = sheet.read("h100")


def bytes_sent(candidate, phase):
    """Bytes that a rank sends, wherever they go."""
    return round(sum(line.price.inside + line.price.between for line in candidate.lines if line.phase == phase))


@pytest.mark.fast_values(4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 6, 8, 64, 256])  # production counts the keys that ranks need pair by pair
@pytest.mark.parametrize("heads", [(64, 64), (64, 8), (48, 1)])
def test_bytes_of_attention_match_production(cp, heads, causal):
    h, g = heads
    s = 16384 * 3
    there = compared("attention", Setting({"cp": cp, "tp": 4}, {"s": s, "h": h, "g": g, "causal": causal}, H100))
    counted = attention_bytes(b=1, s=s, h=h, hk=g, p=128, cp_size=cp, itemsize=2, causal=causal)
    by_name = {t.exchange if t.exchange != "usp" else f"usp heads={t.heads_size}": t for t in counted}
    assert {each.label for each in there.candidates} == set(by_name)
    for each in there.candidates:
        traffic = by_name[each.label]
        assert [bytes_sent(each, phase) for phase in PHASES] == [traffic.forward, traffic.backward], each.label


@pytest.mark.parametrize("cp", [1, 2, 8, 64, 1024])
def test_bytes_of_a_mixer_match_production(cp):
    h, g, t = 128, 8, 65536
    there = compared("mamba", Setting({"cp": cp}, {"t": t, "h": h, "g": g}, H100))
    counted = mamba_cp_bytes(
        tokens=t, cp_size=cp, num_heads=h, head_dim=64, n_groups=g, d_state=128, d_conv=4, element_size=2
    )
    by_label = {each.label: bytes_sent(each, "forward") for each in there.candidates}
    assert by_label.pop("states") == counted.state_passing
    assert set(by_label.values()) == ({counted.hidden_parallel} if counted.hidden_parallel is not None else set())
    assert sorted(by_label) == (["hidden fused=False", "hidden fused=True"] if 1 < cp <= h else ["hidden"] * (cp == 1))


def test_the_least_is_the_shortest_step():
    there = compared("attention", Setting({"cp": 64, "tp": 8}, {"s": 131072, "h": 64, "g": 8}, H100))
    assert there.least.seconds == min(each.seconds for each in there.candidates)
    for each in there.candidates:
        for phase in PHASES:
            assert max(each.product_seconds[phase], each.communication(phase)) <= each.step(phase)
            assert each.step(phase) <= each.product_seconds[phase] + each.communication(phase)


def test_messages_hide_behind_products_and_collectives_do_not():
    there = compared("attention", Setting({"cp": 8}, {"s": 131072, "h": 64, "g": 8}, H100))
    ring, gathered = (each for each in there.candidates if each.label in ("ring", "all_gather"))
    assert ring.step("forward") == ring.product_seconds["forward"] > ring.communication("forward") > 0
    assert gathered.step("forward") == gathered.product_seconds["forward"] + gathered.communication("forward")


def test_no_products_take_no_time():
    without = dataclasses.replace(H100, operations_per_second=None)
    there = compared("attention", Setting({"cp": 8}, {"s": 1024, "h": 8, "g": 8}, without))
    assert {tuple(each.product_seconds) for each in there.candidates} == {()}


def test_a_hundred_thousand_ranks_take_seconds():
    start = time.process_time()
    mesh = {"dp": 25, "cp": 500, "tp": 8}
    there = compared("attention", Setting(mesh, {"s": 2**20 // 1000 * 1000, "h": 64, "g": 8}, H100))
    assert {each.label.partition(" ")[0] for each in there.candidates} == {"ring", "all_gather", "usp"}
    assert time.process_time() - start < 10


# A scheme of the user's own


def scheme_on_two_axes(cost, **more):
    specs = {"x": "b tp=P cp=I"}, "b tp=I cp=I"
    return declared(
        lambda mesh, x: summed(x, mesh["tp"]), lambda x: x * 1.0, *specs, mesh={"cp": (1, 2), "tp": (1, 2)}, cost=cost,
        **more,
    )  # fmt: skip


def setting(names=(), **mesh):
    return Setting(mesh, dict(names), H100)


def test_an_op_without_an_axis_belongs_to_the_only_axis_with_several_ranks():
    scheme = scheme_on_two_axes(lambda c: Cost(forward={"all_reduce": (1, 4 * c.b)}))
    (alone,) = candidates(scheme, setting({"b": 5}, cp=1, tp=16)).candidates
    assert [(line.axis, line.calls, line.size) for line in alone.lines] == [("tp", 1, 20)]
    both = candidates(scheme, setting({"b": 5}, cp=2, tp=16))
    assert [line.price for line in both.candidates[0].lines] == [None]
    assert both.least is None and not both.candidates[0].is_complete


def test_an_axis_that_the_scheme_lacks_spreads_its_groups_over_hosts():
    scheme = scheme_on_two_axes(lambda c: Cost(forward={"all_gather/tp": (1, 4 * c.b)}))
    (near,) = candidates(scheme, setting({"b": 5}, cp=4, tp=8)).candidates
    (far,) = candidates(scheme, setting({"b": 5}, cp=4, tp=8, pp=8)).candidates
    assert (near.between, far.inside) == (0.0, 0.0) and near.inside == far.between > 0
    assert "pp" not in far.case.mesh


def test_a_cost_by_rank_counts_the_busiest():
    def cost(c):
        return [Cost({"send/tp": (1, 40), "recv/tp": (rank, 8)}, products=(rank, 1)) for rank in range(c.cp * c.tp)]

    (each,) = candidates(scheme_on_two_axes(cost), setting({"b": 5}, cp=2, tp=4)).candidates
    assert [(line.op, line.calls, line.size) for line in each.lines] == [("send", 1, 40), ("recv", 7, 8)]
    assert each.products == (7, 1)


def scheme_with_offsets(cost, **sizes):
    return declared(
        lambda mesh, x, ends: summed(x, mesh["tp"]), lambda x, ends: x * 1.0, {"x": "b tp=P", "ends": "n"}, "b tp=I",
        draw={"ends": integers(1, 3)}, cost=cost, **sizes,
    )  # fmt: skip


def test_a_cost_that_depends_on_values_uses_drawn_values():
    scheme = scheme_with_offsets(lambda c, ends: Cost({"all_reduce": (len(ends), int(ends.max()))}))
    (each,) = candidates(scheme, setting({"b": 5, "n": 3}, tp=4)).candidates
    assert each.lines[0].calls == 3 and 1 <= each.lines[0].size <= 3


@pytest.mark.parametrize(
    ("tp", "n", "here"), [(65, 3, "65 ranks and 3 elements"), (4, 2**20 + 1, "4 ranks and 1,048,577 elements")]
)
def test_values_are_not_drawn_for_large_meshes(tp, n, here):
    with pytest.raises(ValueError) as rejected:
        candidates(scheme_with_offsets(lambda c, ends: Cost()), setting({"b": 5, "n": n}, tp=tp))
    limit = "which are drawn for at most 64 ranks and 1,048,576 elements"
    assert str(rejected.value).endswith(f"its cost depends on the values of ends, {limit}; here are {here}")


def test_rank_options_that_change_the_cost_are_candidates():
    def cost(c):
        return Cost(forward={"all_reduce/tp": (c.parts, 4 * c.b)})

    options = {"parts": (1, 3), "idle": (1, 2)}
    scheme = declared(
        lambda mesh, x, parts, idle: summed(x, mesh["tp"]), lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I",
        rank_options=options, cost=cost, assume=lambda c: c.parts == 1 or c.b > 2,
    )  # fmt: skip
    there = candidates(scheme, setting({"b": 8}, tp=4))
    assert [(each.label, each.case.idle) for each in there.candidates] == [("parts=1", 1), ("parts=3", 1)]
    assert there.least.label == "parts=1"
    few = candidates(scheme, setting({"b": 2}, tp=4))
    assert few.left_out == {"parts=3": "assume rejects these sizes and options"}
    (named,) = candidates(scheme, setting({"b": 8, "parts": 3}, tp=4)).candidates
    assert named.case.parts == 3


@pytest.mark.parametrize(("seed", "counts"), [(None, 16), (None, 64), (3, 16), (3, 64)])
def test_lengths_are_the_standard_case_or_drawn(seed, counts):
    scheme = declared(
        lambda mesh, x: x, lambda x: x * 1.0, {"x": "v/tp:ragged"}, "v/tp:ragged",
        cost=lambda c: Cost(forward={"all_gather": (1, 4 * max(c.layouts["v/tp"]["lengths"]))}),
    )  # fmt: skip
    (each,) = candidates(scheme, Setting({"tp": counts}, {"v": 1000}, H100, seed=seed)).candidates
    standard = [min(-(-1000 // counts), max(0, 1000 - -(-1000 // counts) * rank)) for rank in range(counts)]
    lengths = each.case.layouts["v/tp"]["lengths"]
    assert sum(lengths) == 1000 and (seed is not None or lengths == standard)
    assert each.lines[0].size == 4 * max(lengths)


@pytest.mark.parametrize(
    ("cost", "names", "mesh", "message"),
    [
        (None, {}, {"cp": 2, "tp": 2}, "declares no cost; give scheme(...) cost=lambda case: Cost(forward="),
        (lambda c: Cost(), {}, {"tp": 2}, "--mesh lacks cp: scheme '<lambda>' has the axes cp, tp; give cp=N"),
        (lambda c: Cost(), {"v": 3}, {"cp": 2, "tp": 2}, "'v' is not a mesh axis, dim or option (cp, tp, b)"),
        (
            lambda c: Cost(forward={"sum/tp": (1, 4)}),
            {},
            {"cp": 2, "tp": 2},
            "cost names 'sum', which has no cost model",
        ),
        (lambda c: Cost(forward={"all_reduce/pp": (1, 4)}), {}, {"cp": 2, "tp": 2}, "its cost names all_reduce/pp;"),
        (lambda c: Cost(forward={"all_reduce": (1, c.z)}), {}, {"cp": 2, "tp": 2}, "its cost raised AttributeError:"),
    ],
)
def test_schemes_without_a_price(cost, names, mesh, message):
    with pytest.raises(ValueError) as rejected:
        candidates(scheme_on_two_axes(cost), Setting(mesh, names, H100))
    assert message in str(rejected.value)


@pytest.mark.parametrize(
    ("name", "mesh", "names", "message"),
    [
        ("attention", {"tp": 2}, {}, "--mesh lacks cp: attention is compared over it; give cp=N"),
        ("attention", {"cp": 2}, {"s": 8}, "--dim lacks h: give h=N, g=N"),
        ("attention", {"cp": 2}, {"causal": 1}, "--option causal=1: give True or False"),
        ("mamba", {"cp": 2}, {"s": 8}, "--dim s: mamba has the dims b, t, h, g, p, n, k, d"),
        ("mamba", {"cp": 2}, {"t": 8, "h": 9}, "--dim h=9: mamba needs a multiple of g=8"),
    ],
)
def test_candidates_that_are_not_compared(name, mesh, names, message):
    with pytest.raises(ValueError) as rejected:
        compared(name, Setting(mesh, names, H100))
    assert str(rejected.value) == message
