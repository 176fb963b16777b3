"""A report as a notebook shows it: its text, and a map of the error over the budget of each tensor."""

from __future__ import annotations

import base64
import html as html_module
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from parity_tests.harness.judge.compare import TensorRow, errors
from parity_tests.harness.report.colours import whole_numbers

if TYPE_CHECKING:
    from parity_tests.harness.report.report import Report

FLOOR = 1e-3  # ratios below are drawn as this: far inside the budget
MAX_COLUMNS = 3  # of panels: more would be scaled down to the page
PANEL, BAR = (2.7, 2.3), 0.9  # inches


def html(report: Report) -> str:
    """The text, and a figure where there is a tensor to draw."""
    text = f"<pre>{html_module.escape(str(report))}</pre>"
    drawable = [row for row in report.rows if row.want.size]
    if not drawable:
        return text
    out = io.BytesIO()
    figure(report).savefig(out, format="png", dpi=100)
    picture = base64.b64encode(out.getvalue()).decode()
    return f'{text}<img alt="error over budget of each tensor" src="data:image/png;base64,{picture}">'


def figure(report: Report) -> Any:
    """One panel for each tensor: log10 of error over budget, shards outlined; above 0 is a mismatch."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.want.size]
    high = -(-len(rows) // MAX_COLUMNS)
    wide = -(-len(rows) // high)
    canvas = Figure(figsize=(PANEL[0] * max(wide, 2) + BAR, PANEL[1] * high + 0.4), layout="constrained")
    grid = canvas.subplots(high, wide, squeeze=False).ravel()
    image: Any = None
    for panel, row in zip(grid, rows, strict=False):
        image = _panel(panel, row)
    for spare in grid[len(rows) :]:
        spare.set_axis_off()
    bar = canvas.colorbar(image, ax=list(grid), shrink=0.9)
    bar.set_label("log10(error / budget)")
    canvas.suptitle(f"{report.scheme.rpartition(':')[2]}: {report.verdict}", fontsize=11)
    return canvas


def _panel(panel: Any, row: TensorRow) -> Any:
    ratio = errors(row.got, row.want, _float(row.dtype)) / row.budgets
    flat = np.log10(np.clip(ratio, FLOOR, 1 / FLOOR**2)).reshape(-1, row.want.shape[-1] if row.want.ndim else 1)
    image = panel.imshow(flat, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
    names = row.argument.spec.dim_names
    panel.set_title(f"{row.label}\n{row.argument.spec}", fontsize=8)
    panel.set_xlabel(names[-1] if names else "", fontsize=9)
    panel.set_ylabel(" x ".join(names[:-1]), fontsize=9)
    panel.tick_params(labelsize=8)
    whole_numbers(panel)
    if len(names) < 2:
        panel.set_yticks([])
    across, down = _borders(row)
    for at in across:
        panel.axvline(at - 0.5, color="black", linewidth=0.8)
    for at in down:
        panel.axhline(at - 0.5, color="black", linewidth=0.8)
    return image


def _borders(row: TensorRow) -> tuple[list[int], list[int]]:
    """Columns and rows of the drawn matrix where the owner changes, by the last dim's shardings and by the others'."""
    dims = row.argument.spec.dims
    if not dims:
        return [], []
    width = row.want.shape[-1]
    borders = []
    for shardings, axis in (
        (dims[-1].shardings, 1),
        ([sharding for dim in dims[:-1] for sharding in dim.shardings], 0),
    ):
        changes = [
            np.diff(row.owners[sharding.axis].reshape(-1, width), axis=axis).any(1 - axis) for sharding in shardings
        ]
        borders.append((np.flatnonzero(np.any(changes, axis=0)) + 1).tolist() if shardings else [])
    return borders[0], borders[1]


def _float(dtype: str) -> str:
    return dtype if "float" in dtype else "float64"
