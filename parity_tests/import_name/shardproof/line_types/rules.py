"""The types of our collectives and kernels, as rules of spmd-types for the inputs and outputs of each Function.

A Function whose body calls collectives is opaque to a type checker. A rule says in its place which type each input has
on the group's axis, and which type the result has. Production knows nothing of them: `register` attaches the rules to
its classes, in the process that types a scheme and nowhere else.

On an axis that is not typed here (of a layout that a dim's index cannot say) a collective leaves its input's type as it
is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import spmd_types as st
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import exchanges, gathers, reductions
from torch_impl.context_parallel import blockwise_attention
from torch_impl.expert_parallel import balance, dispatch, experts
from torch_impl.layouts import reorder
from torch_impl.mamba import all_to_all
from torch_impl.vocab_parallel import (
    cross_entropy,
    fused_logprob,
    kl_divergence,
    linear_logprob,
    logprob,
    next_token,
    sampling,
    sequence_gather,
    softmax,
    topk,
)

LETTERS = {"R": st.R, "I": st.I, "P": st.P, "V": st.V}


def is_typed(group: Any) -> bool:
    """Whether the axis of a group is typed here."""
    return st.normalize_axis(group) in (st.current_mesh() or ())


def unchanged(x: Any) -> Any:
    """The type of x: of a linear function of x that moves no number to another rank."""
    return st.rules.einsum("...->...", x, linear_in=(0,))


def moved(rule: Callable[..., Any], x: Any, group: Any, **types: Any) -> Any:
    """The type of x after a collective over `group`."""
    return rule(x, group, **types) if is_typed(group) else unchanged(x)


def _sum(x: Any, group: Any, out: str = "I") -> Any:
    return moved(st.rules.all_reduce, x, group, src=st.P, dst=LETTERS[out])


def _all_reduce(*, x: Any, group: Any, out: Any) -> Any:
    return _sum(x, group, out)


def _replicated(*, x: Any, group: Any) -> Any:
    return moved(st.rules.convert, x, group, src=st.I, dst=st.R)


def _broadcast(*, x: Any, group: Any, out: Any) -> Any:
    """Of any type but P: the other ranks' values are not read."""
    if not is_typed(group):
        return unchanged(x)
    actual = st.get_axis_local_type(x, group)
    varying = st.rules.reinterpret(x, group, src=actual, dst=st.V) if actual in (st.R, st.I) else x
    return st.rules.all_reduce(varying, group, src=st.V, dst=LETTERS[out])


def _all_gather(*, x: Any, group: Any, out: Any, dim: Any) -> Any:
    return moved(st.rules.all_gather, x, group, src=st.S(dim), dst=LETTERS[out])


def _own_shard(*, x: Any, group: Any, dim: Any) -> Any:
    return moved(st.rules.convert, x, group, src=st.I, dst=st.S(dim))


def _reduce_scatter(*, x: Any, group: Any, dim: Any) -> Any:
    return moved(st.rules.reduce_scatter, x, group, src=st.P, dst=st.S(dim))


def _all_to_all(*, x: Any, group: Any, split_dim: Any, concat_dim: Any) -> Any:
    return moved(st.rules.all_to_all, x, group, src=st.S(concat_dim), dst=st.S(split_dim))


def _all_to_all_of_rows(*, input_: Any, group: Any) -> Any:
    """Blocks of dim 0 go to other ranks. A shard of any dim stays a shard, and a term stays a term."""
    return unchanged(input_)


def _x_alone(*, x: Any) -> Any:
    return unchanged(x)


def _permuted(*, x: Any, index: Any, back: Any) -> Any:
    st.rules.ignore(index, back)
    return unchanged(x)


def _rows(*, rows: Any) -> Any:
    return unchanged(rows)


def _with_loss(*, x: Any, loss: Any) -> Any:
    st.rules.ignore(loss)
    return unchanged(x)


def _grouped_product(*, x: Any, weight: Any, counts: Any) -> Any:
    """An expert's rows and its matrix are on the same rank: one letter for both."""
    st.rules.ignore(counts)
    return st.rules.einsum("rd,rdm->rm", x, weight, linear_in=(0, 1))


def _attention(*, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """Queries, keys and values are sharded alike, along the sequence and along the heads."""
    if sinks is not None:
        st.rules.ignore(sinks)
    return st.rules.einsum("...d,...d,...d->...d", q, k, v)


def _of_vocabulary(equation: str, group: Any, *tensors: Any) -> Any:
    """A sum over the vocabulary; the group has its shards."""
    return _sum(st.rules.einsum(equation, *tensors), group)


def _logprob(*, vocab_parallel_logits: Any, target: Any, group: Any) -> Any:
    return _of_vocabulary("...v,...->...", group, vocab_parallel_logits, target)


def _logprob_tp(*, vocab_parallel_logits: Any, target: Any, tp_group: Any) -> Any:
    return _of_vocabulary("...v,...->...", tp_group, vocab_parallel_logits, target)


def _logprob_at_ids(*, vocab_parallel_logits: Any, global_indices: Any, tp_group: Any) -> Any:
    return _of_vocabulary("...v,...k->...k", tp_group, vocab_parallel_logits, global_indices)


def _entropy(*, vocab_parallel_logits: Any, tp_group: Any) -> Any:
    return _of_vocabulary("...v->...", tp_group, vocab_parallel_logits)


def _fused_logprob(outputs: Any, *, logits: Any, ids: Any, options: Any) -> None:
    with_ids = "...v,...k->...k" if options.has_id_dim else "...v,...->..."
    entropy = _of_vocabulary("...v->...", options.group, logits)
    first = entropy if ids is None else _of_vocabulary(with_ids, options.group, logits, ids)
    st.rules.output(outputs, (first, entropy)[: len(outputs)])


def _filtered_logprob(*, logits: Any, target: Any, options: Any) -> Any:
    return _of_vocabulary("...v,...->...", options.group, logits, target)


def _logits_at(*, logits: Any, ids: Any, group: Any) -> Any:
    looked_up = st.rules.einsum("...v,...k->...k", logits, ids)
    return looked_up if group is None else _sum(looked_up, group)


def _log_softmax(*, logits: Any) -> Any:
    return st.rules.einsum("...v->...v", logits)


def _kl_divergence(*, student: Any, teacher: Any, options: Any) -> Any:
    return _of_vocabulary("...v,...v->...", options.group, student, teacher)


def _soft_cross_entropy(*, student_logits: Any, target_logits: Any, group: Any) -> Any:
    return _of_vocabulary("...v,...v->...", group, student_logits, target_logits)


def _gather_over_cp(*, tensor: Any, group: Any) -> Any:
    return _of_permuted_sequence(tensor, group)


def _gather_cp(*, tensor: Any, cp_group: Any) -> Any:
    return _of_permuted_sequence(tensor, cp_group)


def _of_permuted_sequence(tensor: Any, group: Any) -> Any:
    if is_typed(group):
        raise st.SpmdTypeError("the rule of dual_chunk_swap: its axis has no type")
    return unchanged(tensor)


def _hidden_logprob(*, tensor_parallel_hidden_states: Any, target: Any, output_weight_layer: Any, tp_group: Any) -> Any:
    """Hidden states are shards of the sequence, or the same on every rank: then their gradient is summed."""
    states = tensor_parallel_hidden_states
    is_varying = is_typed(tp_group) and st.get_axis_local_type(states, tp_group) is st.V
    if is_varying:
        states = st.rules.all_gather(states, tp_group, src=st.S(0), dst=st.R)
    else:
        states = moved(st.rules.convert, states, tp_group, src=st.I, dst=st.R)
    return _of_vocabulary("sbd,vd,bs->bs", tp_group, states, output_weight_layer, target)


def _hidden_logprobs(outputs: Any, *, hidden: Any, target: Any, weight: Any, settings: Any) -> None:
    values = _hidden_logprob(
        tensor_parallel_hidden_states=hidden, target=target, output_weight_layer=weight, tp_group=settings[2]
    )
    with_entropy = outputs.ndim > values.ndim
    st.rules.output(outputs, st.rules.einsum("bs->bse", values) if with_entropy else values)


RULES: dict[type, Callable[..., Any]] = {
    reductions._AllReduce: _all_reduce,
    reductions._Replicated: _replicated,
    reductions._Broadcast: _broadcast,
    gathers.AllGather: _all_gather,
    gathers._Shard: _own_shard,
    gathers.ReduceScatter: _reduce_scatter,
    exchanges._AllToAll: _all_to_all,
    exchanges._RingShift: _x_alone,
    all_to_all._AllToAll: _all_to_all_of_rows,
    reorder._Permute: _permuted,
    dispatch._Rows: _x_alone,
    dispatch._Sums: _rows,
    balance._WithLoss: _with_loss,
    experts._GroupedProduct: _grouped_product,
    blockwise_attention._BlockwiseAttention: _attention,
    logprob.DistributedLogprob: _logprob,
    logprob.ChunkedDistributedLogprob: _logprob_tp,
    logprob.ChunkedDistributedGatherLogprob: _logprob_at_ids,
    logprob.ChunkedDistributedEntropy: _entropy,
    sampling.DistributedLogprobWithSampling: _logprob_tp,
    sampling.ChunkedDistributedLogprobWithSampling: _logprob_tp,
    fused_logprob.FusedLogprob: _fused_logprob,
    next_token.FilteredLogprob: _filtered_logprob,
    linear_logprob.ChunkedDistributedHiddenStatesToLogprobs: _hidden_logprob,
    linear_logprob._HiddenStatesToLogprobs: _hidden_logprobs,
    topk.LogitsAt: _logits_at,
    softmax._LogSoftmax: _log_softmax,
    kl_divergence._KlDivergence: _kl_divergence,
    cross_entropy.DistributedCrossEntropy: _soft_cross_entropy,
    sequence_gather.GatherOverCp: _gather_over_cp,
    sequence_gather.AllGatherCPTensor: _gather_cp,
}


_all_reduce_max = reductions.all_reduce_max


def all_reduce_max(x: Tensor, group: ProcessGroup) -> Tensor:
    """`collectives.all_reduce_max`, which is no Function, with the type of its result: the same on every rank."""
    with st.no_typecheck():
        largest = _all_reduce_max(x, group)
    if st.has_local_type(x):
        actual = st.maybe_get_axis_local_type(x, group) if is_typed(group) else None
        if actual is st.P:
            raise st.SpmdTypeError(f"Partial type on axis {group.group_name} cannot propagate through all_reduce_max")
        varying = st.rules.reinterpret(x, group, src=actual, dst=st.V) if actual in (st.R, st.I) else x
        st.rules.output(largest, moved(st.rules.all_reduce, varying, group, src=st.V, dst=st.R))
    return largest


def register() -> None:
    """Attach the rules to the classes of this process, and put the typed `all_reduce_max` in its place."""
    for function, rule in RULES.items():
        function.spmd_typecheck = staticmethod(rule)  # pyright: ignore[reportAttributeAccessIssue]
        st.register_autograd_function(function)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_impl") and getattr(module, "all_reduce_max", None) is _all_reduce_max:
            module.all_reduce_max = all_reduce_max  # pyright: ignore[reportAttributeAccessIssue]
