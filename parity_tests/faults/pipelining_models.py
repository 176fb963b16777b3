"""Faults of models in stages: who has which module, what is handed on, and what two stages share."""

from parity_tests.faults.fault import Fault

ANATOMY = "torch_impl/pipelining/anatomy.py"
SPLIT = "torch_impl/pipelining/split.py"
MODULE = "torch_impl/pipelining/stage_module.py"
TIES = "torch_impl/pipelining/ties.py"
PIPELINE = "torch_impl/pipelining/pipeline.py"

FAULTS = (
    Fault(
        name="a tied gradient that is not summed",
        kind="tied",
        file=TIES,
        old="total = gradient + received if stage == first else received + gradient",
        new="total = gradient + 0 * received",
        expect="gradient: ",
    ),
    Fault(
        name="a tied gradient summed with what was accumulated",
        kind="tied",
        file=TIES,
        old="            parameter.grad = None\n        returned = step",
        new="            parameter.grad = parameter.grad\n        returned = step",
        expect="gradient: ",
    ),
    Fault(
        name="a tied gradient of the last step alone",
        kind="tied",
        file=TIES,
        old="if sum_so_far is not None:",
        new="if False:",
        expect="gradient: ",
    ),
    Fault(
        name="both ends of a tie on one rank without copies",
        kind="tied",
        file=TIES,
        old="        if first in modules and second in modules:",
        new="        if first in modules and second in ():",
        expect="gradient: ",
    ),
    Fault(
        name="a tied gradient of one rank that has both, not summed",
        kind="tied",
        file=TIES,
        old="total = gradients[first] + gradients[second]",
        new="total = gradients[first] + 0 * gradients[second]",
        expect="gradient: ",
    ),
    Fault(
        name="layers by their place in the stage",
        kind="order",
        file=MODULE,
        old="own[str(n)] if str(n) in own else",
        new="own[str(min(map(int, own)) + max(map(int, own)) - n)] if str(n) in own else",
        expect="value: ",
    ),
    Fault(
        name="hidden states doubled by a layer that is elsewhere",
        kind="scale",
        file=MODULE,
        old="self.given[layer] = x\n        return x\n",
        new="self.given[layer] = x + x\n        return self.given[layer]\n",
        expect="value: ",
    ),
    Fault(
        name="hidden states of float64 taken for ids",
        kind="precision",
        file=MODULE,
        old='"inputs_embeds": x} if x.dtype.is_floating_point else',
        new='"inputs_embeds": x} if x.dtype.is_floating_point and x.dtype.itemsize < 8 else',
        expect="raised: ",
    ),
    Fault(
        name="a head on no stage",
        kind="border",
        file=MODULE,
        old="has_heads = all(_at(outer, name) is not None for name in heads)",
        new="has_heads = False",
        expect="raised: ",
    ),
    Fault(
        name="a norm on the first stage",
        kind="border",
        file=ANATOMY,
        old="        stages[-1] += self.last\n",
        new="        stages[0] += self.last[:1]\n        stages[-1] += self.last[1:]\n",
        expect="value: ",
    ),
    Fault(
        name="rotary angles for one stage alone",
        kind="border",
        file=ANATOMY,
        old="        return [[*stage, *self.shared] for stage in stages]",
        new="        return [[*stage, *(self.shared if stage is stages[0] else ())] for stage in stages]",
        expect="raised: ",
    ),
    Fault(
        name="the stages of a rank turned round",
        kind="schedule",
        file=SPLIT,
        old="    modules = [_part(model, names, stage, own) for stage in own]",
        new="    modules = [_part(model, names, stage, own) for stage in own][::-1]",
        expect="raised: ",
    ),
    Fault(
        name="shapes told for twice as many rows",
        kind="border",
        file=PIPELINE,
        old="_precompute_stage_shapes(stages, config, microbatch_size, seq_len",
        new="_precompute_stage_shapes(stages, config, 2 * microbatch_size, seq_len",
        expect="mismatch: ",
    ),
)
