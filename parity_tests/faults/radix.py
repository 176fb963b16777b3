"""Faults of radix selection over cut rows: digits, bins, and the lists of candidates."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
CANDIDATES = f"{FOLDER}/candidates.py"
RADIX = f"{FOLDER}/radix.py"

ROUNDS = (
    Fault(
        name="negative floats not mirrored",
        kind="order",
        file=RADIX,
        old="return torch.where(bits < 0, bits ^ ((1 << (8 * itemsize - 1)) - 1), bits)",
        new="return bits",
        expect="value: ",
    ),
    Fault(
        name="the two zeros are two logits",
        kind="order",
        file=RADIX,
        old="bits = (z + 0.0).view(INTEGER[z.itemsize]).long()",
        new="bits = z.view(INTEGER[z.itemsize]).long()",
        expect="value: ",
    ),
    Fault(
        name="bins of the own shard",
        kind="reduction",
        file=RADIX,
        old="dist.all_reduce(bins, group=group)",
        new="pass",
        expect="cost: forward all_reduce",
    ),
    Fault(
        name="bins averaged over the ranks",
        kind="reduction",
        file=RADIX,
        old="dist.all_reduce(bins, group=group)",
        new="dist.all_reduce(bins, group=group)\n            bins /= group.size()",
        expect="value: ",
    ),
    Fault(
        name="bins over the default group",
        kind="group",
        file=RADIX,
        old="dist.all_reduce(bins, group=group)",
        new="dist.all_reduce(bins)",
        expect="hygiene: the default group is used inside a sub-group",
    ),
    Fault(
        name="weight of earlier rounds forgotten",
        kind="statistic",
        file=RADIX,
        old="before = above[part].unsqueeze(-1) + _above_each(rows)",
        new="before = _above_each(rows)",
        expect="value: ",
    ),
    Fault(
        name="a bin's own weight lies above it",
        kind="statistic",
        file=RADIX,
        old="return torch.nn.functional.pad(upto[:, 1:], (0, 1))",
        new="return upto",
        expect="value: ",
    ),
    Fault(
        name="room that is just used up goes on",
        kind="border",
        file=RADIX,
        old="(before < room[part].unsqueeze(-1))",
        new="(before <= room[part].unsqueeze(-1))",
        expect="value: ",
    ),
    Fault(
        name="empty bins are entered",
        kind="border",
        file=RADIX,
        old="goes_on = (rows > 0) &",
        new="goes_on = (rows >= 0) &",
        expect="value: ",
    ),
    Fault(
        name="the highest bin with room",
        kind="order",
        file=RADIX,
        old="digit = goes_on.to(torch.uint8).argmax(-1, keepdim=True)",
        new="digit = BINS - 1 - goes_on.to(torch.uint8).flip(-1).argmax(-1, keepdim=True)",
        expect="value: ",
    ),
    Fault(
        name="first digit without the sign",
        kind="border",
        file=RADIX,
        old="base = prefix - BINS // 2 if is_first else prefix << BITS",
        new="base = prefix << BITS",
        expect="value: ",
    ),
    Fault(
        name="last round left out",
        kind="schedule",
        file=RADIX,
        old="reversed(range(0, BITS * dtype.itemsize, BITS))",
        new="reversed(range(BITS, BITS * dtype.itemsize, BITS))",
        expect="value: ",
    ),
    Fault(
        name="bins of masses rounded to bfloat16",
        kind="precision",
        file=RADIX,
        old="bins[part] += sums.index_add_(0, place, weight.double()).view(-1, BINS)",
        new="bins[part] += sums.index_add_(0, place, weight.double()).view(-1, BINS).bfloat16()",
        expect="value: ",
    ),
)

LISTS = (
    Fault(
        name="the lower bound is not a candidate",
        kind="border",
        file=CANDIDATES,
        old="(block >= low.unsqueeze(-1))",
        new="(block > low.unsqueeze(-1))",
        expect="value: ",
    ),
    Fault(
        name="the upper bound is not a candidate",
        kind="border",
        file=CANDIDATES,
        old="(block <= high.unsqueeze(-1))",
        new="(block < high.unsqueeze(-1))",
        expect="value: ",
    ),
    Fault(
        name="ordinals run on from row to row",
        kind="order",
        file=CANDIDATES,
        old="return flags.cumsum(0) - 1 - before_row[rows]",
        new="return flags.cumsum(0) - 1",
        expect="value: ",
    ),
    Fault(
        name="joined lists all start at one row",
        kind="order",
        file=CANDIDATES,
        old="rows = torch.cat([found.rows + (part.start - start) for part, found in group])",
        new="rows = torch.cat([found.rows for part, found in group])",
        expect="value: ",
    ),
    Fault(
        name="blocks read again beside their lists",
        kind="statistic",
        file=CANDIDATES,
        old="self._blocks = long",
        new="pass",
        expect="value: ",
    ),
    Fault(
        name="long lists dropped",
        kind="border",
        file=CANDIDATES,
        old="                yield part, found\n                continue",
        new="                continue",
        expect="value: ",
    ),
    Fault(
        name="short lists dropped once another is kept",
        kind="buffer",
        file=CANDIDATES,
        old="self._lists += [*joined",
        new="self._lists = [*joined",
        expect="value: ",
    ),
    Fault(
        name="candidates counted once for a row",
        kind="statistic",
        file=CANDIDATES,
        old="index_add_(0, rows, flags.long())",
        new="index_add_(0, rows, flags.long()).clamp_max(1)",
        expect="value: ",
    ),
)

FAULTS = (*ROUNDS, *LISTS)
