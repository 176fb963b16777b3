"""Draw rows of packed sequences: empty and one-token sequences, padding in slots and behind them, fill values."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

FILL = -1000


@dataclass(frozen=True)
class Rows:
    """Row b has slots of `units[b]` units, and slot j ends with `short[b][j]` tokens of padding.

    With `tail` the last slot of a row ends with its real tokens, and the padding behind them is in no slot.
    """

    units: tuple[tuple[int, ...], ...]
    short: tuple[tuple[int, ...], ...]
    tail: bool
    chunks: int


@st.composite
def drawn_rows(draw):
    """One to four rows of equal length."""
    rows, width = draw(st.sampled_from([(2, 2), (1, 3), (4, 1), (3, 4)])), draw(st.integers(0, 4))
    units, short = [], []
    for _ in range(rows[0]):
        borders = sorted(draw(st.lists(st.integers(0, width), max_size=rows[1] - 1)))
        units.append(tuple(b - a for a, b in zip([0, *borders], [*borders, width], strict=True)))
        short.append(tuple(draw(st.integers(0, 7)) for _ in units[-1]))
    chunks = draw(st.sampled_from([m for m in (1, 2, 3, 4) if rows[0] % m == 0]))
    return Rows(tuple(units), tuple(short), draw(st.booleans()), chunks)


def batch_of(rows, n):
    """A batch of ids, labels and lengths whose slots can be sharded over `n`."""
    unit = 2 * n
    width = max(map(len, rows.units)) + 1
    real, padded = torch.full((2, len(rows.units), width), FILL)
    for b, (units, short) in enumerate(zip(rows.units, rows.short, strict=True)):
        for j, (count, less) in enumerate(zip(units, short, strict=True)):
            real[b, j], padded[b, j] = max(count * unit - less, 0), count * unit
        if rows.tail:
            padded[b, j] = real[b, j]
    size = sum(rows.units[0]) * unit
    ids = torch.arange(len(rows.units) * size).view(len(rows.units), size)
    return {"input_ids": ids % 5, "labels": ids * 7 % 101, "seq_lens": real, "seq_lens_padded": padded}
