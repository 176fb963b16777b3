"""Faults of a step in pipeline stages: what a stage is told of a micro-batch, one loss, one norm, one tied gradient."""

from parity_tests.faults.fault import Fault

BATCH = "torch_impl/models/batch.py"
HYBRID = "torch_impl/models/hybrid.py"
NORM = "torch_impl/models/gradient_norm.py"
STAGED = "torch_impl/models/staged.py"
TIES = "torch_impl/pipelining/ties.py"
TRAIN_VERIFY = "TrainVerify"

FAULTS = (
    Fault(
        name="a stage with the layout of another micro-batch",
        kind="sequence",
        file=BATCH,
        old="value=FILLED) for row in rows])",
        new="value=FILLED) for row in rows[::-1]])",
        expect="value: ",
    ),
    Fault(
        name="a stage that keeps the layout of its first micro-batch",
        kind="sequence",
        file=HYBRID,
        old="else layout_of(layout, self.placement)",
        new='else self.__dict__.setdefault("kept", layout_of(layout, self.placement))',
        expect="value: ",
    ),
    Fault(
        name="ids of another micro-batch than its targets",
        kind="order",
        file=STAGED,
        old="torch.cat([stream.ids for stream in streams])",
        new="torch.cat([stream.ids for stream in streams[::-1]])",
        expect="value: ",
    ),
    Fault(
        name="targets of another micro-batch",
        kind="order",
        file=STAGED,
        old='"target": torch.cat(targets)',
        new='"target": torch.cat(targets[::-1])',
        expect="value: ",
    ),
    Fault(
        name="a loss divided by the micro-batches again",
        kind="scale",
        file=STAGED,
        old="    loss.count = valid_count(targets, groups, loss.vocab_size)\n",
        new="    loss.count = valid_count(targets, groups, loss.vocab_size) * len(streams)\n",
        expect="value: off by the constant factor",
        source=TRAIN_VERIFY,
    ),
    Fault(
        name="a loss over the count of the first micro-batch",
        kind="scale",
        file=STAGED,
        old="    loss.count = valid_count(targets, groups, loss.vocab_size)\n",
        new="    loss.count = valid_count(targets[:1], groups, loss.vocab_size)\n",
        expect="value: ",
    ),
    Fault(
        name="the last operation of the second micro-batch missing",
        kind="schedule",
        file=STAGED,
        old="        return normalised(",
        new='        self.calls = getattr(self, "calls", 0) + 1\n'
        "        if self.calls % 2 == 0:\n"
        "            return token_losses(logits, targets, self.tp, self.vocab_size).sum() * self.averaged_over\n"
        "        return normalised(",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    Fault(
        name="a share of the loss on one micro-batch alone",
        kind="schedule",
        file=STAGED,
        old="return [share.detach() for share in shares]",
        new="return [share.detach() for share in shares[:1]]",
        expect="value: ",
    ),
    Fault(
        name="a norm that counts a tied weight twice",
        kind="tied",
        file=TIES,
        old="        if (stage.stage_index, name) not in later\n",
        new="",
        expect="value: ",
    ),
    Fault(
        name="a norm of this rank's stages alone",
        kind="reduction",
        file=NORM,
        old="        dist.all_reduce(total, group=pp)\n",
        new="        dist.all_reduce(total.clone(), group=pp)\n",
        expect="value: ",
    ),
    Fault(
        name="a tied gradient averaged over its stages",
        kind="tied",
        file=TIES,
        old="        gradient.copy_(total)\n",
        new="        gradient.copy_(total / 2)\n",
        expect="gradient: ",
    ),
    Fault(
        name="a tied gradient lost where the head is",
        kind="tied",
        file=TIES,
        old="    (first, _), (second, _) = tie\n    if len(own) == 2:",
        new="    (first, _), (second, _) = tie\n    if second in gradients:\n        gradients[second].zero_()\n"
        "    if len(own) == 2:",
        expect="gradient: ",
    ),
    Fault(
        name="wrong rank between the stages of a tie",
        kind="group",
        file=TIES,
        old="peer = stage.group, stage.stage_index_to_group_rank[other]",
        new="peer = stage.group, (stage.stage_index_to_group_rank[other] + 1) % stage.group_size",
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
)
