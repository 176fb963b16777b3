"""What schedules cost in closed form: idle time of a rank, bubble, chunks whose activations it holds.

p ranks, v chunks on each, n micro-batches; a forward takes f, an input gradient i, a weight gradient w; messages take
no time. The last three schedules are in closed form only for f = i = w = 1.

Source: GPipe arXiv 1811.06965; 1F1B and Interleaved1F1B arXiv 2104.04473; LoopedBFS arXiv 2211.05953; zero bubble
arXiv 2401.10241; DualPipeV after arXiv 2412.19437.
"""

from fractions import Fraction

FILL_AND_DRAIN = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")
FILL_ALONE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def idle(name: str, p: int, n: int, v: int, f: int = 1, i: int = 1, w: int = 1) -> int:
    """Of every rank: what the pipeline takes to fill and to drain, or to fill alone.

    With fewer micro-batches than ranks LoopedBFS waits between chunks too, for those that are still on their way.
    """
    if name in FILL_ALONE:
        return p - 1
    between = (v - 1) * max(0, p - n) if name == "LoopedBFS" else 0
    return (p - 1 + between) * (f + i + w)


def bubble(name: str, p: int, n: int, v: int) -> Fraction:
    """Idle time as a fraction of the whole, for f = i = w = 1: (p - 1) / (vn + p - 1), or (p - 1) / (3vn + p - 1)."""
    lost = idle(name, p, n, v)
    return Fraction(lost, 3 * v * n + lost)


def live_chunks(name: str, p: int, n: int, v: int, rank: int) -> int:
    """The most chunks that a rank holds at once."""
    return {
        "GPipe": n,
        "1F1B": min(n, p - rank),
        "LoopedBFS": v * n,
        "Interleaved1F1B": min(v * n, 2 * (p - rank - 1) + (v - 1) * p + 1),
    }[name]


def live_bound(name: str, p: int) -> int:
    """What the others hold at most, with two chunks on each rank; the first of them where n is a multiple of p."""
    return {"InterleavedZeroBubble": 2 * p, "ZBVZeroBubble": 2 * p, "DualPipeV": 2 * p + 1}[name]
