"""A report in a notebook: the terminal's text, and error over budget on the whole tensor with its shard borders."""

from __future__ import annotations

import base64
import html as html_module
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from parity_tests.harness.compare import TensorRow, errors

if TYPE_CHECKING:
    from parity_tests.harness.report import Report

FLOOR = 1e-3  # ratios below are drawn as this: far inside the budget


def html(report: Report) -> str:
    """The text, and a figure where there is a tensor to draw."""
    text = f"<pre>{html_module.escape(str(report))}</pre>"
    drawable = [row for row in report.rows if row.want.size]
    if not drawable:
        return text
    out = io.BytesIO()
    figure(report).savefig(out, format="png", dpi=110)
    picture = base64.b64encode(out.getvalue()).decode()
    return f'{text}<img alt="error over budget of each tensor" src="data:image/png;base64,{picture}">'


def figure(report: Report) -> Any:
    """One panel for each tensor: log10 of error over budget, shards outlined; above 0 is a mismatch."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.want.size]
    canvas = Figure(figsize=(3.4 * len(rows) + 1.0, 2.9), layout="constrained")
    axes = np.atleast_1d(np.asarray(canvas.subplots(1, len(rows))))
    image: Any = None
    for panel, row in zip(axes, rows, strict=True):
        image = _panel(panel, row)
    bar = canvas.colorbar(image, ax=list(axes), shrink=0.9)
    bar.set_label("log10(error / budget)")
    canvas.suptitle(f"{report.scheme.rpartition(':')[2]}: {report.verdict}")
    return canvas


def _panel(panel: Any, row: TensorRow) -> Any:
    ratio = errors(row.got, row.want, _float(row.dtype)) / row.budgets
    flat = np.log10(np.clip(ratio, FLOOR, 1 / FLOOR**2)).reshape(-1, row.want.shape[-1] if row.want.ndim else 1)
    image = panel.imshow(flat, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
    dims = row.argument.spec.dims
    panel.set_title(f"{row.label}   {row.argument.spec}", fontsize=8)
    panel.set_xlabel(str(dims[-1]) if dims else "")
    panel.set_ylabel(" x ".join(map(str, dims[:-1])))
    for at in _borders(row):
        panel.axvline(at - 0.5, color="black", linewidth=0.8)
    return image


def _borders(row: TensorRow) -> list[int]:
    """Columns at which the owner of the last dim changes."""
    dims = row.argument.spec.dims
    if not dims or not dims[-1].cuts:
        return []
    changes = [np.diff(row.owners[cut.axis].reshape(-1, row.want.shape[-1])[0]) != 0 for cut in dims[-1].cuts]
    return (np.flatnonzero(np.any(changes, axis=0)) + 1).tolist()


def _float(dtype: str) -> str:
    return dtype if "float" in dtype else "float64"
