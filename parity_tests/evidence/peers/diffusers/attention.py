"""diffusers' context parallelism: exchanges of heads and sequence, attention by a ring and by Ulysses.

The attention of one block is written here in plain torch, because the library takes it from the chosen backend.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig

from parity_tests.evidence.peers.mathematics import attention, identity
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import scheme, values

NORMAL = values("normal")
SP = dict(mesh={"sp": (1, 2, 4)}, dims={"h": (4, 8)}, dtypes=("float32",), draw={"x": NORMAL}, **CONTIGUOUS)


@scheme(reference=identity, inputs={"x": "b s/sp h d"}, outputs="b s h/sp d", **SP)
def heads_for_sequence(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return attention_dispatch.SeqAllToAllDim.apply(mesh["sp"], x, 2, 1)


@scheme(reference=identity, inputs={"x": "b s h/sp d"}, outputs="b s/sp h d", **SP)
def sequence_for_heads(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return attention_dispatch.SeqAllToAllDim.apply(mesh["sp"], x, 1, 2)


@scheme(reference=identity, inputs={"x": "b s/sp h d"}, outputs="b s/sp h d", **SP)
def there_and_back(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    heads = attention_dispatch.SeqAllToAllDim.apply(mesh["sp"], x, 2, 1)
    return attention_dispatch.SeqAllToAllDim.apply(mesh["sp"], heads, 1, 2)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5


def forward_op(ctx: Any, query: Any, key: Any, value: Any, *options: Any, _save_ctx: bool = True, **more: Any) -> Any:
    """Attention and the log of its denominators, [b, s, h]."""
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
    scores = _scores(query, key)
    out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value)
    lse = scores.logsumexp(-1).transpose(1, 2)
    if _save_ctx:
        ctx.out, ctx.lse = out, lse
    return (out, lse) if options[-1] else out


def backward_op(ctx: Any, grad_out: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of one block. Its weights are normalised by the denominators over all blocks."""
    query, key, value = (
        given.get(name, saved) for name, saved in zip(("query", "key", "value"), ctx.saved_tensors, strict=True)
    )
    out, lse = given.get("out", ctx.out), given.get("lse", ctx.lse)
    weights = (_scores(query, key) - lse.transpose(1, 2).unsqueeze(-1)).exp()
    grad_value = torch.einsum("bhst,bshd->bthd", weights, grad_out)
    grad_weights = torch.einsum("bshd,bthd->bhst", grad_out, value)
    shared = (grad_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    grad_scores = weights * (grad_weights - shared) / query.shape[-1] ** 0.5
    grad_query = torch.einsum("bhst,bthd->bshd", grad_scores, key)
    return grad_query, torch.einsum("bhst,bshd->bthd", grad_scores, query), grad_value


def parallel(mesh: Any, template: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by a template of the library, in a configuration that the library has set up."""
    ring, ulysses = mesh.size("ring"), mesh.size("ulysses")
    if ring == ulysses == 1:  # the library takes no configuration of one rank
        return forward_op(SimpleNamespace(save_for_backward=lambda *saved: None), q, k, v, False)
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    config.setup(mesh.device_mesh.get_rank(), ring * ulysses, torch.device("cpu"), mesh.device_mesh)
    ours = SimpleNamespace(context_parallel_config=config)
    return template.apply(q, k, v, None, 0.0, False, None, False, False, forward_op, backward_op, ours)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, False)


HEADS = dict(
    reference=_attention,
    inputs={name: "b s/ring/ulysses h d" for name in "qkv"},
    outputs="b s/ring/ulysses h d",
    dims={"h": (4,)},
    draw={name: NORMAL for name in "qkv"},
    dtypes=("float32",),
    roundings=8,
    reduction=("s", "d"),
    **CONTIGUOUS,
)


@scheme(mesh={"ring": (1,), "ulysses": (1, 2, 4)}, **HEADS)
def ulysses_attention(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return parallel(mesh, attention_dispatch.TemplatedUlyssesAttention, q, k, v)


@scheme(mesh={"ring": (1, 2), "ulysses": (1,)}, **HEADS)
def ring_attention_of_two(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return parallel(mesh, attention_dispatch.TemplatedRingAttention, q, k, v)


@scheme(mesh={"ring": (3, 4), "ulysses": (1,)}, **HEADS)
def ring_attention_of_three_or_more(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return parallel(mesh, attention_dispatch.TemplatedRingAttention, q, k, v)


@scheme(mesh={"ring": (1, 2, 3, 4), "ulysses": (1,)}, **HEADS, nograd=("q", "k", "v"))
def ring_attention_forward(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return parallel(mesh, attention_dispatch.TemplatedRingAttention, q, k, v)


@scheme(mesh={"ring": (1, 2, 3, 4), "ulysses": (1,)}, **HEADS, nograd=("k", "v"))
def ring_attention_gradient_of_queries(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return parallel(mesh, attention_dispatch.TemplatedRingAttention, q, k, v)
