"""The contexts of a training step, entered around forward and backward.

Inside a context-parallel context each buffer is this rank's DualChunkSwap shard of its sequence, and attention sees
the full sequence. Backward must run inside too, because forward saved shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_impl.collectives.lengths import dim_from_front
from torch_impl.context_parallel.kinds import CpMesh
from torch_impl.context_parallel.sdpa_mode import SequenceAttention
from torch_impl.contract import Instance, ListOf, OneOf, Rejected, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import sharding_problem

# Any object with `__enter__` and `__exit__` is a context manager.
OneContext = Annotated[
    AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]],
    Instance((AbstractContextManager, Callable), "pass a context manager, or a function that makes one", False),
]
EXCHANGES = {"allgather": "all_gather", "alltoall": "ring", "addtoall": "ring"}
RotateMethod = Annotated[str, OneOf(tuple(EXCHANGES))]
Buffers = Annotated[
    list[Tensor],
    ListOf(Instance(Tensor, "pass a Tensor", shows_value=False), "tensors", if_empty="pass the tensors to shard"),
]
SequenceDims = Annotated[list[int], ListOf(Instance(int, "pass an int"), "dims")]
Unrestored = Annotated[set[Tensor], Instance(Collection, "pass a set of buffers", shows_value=False)]


@contract
def get_train_context(
    enable_loss_parallel: bool,
    enable_compiled_autograd: bool,
    cp_context: OneContext | None = None,
) -> Callable[[], AbstractContextManager[None]]:
    """A factory for the context of a step: loss parallelism, compiled autograd, fused attention, context parallelism.

    `enable_loss_parallel` enters torch's `loss_parallel`, `enable_compiled_autograd` its compiled autograd. Enabled
    contexts are entered in this order and left in reverse, even if the step raises. With a `cp_context`, a context
    manager or a function that returns one, attention is restricted to fused backends. The factory can be called any
    number of times.

    Cost:   no collective.
    Errors: TypeError for a wrong type; on entering, RuntimeError if `cp_context` is entered already, or if it was
            entered before and can be entered only once.
    """
    entered = Entries(cp_context)

    @contextmanager
    def train_context() -> Iterator[None]:
        with ExitStack() as stack:
            if enable_loss_parallel:
                # Always leave it as after success: torch's context would stay entered after a step that raises.
                loss_parallelism = loss_parallel()
                loss_parallelism.__enter__()
                stack.callback(loss_parallelism.__exit__, None, None, None)
            if enable_compiled_autograd:
                stack.enter_context(torch._dynamo.utils.maybe_enable_compiled_autograd(True))
            if cp_context is not None:
                stack.enter_context(sdpa_kernel(fused_backends()))
                stack.enter_context(entered)
            yield

    return train_context


def fused_backends() -> list[SDPBackend]:
    """The attention backends of this build that return a logsumexp, which merging blocks of keys needs."""
    # The CPU has flash attention too, so every device has a backend in the list.
    has_cuda = torch.cuda.is_available()
    return [
        *([SDPBackend.CUDNN_ATTENTION] if has_cuda and torch.backends.cudnn.is_available() else []),
        SDPBackend.FLASH_ATTENTION,
        *([SDPBackend.EFFICIENT_ATTENTION] if has_cuda else []),
    ]


class Entries:
    """A caller's context, or a function that makes one, entered once for each step."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.name = type(context).__name__
        self.entries = 0
        self.inside: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Any:
        if self.inside is not None:
            raise RuntimeError(
                f"context_parallel.train_context: cp_context {self.name} is entered already; leave it first"
            )
        current = self.context if isinstance(self.context, AbstractContextManager) else self.context()
        # A generator's context fails on its second entry, with an AttributeError or RuntimeError that does not name
        # the remedy. Errors of a first entry, or of our own context, have other causes.
        try:
            result = current.__enter__()
        except (AttributeError, RuntimeError) as error:
            if not self.entries or isinstance(self.context, SequenceContext):
                raise
            raise RuntimeError(
                f"context_parallel.train_context: cp_context {self.name} can be entered only once; "
                "pass a function that makes one, or create_context_parallel_ctx(...)"
            ) from error
        self.inside = current
        self.entries += 1
        return result

    def __exit__(self, *raised: Any) -> bool | None:
        current, self.inside = self.inside, None
        return None if current is None else current.__exit__(*raised)


@contract
def create_context_parallel_ctx(
    cp_mesh: CpMesh,
    cp_buffers: Buffers,
    cp_seq_dims: SequenceDims,
    cp_no_restore_buffers: Unrestored,
    cp_rotate_method: RotateMethod | None = None,
) -> SequenceContext:
    """A context in which every buffer is sharded in place over cp, and attention sees the full sequence.

        buffer  "... s ..."   ->   inside  "... s/cp:dual_chunk_swap ..."

    `cp_buffers` are sharded over the ranks of `cp_mesh`, each along its dim in `cp_seq_dims`. On leaving they are
    restored, except buffers in `cp_no_restore_buffers`, which stay shards and keep their new values. The context can be
    entered any number of times.

    Inside, `F.scaled_dot_product_attention` is `context_parallel_attention`. `cp_rotate_method` is the exchange of its
    keys: "allgather" for one gather, "alltoall" (or "addtoall") for the ring, None for torch's own setting, which is
    not changed. This applies to every call of that function: by name or through an earlier import, in modules
    (MultiheadAttention with need_weights=False, Transformer layers), during recomputation in backward, and in threads
    without a context of their own while one is open. `flex_attention` is rejected on this thread: its masks are
    functions of positions in the full sequence.

    Cost:   no collective to enter and leave, one copy of the shard for each buffer; see `context_parallel_attention`.
    Errors: ValueError for no buffers, collections that do not fit, a length that cannot be sharded, an unknown rotate
            method, or a buffer that occurs twice, requires a gradient or is a view with overlapping entries; in
            attention inside, for a mask, dropout or need_weights. TypeError without a mesh. RuntimeError if the context
            is entered inside itself, or for attention in a thread without a context while several are open.
    """
    # Compare by identity in any collection: `in` a list compares tensors by value.
    unrestored = {id(buffer) for buffer in cp_no_restore_buffers}
    for problem in _buffer_problems(cp_buffers, cp_seq_dims, unrestored, cp_mesh.size()):
        raise Rejected(problem)
    layout = TokenLayout.dense(
        "dual_chunk_swap",
        cp_buffers[0].shape[cp_seq_dims[0]],
        cp_size=cp_mesh.size(),
        cp_rank=cp_mesh.get_group().rank(),
        device=cp_buffers[0].device,
    )
    exchange = None if cp_rotate_method is None else EXCHANGES[cp_rotate_method]
    stays = [id(buffer) in unrestored for buffer in cp_buffers]
    return SequenceContext(cp_mesh.get_group(), layout, exchange, cp_buffers, cp_seq_dims, stays)


class SequenceContext:
    """A context that shards buffers on entering and restores them on leaving; reusable, but not inside itself.

    A buffer remains the same object and gets other memory, so its original values are untouched. Buffers with `stays`
    stay shards on leaving. If a buffer has an entry in `full_tensors`, such as a padded copy, that tensor is sharded
    instead of the buffer's values. An `exchange` of None means torch's rotate method.
    """

    def __init__(
        self,
        group: ProcessGroup,
        layout: TokenLayout,
        exchange: str | None,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        stays: Sequence[bool],
        full_tensors: Sequence[Tensor | None] = (),
        causal_only: str | None = None,
    ) -> None:
        self.group, self.layout, self.exchange, self.causal_only = group, layout, exchange, causal_only
        self.buffers, self.dims, self.stays = list(buffers), list(dims), list(stays)
        self.full_tensors = list(full_tensors) or [None] * len(self.buffers)
        self._sharded: dict[int, Tensor] = {}  # by position: the shard of a buffer that stayed sharded
        self._stack: ExitStack | None = None

    def __enter__(self) -> SequenceContext:
        if self._stack is not None:
            raise RuntimeError("context_parallel: this context is entered already; leave it first, or make another")
        # 1. Compute every shard before any buffer changes, so that an error leaves all of them unchanged.
        originals = [buffer.detach() for buffer in self.buffers]
        shares = [self._share(i, original) for i, original in enumerate(originals)]
        exchange = self.exchange or EXCHANGES[torch_rotate_method()]
        # 2. Swap memory and enter attention. The stack undoes both: here on an error, else in `__exit__`.
        with ExitStack() as stack:
            stack.callback(self._restore, originals, shares)
            for buffer, share in zip(self.buffers, shares, strict=True):
                _replace(buffer, share)
            stack.enter_context(SequenceAttention(self.group, self.layout, exchange, self.causal_only))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        stack, self._stack = self._stack, None
        return None if stack is None else stack.__exit__(*raised)

    def _share(self, i: int, original: Tensor) -> Tensor:
        """This rank's shard of a buffer. A buffer that stayed sharded is its own shard, unless its memory changed."""
        shard = self._sharded.get(i)
        # With the same memory it is still a shard; with other memory the user has put a full tensor there.
        if shard is not None and original.data_ptr() == shard.data_ptr() and original.shape == shard.shape:
            return original
        full = self.full_tensors[i]
        return self.layout.shard(original if full is None else full, self.dims[i])

    def _restore(self, originals: list[Tensor], shares: list[Tensor]) -> None:
        for i, buffer in enumerate(self.buffers):
            if self.stays[i]:
                self._sharded[i] = shares[i]
            else:
                _replace(buffer, originals[i])


def _buffer_problems(
    buffers: Sequence[Tensor], dims: Sequence[int], unrestored: set[int], cp_size: int
) -> Iterator[str]:
    """The reasons why a context cannot shard these buffers. Each check relies on the checks before it."""
    # 1. The collections must fit each other.
    if len(dims) != len(buffers):
        yield f"cp_seq_dims has {len(dims)} entries for {len(buffers)} buffers; give one for each"
    if unrestored - {id(buffer) for buffer in buffers}:
        yield "cp_no_restore_buffers has a tensor that is not in cp_buffers; add it there"
    # 2. Each buffer must occur once and accept other memory.
    places: dict[int, int] = {}
    for i, buffer in enumerate(buffers):
        if (before := places.setdefault(id(buffer), i)) < i:
            yield f"cp_buffers[{i}] is cp_buffers[{before}] again; give each tensor once"
        if reason := _unfit(buffer):
            yield f"cp_buffers[{i}] {reason}; shard it with layout.shard instead"
    # 3. All buffers must have one length, which the layout can shard.
    lengths = [x.shape[dim_from_front(f"cp_seq_dims[{i}]", dims[i], x)] for i, x in enumerate(buffers)]
    for i, length in enumerate(lengths):
        if length != lengths[0]:
            this_buffer = f"cp_buffers[{i}] has {length} positions along dim {dims[i]}"
            yield f"{this_buffer}, cp_buffers[0] has {lengths[0]}; pass whole tensors of one length"
    reason = sharding_problem("s", lengths[0], "cp", cp_size, "dual_chunk_swap") if cp_size > 1 else None
    if reason:
        yield reason


def torch_rotate_method() -> str:
    """torch's process-wide rotate method, as `set_rotate_method` names it; it is only read."""
    # Import the experimental, private module only here: nothing else depends on it.
    from torch.distributed.tensor.experimental import _context_parallel

    method = _context_parallel._attention._cp_options.rotate_method
    return "alltoall" if method.name == "ALL_TO_ALL" else "allgather"


def _unfit(buffer: Tensor) -> str | None:
    """The reason why a tensor cannot get other memory, or None."""
    if isinstance(buffer, nn.Parameter):
        return "is an nn.Parameter"
    if buffer.requires_grad:
        return "requires a gradient"
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        return "is an expanded view, which cannot be written in place"
    # In order of stride, each dim must step over all memory covered by the dims before it.
    last_offset = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= last_offset:
            return "is a view whose entries overlap, which cannot be written in place"
        last_offset += max(size - 1, 0) * stride
    return None


def _replace(buffer: Tensor, by: Tensor) -> None:
    """Give a buffer other memory; a backward that saved the buffer earlier then raises an error."""
    # Backward compares versions, and assigning .data does not raise the version: raise it by hand.
    with torch.no_grad():
        buffer.data = by
    if not buffer.is_inference():
        increment_version(buffer)
