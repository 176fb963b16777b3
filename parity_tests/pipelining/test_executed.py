"""pipelining.executed: what ran is noted, and stages are as before when the block ends."""

import pytest

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.pipelining.perceptron import PER_MICROBATCH, batch, loss_of, made_stages
from torch_impl.pipelining.executed import executed_actions
from torch_impl.pipelining.schedule import build_pipeline_schedule


def noted(mesh, case):
    stages = list(made_stages(mesh, [0, 0], None).values())
    schedule = build_pipeline_schedule(None, "ZBVZeroBubble", PER_MICROBATCH, PER_MICROBATCH, stages, loss_of)
    inputs, target = batch(1, stages[0].submod[0].weight.dtype)
    with executed_actions(stages) as actions:
        schedule.step(inputs, target=target)
    schedule.step(inputs, target=target)
    with pytest.raises(KeyError), executed_actions(stages):
        raise KeyError
    left = [name for stage in stages for name in vars(stage) if name.endswith("_one_chunk")]
    return [str(action) for action in actions], left


@pytest.mark.filterwarnings("ignore")
def test_actions_are_noted_inside_the_block_alone():
    assert run(noted, CaseSpec("noted", {"pp": 1})).results == ((["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"], []),)


def noted_by_two(mesh, case):
    stages = list(made_stages(mesh, [0], None).values())
    schedule = build_pipeline_schedule(None, "GPipe", PER_MICROBATCH, PER_MICROBATCH, stages, loss_of)
    inputs, target = batch(1, stages[0].submod[0].weight.dtype)
    with executed_actions(stages) as outer:
        with executed_actions(stages) as inner:
            schedule.step(inputs, target=target)
        schedule.step(inputs, target=target)
    left = [name for name in vars(stages[0]) if name.endswith("_one_chunk")]
    return [[str(action) for action in actions] for actions in (outer, inner)], left


@pytest.mark.filterwarnings("ignore")
def test_a_block_inside_another_leaves_it_as_it_was():
    ((((outer, inner), left),)) = run(noted_by_two, CaseSpec("noted", {"pp": 1})).results
    assert (outer, inner, left) == (["0F0", "0B0"] * 2, ["0F0", "0B0"], [])
