"""The arms that are compared: ours, whole-vocabulary torch, and what installs from the index.

An arm takes what every rank is given and returns the log-probabilities and the gradients by what it was
differentiated by: those of whole arguments are whole, those of a rank's part are its part.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, log_softmax

from torch_impl.collectives.plain import gathered
from torch_impl.vocab_parallel import ChunkedDistributedHiddenStatesToLogprobs, vocab_parallel_logprob


@dataclass(frozen=True)
class Given:
    """What a rank has: logits, or a weight that makes them of hidden states, whole and its own part."""

    whole: Tensor
    own: Tensor
    target: Tensor
    cotangent: Tensor
    mesh: DeviceMesh
    hidden: Tensor

    @property
    def owned(self) -> dict[str, int]:
        width = self.own.shape[-1]
        start = self.mesh.get_local_rank() * width
        return {"vocab_start_index": start, "vocab_end_index": start + width}


Arm = Callable[[Given], list[Tensor]]


def backward(out: Tensor, by: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, by, cotangent.to(out.dtype))]


def ours(given: Given, **options: Any) -> list[Tensor]:
    logits = given.own.detach().requires_grad_()
    out = vocab_parallel_logprob(logits, given.target, given.mesh.get_group(), **given.owned, **options)
    assert isinstance(out, Tensor)  # a pair with entropy only
    return backward(out, [logits], given.cotangent)


def ours_with_entropy(given: Given) -> list[Tensor]:
    """The entropy's cotangent is 0, so that the gradient is the other arms'; the work is the same."""
    logits = given.own.detach().requires_grad_()
    options = {"with_entropy": True, **given.owned}
    out, entropy = vocab_parallel_logprob(logits, given.target, given.mesh.get_group(), **options)
    cotangents = [given.cotangent.to(out.dtype), torch.zeros_like(entropy)]
    return [out.detach(), *torch.autograd.grad([out, entropy], logits, cotangents)]


def whole_vocabulary(given: Given) -> list[Tensor]:
    """Every rank has all logits and does all the work."""
    logits = given.whole.detach().requires_grad_()
    return backward(_log_softmax_at(logits, given.target), [logits], given.cotangent)


def gathered_vocabulary(given: Given) -> list[Tensor]:
    """The same, on logits that are first gathered from the ranks."""
    world, own = given.mesh.size(), given.own
    logits = gathered(own, given.mesh.get_group(), own.ndim - 1, [own.shape[-1]] * world).requires_grad_()
    out, gradient = backward(_log_softmax_at(logits, given.target), [logits], given.cotangent)
    return [out, gradient.chunk(world, -1)[given.mesh.get_local_rank()].contiguous()]


def dtensor(given: Given) -> list[Tensor]:
    """torch's own: a DTensor cut over the vocabulary, cross_entropy under loss_parallel."""
    local = given.own.detach().requires_grad_()
    with loss_parallel():
        logits = DTensor.from_local(local, given.mesh, [Shard(local.ndim - 1)], run_check=False)
        target = given.target
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        out = -(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        return backward(out, [local], given.cotangent)


def megatron(given: Given) -> list[Tensor]:
    """Overwrites float32 logits, and takes the sequence first or last alike."""
    logits = given.own.detach().requires_grad_()
    return backward(-_megatron()(logits, given.target), [logits], given.cotangent)


def our_head(given: Given) -> list[Tensor]:
    """Hidden states are whole on every rank, the weight's rows are cut over the ranks."""
    hidden, weight = given.hidden.detach().requires_grad_(), given.own.detach().requires_grad_()
    start = given.mesh.get_local_rank() * len(weight)
    options = start, start + len(weight), None, given.mesh.get_group()
    out = ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, given.target, weight, *options)
    return backward(out, [hidden, weight], given.cotangent)


def whole_head(given: Given) -> list[Tensor]:
    """Every rank has the whole weight, makes all logits and keeps them."""
    hidden, weight = given.hidden.detach().requires_grad_(), given.whole.detach().requires_grad_()
    out = _log_softmax_at((hidden @ weight.T).transpose(0, 1), given.target)
    return backward(out, [hidden, weight], given.cotangent)


def megatron_head(given: Given) -> list[Tensor]:
    """A rank's logits whole, then Megatron's cross entropy; d hidden is summed over the ranks as its layer does."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    _megatron()
    hidden, weight = given.hidden.detach().requires_grad_(), given.own.detach().requires_grad_()
    logits = copy_to_tensor_model_parallel_region(hidden) @ weight.T
    out = -_megatron()(logits, given.target.T.contiguous()).T
    return backward(out, [hidden, weight], given.cotangent)


def cut_cross_entropy_compiled(given: Given) -> list[Tensor]:
    """The path of cut-cross-entropy that is no kernel of its own: torch.compile of the whole head."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight = given.hidden.detach().requires_grad_(), given.whole.detach().requires_grad_()
    states = hidden.transpose(0, 1)
    loss = linear_cross_entropy(states, weight, given.target, reduction="none", impl="torch_compile")
    return backward(-loss.view(given.target.shape), [hidden, weight], given.cotangent)


def _log_softmax_at(logits: Tensor, target: Tensor) -> Tensor:
    return log_softmax(logits.float(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _megatron() -> Callable[[Tensor, Tensor], Tensor]:
    """Its cross entropy, its own groups made if they are not yet: the ranks are all of tensor parallelism."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of optional packages
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    return vocab_parallel_cross_entropy


LOGPROB: dict[str, Arm] = {
    "ours": ours,
    "ours, gradient in place": lambda given: ours(given, inplace_gradient=True),
    "ours, with entropy": ours_with_entropy,
    "ours, compiled": lambda given: ours(given, backend="compile"),
    "whole vocabulary on each rank": whole_vocabulary,
    "logits gathered, then whole": gathered_vocabulary,
    "DTensor loss_parallel": dtensor,
    "megatron-core": megatron,
}
HEAD: dict[str, Arm] = {
    "ours": our_head,
    "whole weight on each rank": whole_head,
    "megatron-core": megatron_head,
    "cut-cross-entropy, torch.compile": cut_cross_entropy_compiled,
}
COMPILED = ("ours, compiled", "cut-cross-entropy, torch.compile")  # which no recorder can look into
NEEDS = {
    "megatron-core": ("megatron.core", "bench"),
    "cut-cross-entropy, torch.compile": ("cut_cross_entropy", "bench"),
}


def missing(name: str) -> str | None:
    """Why an arm cannot run here, or None."""
    if name not in NEEDS:
        return None
    module, extra = NEEDS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except ImportError as error:
        return f"not run: pip install 'shardproof[{extra}]' ({str(error).splitlines()[0]})"
    return None
