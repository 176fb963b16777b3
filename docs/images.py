"""Draw the pictures that the pages and the README show, with the project's own drawing: `python docs/images.py`."""

from pathlib import Path

from jax_ref.layouts import contiguous, dual_chunk_swap, packed, striped
from parity_tests.cli.priced import Request, compare
from parity_tests.cost.figure import figure as cost_figure
from shardproof import figure, layout_figure, parse
from torch_impl.pipelining import schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.simulation import draw

FOLDER = Path(__file__).with_name("images")
PLAIN = {"Software": None}  # the version that drew it is no part of a picture
SIZE, WORLD, SEQUENCES = 32, 4, (0, 8, 32)


def spec_strings() -> None:
    """A scheme's input and output: who holds which position, and what the other axes promise."""
    axes = ("cp", "tp")
    tensors = {"logits": parse("b s/cp:dual_chunk_swap v/tp", axes), "-> logprob": parse("b s tp=I cp=R", axes)}
    canvas = figure(tensors, {"b": 2, "s": 16, "v": 12}, {"cp": 4, "tp": 2})
    canvas.savefig(FOLDER / "spec.png", dpi=150, metadata=PLAIN)


def layouts() -> None:
    """One dim of 32 positions sharded over 4 ranks in four orders, the last of two sequences of 8 and 24."""
    orders = {each.__name__: each(SIZE, WORLD) for each in (contiguous, striped, dual_chunk_swap)}
    orders["packed"] = packed(SIZE, WORLD, SEQUENCES)
    layout_figure(orders, {"packed": SEQUENCES}).savefig(FOLDER / "layouts.png", dpi=150, metadata=PLAIN)


def schedule() -> None:
    """One pipeline schedule, as the command draws it."""
    name = "ZBVZeroBubble"
    canvas = draw(simulate(schedule_order(name, 4, 8, 2), stage_to_rank(4, 8, "v")), name)
    canvas.savefig(FOLDER / "schedule.png", dpi=100, metadata=PLAIN)


def crossovers() -> None:
    """Attention over cp from 8 to 8,192 ranks, as `shardproof cost` draws it."""
    words = Request(["cp=8..8192"], ["s=2097152,h=128,g=8"], {}, None, None, "h100")
    canvas = cost_figure(compare(["attention"], words), "attention cp=8..8192 s=2097152,h=128,g=8")
    canvas.savefig(FOLDER / "crossovers.png", dpi=100, metadata=PLAIN)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    spec_strings()
    layouts()
    schedule()
    crossovers()
