"""Schemes with normal inputs, declared in a line, and the notes of their failing reports."""

from shardproof import scheme, values
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case


def declared(function, reference, inputs, outputs, **more):
    inputs = {"x": inputs} if isinstance(inputs, str) else inputs
    defaults = {"mesh": {"tp": (2,)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs=inputs, outputs=outputs, **{**defaults, **more})(function)


def notes(report):
    assert not report.ok and report.failure is None, str(report)
    return [note for of_tensor in report.notes.values() for note in of_tensor]


def notes_on_case(function, reference, inputs, outputs, case, kinds=None, **more):
    """The notes on each wrong tensor of a case, after the experiments; `kinds` replaces kinds of drawn values."""
    draw = {name: values("normal") for name in inputs}
    defaults = {"mesh": {"tp": (1, 2, 4)}, "draw": draw, "dtypes": ("float32",)}
    declaration = scheme(reference=reference, inputs=inputs, outputs=outputs, **{**defaults, **more})(function)
    drawn = declaration.case(**case)
    report = verify_case(declaration, drawn.replace(values={**drawn.values, **(kinds or {})}))
    assert report.verdict == "mismatch", str(report)
    return {label: [str(note) for note in each] for label, each in check_notes(declaration, report).notes.items()}
