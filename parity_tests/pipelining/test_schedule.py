"""Parity of pipelining.schedule: every schedule against accumulation on one device, bit by bit."""

import logging
import tempfile
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parity_tests.pipelining.drawn_orders import legal_sizes, named_orders, own_orders
from parity_tests.pipelining.perceptron import (
    PER_MICROBATCH,
    accumulated,
    batch,
    gradients,
    last_backwards,
    loss_of,
    made_stages,
    placement,
    stepped,
    written,
)
from parity_tests.pipelining.test_csv_schedule import dumped, with_communication
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining import schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.schedule import build_pipeline_schedule, executed_actions, scale_grads_by_divisor

DTYPES = st.sampled_from(["float32", "float64"])


@pytest.fixture(autouse=True)
def quiet():
    """Few micro-batches are warned of, which is tested where it is meant."""
    logging.getLogger("torch_impl.pipelining.schedule").setLevel(logging.ERROR)
    yield
    logging.getLogger("torch_impl.pipelining.schedule").setLevel(logging.NOTSET)


def check_steps(ranks, order, placed, n, dtype, steps=1):
    """Losses and gradients equal one device's, and the executed order the simulation's."""
    losses, gradients = accumulated(len(placed), n, dtype, last_backwards(order), steps)
    of_ranks = {}
    for result in ranks.results:
        of_ranks |= result["gradients"]
    assert of_ranks == gradients
    assert [result["losses"] for result in ranks.results if result["losses"]] == [losses]
    timeline = simulate(order, placed)
    for rank, result in enumerate(ranks.results):
        assert result["executed"] == [[str(event.action) for event in timeline.of(rank)]] * steps


def case_of(p, dtype="float32", **options):
    return CaseSpec("pipeline", {"pp": p}, dtype=dtype, options=options)


@pytest.mark.slow
@given(named_orders(ranks=range(1, 5), max_microbatches=8), DTYPES, st.integers(1, 2))
def test_every_schedule_is_accumulation_bit_by_bit(sample, dtype, steps):
    name, p, n, _, order, placed = sample
    ranks = run(stepped, case_of(p, dtype, n=n, placed=placed, name=name, steps=steps))
    check_steps(ranks, order, placed, n, dtype, steps)


@pytest.mark.fast_values(5)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(RULES))
def test_the_fewest_microbatches_and_one_more(name, p):
    for _, n, v in legal_sizes(name, ranks=[p], chunks=(1, 2))[:2]:
        placed = placement(name, p, v)
        order = schedule_order(name, p, n, v)
        check_steps(run(stepped, case_of(p, n=n, placed=placed, name=name)), order, placed, n, "float32")


@pytest.mark.fast_values(4)
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", list(RULES))
def test_every_schedule_in_processes(name, p):
    _, n, v = next(sizes for sizes in legal_sizes(name, ranks=[p], chunks=(2,)) if sizes[1] >= 2)
    placed = placement(name, p, v)
    ranks = run(stepped, case_of(p, n=n, placed=placed, name=name.upper()), engine="gloo")
    check_steps(ranks, schedule_order(name, p, n, v), placed, n, "float32")


@given(own_orders(for_torch=True), st.booleans(), DTYPES)
def test_any_file_is_accumulation_in_its_order(sample, says_all, dtype):
    order, placed, n = sample
    text = dumped(with_communication(order, placed, n) if says_all else order)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(stepped, case_of(len(order), dtype, n=n, placed=placed, name=None, csv=written(folder, text)))
    check_steps(ranks, order, placed, n, dtype)


@pytest.mark.slow
@given(named_orders(ranks=range(1, 4), max_microbatches=6), st.booleans())
def test_a_dumped_schedule_gives_the_schedules_results(sample, says_all):
    name, p, n, _, order, placed = sample
    text = dumped(with_communication(order, placed, n) if says_all else order)
    by_name = run(stepped, case_of(p, n=n, placed=placed, name=name))
    with tempfile.TemporaryDirectory() as folder:
        by_file = run(stepped, case_of(p, n=n, placed=placed, name=name, csv=written(folder, text)))
    assert by_file.results == by_name.results


@pytest.mark.slow
@given(named_orders(ranks=range(2, 5), max_microbatches=6))
def test_the_ledger_has_the_messages_of_the_simulation_in_their_order(sample):
    name, p, n, _, order, placed = sample
    ranks = run(stepped, case_of(p, n=n, placed=placed, name=name))
    timeline = simulate(order, placed)
    for rank in range(p):
        sent = [row.peer for row in ranks.ledger.of(rank) if row.op == "send" and row.shapes == ((PER_MICROBATCH, 3),)]
        assert sent == [peer for event in timeline.of(rank) if (peer := receiver(event.action, placed)) is not None]


def receiver(action, placed):
    """The rank that receives the result of an action."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < len(placed):
        return None
    peer = placed[action.stage + step]
    return None if peer == placed[action.stage] else peer


def stage(*parameters):
    module = nn.ParameterList(parameters)
    return SimpleNamespace(submod=module, scale_grads=lambda factor: None)


def parameter(gradient):
    leaf = nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64))
    leaf.grad = torch.tensor(gradient, dtype=torch.float64)
    return leaf


FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4)


@given(FLOATS, st.integers(1, 10**6))
def test_every_gradient_is_divided_once(values, divisor):
    shared, separate = parameter(values), parameter(values)
    without = nn.Parameter(torch.ones(2))
    scale_grads_by_divisor([stage(shared, separate), stage(shared, without)], divisor)
    for gradient in (shared.grad, separate.grad):
        assert gradient.tolist() == [value / divisor for value in values]
    assert without.grad is None


@given(FLOATS, st.integers(0, 20), st.integers(0, 20))
def test_powers_of_two_multiply(values, a, b):
    twice, once = parameter(values), parameter(values)
    for divisor in (2**a, 2**b):
        scale_grads_by_divisor([stage(twice)], divisor)
    scale_grads_by_divisor([stage(once)], 2 ** (a + b))
    assert twice.grad.equal(once.grad)


def test_it_is_divided_in_place():
    given_as = parameter([4.0])
    gradient = given_as.grad
    scale_grads_by_divisor([stage(given_as)], 4)
    assert given_as.grad is gradient
    assert gradient.tolist() == [1.0]


def sharded(mesh, case):
    gradients = []
    for placed in (Shard(0), Replicate()):
        local = torch.arange(3, dtype=torch.float64) + mesh.rank("dp")
        full = DTensor.from_local(local, mesh.device_mesh, [placed], run_check=False)
        leaf = nn.Parameter(torch.zeros_like(full))
        leaf.grad = full
        scale_grads_by_divisor([stage(leaf)], 4)
        assert leaf.grad.placements == (placed,)
        gradients.append(leaf.grad.to_local().tolist())
    return gradients


def test_shards_are_divided_where_they_lie():
    ranks = run(sharded, CaseSpec("sharded", {"dp": 2}))
    assert ranks.results == ([[0.0, 0.25, 0.5]] * 2, [[0.25, 0.5, 0.75]] * 2)
    assert ranks.ledger.rows == []


def mean_step(mesh, case):
    """Some steps of a schedule whose gradients are divided once at the end."""
    n, steps, by_torch = case.n, case.steps, case.by_torch
    stages = made_stages(mesh, stage_to_rank(2, 2), torch.float64)
    local_stages = list(stages.values())
    schedule = build_pipeline_schedule(None, "GPipe", PER_MICROBATCH, n * PER_MICROBATCH, local_stages, loss_of)
    schedule.scale_grads = by_torch
    inputs, target = batch(n, torch.float64)
    for _ in range(steps):
        schedule.step(*([inputs] if 0 in stages else []), **({"target": target} if 1 in stages else {}))
    if not by_torch:
        scale_grads_by_divisor(local_stages, n * steps)
    return gradients({number: each.submod for number, each in stages.items()})


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_steps_then_one_division_are_the_mean(n, steps):
    ranks = run(mean_step, CaseSpec("mean", {"pp": 2}, options={"n": n, "steps": steps, "by_torch": False}))
    _, summed = accumulated(2, n, "float64", steps=steps)
    assert ranks.results[0] | ranks.results[1] == {name: divided(sums, n * steps) for name, sums in summed.items()}


def test_torch_divides_the_first_steps_gradients_again():
    """Two equal steps of two micro-batches come to 1.5 means where 2 are due."""
    gradients = {}
    for steps in (1, 2):
        ranks = run(mean_step, CaseSpec("mean", {"pp": 2}, options={"n": 2, "steps": steps, "by_torch": True}))
        gradients[steps] = {
            name: torch.frombuffer(bytearray(x), dtype=torch.float64) for name, x in ranks.results[0].items()
        }
    ratios = torch.cat([gradients[2][name] / gradients[1][name] for name in gradients[1]])
    assert set(ratios.round(decimals=9).tolist()) == {1.5}


def divided(sums, divisor):
    return (torch.frombuffer(bytearray(sums), dtype=torch.float64) / divisor).numpy().tobytes()


@pytest.mark.parametrize("divisor", [0, -1])
def test_a_divisor_below_one_is_rejected(divisor):
    words = rf"^pipelining\.scale_grads_by_divisor: divisor={divisor} must be at least 1 \(microbatches x accumulation"
    with pytest.raises(ValueError, match=words):
        scale_grads_by_divisor([], divisor)


@pytest.mark.parametrize(
    ("stages", "divisor", "words"),
    [
        ([], 2.0, r"divisor=2\.0 is a float; pass an int"),
        ([], True, r"divisor=True is a bool; pass an int"),
        (stage(), 2, r"stages is a SimpleNamespace; pass a list of PipelineStage"),
        ([stage(), nn.Linear(1, 1)], 2, r"stages\[1\] is a Linear; pass a PipelineStage"),
        ([SimpleNamespace(submod=nn.Identity())], 2, r"stages\[0\] is a SimpleNamespace; pass a PipelineStage"),
    ],
)
def test_other_kinds_are_rejected(stages, divisor, words):
    with pytest.raises(TypeError, match=rf"^pipelining\.scale_grads_by_divisor: {words}"):
        scale_grads_by_divisor(stages, divisor)


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
