"""Faults of the exchanges of attention: how keys and their gradients travel, and how heads change ranks."""

from parity_tests.faults.fault import Fault

RING = "torch_impl/context_parallel/ring.py"
GATHERED = "torch_impl/context_parallel/gathered.py"
ULYSSES = "torch_impl/context_parallel/ulysses.py"

TRAVEL = (
    Fault(
        name="the gradient of a rank's own keys dropped",
        kind="reduction",
        file=RING,
        old="add(*here, sums.arrived)  #",
        new="here  #",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys sent once too few",
        kind="schedule",
        file=RING,
        old="            sums = _Travelling.post(sums.arrived(), self.group, 1 if",
        new="            sums = sums if hop == pairs.hops else _Travelling.post(sums.arrived(), self.group, 1 if",
        expect="cost: ",
    ),
    Fault(
        name="gradients that come home left there",
        kind="reduction",
        file=RING,
        old="        add(*here, sums.arrived)  # of this rank's own keys: it never leaves\n"
        "        return sums.arrived()",
        new="        home = torch.zeros_like(sums.arrived())\n        add(*here, lambda: home)\n        return home",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys sent on instead of home",
        kind="schedule",
        file=RING,
        old="1 if hop < pairs.hops else -pairs.hops)",
        new="1)",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="a rank's share of the gradient not added",
        kind="reduction",
        file=RING,
        old="add(source, keys, sums.arrived)  #",
        new="add(source, keys, sums.arrived().clone)  #",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys read before they arrive",
        kind="buffer",
        file=RING,
        old="add(*here, sums.arrived)  #",
        new="add(*here, lambda: sums.buffer)  #",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys sent before their block",
        kind="buffer",
        file=RING,
        old="            add(source, keys, sums.arrived)  # which waits for them when their block is computed\n",
        new="            early = sums.arrived()\n"
        "            if hop == pairs.hops:\n"
        "                _Travelling.post(early, self.group, -pairs.hops)\n"
        "            add(source, keys, lambda early=early: early)\n",
        expect="unwaited: ",
    ),
    Fault(
        name="keys taken for the rank behind",
        kind="group",
        file=RING,
        old="return (pairs.rank - hop) % len(pairs.blocks)",
        new="return (pairs.rank + hop) % len(pairs.blocks)",
        expect="value: ",
    ),
    Fault(
        name="gradients of keys summed in the input's dtype",
        kind="precision",
        file=RING,
        old="torch.zeros_like(own, dtype=dtype)",
        new="torch.zeros_like(own)",
        expect="cost: ",
    ),
    Fault(
        name="gathered keys' gradients not summed",
        kind="reduction",
        file=GATHERED,
        old="return scattered_sum(sums, self.group, 0, pairs.counts)",
        new="return shares[pairs.rank]",
        expect="cost: ",
    ),
    Fault(
        name="gathered keys taken for those of other ranks",
        kind="order",
        file=GATHERED,
        old="enumerate(gathered(own, self.group, 0, pairs.counts).split(pairs.counts))",
        new="enumerate(gathered(own, self.group, 0, pairs.counts).split(pairs.counts)[::-1])",
        expect="value: ",
    ),
)
HEADS = (
    Fault(
        name="rows left in the order of ranks",
        kind="order",
        file=ULYSSES,
        old="mixed[:, :, joined.in_order].split",
        new="mixed.split",
        expect="value: ",
    ),
    Fault(
        name="rows put in order twice",
        kind="order",
        file=ULYSSES,
        old="out[:, :, joined.by_rank]",
        new="out[:, :, joined.in_order]",
        expect="value: ",
    ),
    Fault(
        name="copies of KV heads in the order of copies",
        kind="order",
        file=ULYSSES,
        old="x = x.unsqueeze(2).expand(-1, -1, a // x.shape[1], -1, -1).flatten(1, 2)",
        new="x = x.repeat(1, a // x.shape[1], 1, 1)",
        expect="value: ",
    ),
    Fault(
        name="heads dealt out instead of cut",
        kind="order",
        file=ULYSSES,
        old="return x.unflatten(1, (a, -1))",
        new="return x.unflatten(1, (-1, a)).transpose(1, 2)",
        expect="value: ",
    ),
    Fault(
        name="the place on the ring by the other axis",
        kind="group",
        file=ULYSSES,
        old="inner = layout.rebind(layout.cp_size // a, layout.cp_rank // a)",
        new="inner = layout.rebind(layout.cp_size // a, layout.cp_rank % (layout.cp_size // a))",
        expect="value: ",
    ),
)

FAULTS = (*TRAVEL, *HEADS)
