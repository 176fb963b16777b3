"""Faults of batches over cp: what joins a stream, what is cut with what, and what padding is."""

from parity_tests.faults.fault import Fault

THD = "torch_impl/context_parallel/thd.py"
SLOTS = "torch_impl/context_parallel/slots.py"
TE = "torch_impl/context_parallel/batch_te.py"
PLACE = "torch_impl/context_parallel/arguments.py"
DENSE = "torch_impl/context_parallel/batch_ctx.py"
MODE = "torch_impl/context_parallel/sdpa_mode.py"
CONTEXT = "torch_impl/context_parallel/sequence_context.py"

STREAMS = (
    Fault(
        name="labels cut by another layout",
        kind="order",
        file=TE,
        old="share = rows_at(x, index, 2 if",
        new="at = index if name != 'labels' else torch.arange(len(index)) + layout.cp_rank * len(index)\n"
        "        share = rows_at(x, at, 2 if",
        expect="value: ",
    ),
    Fault(
        name="positions cut by another layout",
        kind="order",
        file=TE,
        old="share = rows_at(x, index, 2 if",
        new="at = index if name != 'position_ids' else torch.arange(len(index)) + layout.cp_rank * len(index)\n"
        "        share = rows_at(x, at, 2 if",
        expect="value: ",
    ),
    Fault(
        name="embeddings cast to integers",
        kind="precision",
        file=TE,
        old="share.long() if name in IDS and not share.is_floating_point() else share",
        new="share.long().to(share.dtype) if name in IDS else share",
        expect="value: ",
    ),
    Fault(
        name="the share of another rank",
        kind="group",
        file=PLACE,
        old="cp_mesh.get_group().rank()",
        new="cp_mesh.size() - 1 - cp_mesh.get_group().rank()",
        expect="value: ",
    ),
    Fault(
        name="padding by token id",
        kind="sequence",
        file=THD,
        old='"padding_mask": layout.padding_mask}',
        new='"padding_mask": self.tokens["labels"] == 0}',
        expect="value: ",
    ),
    Fault(
        name="chunks dealt out token by token",
        kind="order",
        file=THD,
        old="return x.unflatten(0, (chunks, len(x) // chunks))",
        new="return x.unflatten(0, (len(x) // chunks, chunks)).transpose(0, 1)",
        expect="value: ",
    ),
    Fault(
        name="real offsets for padded ones",
        kind="sequence",
        file=SLOTS,
        old="return _sums(torch.stack([self.padded, self.real]))",
        new="return _sums(torch.stack([self.padded, self.padded]))",
        expect="value: ",
    ),
    Fault(
        name="offsets confused",
        kind="sequence",
        file=SLOTS,
        old='zip(("cu_seqlens_padded", "cu_seqlens"), self.offsets, strict=True)',
        new='zip(("cu_seqlens", "cu_seqlens_padded"), self.offsets, strict=True)',
        expect="value: ",
    ),
    Fault(
        name="the tail of a row left out",
        kind="border",
        file=SLOTS,
        old="torch.where(columns == last, left[:, None], 0)",
        new="torch.where(columns == last, 0, 0)",
        expect="raised: ",
    ),
    Fault(
        name="the tail of a row taken for real",
        kind="border",
        file=SLOTS,
        old="return Slots(real[kept],",
        new="return Slots((real + torch.where(columns == last, left[:, None], 0))[kept],",
        expect="value: ",
    ),
    Fault(
        name="the tail of a row joins its first slot",
        kind="border",
        file=SLOTS,
        old="torch.where(kept, columns, -1).amax(1, keepdim=True)",
        new="torch.zeros_like(left)[:, None]",
        expect="raised: cu_seqlens: sequence 0 has padded length",
    ),
    Fault(
        name="offsets of a chunk go on from the last one",
        kind="sequence",
        file=SLOTS,
        old="sums[1:] - sums[starts[chunk]]",
        new="sums[1:]",
        expect="raised: pass the padded offsets",
    ),
)

ROWS = (
    Fault(
        name="padding counted in the loss",
        kind="border",
        file=DENSE,
        old='"labels": -100',
        new='"labels": 0',
        expect="value: ",
    ),
    Fault(
        name="padding not masked",
        kind="border",
        file=DENSE,
        old='"padding_mask": True}',
        new='"padding_mask": False}',
        expect="value: ",
    ),
    Fault(
        name="padding on the left",
        kind="border",
        file=DENSE,
        old="F.pad(x, [*behind, 0, more], value=fill)",
        new="F.pad(x, [*behind, more, 0], value=fill)",
        expect="value: ",
    ),
    Fault(
        name="positions of padding start anew",
        kind="sequence",
        file=DENSE,
        old="last + further],",
        new="further - 1 + 0 * last],",
        expect="value: ",
    ),
    Fault(
        name="last columns dropped",
        kind="border",
        file=DENSE,
        old="more = -size % multiple",
        new="more = -(size % multiple)",
        expect="raised: ",
    ),
    Fault(
        name="embeddings that need a gradient left whole",
        kind="order",
        file=DENSE,
        old="padded[name] = layout.shard(x, dim)",
        new="padded[name] = x",
        expect="raised: ",
    ),
    Fault(
        name="buffers cut in blocks",
        kind="order",
        file=CONTEXT,
        old="return self.layout.shard(original if whole is None else whole, self.dims[i])",
        new="x = original if whole is None else whole\n"
        "        return x.chunk(self.layout.cp_size, self.dims[i])[self.layout.cp_rank].contiguous()",
        expect="value: ",
    ),
    Fault(
        name="attention inside always causal",
        kind="statistic",
        file=MODE,
        old="causal=is_causal,",
        new="causal=True,",
        expect="value: ",
    ),
    Fault(
        name="attention of a share alone",
        kind="statistic",
        file=MODE,
        old="if func is SDPA:",
        new="if False:",
        expect="value: ",
    ),
)

FAULTS = (*STREAMS, *ROWS)
