"""Hints that a report takes from the failing case itself."""

from dataclasses import replace

import torch

from parity_tests.harness.report.test_report import broken, doubled, of_ones
from shardproof import values
from shardproof.engines.ledger import CallSite
from shardproof.explain.note import Note
from shardproof.verify_one_case import verify_case


def test_one_rank_is_enough():
    declaration = of_ones(doubled)
    last = str(verify_case(declaration, declaration.case(tp=1, b=4, dtype="float32"))).splitlines()[-1]
    assert last == "  one rank is enough for it: the function and its reference differ before anything is sharded"
    declaration = of_ones(broken)
    assert "one rank" not in str(verify_case(declaration, declaration.case(tp=1, b=4, dtype="float32")))


def test_values_that_may_never_occur():
    declaration = of_ones(doubled, draw={"x": values("large")})
    last = str(verify_case(declaration, declaration.case(tp=2, b=4, dtype="float32"))).splitlines()[-1]
    assert last == ("  drawn for it: x large; if such values never occur, declare draw={'x': values('normal', 'ties')}")


def test_no_values_are_advised_where_a_line_is_blamed():
    declaration = of_ones(doubled, draw={"x": values("large")})
    report = verify_case(declaration, declaration.case(tp=2, b=4, dtype="float32"))
    blamed = Note("off by 2 at a line", sites=[CallSite("all_reduce", "a.py:1", "bwd")])
    assert "drawn for it" not in str(replace(report, notes={"out": (blamed,)}))


def test_rows_of_nan_that_reach_the_result():
    """A product with zeros keeps the NaN of rows that the scheme declares as not read."""

    def product(mesh, x):
        return torch.cat([x[:1] * 0, x[1:]])

    def zeroed(x):
        return x.at[:1].set(0)

    rows = values("normal", nan_rows=lambda case, inputs: [place == 0 for place in range(case.dims["b"])])
    specs = {"inputs": {"x": "b d"}, "outputs": "b d"}
    declaration = of_ones(product, reference=zeroed, mesh={"tp": (1,)}, draw={"x": rows}, **specs)
    case = declaration.case(b=4, d=2)
    hint = "drawn for it: NaN in the rows of x that are not read; leave them out with torch.where, not with a product"
    for padding, is_said in (("nan", True), ("zero", False)):
        drawn = case.replace(values={"x": {"kind": "normal", "padding": padding}})
        assert (hint in str(verify_case(declaration, drawn))) == is_said
