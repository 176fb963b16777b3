"""The maps of a tensor show each element's owner and error as the report has them, in few enough cells to see."""

from dataclasses import replace

import numpy as np

from parity_tests.specimens.page_reader import read
from shardproof import scheme, values
from shardproof.report.colours import ERRORS, RANKS
from shardproof.report.markup import as_text
from shardproof.report.owner_map import MAX_COLUMNS, MAX_ROWS, owner_map
from shardproof.report.page_style import style
from shardproof.report.tensor_maps import LEGEND, LEVELS, holders, level, maps
from shardproof.verify_one_case import verify_case


def off_at_position_2(mesh, x):
    return x + 1.0 * (mesh.global_ids("s") == 2)


def report_of(function, mesh, inputs="b s/cp", **sizes):
    declaration = scheme(
        reference=lambda x: x, mesh={axis: (size,) for axis, size in mesh.items()}, inputs={"x": inputs},
        outputs=inputs, draw={"x": values("ones")}, dtypes=("float32",), nograd=("x",),
    )(function)  # fmt: skip
    return verify_case(declaration, declaration.case(dtype="float32", **sizes))


def test_a_cross_and_a_colour_for_each_wrong_element():
    report = report_of(off_at_position_2, {"cp": 2}, b=2, s=4)
    tree = read(as_text(maps(report)))
    (cross,) = tree.all("path", "cross")
    assert cross.attributes["d"].count("M") == 2  # the third of four, in both rows
    assert cross.attributes["class"] == "cross on6" and ".on6 { stroke: white; }" in style()  # on dark red
    wrong = [cell.all("title")[0].text for cell in tree.all("rect", f"e{len(ERRORS) - 1}") if cell.all("title")]
    assert [text.partition(" budgets")[0].rpartition(",")[0] for text in wrong] == [
        "(0,2): 2, reference 1",
        "(1,2): 2, reference 1",
    ]
    assert "error over budget: 2 of 8 wrong" in tree.text


def test_owners_are_ranks_of_the_world():
    report = report_of(off_at_position_2, {"tp": 2, "cp": 2}, "b/tp s/cp", b=2, s=4)
    assert holders(report.tensors[0], report.case.mesh).tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    tree = read(as_text(maps(report)))
    owners = tree.all("figure")[1]
    assert [text.text for text in owners.all("text")] == ["0", "1", "2", "3"]
    assert [cell.classes[1] for cell in owners.all("rect")] == ["r0", "r1", "r2", "r3"]


def test_the_worst_copy_is_drawn():
    report = report_of(lambda mesh, x: x + mesh.rank("tp"), {"tp": 2, "cp": 2}, "b s/cp tp=I", b=1, s=4)
    assert holders(report.tensors[0], report.case.mesh).tolist() == [[2, 2, 3, 3]]


def test_a_tensor_from_another_case_names_that_case():
    report = report_of(lambda mesh, x: x, {"cp": 2}, b=2, s=4)
    assert "worst in" not in read(as_text(maps(report))).text
    other = report.case.replace(dims={"b": 2, "s": 22}, conditions={"no_grad": True})
    tree = read(as_text(maps(replace(report, case_of_tensor={report.tensors[0].label: other}))))
    assert "worst in cp=2 b=2 s=22 float32 seed=0, when it is called under torch.no_grad()" in tree.text


def test_every_error_has_one_colour_and_one_meaning():
    assert len(LEVELS) + 1 == len(LEGEND) == len(ERRORS)
    assert [level(ratio) for ratio in (0.0, 0.005, 0.05, 1.0, 1.01, 1e3, 1e4, np.inf, np.nan)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        6,
        6,
    ]


def test_a_large_tensor_has_no_more_cells_than_can_be_seen():
    ranks = np.arange(100 * 1000).reshape(100, 1000) % len(RANKS)
    cells = read(as_text(owner_map(ranks, "owner"))).all("rect")
    assert len(cells) <= MAX_ROWS * MAX_COLUMNS
    assert "each cell stands for up to 63 elements" in as_text(owner_map(ranks, "owner"))  # 3 rows of 21 columns


def test_a_scalar_and_an_empty_tensor():
    report = report_of(lambda mesh, x: x, {"cp": 2}, "cp=I")
    assert len(read(as_text(maps(report))).all("figure")) == 2
    empty = report_of(lambda mesh, x: x, {"cp": 2}, "b s/cp", b=0, s=4)
    assert "No tensor was compared." in as_text(maps(empty))
