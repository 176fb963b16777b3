"""A drawing of a ledger: ranks are columns, steps of collectives or messages are rows, time runs down.

Above each step are the blocks that the ranks hand in, below it the blocks that they receive; lines between them are as
wide as their bytes and have the colour of the source rank. Steps of the backward have a different background, and
blamed steps are marked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.engines.movement import Step, Transfer, steps
from shardproof.report import colours
from shardproof.report.markup import Child, svg, tag

MAX_STEPS = 80
MAX_FANNED = 8  # largest group whose blocks are drawn one by one; lines of a larger one meet in the middle
COLUMN, NARROW, FEW = 88.0, 64.0, 4  # width of a column with up to FEW ranks, and with more
LEAST_SCALE = 0.7  # smallest scale of a drawing on a narrow page
BOX, HEAD, GAP = 20.0, 24.0, 66.0  # heights: of a box, of the row of rank names, of the space that lines cross
THINNEST, WIDEST = 1.5, 11.0
IN_BLOCKS = ("all_to_all", "reduce_scatter")  # their input has one block for each rank
FROM_THE_ROOT = ("broadcast", "scatter")
SUMS = {"all_reduce", "reduce_scatter", "reduce"}


@dataclass(frozen=True)
class Grid:
    """The columns of the ranks, and the bytes of the widest line."""

    ranks: tuple[int, ...]
    largest: int

    @property
    def column(self) -> float:
        return COLUMN if len(self.ranks) <= FEW else NARROW

    @property
    def width(self) -> float:
        return self.column * len(self.ranks)

    @property
    def style(self) -> str:
        """A phone scales a drawing of up to 8 ranks to its width and scrolls larger ones, to keep text legible."""
        return f"min-width: {LEAST_SCALE * self.width:.0f}px"

    def x(self, rank: int) -> float:
        return self.column * (self.ranks.index(rank) + 0.5)

    def stroke(self, size: int) -> float:
        return THINNEST + (WIDEST - THINNEST) * size / max(self.largest, 1)


def movement(ledger: Ledger, blamed: Collection[LedgerRow] = (), world: int = 0) -> Element:
    """Draw a ledger of `world` ranks, or of the ranks in it; `blamed` rows are marked."""
    all_steps = steps(ledger)
    if not all_steps:
        return tag("p", "No collectives and no messages.", class_="quiet")
    ranks = {row.rank for row in ledger.rows} | {rank for row in ledger.rows for rank in row.group} | set(range(world))
    grid = Grid(tuple(sorted(ranks)), max(move.size for step in all_steps for move in (*step.transfers, _NOTHING)))
    marked = {id(row) for row in blamed}
    visible_steps = [step for number, step in enumerate(all_steps) if number < MAX_STEPS or _marks(step, marked)]
    rest = sum(row.payload for step in all_steps for row in step.rows) - sum(
        r.payload for s in visible_steps for r in s.rows
    )
    more = (
        f"{len(all_steps) - len(visible_steps)} more steps of {rest} B are not drawn."
        if len(visible_steps) < len(all_steps)
        else None
    )
    names = [tag("text", f"rank {rank}", x=grid.x(rank), y=16.0) for rank in grid.ranks]
    head = tag("div", tag("p"), svg(grid.width, HEAD, *names, label="the ranks", style=grid.style), class_="step quiet")
    picture = tag("div", head, *(_step(step, grid, marked) for step in visible_steps), class_="movement")
    return tag("div", picture, tag("p", more, class_="quiet") if more else None)


_NOTHING = Transfer(None, None, 0, ())


def _marks(step: Step, marked: Collection[int]) -> bool:
    return any(id(row) in marked for row in step.rows)


def _step(step: Step, grid: Grid, marked: Collection[int]) -> Element:
    is_marked = _marks(step, marked)
    classes = ["step", step.phase, *(["blamed"] if is_marked else [])]
    hubs = _hubs(step, grid)
    gap = GAP + 18.0 * max(len(set(hubs.values())) - 2, 0)
    height = 2 * BOX + gap + 16.0
    parts: list[Child] = [
        tag("line", x1=grid.x(rank), x2=grid.x(rank), y1=0, y2=height, class_="lifeline") for rank in grid.ranks
    ]
    for move in sorted(step.transfers, key=lambda move: -move.size):
        parts += _line(move, step, grid, hubs, gap)
    parts += _hub_marks(step, grid, hubs, gap)
    for row in _input_rows(step):
        parts += _box(row, grid, 8.0, _input_blocks(row), marked)
    arrived = {move.target for move in step.transfers if move.target is not None}
    for rank in sorted(arrived):
        parts += _cells(rank, grid, 8.0 + BOX + gap, _output_blocks(step, rank))
    parts += [
        tag("rect", tag("title", f"rank {rank} has not issued it"), **_frame(rank, grid, 8.0), class_="absent")
        for rank in step.missing
    ]
    label = " / ".join(_texts(step))
    drawing = svg(grid.width, height, *parts, label=label, style=grid.style)
    return tag("div", _label(step, is_marked), drawing, class_=" ".join(classes))


def _label(step: Step, is_marked: bool) -> Element:
    """The operation of a step, its size, and the user's line."""
    badge = tag("span", "blamed", class_="badge") if is_marked else None
    lines = [tag("code", text) for text in _texts(step)]
    sizes = sorted({row.payload for row in _input_rows(step)})
    each = f"{sizes[0]} B" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} B"
    ranks = len(_input_rows(step))
    back = "backward, " if step.phase == "bwd" else ""
    count = f"{back}{each} from {'each of ' if ranks > 1 else ''}{ranks} rank{'s' if ranks > 1 else ''}"
    absent = f"; not issued by rank {', '.join(map(str, step.missing))}" if step.missing else ""
    return tag("p", *lines, tag("span", count + absent, class_="quiet"), " ", badge)


def short(size: int) -> str:
    """Bytes as a text short enough for a box: `24 B`, `1.5 MB`."""
    if size < 10_000:
        return f"{size} B"
    unit, letter = next((unit, letter) for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")) if size >= unit)
    return f"{size / unit:.3g} {letter}B"


def _texts(step: Step) -> list[str]:
    """`all_reduce SUM float32[4] over tp, my_scheme.py:28`, one line per set of rows that differ only in rank."""
    rows = _input_rows(step)
    texts: dict[str, list[int]] = {}
    shapes = {(row.op, row.source): row for row in rows}
    for row in rows:
        first = shapes[row.op, row.source]
        what = " ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(first.dtypes, first.shapes, strict=True))
        how = f" {row.reduce_op}" if row.reduce_op else ""
        texts.setdefault(f"{row.op}{how} {what} over {row.group_name}, {row.source}", []).append(row.rank)
    if len(texts) == 1:
        return list(texts)
    return [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]


def _input_rows(step: Step) -> list[LedgerRow]:
    """The rows that hand in data; if nobody sent to a receive, the receive itself."""
    takers = [row for row in step.rows if row.op == "recv" or (row.op in FROM_THE_ROOT and row.rank != row.root)]
    return [row for row in step.rows if row not in takers] or takers


def _hubs(step: Step, grid: Grid) -> dict[tuple[int, ...], int]:
    """The level of each group whose lines meet in the middle, because of a sum or the group's size."""
    groups = {
        move.group: None
        for move in step.transfers
        if None in (move.source, move.target) or len(move.group) > MAX_FANNED
    }
    heights: dict[float, int] = {}
    levels = {}
    for group in groups:
        middle = _middle(group, grid)
        levels[group] = heights.get(middle, 0)
        heights[middle] = levels[group] + 1
    return levels


def _middle(group: tuple[int, ...], grid: Grid) -> float:
    return sum(grid.x(rank) for rank in group) / len(group)


def _hub_place(
    group: tuple[int, ...], grid: Grid, hubs: Mapping[tuple[int, ...], int], gap: float
) -> tuple[float, ...]:
    levels = max(hubs.values()) + 1
    return _middle(group, grid), 8.0 + BOX + gap * (hubs[group] + 1) / (levels + 1)


def _hub_marks(step: Step, grid: Grid, hubs: Mapping[tuple[int, ...], int], gap: float) -> list[Child]:
    marks: list[Child] = []
    text = _reduction(step) if step.rows[0].op in SUMS else "each"
    for group in hubs:
        x, y = _hub_place(group, grid, hubs, gap)
        marks.append(tag("rect", x=x - 20, y=y - 9, width=40, height=18, rx=9, class_="hub"))
        marks.append(tag("text", text, x=x, y=y + 4))
    return marks


def _reduction(step: Step) -> str:
    """How the terms of a step are combined: sum, max, avg."""
    return next((row.reduce_op for row in step.rows if row.reduce_op), "sum").lower()


def _line(move: Transfer, step: Step, grid: Grid, hubs: Mapping[tuple[int, ...], int], gap: float) -> list[Child]:
    """The path of one transfer, drawn over a darker one because some ranks' colours are pale."""
    top, bottom = 8.0 + BOX, 8.0 + BOX + gap
    start = None if move.source is None else (_block_x(move, step, grid, is_target=False), top)
    end = None if move.target is None else (_block_x(move, step, grid, is_target=True), bottom)
    if move.group in hubs:
        hub = _hub_place(move.group, grid, hubs, gap)
        curves = [(start, hub)] if start else []
        curves += [(hub, end)] if end else []
    else:
        assert start is not None and end is not None
        curves = [(start, end)]
    width = grid.stroke(move.size)
    source, target = (_reduction(step) if r is None else f"rank {r}" for r in (move.source, move.target))
    title = f"{source} to {target}: {move.size} B"
    paint = "under" if move.source is None else f"l{move.source % len(colours.RANKS)}"
    lines: list[Child] = []
    for (x1, y1), (x2, y2) in curves:
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {y2:.1f}"
        lines.append(tag("path", d=path, class_="under", stroke_width=width + 1.2))
        lines.append(tag("path", tag("title", title), d=path, class_=f"transfer {paint}", stroke_width=width))
    return lines


def _block_x(move: Transfer, step: Step, grid: Grid, *, is_target: bool) -> float:
    """The x at which a line starts or ends: the middle of its block in the rank's box."""
    rank, other = (move.target, move.source) if is_target else (move.source, move.target)
    assert rank is not None
    row = next((row for row in step.rows if row.rank == rank and row.op != "recv"), None)
    blocks = _output_blocks(step, rank) if is_target else _input_blocks(row) if row is not None else [rank]
    frame = _frame(rank, grid, 0.0)
    place = next((place for place, block in enumerate(blocks) if block == other), None)
    if len(blocks) == 1 or place is None:
        return grid.x(rank)
    return frame["x"] + frame["width"] * (place + 0.5) / len(blocks)


def _input_blocks(row: LedgerRow) -> list[int | None]:
    """The blocks that a rank hands in, by target rank; the rank itself if it hands in a single block."""
    is_in_blocks = row.op in IN_BLOCKS or (row.op == "scatter" and row.root == row.rank)
    return list(row.group) if is_in_blocks and len(row.group) <= MAX_FANNED else [row.rank]


def _output_blocks(step: Step, rank: int) -> list[int | None]:
    """The blocks that a rank receives, by source rank; None is the sum of all."""
    moves = [move for move in step.transfers if move.target == rank]
    if step.rows[0].op in SUMS:
        return [None]
    sources = sorted(move.source for move in moves if move.source is not None)
    return [*sources] if len(sources) <= MAX_FANNED else [None]


def _frame(rank: int, grid: Grid, y: float) -> dict[str, float]:
    width = grid.column - 12.0
    return {"x": grid.x(rank) - width / 2, "y": y, "width": width, "height": BOX}


def _box(row: LedgerRow, grid: Grid, y: float, blocks: list[int | None], marked: Collection[int]) -> list[Child]:
    """A rank's input in its colour, with the number of each block's target rank."""
    paint = row.rank % len(colours.RANKS)
    parts: list[Child] = []
    frame = _frame(row.rank, grid, y)
    wide = frame["width"] / len(blocks)
    for place, block in enumerate(blocks):
        at = {**frame, "x": frame["x"] + place * wide, "width": wide}
        parts.append(tag("rect", tag("title", f"rank {row.rank}: {row}"), **at, class_=f"cell r{paint}"))
        text = short(row.payload) if len(blocks) == 1 else str(block)
        parts.append(tag("text", text, x=at["x"] + wide / 2, y=y + 14.0, class_=f"t{paint}"))
    if id(row) in marked:
        parts.append(tag("rect", **frame, class_="culprit"))
    return parts


def _cells(rank: int, grid: Grid, y: float, blocks: list[int | None]) -> list[Child]:
    """A rank's blocks after the step: one for each source rank, or a sum."""
    frame = _frame(rank, grid, y)
    wide = frame["width"] / len(blocks)
    parts: list[Child] = []
    for place, block in enumerate(blocks):
        at = {**frame, "x": frame["x"] + place * wide, "width": wide}
        paint = None if block is None else block % len(colours.RANKS)
        parts.append(tag("rect", **at, class_="cell sum" if paint is None else f"cell r{paint}"))
        text = "of all" if block is None else str(block)
        parts.append(tag("text", text, x=at["x"] + wide / 2, y=y + 14.0, class_=None if paint is None else f"t{paint}"))
    return parts
