"""Faults of the exchanges of attention: how keys and their gradients travel, and how heads change ranks."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

TRAVEL = (
    InjectedBug(
        name="the gradient of a rank's own keys dropped",
        kind="reduction",
        at="context_parallel:Ring.gradients",
        old="add(*here, sums.arrived)  #",
        new="here  #",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="gradients of keys sent once too few",
        kind="schedule",
        at="context_parallel:Ring.gradients",
        old="            sums = _Travelling.post(sums.arrived(), self.group, 1 if",
        new="            sums = sums if hop == pairs.hops else _Travelling.post(sums.arrived(), self.group, 1 if",
        expect="cost: ",
    ),
    InjectedBug(
        name="gradients that come home left there",
        kind="reduction",
        at="context_parallel:Ring.gradients",
        old="        add(*here, sums.arrived)  # of this rank's own keys: it never leaves\n"
        "        return sums.arrived()",
        new="        home = torch.zeros_like(sums.arrived())\n        add(*here, lambda: home)\n        return home",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="gradients of keys sent on instead of home",
        kind="schedule",
        at="context_parallel:Ring.gradients",
        old="1 if hop < pairs.hops else -pairs.hops)",
        new="1)",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="a rank's share of the gradient not added",
        kind="reduction",
        at="context_parallel:Ring.gradients",
        old="add(source, keys, sums.arrived)  #",
        new="add(source, keys, sums.arrived().clone)  #",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="gradients of keys read before they arrive",
        kind="buffer",
        at="context_parallel:Ring.gradients",
        old="add(*here, sums.arrived)  #",
        new="add(*here, lambda: sums.buffer)  #",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="gradients of keys sent before their block",
        kind="buffer",
        at="context_parallel:Ring.gradients",
        old="            add(source, keys, sums.arrived)  # which waits for them when their block is computed\n",
        new="            early = sums.arrived()\n"
        "            if hop == pairs.hops:\n"
        "                _Travelling.post(early, self.group, -pairs.hops)\n"
        "            add(source, keys, lambda early=early: early)\n",
        expect="unwaited: ",
    ),
    InjectedBug(
        name="keys taken for the rank behind",
        kind="group",
        at="context_parallel:_source",
        old="return (pairs.rank - hop) % len(pairs.blocks)",
        new="return (pairs.rank + hop) % len(pairs.blocks)",
        expect="value: ",
    ),
    InjectedBug(
        name="gradients of keys summed in the input's dtype",
        kind="precision",
        at="context_parallel:Ring.gradients",
        old="torch.zeros_like(own, dtype=dtype)",
        new="torch.zeros_like(own)",
        expect="cost: ",
    ),
    InjectedBug(
        name="gathered keys' gradients not summed",
        kind="reduction",
        at="context_parallel:Gathered.gradients",
        old="return scattered_sum(sums, self.group, 0, pairs.counts)",
        new="return shares[pairs.rank]",
        expect="cost: ",
    ),
    InjectedBug(
        name="gathered keys taken for those of other ranks",
        kind="order",
        at="context_parallel:Gathered.keys",
        old="enumerate(gathered(own, self.group, 0, pairs.counts).split(pairs.counts))",
        new="enumerate(gathered(own, self.group, 0, pairs.counts).split(pairs.counts)[::-1])",
        expect="value: ",
    ),
)
HEADS = (
    InjectedBug(
        name="rows left in the order of ranks",
        kind="order",
        at="context_parallel:head_parallel_attention",
        old="mixed[:, :, joined.in_order].split",
        new="mixed.split",
        expect="value: ",
    ),
    InjectedBug(
        name="rows put in order twice",
        kind="order",
        at="context_parallel:head_parallel_attention",
        old="out[:, :, joined.by_rank]",
        new="out[:, :, joined.in_order]",
        expect="value: ",
    ),
    InjectedBug(
        name="copies of KV heads in the order of copies",
        kind="order",
        at="context_parallel:_for_each_rank",
        old="x = x.unsqueeze(2).expand(-1, -1, a // x.shape[1], -1, -1).flatten(1, 2)",
        new="x = x.repeat(1, a // x.shape[1], 1, 1)",
        expect="value: ",
    ),
    InjectedBug(
        name="heads dealt out instead of cut",
        kind="order",
        at="context_parallel:_for_each_rank",
        old="return x.unflatten(1, (a, -1))",
        new="return x.unflatten(1, (-1, a)).transpose(1, 2)",
        expect="value: ",
    ),
    InjectedBug(
        name="the place on the ring by the other axis",
        kind="group",
        at="context_parallel:_built",
        old="inner = layout.rebind(layout.cp_size // a, layout.cp_rank // a)",
        new="inner = layout.rebind(layout.cp_size // a, layout.cp_rank % (layout.cp_size // a))",
        expect="value: ",
    ),
)

BUGS = (*TRAVEL, *HEADS)
