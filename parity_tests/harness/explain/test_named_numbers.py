"""The names of numbers: products, inverses and quotients of sizes, simplest first."""

import math

from shardproof.explain.named_numbers import named_numbers, number_text


def named(sizes, **options):
    return {number.value: str(number) for number in named_numbers(sizes, **options)}


def test_products_inverses_and_quotients():
    assert named({"tp": 4, "cp": 3}) == {
        4: "tp",
        3: "cp",
        12: "tp*cp",
        1 / 4: "1/tp",
        1 / 3: "1/cp",
        1 / 12: "1/(tp*cp)",
        3 / 4: "cp/tp",
        4 / 3: "tp/cp",
    }
    assert max(map(len, named({"tp": 4, "cp": 3}, mixed=False).values())) == len("1/(tp*cp)")


def test_equal_sizes_share_a_number_and_size_1_has_no_name():
    assert named({"tp": 2, "cp": 2}) == {2: "tp or cp", 4: "tp*cp", 0.5: "1/tp or 1/cp", 0.25: "1/(tp*cp)"}
    assert named({"tp": 1, "m": math.inf, "z": 0}) == {}


def test_the_simplest_name_is_reported():
    assert named({"dp": 8, "tp": 2, "cp": 4})[8.0] == "dp"  # not tp*cp
    assert named({"dp": 8, "tp": 2, "cp": 4})[2.0] == "tp"  # not dp/cp


def test_many_sizes_give_few_names():
    assert len(named_numbers({f"axis{i}": 2.0 + i for i in range(40)})) < 3**6


def test_the_text_of_a_number():
    assert [number_text(number) for number in (4.0, 0.125, 1 / 3, 1e300)] == ["4", "0.125", "0.3333", "1e+300"]
