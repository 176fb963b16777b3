"""Exchange logits sharded by columns for logits sharded by rows, and back.

Sharded by columns, a rank has all rows of its columns; sharded by rows, it has all columns of its rows. No other
function of this package needs this exchange: they compute on the columns where these are.
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
    """Rows [r t/tp, (r+1) t/tp) of `vocab_parallel_logits` on rank r, with all columns.

    All ranks have the same number of columns. Any strides, and any dtype that the group's backend sends (gloo sends all
    but float8, int16 and unsigned dtypes wider than uint8). Backward: `all_to_all_sq2vp` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is not a ProcessGroup; ValueError if the logits are not a matrix or tp does
            not divide the rows.
    """
    # Checked here, so that the message speaks of rows of logits, not of lengths of an all_to_all.
    rows, tp = len(vocab_parallel_logits), tp_group.size()
    if rows % tp:
        raise Rejected(f"BS={rows} must be divisible by tp={tp}; pad the rows to {-(-rows // tp) * tp}")
    return all_to_all(vocab_parallel_logits, tp_group, split_dim=0, concat_dim=1)


@contract
def all_to_all_sq2vp(
    seq_parallel_logits: ShardedAny[Tensor, "t/tp v"], tp_group: Group[ProcessGroup, "tp"]
) -> ShardedAny[Tensor, "t v/tp"]:
    """Columns [r v/tp, (r+1) v/tp) of `seq_parallel_logits` on rank r, with all rows.

    All ranks have the same number of rows. Any strides, and any dtype that the group's backend sends (gloo sends all
    but float8, int16 and unsigned dtypes wider than uint8). Backward: `all_to_all_vp2sq` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is not a ProcessGroup; ValueError if the logits are not a matrix or tp does
            not divide the columns.
    """
    columns, tp = seq_parallel_logits.shape[1], tp_group.size()
    if columns % tp:
        raise Rejected(f"V={columns} must be divisible by tp={tp}")
    return all_to_all(seq_parallel_logits, tp_group, split_dim=1, concat_dim=0)
