"""NeMo Automodel's exchanges of Mamba's context parallelism, and the order of chunks that attention leaves."""

from __future__ import annotations

from typing import Any

import torch
from nemo_automodel.components.distributed.context_parallel import mamba

from parity_tests.evidence.peers.mathematics import identity
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import offsets, scheme, values

NORMAL = values("normal")
CP = dict(reference=identity, mesh={"cp": (1, 2, 4)}, dtypes=("float32",), draw={"x": NORMAL}, **CONTIGUOUS)


@scheme(inputs={"x": "b s/cp w"}, outputs="b s w/cp", **CP)
def columns_for_tokens(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all_cp2hp(x, mesh["cp"], len(x))


@scheme(inputs={"x": "b s w/cp"}, outputs="b s/cp w", **CP)
def tokens_for_columns(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all_hp2cp(x, mesh["cp"], len(x))


@scheme(inputs={"x": "t/cp w"}, outputs="t w/cp", **CP)
def columns_for_tokens_of_a_stream(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all_cp2hp(x, mesh["cp"], 1)


@scheme(inputs={"x": "t w/cp"}, outputs="t/cp w", **CP)
def tokens_for_columns_of_a_stream(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all_hp2cp(x, mesh["cp"], 1)


@scheme(inputs={"x": "n/cp d"}, outputs="n/cp d", dims={"n": (16, 32)}, **CP)
def exchange_there_and_back(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all(mamba._all_to_all(x, mesh["cp"]), mesh["cp"])


@scheme(inputs={"x": "b s/cp:dual_chunk_swap w"}, outputs="b s w/cp", **CP)
def columns_in_the_order_of_the_sequence(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._undo_attention_load_balancing(mamba._all_to_all_cp2hp(x, mesh["cp"], len(x)), mesh.size("cp"))


@scheme(inputs={"x": "b s w/cp"}, outputs="b s/cp:dual_chunk_swap w", **CP)
def tokens_in_the_order_of_attention(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mamba._all_to_all_hp2cp(mamba._redo_attention_load_balancing(x, mesh.size("cp")), mesh["cp"], len(x))


# Packed sequences. `cu` has the borders in the stream of all ranks; a rank has the same part of each sequence.
PACKED = {
    **CP,
    "reference": lambda x, cu: x,
    "mesh": {"cp": (2, 4)},
    "dims": {"t": (32, 64), "q": (3, 4)},
    "draw": {"x": NORMAL, "cu": offsets("t", padded=True, empty=False)},
}


@scheme(inputs={"x": "t/cp:packed w", "cu": "q"}, outputs="t w/cp", **PACKED)
def columns_of_packed_sequences(mesh: Any, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    ranks = mesh.size("cp")
    columns = mamba._all_to_all_cp2hp(x, mesh["cp"], 1)
    return mamba._undo_attention_load_balancing(mamba._deinterleave_packed_seqs(columns, cu // ranks, ranks), ranks, cu)


@scheme(inputs={"x": "t w/cp", "cu": "q"}, outputs="t/cp:packed w", **PACKED)
def tokens_of_packed_sequences(mesh: Any, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    ranks = mesh.size("cp")
    balanced = mamba._redo_attention_load_balancing(x, ranks, cu)
    return mamba._all_to_all_hp2cp(mamba._reinterleave_packed_seqs(balanced, cu // ranks, ranks), mesh["cp"], 1)
