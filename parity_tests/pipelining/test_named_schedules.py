"""pipelining.named_schedules: orders by hand, torch's own lists, and rejections."""

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from parity_tests.pipelining.drawn_orders import legal_sizes
from torch_impl.pipelining import schedule_order, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES

SEVERAL = [name for name, rule in RULES.items() if not rule.is_single]


def written(order):
    return [" ".join("." if action is None else str(action) for action in actions) for actions in order]


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("GPipe", (2, 3, 1), ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1F1B", (2, 3, 1), ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("1f1b", (1, 2, 1), ["0F0 0B0 0F1 0B1"]),
        ("LoopedBFS", (1, 2, 2), ["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"]),
        ("Interleaved1F1B", (1, 2, 2), ["0F0 . 1F0 1B0 0F1 0B0 1F1 1B1 . 0B1"]),
        ("ZBVZeroBubble", (1, 2, 2), ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]),
        ("DualPipeV", (1, 2, 2), ["0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1"]),
        (
            "InterleavedZeroBubble",
            (2, 2, 1),
            ["0F0 . 0F1 0I0 0W0 0I1 0W1", ". 1F0 1I0 1F1 1I1 1W0 1W1"],
        ),
    ],
)
def test_orders_by_hand(name, sizes, expected):
    assert written(schedule_order(name, *sizes)) == expected


class Stage:
    """The attributes of a stage that torch's constructors read."""

    def __init__(self, index, stages, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.submod = torch.nn.Identity()


def order_of_torch(name, p, n, v):
    """The words of torch's own list; for GPipe and 1F1B, which have none, by their definition."""
    if name in SEVERAL:
        placed = enumerate(stage_to_rank(p, p * v, RULES[name].style))
        stages = [Stage(stage, p * v, p) for stage, rank in placed if not rank]
        theirs = get_schedule_class(name)(stages, n, loss_fn=lambda output, target: output).pipeline_order
        return written([theirs[rank] for rank in range(p)])
    # A forward as soon as fewer than so many micro-batches are on their way, else a backward.
    ahead = [n if name == "GPipe" else p - rank for rank in range(p)]
    return [" ".join(alternated(rank, n, min(n, ahead[rank]))) for rank in range(p)]


def alternated(rank, n, ahead):
    forwards, backwards = 0, 0
    while backwards < n:
        is_forward = forwards < n and forwards - backwards < ahead
        yield f"{rank}F{forwards}" if is_forward else f"{rank}B{backwards}"
        forwards, backwards = forwards + is_forward, backwards + (not is_forward)


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("name", RULES)
def test_orders_match_torch(name):
    for sizes in legal_sizes(name):
        assert written(schedule_order(name, *sizes)) == order_of_torch(name, *sizes), sizes


REJECTED = [
    (("Interleaved", 2, 4, 2), "name='Interleaved' is not a schedule; nearest: 'Interleaved1F1B'"),
    (("PipelineScheduleMulti", 2, 4, 2), "name='PipelineScheduleMulti' is not a schedule"),
    (("", 2, 4, 2), "name='' is not a schedule"),
    (("GPipe", 2, 4, 2), "stages_per_rank=2, but GPipe has exactly 1 on each rank; use 1"),
    (("ZBVZeroBubble", 2, 4, 1), "stages_per_rank=1, but ZBVZeroBubble has exactly 2 on each rank; use 2"),
    (("1F1B", 4, 3, 1), "n_microbatches=3 cannot be scheduled by 1F1B over pp_size=4 (n >= pp_size); use 4"),
    (
        ("DualPipeV", 2, 3, 2),
        "n_microbatches=3 cannot be scheduled by DualPipeV over pp_size=2 (n >= 2 * pp_size); use 4",
    ),
    (("Interleaved1F1B", 2, 5, 2), "n_microbatches=5 cannot be scheduled by Interleaved1F1B over pp_size=2"),
    (("GPipe", 0, 3, 1), "pp_size=0 must be at least 1"),
    (("GPipe", 2, 0, 1), "n_microbatches=0 must be at least 1"),
]


@pytest.mark.parametrize(("given_as", "words"), REJECTED)
def test_invalid_arguments_of_a_schedule_are_rejected(given_as, words):
    with pytest.raises(ValueError, match=r"^pipelining\.schedule_order: ") as rejection:
        schedule_order(*given_as)
    assert words in str(rejection.value)


@pytest.mark.parametrize("given_as", [(None, 2, 4, 2), ("GPipe", 2.0, 4, 1), ("GPipe", 2, True, 1)])
def test_other_kinds_are_rejected(given_as):
    with pytest.raises(TypeError, match=r"^pipelining\.schedule_order: "):
        schedule_order(*given_as)


@pytest.mark.parametrize("name", list(RULES))
def test_the_number_that_a_message_recommends_is_accepted(name):
    rule = RULES[name]
    for p in range(1, 6):
        for n in range(1, 16):
            if not rule.accepts(n, p):
                with pytest.raises(ValueError, match="use ") as rejection:
                    schedule_order(name, p, n, rule.stages or 2)
                larger = int(str(rejection.value).rpartition("use ")[2])
                assert larger > n
                assert schedule_order(name, p, larger, rule.stages or 2)
