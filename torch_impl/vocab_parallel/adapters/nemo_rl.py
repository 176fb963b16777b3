"""NeMo-RL's newer functions on sharded logits and sequences, with NeMo-RL's argument names and order.

`torch_impl.vocab_parallel` has the same functions with the arguments that the rest of the package uses. These are in a
separate module, so that the names do not collide: `from torch_impl.vocab_parallel.adapters import nemo_rl`. As
everywhere in the package a group is required; NeMo-RL takes None for tensors that are not sharded.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl import vocab_parallel as ours
from torch_impl.collectives import accumulator
from torch_impl.contract import Group, Positive, Sharded, ShardedAny, ShardedIds, contract
from torch_impl.layouts.fill import fill_of


@contract
def vocab_parallel_log_softmax(
    logits: Sharded[Tensor, "... v/tp"], temperature: Positive, tp_group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """This rank's columns of log_softmax(logits / temperature) over the full vocabulary, in float32 or wider.

    Cost:   as `torch_impl.vocab_parallel.vocab_parallel_log_softmax`, and a copy of the logits in float32 or wider.
    Errors: as there; ValueError for a temperature that is not above 0.
    """
    return ours.vocab_parallel_log_softmax(_scaled(logits, temperature), tp_group)


@contract
def vocab_parallel_full_log_softmax(
    logits: Sharded[Tensor, "... v/tp"], temperature: Positive, tp_group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v tp=I"]:
    """Full rows of log_softmax(logits / temperature), on every rank, in float32 or wider.

    Every tp rank passes the same cotangent.

    Cost:   as `torch_impl.vocab_parallel.vocab_parallel_full_log_softmax`, and a copy of the logits in float32 or
            wider.
    Errors: as there; ValueError for a temperature that is not above 0.
    """
    return ours.vocab_parallel_full_log_softmax(_scaled(logits, temperature), tp_group)


@contract
def vocab_parallel_gather_columns(
    logits: Sharded[Tensor, "... v/tp"], column_indices: ShardedIds[Tensor, "k"], tp_group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... k tp=I"]:
    """The same k columns of every row, on every rank; ids are counted in rank order.

    Cost:   as `torch_impl.vocab_parallel.vocab_parallel_gather_columns` without a range.
    Errors: as there.
    """
    return ours.vocab_parallel_gather_columns(logits, column_indices, tp_group)


@contract
def vocab_parallel_argmax(
    logits: Sharded[Tensor, "... v/tp"], tp_group: Group[ProcessGroup, "tp"]
) -> ShardedIds[Tensor, "..."]:
    """The id of the largest logit of each row, of equal logits the lowest; ids are counted in rank order.

    Cost:   as `torch_impl.vocab_parallel.vocab_parallel_argmax` without a range.
    Errors: as there.
    """
    return ours.vocab_parallel_argmax(logits, tp_group)


@contract
def cp_load_balanced_to_contiguous(
    x: ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."], cp_group: Group[ProcessGroup, "cp"], seq_dim: int = 1
) -> ShardedAny[Tensor, "... s/cp ..."]:
    """This rank's contiguous block of the sequence, from shards in DualChunkSwap order along `seq_dim`.

    Cost:   as `torch_impl.vocab_parallel.cp_load_balanced_to_contiguous`.
    Errors: as there.
    """
    return ours.cp_load_balanced_to_contiguous(x, cp_group, seq_dim)


@contract
def cp_shift_next(
    x: ShardedAny[Tensor, "b s/cp ..."], cp_group: Group[ProcessGroup, "cp"], *, fill: float | int
) -> ShardedAny[Tensor, "b s/cp ..."]:
    """Shift contiguous shards by one position to the front; the last position of the sequence gets `fill`.

    Cost:   as `torch_impl.vocab_parallel.cp_shift_next`.
    Errors: as there.
    """
    return ours.cp_shift_next(x, cp_group, 1, fill_of(x, fill, "fill"))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature, in the dtype of the sums."""
    return logits.to(accumulator(logits.dtype)) / temperature
