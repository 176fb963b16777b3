"""Log-probability of each token from hidden states: vocabulary sharded over tp, sequence over cp, then gathered."""

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist

from shardproof import scheme, token_below, values
from torch_impl.collectives import all_gather, all_reduce
from torch_impl.layouts import dual_chunk_swap, inverse


def reference(hidden, weight, target):
    """The meaning of the scheme: the same function on one device, with unsharded arrays."""
    logprob = jax.nn.log_softmax(jnp.einsum("bsd,dv->bsv", hidden, weight))
    return jnp.take_along_axis(logprob, target[..., None], -1)[..., 0]


class Shared(torch.autograd.Function):
    """Every rank of a group uses x: the forward returns it, and the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@scheme(
    reference=reference,
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    inputs={
        "hidden": "b s/cp:dual_chunk_swap d tp=I",
        "weight": "d v/tp cp=R",
        "target": "b s/cp:dual_chunk_swap",
    },
    outputs="b s tp=I cp=R",
    draw={"hidden": values("normal", "ties"), "weight": values("normal"), "target": token_below("v")},
)
def sharded_logprob(mesh, hidden, weight, target):
    cp, tp = mesh["cp"], mesh["tp"]
    logits = torch.einsum("bsd,dv->bsv", Shared.apply(hidden, tp).float(), weight.float())
    row_max = logits.detach().amax(-1)
    dist.all_reduce(row_max, dist.ReduceOp.MAX, group=tp)
    row_sum = all_reduce(torch.exp(logits - row_max[..., None]).sum(-1), tp)
    first = mesh.rank("tp") * logits.shape[-1]
    is_local = target[..., None] == first + torch.arange(logits.shape[-1])
    score = all_reduce(torch.where(is_local, logits, 0.0).sum(-1), tp)
    logprob = all_gather(score - row_max - torch.log(row_sum), cp, out="R", dim=1)
    order = inverse(dual_chunk_swap(logprob.shape[1], mesh.size("cp")))
    return logprob[:, order]
