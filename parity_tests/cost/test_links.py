"""Placement, bytes and seconds against a simulation that moves every block over every hop of a small mesh."""

import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest

from shardproof.cost import sheet
from shardproof.cost.links import OPS, Price, price
from shardproof.cost.placement import Placement, hosts_of, placement

FLAT = sheet.Algorithm("ring", "", 1.0, 0.0, 0.0, 0.0)
H100 = sheet.read("h100")


def links(inside=1.0, between=1.0, ranks_per_host=4, algorithms=(FLAT,), **more):
    return sheet.Sheet("here", ranks_per_host, inside, between, tuple(algorithms), **more)


def groups(mesh, axis):
    """Every group of an axis, as the ranks that differ in it alone."""
    by_others = {}
    for rank, at in enumerate(itertools.product(*(range(size) for size in mesh.values()))):
        others = tuple(i for name, i in zip(mesh, at, strict=True) if name != axis)
        by_others.setdefault(others, []).append(rank)
    return list(by_others.values())


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "mesh", [{"cp": 1}, {"cp": 8}, {"cp": 4, "tp": 2}, {"dp": 3, "cp": 2, "tp": 3}, {"cp": 5, "tp": 3}]
)
def test_a_placement_comes_from_the_group_on_most_hosts(mesh, ranks_per_host):
    for axis in mesh:
        spans = [[rank // ranks_per_host for rank in group] for group in groups(mesh, axis)]
        most = max(len(set(hosts)) for hosts in spans)
        fewest = min(hosts.count(host) for hosts in spans if len(set(hosts)) == most for host in hosts)
        assert placement(mesh, axis, ranks_per_host) == Placement(mesh[axis], most, fewest)


def test_a_placement_of_a_hundred_thousand_ranks():
    mesh = {"dp": 25, "cp": 500, "tp": 8}
    assert [placement(mesh, axis, 8) for axis in mesh] == [
        Placement(25, 25, 1),
        Placement(500, 500, 1),
        Placement(8, 1, 8),
    ]
    assert hosts_of(mesh, 8) == 12500


def hops_of_a_ring(op, n):
    """Blocks that each rank of a ring sends to its neighbour, one at each step, as the algorithm moves them."""
    gathers = [1] * (n - 1)
    return {"all_gather": gathers, "reduce_scatter": gathers, "all_reduce": gathers + gathers}[op]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_of_a_ring_are_the_sum_over_its_hops(op, n):
    """A block is the whole input for a gather, and an n-th of the input for other ops."""
    size = 840
    block = Fraction(size) if op == "all_gather" else Fraction(size, n)
    moved = price(op, 1, size, Placement(n, 1, n), links())
    assert Fraction(moved.inside).limit_denominator(1000) == sum(hops_of_a_ring(op, n)) * block
    assert moved.between == 0


def test_bytes_of_an_all_to_all_are_the_sum_over_its_peers():
    hosts = [rank // 4 for rank in range(6)]  # four and two ranks: one of the two sends most between hosts
    size, to_each = 600, 100
    sent = [sum(to_each for other in hosts if other != host) for host in hosts]
    place = placement({"cp": 6}, "cp", 4)
    moved = price("all_to_all", 1, size, place, links())
    assert moved.between == max(sent)
    assert moved.inside + moved.between == size - to_each


def test_a_ring_over_hosts_crosses_with_all_adapters():
    """Eight ranks on two hosts of four: a quarter of a rank's bytes crosses, over its own adapter."""
    moved = price("all_gather", 1, 100, Placement(8, 2, 4), links(inside=10.0, between=1.0))
    assert (moved.inside, moved.between) == (525.0, 175.0)
    assert moved.seconds == 700 / 4  # four adapters together are slower than the links inside
    assert price("all_gather", 1, 100, Placement(8, 2, 4), links(inside=3.0, between=1.0)).seconds == 700 / 3


def test_a_ring_of_messages_waits_for_one_adapter():
    assert price("send", 7, 700, Placement(8, 2, 4), links(inside=10.0)) == Price(0.0, 700.0, 700.0)
    assert price("send", 7, 700, Placement(8, 1, 8), links(inside=10.0)) == Price(700.0, 0.0, 70.0)
    assert price("recv", 7, 700, Placement(8, 2, 4), links()) == Price()


def test_a_step_waits():
    way = sheet.Algorithm("ring", "", 1.0, 100.0, 1.0, 10.0)
    here = links(inside=1e30, between=1e30, algorithms=[way])
    waits = {"all_gather": 100 + 6 * 1 + 1 * 10, "all_reduce": 100 + 12 * 1 + 2 * 10, "send": 100 + 10}
    assert {op: round(price(op, 1, 0, Placement(8, 2, 4), here).seconds) for op in waits} == waits
    posted = links(inside=1e30, between=1e30, algorithms=[way], message_seconds=1000.0)
    assert round(price("all_to_all", 2, 0, Placement(8, 2, 4), posted).seconds) == 2 * (100 + 10 + 7 * 1000)


def test_an_all_reduce_takes_the_way_that_is_faster():
    """A tree where many ranks wait for little, a ring where few wait for much."""
    rings = [algorithm for algorithm in H100.algorithms if algorithm.kind == "ring"]
    ring_alone = sheet.Sheet("rings", 8, H100.inside_bytes_per_second, H100.between_bytes_per_second, tuple(rings))
    many, few = placement({"dp": 4096}, "dp", 8), placement({"dp": 8}, "dp", 8)
    assert price("all_reduce", 1, 4096, many, H100).seconds < price("all_reduce", 1, 4096, many, ring_alone).seconds
    assert price("all_reduce", 1, 2**30, few, H100) == price("all_reduce", 1, 2**30, few, ring_alone)


@pytest.mark.parametrize("op", OPS)
def test_one_rank_sends_nothing(op):
    assert price(op, 3, 4096, Placement(1, 1, 1), H100) == Price()


def test_an_op_without_a_model():
    with pytest.raises(ValueError, match=r"cost names 'all_too_all', which has no cost model; the modelled ops are"):
        price("all_too_all", 1, 4, Placement(2, 1, 2), H100)


# Sheets

SMALL = {
    "ranks_per_host": 2,
    "inside": {"bytes_per_second": 2e9},
    "between": {"bytes_per_second": 1e9},
    "algorithms": [
        {"kind": "ring", "bandwidth_share": 1, "call_seconds": 0, "inside_seconds": 1e-6, "between_seconds": 2e-6}
    ],
}


def test_the_built_in_sheets():
    assert sheet.names() == ["b200", "h100"]
    assert {sheet.read(name).ranks_per_host for name in sheet.names()} == {8}
    assert all(sheet.read(name).measured.startswith("not yet measured") for name in sheet.names())


def test_a_sheet_of_a_json_file():
    Path("mine.json").write_text(json.dumps(SMALL))
    mine = sheet.read("mine.json")
    assert (mine.name, mine.ranks_per_host, mine.between_bytes_per_second) == ("mine", 2, 1e9)
    assert (mine.operations_per_second, mine.message_seconds) == (None, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_per_host": 0}, "ranks_per_host is 0; give a whole number of at least 1"),
        ({"inside": {"bytes_per_second": 0}}, "inside.bytes_per_second is 0; give a positive number"),
        ({"inside": 3}, "inside is 3; give a table with bytes_per_second"),
        ({"between": {}}, "between.bytes_per_second is missing"),
        ({"speed": 3}, "speed is not known; the keys are algorithms, between, inside, measured, message_seconds, name"),
        ({"algorithms": []}, "algorithms has no row; give one of kind 'ring' at least"),
        ({"algorithms": [3]}, "algorithms[0] is not a table of bandwidth_share, between_seconds, call_seconds"),
        ({"algorithms": [{**SMALL["algorithms"][0], "kind": "star"}]}, "algorithms[0].kind is 'star'; give one of"),
        ({"algorithms": [{**SMALL["algorithms"][0], "kind": "tree"}]}, "algorithms has no row of kind 'ring', which"),
        ({"algorithms": [{**SMALL["algorithms"][0], "bandwidth_share": 2}]}, "algorithms[0].bandwidth_share is 2.0;"),
        ({"operations_per_second": "many"}, "operations_per_second is 'many'; give a positive number"),
    ],
)
def test_a_sheet_that_cannot_be_used(change, message):
    Path("mine.json").write_text(json.dumps({**SMALL, **change}))
    with pytest.raises(ValueError) as rejected:
        sheet.read("mine.json")
    assert str(rejected.value).startswith(f"--links mine.json: {message}")


def test_a_sheet_that_is_not_there():
    with pytest.raises(ValueError, match=r"^--links h200 is neither a file nor a sheet; the sheets are b200, h100$"):
        sheet.read("h200")
    Path("torn.toml").write_text("a = [")
    with pytest.raises(ValueError, match=r"^--links torn.toml: cannot be read: "):
        sheet.read("torn.toml")
