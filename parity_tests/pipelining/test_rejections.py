"""What the parts of pipelining that load no torch reject, each call with words of its message."""

from functools import partial

import pytest
from jaxtyping import Int
from torch import Tensor

from parity_tests.pipelining import test_named_schedules, test_simulation
from parity_tests.rejections import codes, declared
from shardproof import check_cases, scheme
from torch_impl.pipelining import Times, draw, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.order import parse_action


def simulated(rows, placed):
    return simulate([[parse_action(text) for text in row.split()] for row in rows], placed)


ONE_RANK = ["0F0 0B0"]
CALLS = [
    *((partial(schedule_order, *sizes), words) for sizes, words in test_named_schedules.REJECTED),
    (partial(schedule_order, None, 2, 4, 2), "TypeError: pipelining.schedule_order: name"),
    (partial(schedule_order, "GPipe", 2, True, 1), "TypeError: pipelining.schedule_order: n_microbatches=True"),
    *((partial(simulated, rows, placed), words) for rows, placed, words in test_simulation.REJECTED),
    (partial(simulate, [[]], [0], n_microbatches=0), "ValueError: pipelining.simulate: n_microbatches=0 must be"),
    *(
        (partial(Times, **{name: time}), f"ValueError: pipelining.Times: {name}=")
        for name, time in (("f", -1), ("i", float("nan")), ("w", [1, float("inf")]), ("p2p", True))
    ),
    *(
        (partial(Times, **{name: time}), f"TypeError: pipelining.Times: {name}=")
        for name, time in (("f", "long"), ("i", None), ("p2p", [1, 2]))
    ),
    (lambda: simulate([[parse_action("0F0"), parse_action("0B0")]], [0], Times(f=[])), "f has 0 times, but there is a"),
    (lambda: draw(simulated(ONE_RANK, [0]), 3), "TypeError: pipelining.draw: title=3 is an int"),
    (partial(stage_to_rank, 2, 3), "ValueError: pipelining.stage_to_rank: "),
    (partial(stage_to_rank, 2, 4, "u"), "ValueError: pipelining.stage_to_rank: style='u' is not one of loop, v"),
]


@scheme(**declared("pp", (1, 2), len(CALLS)))
def rejected_by_pipelining(mesh, ids) -> Int[Tensor, "k r/pp"]:
    return codes(ids, CALLS)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_rejections(engine):
    check_cases(rejected_by_pipelining, 3, engine=engine)
