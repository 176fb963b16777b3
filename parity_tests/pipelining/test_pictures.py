"""Pictures of pipelining.simulation: grids typed by hand, as text and as boxes."""

import pytest

from torch_impl.pipelining import Times, draw, schedule_order, simulate, stage_to_rank

# (schedule, ranks, micro-batches, stages of a rank, style, times, columns to a time unit) and the rows of its picture
GRIDS = [
    (
        ("1F1B", 2, 2, 1, "loop", Times(), 1),
        [
            "rank 0 |F0 F1 .  .  B0 -  .  B1 - | idle 33.3%, live 2",
            "rank 1 |.  F0 B0 -  F1 B1 -  .  . | idle 33.3%, live 1",
        ],
    ),
    (
        ("ZBVZeroBubble", 1, 2, 2, "v", Times(), 1),
        ["rank 0 |F0 f0 i0 w0 F1 I0 W0 f1 i1 w1 I1 W1| idle 0.0%, live 2"],
    ),
    (("LoopedBFS", 1, 1, 3, "loop", Times(), 1), ["rank 0 |F0 f0 F0 B0 -  b0 -  B0 - | idle 0.0%, live 3"]),
    (
        ("GPipe", 2, 2, 1, "loop", Times(f=2, i=1, w=3, p2p=5), 1),
        [
            f"rank 0 |F0 -  F1 -  {'.  ' * 16}B0 -  -  -  B1 -  -  - | idle 57.1%, live 2",
            f"rank 1 |{'.  ' * 7}F0 -  F1 -  B0 -  -  -  B1 -  -  -  {'.  ' * 8}. | idle 57.1%, live 2",
        ],
    ),
    (
        ("GPipe", 1, 1, 1, "loop", Times(f=0.5, i=1, w=0.25), 4),
        ["rank 0 |F0 -  B0 -  -  -  - | idle 0.0%, live 1"],
    ),
    (
        ("GPipe", 2, 1, 1, "loop", Times(f=[1, 2], i=1, w=[0, 1]), 1),
        ["rank 0 |F0 .  .  .  .  B0| idle 66.7%, live 1", "rank 1 |.  F0 -  B0 -  . | idle 33.3%, live 1"],
    ),
    # A box just wide enough for its number, and one that is not.
    (("GPipe", 1, 1, 1, "loop", Times(f=1, i=60, w=40), 1), [f"rank 0 |F0 B0 {'-  ' * 98}- | idle 0.0%, live 1"]),
    (("GPipe", 1, 1, 1, "loop", Times(f=1, i=100, w=99), 1), [f"rank 0 |F0 B0 {'-  ' * 197}- | idle 0.0%, live 1"]),
]
LABELS = ("forward", "backward", "input gradient", "weight gradient", "idle", "bar: second chunk")
IDLE, SECOND = "idle", "bar: second chunk"
KINDS = dict(zip("FBIW", LABELS, strict=False))
HUNDREDTHS = 100
HATCH, EDGE = 1, 50  # idle is hatched and has no line; actions have one of half a point
BOX, BAR = (-40, 80), (-40, 12)  # above the middle of its row, and the height


def cells_of(line):
    """(column, width, letter, micro-batch) of each action of a row."""
    cells = line.split("|")[1].split()
    starts = [at for at, cell in enumerate(cells) if cell not in (".", "-")]
    for at in starts:
        width = next((more for more in range(1, len(cells) - at) if cells[at + more] != "-"), len(cells) - at)
        yield at, width, cells[at][0], int(cells[at][1:])


def typed(settings, lines):
    """The content of a grid's picture: its text, the boxes of waiting ranks, the boxes of actions, the numbers."""
    (_, p, _, v, _, _, per_unit) = settings
    columns, unit = len(lines[0].split("|")[1].split()), HUNDREDTHS // per_unit
    head = f"{p} ranks, {p * v} stages, makespan {columns / per_unit:g}"
    boxes = [(IDLE, 0, columns * unit, rank * HUNDREDTHS + BOX[0], BOX[1], HATCH) for rank in range(p)]
    numbers, kinds = [], set()
    for rank, line in enumerate(lines):
        for at, width, letter, microbatch in cells_of(line):
            kind, place = KINDS[letter.upper()], (at * unit, width * unit)
            kinds |= {kind, SECOND} if letter.islower() else {kind}
            boxes.append((kind, *place, rank * HUNDREDTHS + BOX[0], BOX[1], EDGE))
            boxes += [(SECOND, *place, rank * HUNDREDTHS + BAR[0], BAR[1], 0)] if letter.islower() else []
            if width > columns * 0.006:
                numbers.append((microbatch, at * unit + width * unit // 2, rank * HUNDREDTHS))
    return {
        "text": "\n".join([head, *lines]),
        "legend": sorted(kinds | {IDLE}, key=LABELS.index),
        "title": f"picture of {p}",
        "width and height": (columns * unit, p * HUNDREDTHS - 50),
        "ranks": [f"rank {rank}" for rank in range(p)],
        "boxes": boxes,
        "numbers": numbers,
    }


def drawn(settings):
    """The same of a picture that was drawn."""
    from matplotlib.colors import to_hex

    name, p, n, v, style, times, _ = settings
    timeline = simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, style), times)
    (ax,) = draw(timeline, f"picture of {p}").axes
    legend = {
        text.get_text(): to_hex(handle.get_facecolor())
        for text, handle in zip(ax.get_legend().get_texts(), ax.get_legend().legend_handles, strict=True)
    }
    kind_of = {colour: label for label, colour in legend.items()}
    boxes = []
    for collection in ax.collections:
        for path in collection.get_paths():
            (x, y), (end, top) = path.vertices.min(0), path.vertices.max(0)
            place = [round(HUNDREDTHS * float(number)) for number in (x, end - x, y, top - y)]
            (line,) = collection.get_linewidth()
            style = HATCH * bool(collection.get_hatch()) + round(HUNDREDTHS * float(line))
            boxes.append((kind_of[to_hex(collection.get_facecolor()[0])], *place, style))
    numbers = [
        (int(text.get_text()), *(round(HUNDREDTHS * float(number)) for number in text.get_position()))
        for text in ax.texts
    ]
    (left, right), (bottom, above) = ax.get_xlim(), ax.get_ylim()
    assert (left, above) == (0, -0.5)
    return {
        "text": str(timeline),
        "legend": list(legend),
        "title": ax.get_title(loc="left"),
        "width and height": (round(HUNDREDTHS * right), round(HUNDREDTHS * bottom)),
        "ranks": [label.get_text() for label in ax.get_yticklabels()],
        "boxes": boxes,
        "numbers": numbers,
    }


@pytest.mark.parametrize(("settings", "lines"), GRIDS, ids=lambda value: value[0] if len(value) == 7 else "")
def test_a_picture_is_as_typed_by_hand(settings, lines):
    assert drawn(settings) == typed(settings, lines)
