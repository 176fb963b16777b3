"""The arms that are compared: ours, full-vocabulary torch, the plain formula, and other libraries from PyPI.

An arm takes the inputs of every rank and returns the log-probabilities and gradients. Gradients of full arguments are
full, gradients of a rank's shard are its shard.
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

from parity_tests.evidence.benchmarks.plain_formula import PlainFormula
from torch_impl.collectives.plain import all_gather_concat
from torch_impl.vocab_parallel import ChunkedDistributedHiddenStatesToLogprobs, vocab_parallel_logprob


@dataclass(frozen=True)
class ArmInputs:
    """A rank's inputs: logits, or hidden states and a weight; full and this rank's shard."""

    full: Tensor
    shard: Tensor
    target: Tensor
    cotangent: Tensor
    mesh: DeviceMesh
    hidden: Tensor

    @property
    def owned(self) -> dict[str, int]:
        width = self.shard.shape[-1]
        start = self.mesh.get_local_rank() * width
        return {"vocab_start_index": start, "vocab_end_index": start + width}


Arm = Callable[[ArmInputs], list[Tensor]]


def backward(out: Tensor, by: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, by, cotangent.to(out.dtype))]


def ours(inputs: ArmInputs, **options: Any) -> list[Tensor]:
    logits = inputs.shard.detach().requires_grad_()
    out = vocab_parallel_logprob(logits, inputs.target, inputs.mesh.get_group(), **inputs.owned, **options)
    assert isinstance(out, Tensor)  # a pair with entropy only
    return backward(out, [logits], inputs.cotangent)


def ours_with_entropy(inputs: ArmInputs) -> list[Tensor]:
    """The entropy's cotangent is 0, so that the gradient is the other arms'; the work is the same."""
    logits = inputs.shard.detach().requires_grad_()
    options = {"with_entropy": True, **inputs.owned}
    out, entropy = vocab_parallel_logprob(logits, inputs.target, inputs.mesh.get_group(), **options)
    cotangents = [inputs.cotangent.to(out.dtype), torch.zeros_like(entropy)]
    return [out.detach(), *torch.autograd.grad([out, entropy], logits, cotangents)]


def forward_only(inputs: ArmInputs) -> list[Tensor]:
    """Nothing is saved for a gradient."""
    options = {"inference_only": True, **inputs.owned}
    out = vocab_parallel_logprob(inputs.shard, inputs.target, inputs.mesh.get_group(), **options)
    assert isinstance(out, Tensor)
    return [out]


def plain_formula(inputs: ArmInputs) -> list[Tensor]:
    """The formula as first written: maximum, sum, the target's share, each by an all_reduce, on all logits at once."""
    logits = inputs.shard.detach().requires_grad_()
    out = PlainFormula.apply(logits, inputs.target, inputs.mesh.get_group(), inputs.owned["vocab_start_index"], True)
    return backward(out, [logits], inputs.cotangent)


def plain_formula_forward_only(inputs: ArmInputs) -> list[Tensor]:
    start = inputs.owned["vocab_start_index"]
    return [PlainFormula.apply(inputs.shard, inputs.target, inputs.mesh.get_group(), start, False)]


def whole_vocabulary(inputs: ArmInputs) -> list[Tensor]:
    """Every rank has all logits and does all the work."""
    logits = inputs.full.detach().requires_grad_()
    return backward(_log_softmax_at(logits, inputs.target), [logits], inputs.cotangent)


def gathered_vocabulary(inputs: ArmInputs) -> list[Tensor]:
    """The same, on logits that are first gathered from the ranks."""
    world, shard = inputs.mesh.size(), inputs.shard
    logits = all_gather_concat(
        shard, inputs.mesh.get_group(), shard.ndim - 1, [shard.shape[-1]] * world
    ).requires_grad_()
    out, gradient = backward(_log_softmax_at(logits, inputs.target), [logits], inputs.cotangent)
    return [out, gradient.chunk(world, -1)[inputs.mesh.get_local_rank()].contiguous()]


def dtensor(inputs: ArmInputs) -> list[Tensor]:
    """torch's own: a DTensor sharded over the vocabulary, cross_entropy under loss_parallel."""
    local = inputs.shard.detach().requires_grad_()
    with loss_parallel():
        logits = DTensor.from_local(local, inputs.mesh, [Shard(local.ndim - 1)], run_check=False)
        target = inputs.target
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        out = -(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        return backward(out, [local], inputs.cotangent)


def megatron(inputs: ArmInputs) -> list[Tensor]:
    """Overwrites float32 logits, and takes the sequence first or last alike."""
    logits = inputs.shard.detach().requires_grad_()
    return backward(-_megatron()(logits, inputs.target), [logits], inputs.cotangent)


def our_head(inputs: ArmInputs) -> list[Tensor]:
    """Hidden states are replicated, the weight's rows are sharded over the ranks."""
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.shard.detach().requires_grad_()
    start = inputs.mesh.get_local_rank() * len(weight)
    options = start, start + len(weight), None, inputs.mesh.get_group()
    out = ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, inputs.target, weight, *options)
    return backward(out, [hidden, weight], inputs.cotangent)


def whole_head(inputs: ArmInputs) -> list[Tensor]:
    """Every rank has the full weight, makes all logits and keeps them."""
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.full.detach().requires_grad_()
    out = _log_softmax_at((hidden @ weight.T).transpose(0, 1), inputs.target)
    return backward(out, [hidden, weight], inputs.cotangent)


def megatron_head(inputs: ArmInputs) -> list[Tensor]:
    """A rank's logits whole, then Megatron's cross entropy; d hidden is summed over the ranks as its layer does."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    _megatron()
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.shard.detach().requires_grad_()
    logits = copy_to_tensor_model_parallel_region(hidden) @ weight.T
    out = -_megatron()(logits, inputs.target.T.contiguous()).T
    return backward(out, [hidden, weight], inputs.cotangent)


def cut_cross_entropy_compiled(inputs: ArmInputs) -> list[Tensor]:
    """The path of cut-cross-entropy that is no kernel of its own: torch.compile of the full head."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.full.detach().requires_grad_()
    states = hidden.transpose(0, 1)
    loss = linear_cross_entropy(states, weight, inputs.target, reduction="none", impl="torch_compile")
    return backward(-loss.view(inputs.target.shape), [hidden, weight], inputs.cotangent)


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
    "ours, gradient in place": lambda inputs: ours(inputs, inplace_gradient=True),
    "ours, with entropy": ours_with_entropy,
    "ours, compiled": lambda inputs: ours(inputs, backend="compile"),
    "ours, compiled, in place": lambda inputs: ours(inputs, backend="compile", inplace_gradient=True),
    "ours, forward only": forward_only,
    "plain formula": plain_formula,
    "plain formula, forward only": plain_formula_forward_only,
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
COMPILED = (
    "ours, compiled",
    "ours, compiled, in place",
    "cut-cross-entropy, torch.compile",
)  # which no recorder can look into
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
        return f"not run: pip install -e '.[{extra}]' in the clone ({str(error).splitlines()[0]})"
    return None
