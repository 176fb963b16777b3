"""Faults of packed sequences: where one ends, whose slot is whose, and which cell a score belongs to."""

from parity_tests.faults.fault import Fault

PACKED = "torch_impl/vocab_parallel/packed.py"
SLOTS = "torch_impl/vocab_parallel/packed_slots.py"

SEQUENCES = (
    Fault(
        name="a stream shifted across its sequences",
        kind="sequence",
        file=SLOTS,
        old="return PackedSlots(sequence, position, place, place + 1 < ends[sequence])",
        new="return PackedSlots(sequence, position, place, position + 1 < total)",
        expect="value: ",
    ),
    Fault(
        name="the last token of a sequence scored",
        kind="sequence",
        file=SLOTS,
        old="place + 1 < ends[sequence])",
        new="place < ends[sequence])",
        expect="value: ",
    ),
    Fault(
        name="the last token but one dropped",
        kind="sequence",
        file=SLOTS,
        old="place + 1 < ends[sequence])",
        new="place + 2 < ends[sequence])",
        expect="value: ",
    ),
    Fault(
        name="places counted from the start of the stream",
        kind="sequence",
        file=SLOTS,
        old="place = position - offsets[sequence]",
        new="place = position - offsets[sequence[:1]]",
        expect="value: ",
    ),
    Fault(
        name="true lengths ignored",
        kind="border",
        file=SLOTS,
        old="ends = lengths if true is None else true.to(device).diff()",
        new="ends = lengths",
        expect="value: ",
    ),
    Fault(
        name="true lengths taken for the share of a rank",
        kind="border",
        file=SLOTS,
        old="true.to(device).diff()",
        new="true.to(device).diff() // cp",
        expect="value: ",
    ),
    Fault(
        name="slots in the order of one long sequence",
        kind="order",
        file=SLOTS,
        old="held = packed(total, cp, padded, device=device) if cp > 1",
        new="held = packed(total, cp, padded[[0, -1]], device=device) if cp > 1",
        expect="value: ",
    ),
    Fault(
        name="sequences of whole length on each rank",
        kind="sequence",
        file=SLOTS,
        old="each.repeat_interleave(lengths // cp, output_size=total // cp)",
        new="each.repeat_interleave(lengths, output_size=total)[: total // cp]",
        expect="value: ",
    ),
    Fault(
        name="targets of the first rank",
        kind="group",
        file=PACKED,
        old="slots.next_ids(ids, rank)",
        new="slots.next_ids(ids, 0)",
        expect="value: ",
    ),
    Fault(
        name="packed scores in rank order",
        kind="order",
        file=SLOTS,
        old="index = torch.where(self.has_next, to, size)",
        new="index = torch.where(self.has_next, to.flatten().sort().values.view(to.shape), size)",
        expect="value: ",
    ),
    Fault(
        name="packed scores gathered without their sum back",
        kind="reduction",
        file=SLOTS,
        old='scores = all_gather(scores, cp_group, out="R", dim=1)',
        new='scores = all_gather(scores, cp_group, out="I", dim=1)',
        expect="gradient: ",
    ),
    Fault(
        name="rows one column too wide",
        kind="border",
        file=PACKED,
        old="slots.sequence * u + slots.place, cells)",
        new="slots.sequence * (u + 1) + slots.place, cells)",
        expect="value: ",
    ),
    Fault(
        name="long sequences run on into the next row",
        kind="border",
        file=PACKED,
        old="cell = torch.where(slots.place < u, slots.sequence * u + slots.place, cells)",
        new="cell = slots.sequence * u + slots.place",
        expect="value: ",
    ),
    Fault(
        name="a rolled target taken for a raw one",
        kind="sequence",
        file=PACKED,
        old="own = slots.asked(ids[:, :used], rank) if target_is_pre_rolled",
        new="own = slots.asked(ids[:, :used].roll(-1, 1), rank) if target_is_pre_rolled",
        expect="value: ",
    ),
    Fault(
        name="one gather for each sequence",
        kind="reduction",
        file=SLOTS,
        old='scores = all_gather(scores, cp_group, out="R", dim=1)',
        new='pieces = [all_gather(x, cp_group, out="R", dim=1) for x in scores.split(2, 1)]\n'
        "            scores = torch.cat([x.unflatten(1, (cp, -1)) for x in pieces], 2).flatten(1)",
        expect="cost: ",
    ),
)

FAULTS = (*SEQUENCES,)
