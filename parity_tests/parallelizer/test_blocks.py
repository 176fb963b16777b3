"""Blocks of a model: which modules are one unit, and the effects of recomputing them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parity_tests.parallelizer.families import OWN, Chosen, batch, model_of
from parity_tests.parallelizer.nested_modules import Layer
from parity_tests.parallelizer.small_net import Net
from parity_tests.parallelizer.styled import linear_layer
from parity_tests.parallelizer.training import accumulated, full_arrays
from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize
from torch_impl.parallelizer.blocks import blocks, checkpoint_blocks, units


class Tree(nn.Module):
    """A module with the given children."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def linear():
    return nn.Linear(2, 2)


def test_elements_of_lists_and_of_numbered_dicts():
    first, second, third, inner = linear(), linear(), Tree(experts=nn.ModuleList([linear()])), linear()
    model = Tree(
        embed=linear(),
        layers=nn.ModuleList([first, nn.ModuleList([inner]), nn.Identity(), first]),
        stage=Tree(layers=nn.ModuleDict({"7": second, "3": third})),
        heads=nn.ModuleDict({"main": linear()}),
    )
    assert blocks(model) == [first, inner, second, third]  # the experts of a block are inside it
    assert units(model) == [[first], [inner], [second], [third]]


def test_a_stage_of_one_layer_has_one_unit():
    only = linear()
    assert units(Tree(layers=nn.ModuleDict({"0": only}), head=linear())) == [[only]]
    assert units(Tree(layers=nn.ModuleDict(), head=linear())) == []


def test_blocks_that_share_a_parameter_are_one_unit():
    a, b, c, d = linear(), linear(), linear(), linear()
    c.weight = a.weight
    assert units(Tree(layers=nn.ModuleList([a, b, c, d]))) == [[b], [a, c], [d]]
    d.bias = b.bias
    assert units(Tree(layers=nn.ModuleList([a, b, c, d]))) == [[a, c], [b, d]]


def test_a_block_that_shares_with_the_rest_is_left_to_the_root():
    a, b, head = linear(), linear(), linear()
    head.weight = b.weight
    assert units(Tree(layers=nn.ModuleList([a, b]), head=head)) == [[a]]


def test_a_model_without_lists_is_the_root_alone():
    assert units(nn.Sequential(linear(), linear())) == []
    assert blocks(nn.ModuleList([linear()])) == []


def order_of_gathers(count, tie, entry, forward, backward):
    """The blocks that are in units; and {(block, block that its unit gathers ahead): units ahead} in each direction."""
    last = count - 1
    # Blocks that share a parameter are one unit, at the place of the last of them; a block tied to the head is in none.
    units_in_order = [[block] for block in range(last if tie == "head" else last + 1)]
    if tie == "blocks" and last:
        units_in_order = [*units_in_order[1:-1], [0, last]]
    steps = (forward, -backward) if entry == "fsdp2" else (1, -2) if forward else (0, 0)
    tables = {}, {}
    for place, unit in enumerate(units_in_order):
        for table, step in zip(tables, steps, strict=True):
            for distance in range(1, abs(step) + 1):
                other = place + distance if step > 0 else place - distance
                if 0 <= other < len(units_in_order):
                    table |= {(block, units_in_order[other][0]): distance for block in unit}
    return sorted(block for unit in units_in_order for block in unit), *tables


ORDERS = {
    "count": st.sampled_from((1, 2, 4, 5)),
    "tie": st.sampled_from(("none", "blocks", "head")),
    "entry": st.sampled_from(("nvfsdp", "fsdp2")),
    "forward": st.sampled_from((1, 0, 2)),
    "backward": st.sampled_from((1, 0, 3)),
}


@settings(max_examples=few(25))
@given(ranks=st.sampled_from((1, 2)), **ORDERS)
def test_units_that_are_gathered_ahead(ranks, count, tie, entry, forward, backward):
    """FSDP's own states say which blocks are units, and which units each gathers ahead in forward and backward."""

    def body(mesh, case):
        layers = [Layer() for _ in range(count)]
        net = Tree(blocks=nn.ModuleList(layers), head=linear_layer(torch.ones(2, 2)))
        if tie != "none":
            layers[-1].up.weight = (net.head if tie == "head" else layers[0].up).weight
        if entry == "fsdp2":
            depths = {"fsdp2_forward_prefetch_depth": forward, "fsdp2_backward_prefetch_depth": backward}
            fsdp2_strategy_parallelize(net, mesh.device_mesh, **depths)
        else:
            paths = [f"{Layer.__module__}.Layer"]
            nvfsdp_strategy_parallelize(net, mesh.device_mesh, paths, overlap_param_gather=forward > 0)
        states = {i: layer._get_fsdp_state() for i, layer in enumerate(layers) if isinstance(layer, FSDPModule)}
        first = {id(state): i for i, state in reversed(states.items())}

        def ahead(name):
            return {
                (i, first[id(other)]): distance
                for i, state in states.items()
                for distance, other in enumerate(getattr(state, name), 1)
            }

        return list(states), ahead("_states_to_forward_prefetch"), ahead("_states_to_backward_prefetch")

    seen = run(body, CaseSpec(scheme="blocks", mesh={"dp_shard": ranks})).results
    assert seen == (order_of_gathers(count, tie, entry, forward, backward),) * ranks


def recorded_calls(model, kind):
    """A list that gets one element for each call of a module whose class name ends in `kind`."""
    calls = []
    for module in model.modules():
        if type(module).__name__.endswith(kind):
            inner = module.forward
            module.forward = lambda *a, _inner=inner, **k: calls.append(1) or _inner(*a, **k)
    return calls


@pytest.mark.parametrize("family", OWN)
def test_gradients_are_the_same_to_the_bit(family):
    chosen, outcome = Chosen(family), []
    for is_recomputed in (False, True):
        model = model_of(chosen)
        names = list(model.state_dict()), [name for name, _ in model.named_modules()]
        if is_recomputed:
            checkpoint_blocks(model)
        assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == names
        accumulated(model, *batch(chosen, 2, 5), 0, 1, 1)
        outcome.append(full_arrays(model, gradients=True))
    assert all(np.array_equal(outcome[0][name], outcome[1][name]) for name in outcome[0])


def test_each_block_is_computed_twice():
    model = model_of(Chosen("llama"))
    calls = recorded_calls(model, "Attention")
    checkpoint_blocks(model)
    accumulated(model, *batch(Chosen("llama"), 2, 5), 0, 1, 1)
    assert len(calls) == 2 * 2


@pytest.mark.parametrize("strategy", [fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_strategy_recomputes_blocks_if_the_option_is_on(strategy, is_recomputed):
    def body(mesh, case):
        net = Net().double()
        calls = recorded_calls(net, "Linear")  # two in each of two blocks, and the head
        net = strategy(net, mesh.device_mesh, activation_checkpointing=is_recomputed)
        net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        return len(calls)

    assert run(body, CaseSpec("recomputed", {"dp_shard": 2})).results == (5 + 4 * is_recomputed,) * 2


def test_a_recomputation_draws_the_same_random_numbers():
    chosen, outcome = Chosen("llama", changes=(("attention_dropout", 0.5),)), []
    for is_recomputed in (False, True):
        model = model_of(chosen)
        if is_recomputed:
            checkpoint_blocks(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            accumulated(model, *batch(chosen, 2, 5), 0, 1, 1)
        outcome.append(full_arrays(model, gradients=True))
    assert all(np.array_equal(outcome[0][name], outcome[1][name]) for name in outcome[0])


def test_caches_are_off():
    model = model_of(Chosen("llama"))
    model.config.vision_config = model_of(Chosen("qwen2")).config
    assert model.config.use_cache and model.config.vision_config.use_cache
    checkpoint_blocks(model)
    assert not model.config.use_cache and not model.config.vision_config.use_cache


def test_a_frozen_block_is_not_recomputed():
    model = model_of(Chosen("llama"))
    model.model.layers[0].requires_grad_(False)
    calls = recorded_calls(model, "Attention")
    checkpoint_blocks(model)
    accumulated(model, *batch(Chosen("llama"), 2, 5), 0, 1, 1)
    assert len(calls) == 2 + 1


def test_a_partly_trained_block_is_recomputed():
    """As with an adapter: the backward to the trained modules needs activations of frozen ones."""
    model = model_of(Chosen("llama"))
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
    calls = recorded_calls(model, "Attention")
    checkpoint_blocks(model)
    accumulated(model, *batch(Chosen("llama"), 2, 5), 0, 1, 1)
    assert len(calls) == 2 * 2


def test_attention_with_shared_keys_is_not_recomputed():
    model = model_of(Chosen("llama"))
    model.config.num_kv_shared_layers = 1
    attention, mlp = recorded_calls(model, "Attention"), recorded_calls(model, "MLP")
    checkpoint_blocks(model)
    accumulated(model, *batch(Chosen("llama"), 2, 5), 0, 1, 1)
    assert (len(attention), len(mlp)) == (2, 4)


def test_a_model_without_a_configuration():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    model.forward = lambda x: model[0][0](x)
    checkpoint_blocks(model)
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, model[0][0].weight.detach().sum(0)[None])
