"""The exchanges and linear layers of colossalai.shardformer, and its cross entropy of sharded logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from colossalai.shardformer.layer import _operation as operation
from colossalai.shardformer.layer.loss import cross_entropy_1d

from parity_tests.evidence.peers.mathematics import identity, linear, mean_token_loss, token_losses
from parity_tests.evidence.peers.strides import CONTIGUOUS, transposed
from shardproof import ids, scheme, token_below, values

NORMAL = values("normal")
TP = {"tp": (1, 2, 4)}

# For each exchange: its call, and the specs of its input and its output for x [b, s, d].
Exchange = Callable[[torch.Tensor, Any], torch.Tensor]
EXCHANGES: dict[str, tuple[Exchange, str, str]] = {
    "gather_forward_reducescatter_backward": (
        lambda x, group: operation.gather_forward_reducescatter_backward(x, group, 1),
        "b s/tp d",
        "b s d tp=R",
    ),
    "reducescatter_forward_gather_backward": (
        lambda x, group: operation.reducescatter_forward_gather_backward(x, group, 1),
        "b s d tp=P",
        "b s/tp d",
    ),
    "gather_forward_split_backward": (
        lambda x, group: operation.gather_forward_split_backward(x, 2, group),
        "b s d/tp",
        "b s d tp=I",
    ),
    "split_forward_gather_backward": (
        lambda x, group: operation.split_forward_gather_backward(x, 2, group),
        "b s d tp=I",
        "b s d/tp",
    ),
    "reduce_forward": (lambda x, group: operation.reduce_forward(x.clone(), group), "b s d tp=P", "b s d tp=I"),
    "reduce_forward_of_transposed": (
        lambda x, group: operation.reduce_forward(transposed(x), group),
        "b s d tp=P",
        "b s d tp=I",
    ),
    "reduce_backward": (lambda x, group: operation.reduce_backward(x, group) * 1, "b s d tp=I", "b s d tp=R"),
    "all_to_all_of_heads": (
        lambda x, group: operation.all_to_all_comm(x, group, scatter_dim=2, gather_dim=1),
        "b s/tp d",
        "b s d/tp",
    ),
    "all_to_all_of_rows": (
        lambda x, group: operation.all_to_all_comm(x, group, scatter_dim=1, gather_dim=2),
        "b s d/tp",
        "b s/tp d",
    ),
}


def _declare(name: str) -> None:
    call, entered, left = EXCHANGES[name]

    def exchange(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        return call(x, mesh["tp"])

    exchange.__name__ = name
    scheme(
        reference=identity,
        mesh=TP,
        inputs={"x": entered},
        outputs=left,
        draw={"x": values("normal", "ties")},
        dtypes=("float32",),
        **CONTIGUOUS,
    )(exchange)


for _name in EXCHANGES:
    _declare(_name)

LINEAR = dict(
    reference=linear,
    mesh=TP,
    draw={"x": NORMAL, "weight": NORMAL},
    dtypes=("float32",),
    reduction=("b", "s", "i", "o"),
    **CONTIGUOUS,
)


@scheme(inputs={"x": "b s i tp=I", "weight": "o/tp i"}, outputs="b s o/tp", **LINEAR)
def linear_with_async_comm(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return operation.linear_with_async_comm(x, weight, None, mesh["tp"], True)


@scheme(inputs={"x": "b s/tp i", "weight": "o/tp i"}, outputs="b s o/tp", **LINEAR)
def linear_gather_forward(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return operation.linear_gather_forward_reducescatter_backward(x, weight, None, mesh["tp"], True, 1)


@scheme(inputs={"x": "b s i/tp", "weight": "o i/tp"}, outputs="b s/tp o", **LINEAR)
def linear_reducescatter_forward(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return operation.linear_reducescatter_forward_gather_backward(x, weight, None, mesh["tp"], 1)


def _declare_cross_entropy(name: str, mode: str, kinds: tuple[str, ...], ignored: bool) -> None:
    def loss(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy_1d(
            logits, target, process_group=mesh["tp"], vocab_size=mesh.total("v"), dtype=torch.float32, mode=mode
        )

    loss.__name__ = name
    scheme(
        reference=mean_token_loss if mode == "mean" else lambda logits, target: token_losses(logits, target).sum(),
        mesh=TP,
        inputs={"logits": "b s v/tp", "target": "b s"},
        outputs="tp=I",
        draw={"logits": values(*kinds), "target": ids("v", ignore=-100) if ignored else token_below("v")},
        dims={"v": (8, 16)},
        dtypes=("float32",),
        roundings=4,
        reduction=("b", "s", "v"),
        **CONTIGUOUS,
    )(loss)


_declare_cross_entropy("cross_entropy_1d_sum", "sum", ("normal",), True)
_declare_cross_entropy("cross_entropy_1d_mean", "mean", ("normal",), False)
_declare_cross_entropy("cross_entropy_1d_mean_of_sure_tokens", "mean", ("peaked",), False)
