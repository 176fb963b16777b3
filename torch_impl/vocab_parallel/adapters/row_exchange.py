"""Logits cut by columns become logits cut by rows, and back.

Rank r holds all rows of its columns on one side, its share of the rows whole on the other. The functions of
this folder need neither: they work on columns where these lie.
"""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all
from torch_impl.vocab_parallel.arguments import checked_tp_group


def all_to_all_vp2sq(
    vocab_parallel_logits: Shaped[Tensor, "t v"], tp_group: ProcessGroup
) -> Shaped[Tensor, "t_local v_whole"]:
    """This rank's share of the rows, whole; of BS rows rank r gets [r BS/tp, (r+1) BS/tp).

        vocab_parallel_logits  "t v/tp"   ->   "t/tp v"

    All ranks hold equally many columns. Any dtype and strides. Backward: `all_to_all_sq2vp` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is None or no ProcessGroup; ValueError if the logits are no matrix or tp does
            not divide the rows.
    """
    function = "vocab_parallel.all_to_all_vp2sq"
    group = checked_tp_group(function, "tp_group", tp_group)
    _check_matrix(function, "vocab_parallel_logits", vocab_parallel_logits)
    rows, tp = len(vocab_parallel_logits), group.size()
    if rows % tp:
        raise ValueError(f"{function}: BS={rows} must be divisible by tp={tp}; pad the rows to {-(-rows // tp) * tp}")
    return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)


def all_to_all_sq2vp(
    seq_parallel_logits: Shaped[Tensor, "t v"], tp_group: ProcessGroup
) -> Shaped[Tensor, "t_whole v_local"]:
    """All rows of this rank's columns; of V columns rank r gets [r V/tp, (r+1) V/tp).

        seq_parallel_logits  "t/tp v"   ->   "t v/tp"

    All ranks hold equally many rows. Any dtype and strides. Backward: `all_to_all_vp2sq` of the cotangent.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if tp_group is None or no ProcessGroup; ValueError if the logits are no matrix or tp does
            not divide the columns.
    """
    function = "vocab_parallel.all_to_all_sq2vp"
    group = checked_tp_group(function, "tp_group", tp_group)
    _check_matrix(function, "seq_parallel_logits", seq_parallel_logits)
    columns, tp = seq_parallel_logits.shape[1], group.size()
    if columns % tp:
        raise ValueError(f"{function}: V={columns} must be divisible by tp={tp}")
    return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)


def _check_matrix(function: str, name: str, logits: Tensor) -> None:
    if logits.ndim != 2:
        raise ValueError(f"{function}: {name} is {list(logits.shape)}; flatten it to [rows, columns]")
