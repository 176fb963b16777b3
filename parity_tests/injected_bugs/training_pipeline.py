"""Faults of a step in pipeline stages: what a stage is told of a micro-batch, one loss, one norm, one tied gradient."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

TRAIN_VERIFY = "TrainVerify"

BUGS = (
    InjectedBug(
        name="a stage with the layout of another micro-batch",
        kind="sequence",
        at="models:offsets_of",
        old="value=FILLED) for row in rows])",
        new="value=FILLED) for row in rows[::-1]])",
        expect="value: ",
    ),
    InjectedBug(
        name="a stage that keeps the layout of its first micro-batch",
        kind="sequence",
        at="models:HybridLM.forward",
        old="else layout_of(layout, self.placement)",
        new='else self.__dict__.setdefault("kept", layout_of(layout, self.placement))',
        expect="value: ",
    ),
    InjectedBug(
        name="ids of another micro-batch than its targets",
        kind="order",
        at="models:staged_step",
        old="torch.cat([stream.ids for stream in streams])",
        new="torch.cat([stream.ids for stream in streams[::-1]])",
        expect="value: ",
    ),
    InjectedBug(
        name="targets of another micro-batch",
        kind="order",
        at="models:staged_step",
        old='"target": torch.cat(targets)',
        new='"target": torch.cat(targets[::-1])',
        expect="value: ",
    ),
    InjectedBug(
        name="a loss divided by the micro-batches again",
        kind="scale",
        at="models:staged_step",
        old="    loss.count = valid_count(targets, groups, loss.vocab_size)\n",
        new="    loss.count = valid_count(targets, groups, loss.vocab_size) * len(streams)\n",
        expect="value: off by the constant factor",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="a loss over the count of the first micro-batch",
        kind="scale",
        at="models:staged_step",
        old="    loss.count = valid_count(targets, groups, loss.vocab_size)\n",
        new="    loss.count = valid_count(targets[:1], groups, loss.vocab_size)\n",
        expect="value: ",
    ),
    InjectedBug(
        name="the last operation of the second micro-batch missing",
        kind="schedule",
        at="models:StepLoss.__call__",
        old="        return normalised(",
        new='        self.calls = getattr(self, "calls", 0) + 1\n'
        "        if self.calls % 2 == 0:\n"
        "            return token_losses(logits, targets, self.tp, self.vocab_size).sum() * self.averaged_over\n"
        "        return normalised(",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="a share of the loss on one micro-batch alone",
        kind="schedule",
        at="models:staged_step",
        old="return [share.detach() for share in shares]",
        new="return [share.detach() for share in shares[:1]]",
        expect="value: ",
    ),
    InjectedBug(
        name="a norm that counts a tied weight twice",
        kind="tied",
        at="pipelining:named_once",
        old="        if (stage.stage_index, name) not in later\n",
        new="",
        expect="value: ",
    ),
    InjectedBug(
        name="a norm of this rank's stages alone",
        kind="reduction",
        at="models:gradient_norm",
        old="        dist.all_reduce(total, group=pp)\n",
        new="        dist.all_reduce(total.clone(), group=pp)\n",
        expect="value: ",
    ),
    InjectedBug(
        name="a tied gradient averaged over its stages",
        kind="tied",
        at="pipelining:_sum",
        old="        gradient.copy_(total)\n",
        new="        gradient.copy_(total / 2)\n",
        expect="gradient: ",
    ),
    InjectedBug(
        name="a tied gradient lost where the head is",
        kind="tied",
        at="pipelining:_sum",
        old="    (first, _), (second, _) = tie\n    if len(own) == 2:",
        new="    (first, _), (second, _) = tie\n    if second in gradients:\n        gradients[second].zero_()\n"
        "    if len(own) == 2:",
        expect="gradient: ",
    ),
    InjectedBug(
        name="wrong rank between the stages of a tie",
        kind="group",
        at="pipelining:_exchanged",
        old="peer = stage.group, stage.stage_index_to_group_rank[other]",
        new="peer = stage.group, (stage.stage_index_to_group_rank[other] + 1) % stage.group_size",
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
)

# As in `models`: where a trace finds the first difference.
HOMES = {
    "targets of another micro-batch": "",
    "a loss divided by the micro-batches again": "",
    "a loss over the count of the first micro-batch": "",
    "the last operation of the second micro-batch missing": "",
    "a share of the loss on one micro-batch alone": "",
}
