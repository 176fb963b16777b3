"""Two maps of each tensor: the error and the rank of each element. On a narrow page one is below the other.

Wrong tensors come first. A cell of a large tensor stands for several elements: it has their worst error, and the rank
of the first. A report of many examples shows the worst example of each tensor, and names its case if that is not the
report's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from xml.etree.ElementTree import Element

import numpy as np

from shardproof.declare.conditions import when
from shardproof.judge.compare import TensorComparison, errors
from shardproof.report.markup import Child, svg, tag
from shardproof.report.owner_map import cell_size, figure, owner_map, reduced
from shardproof.report.report import Report, sizes

MAX_TITLED = 256  # most cells that show their numbers under the pointer
# Upper bounds, in budgets, for the colours in colours.ERRORS; the last colour is for larger errors.
LEVELS = (0.0, 1e-2, 1e-1, 1.0, 1e1, 1e3)
LEGEND = ("exact", "below 0.01 budgets", "below 0.1", "up to 1", "up to 10: wrong", "up to 1000", "more, or not finite")


def ratios(tensor: TensorComparison) -> np.ndarray:
    """Error over budget of each element in the worst copy."""
    wrong = errors(tensor.got, tensor.want, tensor.dtype if "float" in tensor.dtype else "float64")
    with np.errstate(over="ignore", invalid="ignore"):
        error_ratios = np.where(np.isinf(tensor.element_budgets), 0.0, wrong / tensor.element_budgets)
    return (
        error_ratios
        if tensor.gradient_is_none is None
        else np.where(tensor.gradient_is_none & (tensor.want != 0.0), np.inf, error_ratios)
    )


def holders(tensor: TensorComparison, mesh: Mapping[str, int]) -> np.ndarray:
    """The global rank of each element in the worst copy; for a sum over ranks, the first rank."""
    copy = tensor.stitched.coordinates[tensor.copy]
    ranks = np.zeros(tensor.want.shape, dtype=np.int64)
    for axis, size in mesh.items():
        ranks = ranks * size + tensor.owners.get(axis, copy.get(axis, 0))
    return ranks


def level(ratio: float) -> int:
    """The index of an error's colour."""
    return next((number for number, bound in enumerate(LEVELS) if ratio <= bound), len(LEVELS))


def maps(report: Report) -> Element:
    """The two maps of each non-empty tensor in a report, and a legend for the errors' colours."""
    visible_tensors = [tensor for tensor in report.tensors if tensor.want.size]
    if not visible_tensors:
        return tag("p", "No tensor was compared.", class_="quiet")
    keys = [
        tag("span", svg(14, 12, tag("rect", width=14, height=12, class_=f"cell e{number}"), label=""), text)
        for number, text in enumerate(LEGEND)
    ]
    tensors = [_tensor(report, tensor) for tensor in sorted(visible_tensors, key=lambda tensor: tensor.ok)]
    return tag("div", tag("div", *keys, class_="legend"), tag("div", *tensors, class_="tensors"))


def _tensor(report: Report, tensor: TensorComparison) -> Element:
    case = report.case_of_tensor.get(tensor.label, report.case)
    name = tag("span", tensor.label, " ", tag("code", str(tensor.argument.spec)), " ")
    verdict = tag("span", "equal", class_="right") if tensor.ok else tag("span", "wrong", class_="badge")
    summed = [axis for axis in tensor.stitched.part_axes if axis not in tensor.stitched.coordinates[tensor.copy]]
    holder = "rank of the worst copy" if len(tensor.stitched.copies) > 1 else "rank that holds it"
    holder += f"; a sum over {', '.join(summed)}" if summed else ""
    wrong = int((ratios(tensor) > 1.0).sum())
    off = f"error over budget: {wrong} of {tensor.want.size} wrong" if wrong else "error over budget"
    both = tag("div", _error_map(tensor, off), owner_map(holders(tensor, case.mesh), holder), class_="maps")
    is_of_another = case.json != report.case.json  # the worst of many examples
    of_case = tag("p", f"worst in {sizes(case)}{when(case)}", class_="quiet") if is_of_another else None
    return tag("div", tag("h3", name, verdict), of_case, both, class_="tensor")


def _error_map(tensor: TensorComparison, caption: str) -> Element:
    """A rectangle for each run of errors of the same size, and a cross on each wrong element."""
    error_ratios = ratios(tensor)
    cells, step = reduced(error_ratios, first=False)
    wide, high = cell_size(cells)
    titled = step == 1 and cells.size <= MAX_TITLED
    parts: list[Child] = []
    crosses: dict[int, list[str]] = {}  # by the level, whose colour they must stand out from
    for y, line in enumerate(cells):
        if titled:
            spans = [(x, 1, level(ratio)) for x, ratio in enumerate(line)]
        else:
            spans = _runs([level(ratio) for ratio in line])
        for x, length, number in spans:
            at = {"x": x * wide, "y": y * high, "width": length * wide, "height": high}
            title = tag("title", _numbers(tensor, error_ratios, y * len(line) + x)) if titled else None
            parts.append(tag("rect", title, **at, class_=f"cell e{number}"))
        for x in np.flatnonzero(line > 1.0):
            left, top, arm = (x + 0.5) * wide - 2.5, (y + 0.5) * high - 2.5, 5
            crosses.setdefault(level(line[x]), []).append(f"M{left:.1f} {top:.1f}l{arm} {arm}m0 -{arm}l-{arm} {arm}")
    parts += [tag("path", d="".join(paths), class_=f"cross on{number}") for number, paths in crosses.items()]
    return figure(parts, cells.shape, (wide, high), caption, step)


def _runs(levels: list[int]) -> list[tuple[int, int, int]]:
    """(begin, length, level) of each run of equal levels."""
    runs, begin = [], 0
    for number, run in groupby(levels):
        length = len(list(run))
        runs.append((begin, length, number))
        begin += length
    return runs


def _numbers(tensor: TensorComparison, error_ratios: np.ndarray, flat: int) -> str:
    index = np.unravel_index(flat, tensor.want.shape) if tensor.want.ndim else ()
    place = "(" + ",".join(str(int(i)) for i in index) + ")"
    got, want, ratio = (float(array[index]) for array in (tensor.got, tensor.want, error_ratios))
    return f"{place}: {got:.6g}, reference {want:.6g}, {ratio:.2g} budgets"
