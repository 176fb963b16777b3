"""diffusers' ring attention on three ranks: its gradients beside those of the same attention on one device."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import TemplatedRingAttention


def forward_op(ctx, q, k, v, *rest, _save_ctx=False, **options):
    _ = _save_ctx and ctx.save_for_backward(q, k, v)
    scores = torch.einsum("bshd,bthd->bhst", q, k)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def backward_op(ctx, g, query, key, value, out, lse):
    p = (torch.einsum("bshd,bthd->bhst", query, key) - lse.transpose(1, 2)[..., None]).exp()
    ds = p * (torch.einsum("bshd,bthd->bhst", g, value) - (g * out).sum(-1).transpose(1, 2)[..., None])
    of_key, of_value = torch.einsum("bhst,bshd->bthd", ds, query), torch.einsum("bhst,bshd->bthd", p, g)
    return torch.einsum("bhst,bthd->bshd", ds, key), of_key, of_value


dist.init_process_group("gloo")
mesh, rank = dist.device_mesh.init_device_mesh("cpu", (3,)), dist.get_rank()
ring = SimpleNamespace(_ring_mesh=mesh, _ring_local_rank=rank, ring_degree=3, convert_to_fp32=True)
full = [torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
forward_op(None, *full)[0].square().sum().backward()
own = [x.detach().chunk(3, 1)[rank].clone().requires_grad_() for x in full]
options = (None, 0.0, False, None, False, False, forward_op, backward_op, SimpleNamespace(context_parallel_config=ring))
TemplatedRingAttention.apply(*own, *options).square().sum().backward()
off = [f"{(x.grad - y.grad.chunk(3, 1)[rank]).abs().max().item():.0e}" for x, y in zip(own, full, strict=True)]
print(f"rank {rank}: largest errors of the gradients of q, k and v: {', '.join(off)}\n", end="", flush=True)
