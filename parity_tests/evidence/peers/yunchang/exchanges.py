"""yunchang's exchanges of heads and sequence (Ulysses). Its ring attention calls kernels of CUDA."""

from __future__ import annotations

from typing import Any

import torch
from yunchang.comm.all_to_all import SeqAllToAll4D, SeqAllToAll5D

from parity_tests.evidence.peers.mathematics import identity
from shardproof import scheme, values

NORMAL = values("normal")
CP = dict(mesh={"cp": (1, 2, 4)}, dtypes=("float32",))


@scheme(reference=identity, inputs={"x": "b s/cp h d"}, outputs="b s h/cp d", draw={"x": NORMAL}, **CP)
def heads_for_sequence(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return SeqAllToAll4D.apply(mesh["cp"], x, 2, 1)


@scheme(reference=identity, inputs={"x": "b s h/cp d"}, outputs="b s/cp h d", draw={"x": NORMAL}, **CP)
def sequence_for_heads(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return SeqAllToAll4D.apply(mesh["cp"], x, 1, 2)


@scheme(
    reference=identity, inputs={"x": "b s/cp t h d"}, outputs="b s t h/cp d", draw={"x": NORMAL}, dims={"t": (3,)}, **CP
)
def heads_for_sequence_of_packed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """q, k and v in one tensor."""
    return SeqAllToAll5D.apply(mesh["cp"], x, 3, 1)
