"""Logits sharded by columns become logits sharded by rows, and back.

Rank r has all rows of its columns on one side, its share of the rows with all columns on the other. The functions of
this package need neither: they work on columns where these are.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all
from torch_impl.contract import Group, Rejected, ShardedAny, contract


@contract
def all_to_all_vp2sq(
    vocab_parallel_logits: ShardedAny[Tensor, "t v/tp"], tp_group: Group[ProcessGroup, "tp"]
) -> ShardedAny[Tensor, "t/tp v"]:
    """This rank's share of the rows, with all columns; of BS rows rank r gets [r BS/tp, (r+1) BS/tp).

        vocab_parallel_logits  "t v/tp"   ->   "t/tp v"

    All ranks have equally many columns. Any strides, and any dtype that the group's backend sends (of gloo all but
    float8, int16 and unsigned ones wider than uint8). Backward: `all_to_all_sq2vp` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is None or no ProcessGroup; ValueError if the logits are not a matrix or tp does
            not divide the rows.
    """
    # Checked here, so that the message is in rows of logits and not in lengths of an all_to_all.
    rows, tp = len(vocab_parallel_logits), tp_group.size()
    if rows % tp:
        raise Rejected(f"BS={rows} must be divisible by tp={tp}; pad the rows to {-(-rows // tp) * tp}")
    return all_to_all(vocab_parallel_logits, tp_group, split_dim=0, concat_dim=1)


@contract
def all_to_all_sq2vp(
    seq_parallel_logits: ShardedAny[Tensor, "t/tp v"], tp_group: Group[ProcessGroup, "tp"]
) -> ShardedAny[Tensor, "t v/tp"]:
    """All rows of this rank's columns; of V columns rank r gets [r V/tp, (r+1) V/tp).

        seq_parallel_logits  "t/tp v"   ->   "t v/tp"

    All ranks have equally many rows. Any strides, and any dtype that the group's backend sends (of gloo all but
    float8, int16 and unsigned ones wider than uint8). Backward: `all_to_all_vp2sq` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is None or no ProcessGroup; ValueError if the logits are not a matrix or tp does
            not divide the columns.
    """
    columns, tp = seq_parallel_logits.shape[1], tp_group.size()
    if columns % tp:
        raise Rejected(f"V={columns} must be divisible by tp={tp}")
    return all_to_all(seq_parallel_logits, tp_group, split_dim=1, concat_dim=0)
