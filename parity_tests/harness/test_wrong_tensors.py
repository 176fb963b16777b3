"""Notes on a wrong tensor are about the elements that the comparison finds wrong, and about differing collectives."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from shardproof import scheme, values
from shardproof.engines.ledger import Ledger
from shardproof.engines.program import Program
from shardproof.experiments.notes import check_notes
from shardproof.explain.clues import explain
from shardproof.explain.collect_evidence import collect_evidence
from shardproof.explain.evidence import Evidence
from shardproof.explain.note import Note
from shardproof.explain.places import NO_PATTERN
from shardproof.judge.compare import beyond_budget
from shardproof.verify_one_case import verify_case

LARGEST_OF_FLOAT16 = 65504.0


def declared(function, reference, **more):
    defaults = {"mesh": {"tp": (2,)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs={"x": "b v/tp"}, outputs="b v/tp", **{**defaults, **more})(function)


def evidence_of(declaration, report, tensor):
    return collect_evidence(declaration, Program.of(declaration), report.case, tensor, False, report.ledger, {})


def overflowing(factor):
    """A float16 product returned in float32, and its correct reference."""

    def scaled(mesh, x):
        return (x * factor).float()

    return declared(scaled, lambda x: x * factor, dtypes=("float16",))


def test_an_overflow_before_a_wider_result_is_explained():
    declaration = overflowing(30000.0)
    x = np.full((2, 4), 0.5)
    x[1, 2] = 3.0  # 90000 is finite in float32 alone
    assert x[1, 2] * 30000.0 > LARGEST_OF_FLOAT16
    report = verify_case(declaration, declaration.case(b=2, v=4, dtype="float16"), arrays={"x": x})
    (out,) = [tensor for tensor in report.tensors if tensor.role == "output"]
    assert not out.ok
    assert report.notes["out"][0] == "not finite first at (1,2), rank 1"
    evidence = evidence_of(declaration, report, out)
    assert np.array_equal(evidence.is_wrong, beyond_budget(out, out.got))


def test_the_worst_element_is_a_wrong_one():
    def off_at_one_place(mesh, x):
        return x * 30000.0 + 500.0 * (x == 1.0).to(x.dtype)

    declaration = declared(off_at_one_place, lambda x: x * 30000.0, dtypes=("float16",))
    # The first element overflows, as the reference says.
    x = np.array([[3.0, 0.5, 0.25, 0.125], [0.75, -0.5, 1.0, -0.25]])
    report = verify_case(declaration, declaration.case(b=2, v=4, dtype="float16"), arrays={"x": x})
    report = replace(report, notes={"out": (Note(f"{NO_PATTERN}; worst at (1,2)"),)})
    assert check_notes(declaration, report).notes["out"] == (f"{NO_PATTERN}; worst at (1,2), owner tp rank 1",)


def doubled_after_a_sum_of(view):
    """A function whose result is doubled; its sum is of a tensor that `view` makes, alike on both ranks."""

    def doubled(mesh, x):
        dist.all_reduce(view(torch.zeros(4, 2, dtype=x.dtype)), group=mesh["tp"])
        return x * 2

    return declared(doubled, lambda x: x)


def test_a_collective_that_nccl_rejects_is_not_called_diverging():
    declaration = doubled_after_a_sum_of(lambda zeros: zeros[:, 0])
    report = verify_case(declaration, declaration.case(b=2, v=4))
    assert "which NCCL rejects" in report.protocol[0]
    assert report.notes and not any("diverging" in note for notes in report.notes.values() for note in notes)


def test_a_collective_that_differs_is_called_diverging():
    declaration = doubled_after_a_sum_of(lambda zeros: zeros)
    report = verify_case(declaration, declaration.case(b=2, v=4))
    (out,) = [tensor for tensor in report.tensors if tensor.role == "output"]
    assert evidence_of(declaration, report, out).first_divergence is None
    rows = [replace(row, reduce_op="MAX") if row.rank == 1 else row for row in report.ledger.rows]
    evidence = evidence_of(declaration, replace(report, ledger=Ledger(rows)), out)
    assert str(evidence.first_divergence).startswith("reduce op differs: rank 1 issued all_reduce float32[4, 2] MAX")


def test_a_gradient_that_may_be_anything_is_not_wrong():
    want = np.array([1.0, 2.0, 3.0])
    got = np.array([np.nan, 2.0, 4.0])
    evidence = Evidence("x", "gradient", got, want, np.array([np.inf, 1e-6, 1e-6]))
    assert evidence.is_wrong.tolist() == [False, False, True]
    assert not any(note.startswith("not finite") for note in explain(evidence))
