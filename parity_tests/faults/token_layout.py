"""Faults of token layouts and of reordering: whose token stands where, in which sequence, and the way back."""

from parity_tests.faults.fault import Fault

LAYOUT = "torch_impl/layouts/token_layout.py"
INDEX = "torch_impl/layouts/token_index.py"
REORDER = "torch_impl/layouts/reorder.py"

TABLES = (
    Fault(
        name="sequences begin one token late",
        kind="sequence",
        file=LAYOUT,
        old="self._everywhere, right=True)",
        new="self._everywhere, right=False)",
        expect="value: ",
    ),
    Fault(
        name="sequences found by real offsets",
        kind="sequence",
        file=LAYOUT,
        old="torch.searchsorted(self.cu_padded[1:].long(), self._everywhere, right=True)",
        new="torch.searchsorted(self.cu_real[1:-1].long(), self._everywhere, right=True)",
        expect="value: ",
        source="NVIDIA/TransformerEngine #1929",
    ),
    Fault(
        name="positions not restarted in a sequence",
        kind="sequence",
        file=LAYOUT,
        old="return self._everywhere - self.cu_padded.long()[self.sequence_ids]",
        new="return self._everywhere - self.cu_padded.long()[self.sequence_ids[:1]]",
        expect="value: ",
    ),
    Fault(
        name="padding mask one token late",
        kind="border",
        file=LAYOUT,
        old="return self.position_ids >= self.cu_real.diff()",
        new="return self.position_ids > self.cu_real.diff()",
        expect="value: ",
    ),
    Fault(
        name="padding taken for real tokens",
        kind="border",
        file=LAYOUT,
        old="return self.position_ids >= self.cu_real.diff()",
        new="return self.position_ids >= self.cu_padded.diff()",
        expect="value: ",
    ),
    Fault(
        name="real lengths divided by the ranks",
        kind="border",
        file=LAYOUT,
        old="return self.position_ids >= self.cu_real.diff()[self.sequence_ids]",
        new="return self.position_ids >= (self.cu_real.diff() // self.cp_size * self.cp_size)[self.sequence_ids]",
        expect="value: ",
        source="NVIDIA/TransformerEngine #3331",
    ),
)

CUT = (
    Fault(
        name="zigzag over the whole packed stream",
        kind="sequence",
        file=INDEX,
        old="index = rows(padded.long(), total,",
        new="index = rows(padded.long()[[0, -1]], total,",
        expect="value: ",
    ),
    Fault(
        name="real offsets cut the stream",
        kind="sequence",
        file=INDEX,
        old="index = rows(padded.long(), total,",
        new="index = rows(real.long().clamp(max=total), total,",
        expect="raised: ",
    ),
    Fault(
        name="every rank holds the first share",
        kind="group",
        file=LAYOUT,
        old="return self.index[self.cp_rank, :",
        new="return self.index[0, :",
        expect="value: ",
    ),
    Fault(
        name="gathered stream left in rank order",
        kind="order",
        file=LAYOUT,
        old="whole = rows_at(rank_major, self.inverse, dim)",
        new="whole = rank_major",
        expect="value: same values in another order",
    ),
    Fault(
        name="gathered stream cut again for going back",
        kind="order",
        file=LAYOUT,
        old="whole = rows_at(rank_major, self.inverse, dim)",
        new="whole = rows_at(rank_major, self.index.flatten(), dim)",
        expect="value: same values in another order",
    ),
    Fault(
        name="one gradient for all where they add up",
        kind="reduction",
        file=LAYOUT,
        old="all_gather(x, group, out=gradient,",
        new='all_gather(x, group, out="I",',
        expect="gradient: ",
    ),
    Fault(
        name="gradients added up where they are one",
        kind="reduction",
        file=LAYOUT,
        old="all_gather(x, group, out=gradient,",
        new='all_gather(x, group, out="R",',
        expect="gradient: ",
    ),
)

ORDERS = (
    Fault(
        name="balancing done again instead of undone",
        kind="order",
        file=REORDER,
        old="[*chunks[::2], *chunks[::-2]]",
        new="[c for r in range(cp_size) for c in (r, 2 * cp_size - 1 - r)]",
        expect="value: same values in another order",
    ),
    Fault(
        name="balancing undone instead of done",
        kind="order",
        file=REORDER,
        old="order = [chunk for rank in range(cp_size) for chunk in (rank, last - rank)]",
        new="order = [*range(0, last, 2), *range(last, 0, -2)]",
        expect="value: ",
    ),
    Fault(
        name="second chunks not mirrored on the way back",
        kind="order",
        file=REORDER,
        old="[*chunks[::2], *chunks[::-2]]",
        new="[*chunks[::2], *chunks[1::2]]",
        expect="value: same values in another order",
    ),
    Fault(
        name="cotangent put in order once more",
        kind="order",
        file=REORDER,
        old="_Permuted.apply(cotangent, back, index, ctx.dim)",
        new="_Permuted.apply(cotangent, index, back, ctx.dim)",
        expect="gradient: ",
    ),
    Fault(
        name="sequences put together where ranks should be",
        kind="order",
        file=REORDER,
        old="return _permuted(input_, (back, there), 0)",
        new="return _permuted(input_, (there, back), 0)",
        expect="value: ",
    ),
    Fault(
        name="local offsets taken for those of the stream",
        kind="sequence",
        file=REORDER,
        old="i = torch.arange(rows, device=local.device) - start * cp_size",
        new="i = torch.arange(rows, device=local.device) - start",
        expect="raised: ",
    ),
    Fault(
        name="chunks of the first sequence's size in all",
        kind="sequence",
        file=REORDER,
        old="chunk = (lengths // len(order)).repeat_interleave(",
        new="chunk = (lengths * 0 + lengths[lengths > 0][:1].sum() // len(order)).repeat_interleave(",
        expect="raised: ",
    ),
)

FAULTS = (*TABLES, *CUT, *ORDERS)
