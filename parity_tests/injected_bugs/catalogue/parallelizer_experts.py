"""Injected bugs of experts over ep: whose tokens a gradient is of, which ranks have an expert, what travels."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    # Reductions
    InjectedBug(
        name="experts divided by edp alone",
        kind="scale",
        at="parallelizer:_local_stack",
        old="gradient / ep",
        new="gradient",
        expect="gradient: off by the constant factor",
        source="FSDP2 on a mesh of edp ranks with its own divisor: every expert learns ep times too fast",
    ),
    InjectedBug(
        name="experts divided by ep twice",
        kind="scale",
        at="parallelizer:_local_stack",
        old="gradient / ep",
        new="gradient / ep**2",
        expect="gradient: off by the constant factor",
        source="set_gradient_divide_factor of torch 2.13, where edp is one rank",
    ),
    InjectedBug(
        name="experts reduced over ep too",
        kind="group",
        at="parallelizer:fsdp2_strategy_parallelize",
        old="axes.edp_mesh",
        new="axes.fsdp_mesh",
        expect="raised: ",
    ),
    InjectedBug(
        name="the router's gradient of this ep rank's tokens",
        kind="group",
        at="parallelizer:MeshAxes.shard_mesh",
        old="if self.size(self.ep) == 1:",
        new="if self.size(self.ep) > 0:",
        expect="gradient: ",
        source="a parallelizer that leaves ep to the experts, and shards everything else over dp alone",
    ),
    InjectedBug(
        name="the loss shared among the ranks of dp alone",
        kind="group",
        at="parallelizer:MeshAxes.loss_mesh",
        old="ep = self.ep if self.size(self.ep) > 1 else None",
        new="ep = None",
        expect="value: ",
    ),
    InjectedBug(
        name="data ranks counted without ep",
        kind="scale",
        at="parallelizer:MeshAxes.data_size",
        old="self.cp, self.ep)",
        new="self.cp)",
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="the gates' gradient lost by a detach",
        kind="reduction",
        at="parallelizer:_routed",
        old="gates = top_k_weights.to(",
        new="gates = top_k_weights.detach().to(",
        expect="gradient: ",
    ),
    InjectedBug(
        name="tokens of all tp ranks taken for one rank's",
        kind="reduction",
        at="parallelizer:_routed",
        old='all_gather(y, tp_group, out="I", lengths=lengths)',
        new='all_gather(y, tp_group, out="R", lengths=lengths)',
        expect="gradient: ",
    ),
    # Which ranks have what
    InjectedBug(
        name="experts of the rank before",
        kind="order",
        at="parallelizer:shard_experts",
        old="distribute(stack, mesh,",
        new="distribute(stack.roll(len(stack) // axes.size(axes.ep), 0), mesh,",
        expect="value: ",
    ),
    InjectedBug(
        name="gate and up of stacked experts sharded as one",
        kind="order",
        at="parallelizer:STACKS",
        old="shard_of_halves(1)",
        new="Shard(1)",
        expect="value: ",
    ),
    InjectedBug(
        name="columns of a part of the experts, and no sum of them",
        kind="group",
        at="parallelizer:_routed",
        old="routed_experts(x, gates, experts, gate_up, down, ep_group, tp_group)",
        new="routed_experts(x, gates, experts, gate_up, down, ep_group)",
        expect="value: ",
    ),
)
