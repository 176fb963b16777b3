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
        old="share = home if hop == 0 else torch.zeros_like(home)",
        new="share = torch.zeros_like(home)",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys sent once too few",
        kind="schedule",
        file=RING,
        old="if hop > 0:  #",
        new="if 0 < hop < hops:  #",
        expect="cost: ",
    ),
    Fault(
        name="gradients that come home left there",
        kind="reduction",
        file=RING,
        old="home += gradients.arrived()",
        new="gradients.arrived()",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys sent on instead of home",
        kind="schedule",
        file=RING,
        old="1 if hop < hops else -hops)",
        new="1)",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="a rank's share of the gradient not added",
        kind="reduction",
        file=RING,
        old="share += gradients.arrived()",
        new="share = gradients.arrived()",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="gradients of keys read before they arrive",
        kind="buffer",
        file=RING,
        old="share += gradients.arrived()",
        new="share += gradients.buffer",
        expect="unwaited: ",
    ),
    Fault(
        name="gradients of keys sent before their block",
        kind="buffer",
        file=RING,
        old="share = home if hop == 0 else torch.zeros_like(home)",
        new="share = home if hop == 0 else torch.zeros_like(home)\n"
        "            if hop == hops > 0:\n"
        "                gradients = _Travelling.post(share, group, -hops)",
        expect="modified: ",
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
        old="home = torch.zeros_like(travelling.buffer, dtype=dq.dtype)",
        new="home = torch.zeros_like(travelling.buffer)",
        expect="cost: ",
    ),
    Fault(
        name="gathered keys' gradients not summed",
        kind="reduction",
        file=GATHERED,
        old="own = scattered_sum(gradients, group, 0, pairs.counts)",
        new="own = gradients.split(pairs.counts)[pairs.rank]",
        expect="cost: ",
    ),
    Fault(
        name="gathered keys taken for those of other ranks",
        kind="order",
        file=GATHERED,
        old="zip(everyone.split(pairs.counts), pairs.blocks, strict=True)",
        new="zip(everyone.split(pairs.counts), pairs.blocks[::-1], strict=True)",
        expect="value: ",
    ),
)
HEADS = (
    Fault(
        name="rows left in the order of ranks",
        kind="order",
        file=ULYSSES,
        old="mixed[:, :, in_order].split",
        new="mixed.split",
        expect="value: ",
    ),
    Fault(
        name="rows put in order twice",
        kind="order",
        file=ULYSSES,
        old="out[:, :, in_order.argsort()]",
        new="out[:, :, in_order]",
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
        old="inner = layout.rebind(m, layout.cp_rank // a)",
        new="inner = layout.rebind(m, layout.cp_rank % m)",
        expect="value: ",
    ),
)

FAULTS = (*TRAVEL, *HEADS)
