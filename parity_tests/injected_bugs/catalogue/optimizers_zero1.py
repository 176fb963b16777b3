"""Injected bugs of ZeRO-1: the sums of gradients, the borders of shares, the weights that are gathered."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="ZeRO-1 averages gradients that are to be summed",
        kind="reduction",
        at="optimizers:Zero1.reduce_gradients",
        old="bucket.share.grad = bucket.placed(total, self.mesh)",
        new="bucket.share.grad = bucket.placed(total / self.mesh.size(), self.mesh)",
        expect="value: ",
    ),
    InjectedBug(
        name="ZeRO-1 steps by the gradient of its own rank",
        kind="reduction",
        at="optimizers:Zero1.reduce_gradients",
        old="bucket.share.grad = bucket.placed(total, self.mesh)",
        new="first = sum(bucket.lengths[: self.mesh.get_local_rank()])\n"
        "            total = _flat(gradients, total.dtype)[first : first + len(total)]\n"
        "            bucket.share.grad = bucket.placed(total, self.mesh)",
        expect="value: ",
    ),
    InjectedBug(
        name="the shares' offsets are those of equal shares",
        kind="border",
        at="optimizers:_part",
        old="flat.narrow(0, sum(lengths[:rank]), lengths[rank])",
        new="flat.narrow(0, len(flat) * rank // mesh.size() if lengths[rank] else 0, lengths[rank])",
        expect="value: ",
    ),
    InjectedBug(
        name="a share begins one element early",
        kind="border",
        at="optimizers:_part",
        old="flat.narrow(0, sum(lengths[:rank]), lengths[rank])",
        new="flat.narrow(0, max(sum(lengths[:rank]) - 1, 0), lengths[rank])",
        expect="value: ",
    ),
    InjectedBug(
        name="the new weights of a share stay on its rank",
        kind="reduction",
        at="optimizers:Zero1.gather_weights",
        old="            flat = all_gather_concat(share, self.mesh.get_group(), 0, bucket.lengths)\n",
        new="            all_gather_concat(share, self.mesh.get_group(), 0, bucket.lengths)\n"
        "            flat = _flat([p.detach() for p in bucket.parameters], share.dtype)\n"
        "            first = sum(bucket.lengths[: self.mesh.get_local_rank()])\n"
        "            flat[first : first + len(share)] = share\n",
        expect="value: ",
    ),
    InjectedBug(
        name="weights gathered before the step",
        kind="order",
        at="optimizers:Zero1.step",
        old="        self.optimizer.step()\n        self.optimizer.zero_grad()\n        self.gather_weights()\n",
        new="        self.gather_weights()\n        self.optimizer.step()\n        self.optimizer.zero_grad()\n",
        expect="value: ",
    ),
    InjectedBug(
        name="parameters read from the flat tensor in reverse",
        kind="order",
        at="optimizers:Zero1.gather_weights",
        old="p.copy_(new.view_as(p))",
        new="p.copy_(new.flip(0).view_as(p))",
        expect="value: ",
    ),
    InjectedBug(
        name="a group's own weight decay lost on the way to its share",
        kind="scale",
        at="optimizers:Zero1.__init__",
        old='{**each, "params": [bucket.share for bucket in buckets]}',
        new='{**groups[0], "params": [bucket.share for bucket in buckets]}',
        expect="value: ",
    ),
    InjectedBug(
        name="gradients flattened in the order of their transposes",
        kind="order",
        at="optimizers:_flat",
        old="each.reshape(-1).to(dtype)",
        new="each.mT.reshape(-1).to(dtype) if each.ndim > 1 else each.to(dtype)",
        expect="value: ",
    ),
    InjectedBug(
        name="master weights' gradients summed in the parameters' dtype",
        kind="precision",
        at="optimizers:Zero1.reduce_gradients",
        old="_flat(gradients, bucket.share.dtype)",
        new="_flat(gradients, gradients[0].dtype)",
        expect="raised: ",
    ),
    InjectedBug(
        name="shares as long as n / ranks rounded down",
        kind="border",
        at="optimizers:chunk_lengths",
        old="longest = -(-size // world)",
        new="longest = size // world",
        expect="raised: ",
    ),
    InjectedBug(
        name="a share sent in float32 whatever the weights are",
        kind="call",
        at="optimizers:Zero1.gather_weights",
        old="local_tensor(bucket.share).to(bucket.parameters[0].dtype)",
        new="local_tensor(bucket.share).to(torch.promote_types(bucket.parameters[0].dtype, torch.float32))",
        expect="cost: forward all_gather",
    ),
)
