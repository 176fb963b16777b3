"""Faults of the Mamba2 mixer and of its columns over ranks."""

from parity_tests.faults.fault import Fault

CONV = "torch_impl/mamba/conv.py"
SCAN = "torch_impl/mamba/scan.py"
MIXER = "torch_impl/mamba/mixer.py"
COLUMNS = "torch_impl/layouts/columns.py"
HIDDEN = "torch_impl/mamba/hidden_parallel.py"
EXCHANGE = "torch_impl/mamba/all_to_all.py"

ALONE = (
    Fault(
        name="a convolution not reset where a sequence begins",
        kind="sequence",
        file=CONV,
        old="taps = taps.masked_fill((before != seq_idx[..., None])[:, :, None], 0.0)",
        new="taps = taps.masked_fill((before < 0)[:, :, None], 0.0)",
        expect="value: ",
    ),
    Fault(
        name="a convolution that sees one token ahead",
        kind="sequence",
        file=CONV,
        old="taps = F.pad(x.to(wide), (0, 0, k - 1, 0)).unfold",
        new="taps = F.pad(x.to(wide), (0, 0, k - 2, 1)).unfold",
        expect="value: ",
    ),
    Fault(
        name="a convolution with its taps turned round",
        kind="order",
        file=CONV,
        old="(taps * weight.to(wide)).sum(-1)",
        new="(taps * weight.to(wide).flip(-1)).sum(-1)",
        expect="value: ",
    ),
    Fault(
        name="states carried from one sequence into the next inside a chunk",
        kind="sequence",
        file=SCAN,
        old="reaches = (ids[..., :, None] == ids[..., None, :]).tril()",
        new="reaches = torch.ones_like(ids[..., :, None] == ids[..., None, :]).tril()",
        expect="value: ",
    ),
    Fault(
        name="what enters a chunk reaches its later sequences",
        kind="sequence",
        file=SCAN,
        old="enters = through.masked_fill((ids[:, :, :1] != last[:, :-1, None])[..., None], NEVER).exp()",
        new="enters = through.exp()",
        expect="value: ",
    ),
    Fault(
        name="a token that does not read what it writes",
        kind="border",
        file=SCAN,
        old="return terms.cumsum(-3).masked_fill(~reaches[..., None], NEVER)",
        new="return terms.cumsum(-3).masked_fill(~reaches.tril(-1)[..., None], NEVER)",
        expect="value: ",
    ),
    Fault(
        name="a decay that counts the token that it starts from",
        kind="border",
        file=SCAN,
        old="terms = torch.where(reaches.tril(-1)[..., None]",
        new="terms = torch.where(reaches[..., None]",
        expect="value: ",
    ),
    Fault(
        name="a chunk entered without the decay of its first token",
        kind="border",
        file=SCAN,
        old="through = logs[:, :, :1] + inside[:, :, :, 0]",
        new="through = inside[:, :, :, 0]",
        expect="value: ",
    ),
    Fault(
        name="initial states forgotten",
        kind="sequence",
        file=SCAN,
        old="torch.cat([entering[:, None], left], 1))",
        new="torch.cat([entering[:, None] * 0, left], 1))",
        expect="value: ",
    ),
    Fault(
        name="heads dealt out to groups in turn",
        kind="order",
        file=SCAN,
        old="B, C = (part.to(wide).repeat_interleave(each, dim=2) for part in (B, C))",
        new="B, C = (part.to(wide).repeat(1, 1, each, 1) for part in (B, C))",
        expect="value: ",
    ),
    Fault(
        name="D times the step added",
        kind="statistic",
        file=SCAN,
        old="y = y + x.to(wide) * D.to(wide).reshape(x.shape[2], -1)",
        new="y = y + u * D.to(wide).reshape(x.shape[2], -1)",
        expect="value: ",
    ),
    Fault(
        name="the gate left out",
        kind="order",
        file=MIXER,
        old="return gated(y.flatten(-2), z)",
        new="return y.flatten(-2)",
        expect="value: ",
    ),
    Fault(
        name="a norm over the whole width",
        kind="statistic",
        file=MIXER,
        old=".unflatten(-1, (self.groups, -1))",
        new=".unflatten(-1, (1, -1))",
        expect="value: ",
    ),
    Fault(
        name="steps not held in their limits",
        kind="border",
        file=MIXER,
        old=".clamp(*dt_limit)",
        new=".clamp(min=dt_limit[0])",
        expect="value: ",
    ),
    Fault(
        name="dt_bias added after softplus",
        kind="statistic",
        file=MIXER,
        old="F.softplus(dt.to(wide) + dt_bias.to(wide))",
        new="(F.softplus(dt.to(wide)) + dt_bias.to(wide))",
        expect="value: ",
    ),
)

OVER_RANKS = (
    Fault(
        name="shared groups by the rank and not by its share",
        kind="group",
        file=COLUMNS,
        old="first = torch.arange(cp, device=device) * sizes.n_groups // cp",
        new="first = torch.arange(cp, device=device) % sizes.n_groups * sizes.local(cp).n_groups",
        expect="value: ",
    ),
    Fault(
        name="C taken from the channels of B",
        kind="order",
        file=COLUMNS,
        old="sizes.inner + groups, sizes.inner + sizes.shared + groups)",
        new="sizes.inner + groups, sizes.inner + groups)",
        expect="value: ",
    ),
    Fault(
        name="group copies in the order copy, group",
        kind="order",
        file=HIDDEN,
        old="groups.repeat_interleave(self.group_repeat_count, dim=-2)",
        new="groups.repeat(*[1] * (groups.ndim - 2), self.group_repeat_count, 1)",
        expect="value: ",
    ),
    Fault(
        name="rows left in rank-major order",
        kind="order",
        file=HIDDEN,
        old="in_order = _permuted(arrived.flatten(0, 1), (there, back), 0)",
        new="in_order = arrived.transpose(0, 1).flatten(0, 2) if len(rows) == 1 else arrived.flatten(0, 1)",
        expect="value: ",
    ),
    Fault(
        name="undo and redo of the row order exchanged",
        kind="order",
        file=HIDDEN,
        old="(there, back), 0)",
        new="(back, there), 0)",
        expect="value: ",
    ),
    Fault(
        name="rows sent back in the order in which they are mixed",
        kind="order",
        file=HIDDEN,
        old="send = _permuted(rows.flatten(0, 1), (back, there), 0).unflatten",
        new="send = rows.flatten(0, 1).unflatten",
        expect="value: ",
    ),
    Fault(
        name="parts put in order before their ranks are",
        kind="order",
        file="torch_impl/mamba/five_exchanges.py",
        old="        majored = _deinterleave_packed_seqs(arrived, cu_seqlens // tokens.cp_size, tokens.cp_size)\n"
        "        return _undo_attention_load_balancing(majored, tokens.cp_size, cu_seqlens)[None]",
        new="        undone = _undo_attention_load_balancing(arrived, tokens.cp_size, cu_seqlens)\n"
        "        return _deinterleave_packed_seqs(undone, cu_seqlens // tokens.cp_size, tokens.cp_size)[None]",
        expect="value: ",
    ),
    Fault(
        name="a copied group's gradient from one rank alone",
        kind="reduction",
        file=HIDDEN,
        old="return groups.repeat_interleave(self.group_repeat_count, dim=-2).flatten(-2)",
        new="copies = groups.detach()[..., None, :].expand(*groups.shape[:-1], self.group_repeat_count - 1, -1)\n"
        "        return torch.cat([groups[..., None, :], copies], -2).flatten(-3)",
        expect="gradient: ",
    ),
    Fault(
        name="rows of a batch taken for one row",
        kind="order",
        file=HIDDEN,
        old="there = (there // local * batch + row) * local + there % local",
        new="there = there + row * tokens.total",
        expect="value: ",
    ),
    Fault(
        name="per-head parameters of the first rank",
        kind="group",
        file=HIDDEN,
        old="param.narrow(0, self.cp_rank * size, size)",
        new="param.narrow(0, 0, size)",
        expect="value: ",
    ),
    Fault(
        name="per-head parameters without their gradient",
        kind="reduction",
        file=HIDDEN,
        old="param.narrow(0, self.cp_rank * size, size)",
        new="param.detach().narrow(0, self.cp_rank * size, size)",
        expect="gradient: ",
    ),
    Fault(
        name="convolution channels of another rank",
        kind="group",
        file=HIDDEN,
        old="_channels(self.sizes, self.cp_size, param.device)[self.cp_rank]",
        new="_channels(self.sizes, self.cp_size, param.device)[self.cp_rank - 1]",
        expect="value: ",
    ),
    Fault(
        name="parameter gradients averaged over ranks",
        kind="scale",
        file="torch_impl/mamba/shared_parameters.py",
        old="        return parameter\n    if not all",
        new="        n = mixer.context_parallel.cp_size\n"
        "        return None if parameter is None else parameter / n + (parameter * (1 - 1 / n)).detach()\n"
        "    if not all",
        expect="gradient: ",
    ),
    Fault(
        name="sequences forgotten between the exchanges",
        kind="sequence",
        file=HIDDEN,
        old="if len(tokens.cu_padded) > 2:",
        new="if not tokens.total:",
        expect="value: ",
    ),
    Fault(
        name="an exchange whose backward is the identity",
        kind="reduction",
        file=EXCHANGE,
        old="return _AllToAll.apply(grad_output, ctx.group), None",
        new="return grad_output, None",
        expect="gradient: ",
    ),
    Fault(
        name="column blocks joined in front of the rows",
        kind="order",
        file=EXCHANGE,
        old="return _all_to_all(blocks, cp_group).movedim(0, -2).flatten(-2, -1)",
        new="return _all_to_all(blocks, cp_group).movedim(0, -1).flatten(-2, -1)",
        expect="value: ",
    ),
    Fault(
        name="an exchange of a rank with itself sent all the same",
        kind="reduction",
        file="torch_impl/collectives/plain.py",
        old="    if group.size() == 1:\n        return x\n    x = x.contiguous()",
        new="    x = x.contiguous()",
        expect="cost: ",
    ),
)

FAULTS = (*ALONE, *OVER_RANKS)
