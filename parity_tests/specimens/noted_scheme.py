"""A scheme of one mesh with normal inputs, declared in a line, and the notes of its failing report."""

from shardproof import scheme, values


def declared(function, reference, inputs, outputs, **more):
    inputs = {"x": inputs} if isinstance(inputs, str) else inputs
    defaults = {"mesh": {"tp": (2,)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs=inputs, outputs=outputs, **{**defaults, **more})(function)


def notes(report):
    assert not report.ok and report.failure is None, str(report)
    return [note for of_tensor in report.notes.values() for note in of_tensor]
