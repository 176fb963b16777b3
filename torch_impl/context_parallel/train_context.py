"""The contexts of a training step: what is entered around forward and backward, in which order.

Inside a context-parallel context each buffer is this rank's DualChunkSwap share of its sequence, and attention sees
the whole sequence. Backward runs inside, too: what was saved there is a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_impl.context_parallel.sequence_context import SequenceContext, checked_buffers, checked_exchange


def get_train_context(
    enable_loss_parallel: bool,
    enable_compiled_autograd: bool,
    cp_context: AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]] | None = None,
) -> Callable[[], AbstractContextManager[None]]:
    """What makes the context of one step: loss parallelism, compiled autograd, fused attention, context parallelism.

    `enable_loss_parallel` enters torch's `loss_parallel`, `enable_compiled_autograd` its compiled autograd. What is
    asked for is entered in this order and left in the reverse one, also when the step raises. Fused attention alone is
    allowed only with a `cp_context`, which is a context manager or a function that makes one. What is returned can be
    called any number of times.

    Cost:   no collective.
    Errors: on entering, RuntimeError if `cp_context` can be entered once only and was, or is entered already.
    """
    entered = Entries(cp_context)

    @contextmanager
    def train_context() -> Iterator[None]:
        with ExitStack() as stack:
            if enable_loss_parallel:
                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                stack.enter_context(torch._dynamo.utils.maybe_enable_compiled_autograd(True))
            if cp_context is not None:
                stack.enter_context(sdpa_kernel(fused_backends()))
                stack.enter_context(entered)
            yield

    return train_context


def fused_backends() -> list[SDPBackend]:
    """The attention backends that return a logsumexp, as far as this build has them; flash is a CPU's, too."""
    has_cuda = torch.cuda.is_available()
    return [
        *([SDPBackend.CUDNN_ATTENTION] if has_cuda and torch.backends.cudnn.is_available() else []),
        SDPBackend.FLASH_ATTENTION,
        *([SDPBackend.EFFICIENT_ATTENTION] if has_cuda else []),
    ]


class Entries:
    """A caller's context, entered one time after another."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.name = type(given).__name__
        self.entries = 0
        self.inside: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Any:
        if self.inside is not None:
            raise RuntimeError(
                f"context_parallel.train_context: cp_context {self.name} is entered already; leave it first"
            )
        current = self.given if isinstance(self.given, AbstractContextManager) else self.given()
        try:
            result = current.__enter__()
        except (AttributeError, RuntimeError) as error:
            if not self.entries or isinstance(self.given, SequenceContext):
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


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str | None = None,
) -> SequenceContext:
    """A context in which every buffer is this rank's share of its sequence, in place, and attention sees all of it.

        buffer  "... s ..."   ->   inside  "... s/cp:dual_chunk_swap ..."

    `cp_buffers` are cut over the ranks of `cp_mesh`, each along its dim of `cp_seq_dims`. On leaving, they become what
    they were, but those in `cp_no_restore_buffers`, which stay shares with what is written into them. It can be entered
    any number of times. `cp_rotate_method` says how: `F.scaled_dot_product_attention` inside is
    `context_parallel_attention`: with "allgather" by one gather of keys, with "alltoall" (or "addtoall") around the
    ring, with None as torch's own rotate method says, which is left alone. So it is in modules (MultiheadAttention with
    need_weights=False, Transformer layers), in what backward recomputes inside, and in threads without a context of
    their own, as long as one is open. What was imported from `torch.nn.functional` before is seen on this thread alone,
    and is refused in what backward would recompute: call it by name. `flex_attention` is refused, whose masks are made
    of places in the whole sequence.

    Cost:   no collective to enter and leave, one copy of the share for each buffer; attention as it says there.
    Errors: ValueError for no buffers, collections that do not fit, a length that cannot be cut, another rotate
            method, or a buffer that stands twice, needs a gradient or is a view of overlapping entries; in attention
            inside, for a mask, dropout or need_weights. TypeError without a mesh. RuntimeError if entered inside
            itself, or for attention in a thread without a context while several are open.
    """
    function = "context_parallel.create_context_parallel_ctx"
    exchange = checked_exchange(function, cp_rotate_method)
    layout = checked_buffers(function, cp_mesh, cp_buffers, cp_seq_dims, cp_no_restore_buffers)
    kept = {id(buffer) for buffer in cp_no_restore_buffers}
    stays = [id(buffer) in kept for buffer in cp_buffers]
    return SequenceContext(cp_mesh.get_group(), layout, exchange, cp_buffers, cp_seq_dims, stays)
