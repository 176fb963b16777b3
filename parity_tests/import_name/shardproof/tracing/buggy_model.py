"""A small language model, sharded over tp ranks. One line is wrong: notebooks/09_find_the_injected_bug.py."""

import torch
import torch.nn.functional as F
from torch import nn

from torch_impl.collectives import all_reduce
from torch_impl.vocab_parallel import vocab_parallel_logprob

VOCAB, D, HIDDEN, TP = 128, 16, 32, 2


class Shared(torch.autograd.Function):
    """Every rank uses x: the forward returns it, and the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, ctx.group), None


class ShardedLinear(nn.Module):
    """A linear layer, sharded by rows (its output is a shard) or by columns (its output is the ranks' sum)."""

    def __init__(self, weight, rank, dim):
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(TP, dim)[rank].clone())


class Rows(ShardedLinear):
    def __init__(self, weight, rank, group):
        super().__init__(weight, rank, 0)
        self.group = group

    def forward(self, x):
        return F.linear(Shared.apply(x, self.group), self.weight)


class Columns(ShardedLinear):
    def __init__(self, weight, rank, group, out):
        super().__init__(weight, rank, 1)
        self.group, self.out = group, out

    def forward(self, x):
        return all_reduce(F.linear(x, self.weight), self.group, out=self.out)


class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """x + down(silu(gate(n)) * up(n)), n = norm(x)."""

    def __init__(self, weights, name, rank, group, is_last):
        super().__init__()
        self.norm = Norm(weights[f"{name}.norm.weight"])
        self.gate = Rows(weights[f"{name}.gate.weight"], rank, group)
        self.up = Rows(weights[f"{name}.up.weight"], rank, group)
        # The head after the last block is sharded, so each rank's gradient from it is an addend.
        self.down = Columns(weights[f"{name}.down.weight"], rank, group, out="R" if is_last else "I")

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, weights, rank, group):
        super().__init__()
        self.group, self.first_id = group, rank * VOCAB // TP
        self.embed = nn.Embedding.from_pretrained(weights["embed.weight"].clone(), freeze=False)
        self.lower = Block(weights, "lower", rank, group, is_last=False)
        self.upper = Block(weights, "upper", rank, group, is_last=True)
        self.norm = Norm(weights["norm.weight"])
        self.head = Rows(weights["head.weight"], rank, group)

    def forward(self, ids):
        return self.head(self.norm(self.upper(self.lower(self.embed(ids)))))

    def loss(self, ids, target):
        end = self.first_id + VOCAB // TP
        logprob = vocab_parallel_logprob(
            self(ids), target, self.group, vocab_start_index=self.first_id, vocab_end_index=end
        )
        return -logprob.mean()
