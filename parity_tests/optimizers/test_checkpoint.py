"""State that is saved on one mesh and loaded on another is the same to the bit, on every rank."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parity_tests.optimizers.parameters import full, shard_of
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.optimizers import Muon, Zero1

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is where all is unsharded

WEIGHTS = {
    "tall": torch.linspace(-1.0, 2.0, 21).view(7, 3).sin(),
    "square": torch.linspace(1.0, 3.0, 16).view(4, 4).cos(),
}
PLACEMENTS = {"dp": {"tall": Shard(0), "square": Shard(0)}, "tp": {"tall": Replicate(), "square": Shard(1)}}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "muon": lambda parameters: Muon(parameters, lr=0.1),
}


def built(view, case, weights):
    """A module whose parameters an optimizer steps, that optimizer, and a function that does a step."""
    mesh, make = view.device_mesh, OPTIMIZERS[case.options["optimizer"]]
    if case.options["zero1"]:
        parameters = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
        zero = Zero1(parameters.values(), make, mesh)

        def step(number):
            for name, each in parameters.items():
                each.grad = gradient(name, number) if view.rank("dp") == 0 else None
            zero.reduce_gradients()
            zero.step()

        return zero.shares, zero.optimizer, step
    module = nn.Module()
    for name, x in weights.items():
        placements = [PLACEMENTS[axis][name] for axis in view.axes]
        module.register_parameter(name, nn.Parameter(distribute_tensor(x.clone(), mesh, placements)))
    optimizer = make(module.parameters())

    def step(number):
        for name, each in module.named_parameters():
            each.grad = shard_of(gradient(name, number), each)
        optimizer.step()

    return module, optimizer, step


def gradient(name, number):
    return (WEIGHTS[name] * (number + 2)).tan()


def in_full(module, optimizer):
    """All weights and states, by name."""
    tensors = {name: each.detach() for name, each in module.named_parameters()}
    for i, state in enumerate(optimizer.state.values()):
        tensors |= {f"{i} {key}": x for key, x in state.items()}
    return {name: full(x).clone() for name, x in tensors.items()}


def saved(view, case):
    module, optimizer, step = built(view, case, WEIGHTS)
    step(0)
    step(1)
    state = {"weights": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.save(state, checkpoint_id=case.options["folder"])
    return in_full(module, optimizer)


def loaded(view, case):
    module, optimizer, _ = built(view, case, {name: torch.zeros_like(x) for name, x in WEIGHTS.items()})
    state = {"weights": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=case.options["folder"])
    module.load_state_dict(state["weights"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    sharded = [x for each in optimizer.state.values() for x in each.values() if isinstance(x, DTensor)]
    return in_full(module, optimizer), len(sharded)


def equal(some, others):
    return list(some) == list(others) and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("name", "zero1", "before", "after", "engine"),
    [
        ("adamw", False, {"dp": 2}, {"dp": 2, "tp": 2}, "lockstep"),
        ("adamw", False, {"dp": 3}, {"dp": 2}, "gloo"),
        ("sgd", False, {"dp": 2, "tp": 2}, {"dp": 1}, "lockstep"),
        ("muon", False, {"dp": 2, "tp": 2}, {"dp": 3}, "lockstep"),
        ("adamw", True, {"dp": 2}, {"dp": 4}, "lockstep"),
        ("sgd", True, {"dp": 3}, {"dp": 1}, "lockstep"),
        ("adamw", True, {"dp": 3}, {"dp": 2}, "gloo"),
    ],
)
def test_state_is_resharded(name, zero1, before, after, engine, tmp_path):
    options = {"optimizer": name, "zero1": zero1, "folder": str(tmp_path)}
    cases = [CaseSpec(scheme="checkpoint", mesh=mesh, options=options) for mesh in (before, after)]
    want, *others = run(saved, cases[0], engine).results
    results = run(loaded, cases[1], engine).results
    assert all(equal(want, each) for each in (*others, *(state for state, _ in results)))
    assert all(count for _, count in results)
    assert any(key.endswith(("exp_avg", "momentum_buffer")) and x.any() for key, x in want.items())
