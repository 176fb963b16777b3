"""Draw the pictures of the pages and the README, each light and dark: `python docs/images.py [NAME ...]`.

Without names those are drawn that take seconds. `tour` runs `shardproof tour` first, which takes minutes.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_ref.layouts import contiguous, dual_chunk_swap, packed, striped
from shardproof import figure, layout_figure, parse
from shardproof.cli.priced import Request, compare
from shardproof.cli.tour import judged
from shardproof.cost.figure import figure as cost_figure
from shardproof.report import themes
from torch_impl.pipelining import schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.simulation import draw

FOLDER = Path(__file__).with_name("images")
SIZE, WORLD, SEQUENCES = 32, 4, (0, 8, 32)
EXAMPLES = 8  # of each scheme, as the command draws by default


def spec() -> Any:
    """A scheme's input and output: the rank of each position, and the promises of the other axes."""
    axes = ("cp", "tp")
    tensors = {"logits": parse("b s/cp:dual_chunk_swap v/tp", axes), "-> logprob": parse("b s tp=I cp=R", axes)}
    return figure(tensors, {"b": 2, "s": 16, "v": 12}, {"cp": 4, "tp": 2})


def layouts() -> Any:
    """One dim of 32 positions sharded over 4 ranks in four orders, the last of two sequences of 8 and 24."""
    orders = {each.__name__: each(SIZE, WORLD) for each in (contiguous, striped, dual_chunk_swap)}
    orders["packed"] = packed(SIZE, WORLD, SEQUENCES)
    return layout_figure(orders, {"packed": SEQUENCES})


def schedule() -> Any:
    """One pipeline schedule, as the command draws it."""
    name = "ZBVZeroBubble"
    return draw(simulate(schedule_order(name, 4, 8, 2), stage_to_rank(4, 8, "v")), name)


def crossovers() -> Any:
    """Attention over cp from 8 to 8,192 ranks, as `shardproof cost` draws it."""
    words = Request(["cp=8..8192"], ["s=2097152,h=128,g=8"], {}, None, None, "h100")
    return cost_figure(compare(["attention"], words), "attention cp=8..8192 s=2097152,h=128,g=8")


def tour() -> Any:
    """The verdicts of `shardproof tour`."""
    return _toured().figure()


@cache
def _toured() -> Any:
    return judged(Console(), EXAMPLES)


QUICK = {each.__name__: each for each in (spec, layouts, schedule, crossovers)}
ALL = QUICK | {"tour": tour}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or QUICK:
        themes.write(ALL[name], FOLDER / f"{name}.svg")
