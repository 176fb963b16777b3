"""Schemes, cases and ledgers draw themselves in a notebook."""

import numpy as np

from parity_tests.specimens.page_reader import read
from shardproof import scheme, values
from shardproof.declare.case import CaseSpec
from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.report.markup import as_text
from shardproof.report.notebook import MAX_RUNS, strip


def unharmed(mesh, x):
    return x * 1


def declared(**more):
    return scheme(
        **{
            "reference": lambda x: x, "mesh": {"cp": (1, 2, 4)}, "inputs": {"x": "b s/cp:dual_chunk_swap"},
            "outputs": "b s/cp:dual_chunk_swap", "draw": {"x": values("normal")}, **more,
        }
    )(unharmed)  # fmt: skip


def strips(tree):
    return [[text.text for text in drawing.all("text")] for drawing in tree.all("svg")]


def test_a_scheme_has_the_strips_of_its_largest_mesh():
    tree = read(declared(dims={"s": (8,)})._repr_html_())
    assert strips(tree) == [["0", "1", "2", "3", "2", "1", "0"]] * 2
    assert [heading.text for heading in tree.all("h3")] == ["x b s/cp:dual_chunk_swap", "-> out b s/cp:dual_chunk_swap"]


def test_a_scheme_that_cannot_have_its_largest_mesh_has_another():
    tree = read(declared(assume=lambda case: case.cp < 4)._repr_html_())
    assert tree.all("svg") and "cp=4" not in tree.text


def test_a_case_shows_its_choices_and_its_strips():
    case = declared().case(cp=2, b=1, s=4, dtype="float32")
    tree = read(case._repr_html_())
    facts = {line.all("th")[0].text: line.all("td")[0].text for line in tree.all("table")[0].all("tr")}
    assert facts["mesh"] == "cp=2" and facts["dims"] == "b=1 s=4" and facts["engine"] == "lockstep, float32, seed 0"
    assert strips(tree) == [["0", "1", "0"]] * 2
    assert strips(read(CaseSpec("nowhere:f", {"tp": 2})._repr_html_())) == []


def test_a_ledger_is_drawn_as_its_collectives():
    rows = [LedgerRow(rank, 0, "all_gather", (0, 1), "tp", ("int64",), ((1,),), 8, 16) for rank in (0, 1)]
    tree = read(Ledger(rows)._repr_html_())
    assert len(tree.all("div", "step")) == 2 and len(tree.all("path", "transfer")) == 4
    assert "No collectives" in Ledger()._repr_html_()


def test_a_strip_has_a_bar_for_each_run_and_never_too_many():
    owners = np.repeat([0, 1, 0], [5, 1, 2])
    assert [bar.attributes["width"] for bar in read(as_text(strip(owners))).all("rect")] == ["300", "60", "120"]
    assert len(read(as_text(strip(np.arange(10_000) % 4))).all("rect")) <= MAX_RUNS
    assert read(as_text(strip(np.zeros(0, dtype=np.int64)))).all("rect") == []
