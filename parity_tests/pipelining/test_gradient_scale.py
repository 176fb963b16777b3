"""Parity of pipelining.gradient_scale: one division, once; what torch's own scale does; what is refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.pipelining.perceptron import PER_MICROBATCH, accumulated, batch, gradients, loss_of, made_stages
from torch_impl.pipelining import stage_to_rank
from torch_impl.pipelining.gradient_scale import scale_grads_by_divisor
from torch_impl.pipelining.schedule import build_pipeline_schedule


def stage(*parameters):
    module = nn.ParameterList(parameters)
    return SimpleNamespace(submod=module, scale_grads=lambda factor: None)


def parameter(gradient):
    made = nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64))
    made.grad = torch.tensor(gradient, dtype=torch.float64)
    return made


FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4)


@given(FLOATS, st.integers(1, 10**6))
def test_every_gradient_is_divided_once(values, divisor):
    shared, own = parameter(values), parameter(values)
    without = nn.Parameter(torch.ones(2))
    scale_grads_by_divisor([stage(shared, own), stage(shared, without)], divisor)
    for gradient in (shared.grad, own.grad):
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
    held = given_as.grad
    scale_grads_by_divisor([stage(given_as)], 4)
    assert given_as.grad is held
    assert held.tolist() == [1.0]


def sharded(mesh, case):
    found = []
    for placement in (Shard(0), Replicate()):
        local = torch.arange(3, dtype=torch.float64) + mesh.rank("dp")
        whole = DTensor.from_local(local, mesh.device_mesh, [placement], run_check=False)
        made = nn.Parameter(torch.zeros_like(whole))
        made.grad = whole
        scale_grads_by_divisor([stage(made)], 4)
        assert made.grad.placements == (placement,)
        found.append(made.grad.to_local().tolist())
    return found


def test_shards_are_divided_where_they_lie():
    ranks = run(sharded, CaseSpec("sharded", {"dp": 2}))
    assert ranks.results == ([[0.0, 0.25, 0.5]] * 2, [[0.25, 0.5, 0.75]] * 2)
    assert ranks.ledger.rows == []


def mean_step(mesh, case):
    """Some steps of a schedule whose gradients are divided once at the end."""
    n, steps, by_torch = case.n, case.steps, case.by_torch
    stages = made_stages(mesh, stage_to_rank(2, 2), torch.float64)
    held = list(stages.values())
    schedule = build_pipeline_schedule(None, "GPipe", PER_MICROBATCH, n * PER_MICROBATCH, held, loss_of)
    schedule.scale_grads = by_torch
    inputs, target = batch(n, torch.float64)
    for _ in range(steps):
        schedule.step(*([inputs] if 0 in stages else []), **({"target": target} if 1 in stages else {}))
    if not by_torch:
        scale_grads_by_divisor(held, n * steps)
    return gradients({number: each.submod for number, each in stages.items()})


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_steps_then_one_division_are_the_mean(n, steps):
    ranks = run(mean_step, CaseSpec("mean", {"pp": 2}, options={"n": n, "steps": steps, "by_torch": False}))
    _, summed = accumulated(2, n, "float64", steps=steps)
    assert ranks.results[0] | ranks.results[1] == {name: divided(sums, n * steps) for name, sums in summed.items()}


def test_torch_divides_what_was_divided():
    """Two equal steps of two micro-batches come to 1.5 means where 2 are due."""
    found = {}
    for steps in (1, 2):
        ranks = run(mean_step, CaseSpec("mean", {"pp": 2}, options={"n": 2, "steps": steps, "by_torch": True}))
        found[steps] = {
            name: torch.frombuffer(bytearray(x), dtype=torch.float64) for name, x in ranks.results[0].items()
        }
    ratios = torch.cat([found[2][name] / found[1][name] for name in found[1]])
    assert set(ratios.round(decimals=9).tolist()) == {1.5}


def divided(sums, divisor):
    return (torch.frombuffer(bytearray(sums), dtype=torch.float64) / divisor).numpy().tobytes()


@pytest.mark.parametrize("divisor", [0, -1])
def test_a_divisor_below_one_is_refused(divisor):
    words = (
        rf"^pipelining\.scale_grads_by_divisor: divisor={divisor} must be a positive int \(microbatches x accumulation"
    )
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
def test_other_kinds_are_refused(stages, divisor, words):
    with pytest.raises(TypeError, match=rf"^pipelining\.scale_grads_by_divisor: {words}"):
        scale_grads_by_divisor(stages, divisor)
