"""Every autograd Function of the production code: its second derivative is right, or an error."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

import torch_impl
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.expert_parallel import with_loss
from torch_impl.expert_parallel.router import _ZeroBesideTokens
from torch_impl.layouts.reorder import _Permute
from torch_impl.parallelizer._torch_compat import _Waited
from torch_impl.parallelizer.fsdp2 import _Untangled
from torch_impl.vocab_parallel import allgather_cp_sharded_tensor, gather_logits_at_global_indices

TWO = CaseSpec(scheme="derivatives", mesh={"x": 2})
NEEDS_TRITON = "torch_impl.kernels.softmax"
# Linear: backward calls the transpose, or operations of torch. Each is differentiated twice here, in
# collectives/test_cotangents.py or test_types.py, or in mamba/test_all_to_all.py; _Rows and _Sums of a mixture of
# experts in expert_parallel/test_experts.py.
LINEAR = (
    *("_AllReduce", "_Replicated", "_Broadcast", "_ToSource", "AllGather", "_Shard", "ReduceScatter", "_AllToAll"),
    *("_RingShift", "AllGatherCPTensor", "GatherOverCp", "LogitsAt", "_Permute", "_Untangled"),
    *("_Rows", "_Sums", "_Waited", "_Same", "_Term", "_Whole", "_Own", "_Padded", "_ZeroBesideTokens"),
)


def functions():
    classes = set()
    for module in pkgutil.walk_packages(torch_impl.__path__, "torch_impl."):
        if module.name != NEEDS_TRITON:
            members = vars(importlib.import_module(module.name)).values()
            classes |= {m for m in members if inspect.isclass(m) and issubclass(m, torch.autograd.Function)}
    return sorted((c for c in classes if c.__module__.startswith("torch_impl.")), key=lambda c: c.__qualname__)


def is_marked(function):
    return inspect.unwrap(function.backward) is not function.backward


def test_every_function_is_linear_or_marked():
    assert {f.__name__ for f in functions() if not is_marked(f)} == set(LINEAR)
    assert {f.__name__ for f in functions() if is_marked(f)} >= {"FusedLogprob", "_BlockwiseAttention"}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unused):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @first_derivative_only
    def backward(ctx, cotangent):
        return 2 * ctx.saved_tensors[0] * cotangent, None


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_marked_backward_has_one_derivative(is_constant):
    x = torch.tensor([3.0], requires_grad=True)
    cotangent = torch.ones(1, requires_grad=not is_constant)
    (first,) = torch.autograd.grad(Square.apply(x, 1.0), x, cotangent)
    assert first.item() == 6.0 and not first.requires_grad
    (first,) = torch.autograd.grad(Square.apply(x, 1.0), x, cotangent, create_graph=True)
    assert first.item() == 6.0
    with pytest.raises(RuntimeError, match="Square: its gradient cannot be differentiated again"):
        (x + first).square().sum().backward()


def second_derivatives(function, x):
    """y = f(x), g the gradient of sum y^3, and the gradient of |g|^2."""
    y = function(x)
    (g,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    return g.detach().numpy(), second.numpy()


def integers(*shape):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).double()


def test_a_loss_that_is_added_has_one_derivative():
    x = integers(4).requires_grad_()
    with pytest.raises(RuntimeError, match="_WithLoss: its gradient cannot be differentiated again"):
        second_derivatives(lambda x: with_loss(x, x.square().sum()), x)


ORDER = torch.tensor([2, 0, 3, 1])


class Unfinished(torch.Tensor):
    """An unfinished result of a functional collective, with the attributes that `_Waited` reads."""

    def trigger_wait(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    "function",
    [
        _Untangled.apply,
        lambda x: _Permute.apply(x, ORDER, ORDER.argsort(), 0),
        lambda x: _Waited.apply(x.as_subclass(Unfinished)),
    ],
    ids=["untangled", "permuted", "waited"],
)
def test_a_function_of_one_rank(function):
    x = integers(4, 3).requires_grad_()
    g, second = second_derivatives(function, x)
    np.testing.assert_array_equal(g, 3 * x.detach().numpy() ** 2)
    np.testing.assert_array_equal(second, 2 * g * 6 * x.detach().numpy())


def test_rows_that_are_no_tokens():
    """y = 0 in the second row, whose gradients are 0."""
    x, is_token = integers(4, 3).requires_grad_(), torch.tensor([[True], [False], [True], [True]])
    g, second = second_derivatives(lambda x: _ZeroBesideTokens.apply(x, is_token), x)
    y = x.detach().numpy() * is_token.numpy()
    np.testing.assert_array_equal(g, 3 * y**2)
    np.testing.assert_array_equal(second, 2 * g * 6 * y)


def test_a_sequence_gathered_over_cp():
    """The gradient of the sum of all ranks' y^3 is n 3 x^2; the gradient of its square is 2 g n 6 x."""
    full = integers(2, 8, 3)

    def body(mesh, case):
        x = full.view(2, 4, 2, 3)[:, [mesh["x"].rank(), 3 - mesh["x"].rank()]].reshape(2, 4, 3).requires_grad_()
        return x.detach().numpy(), *second_derivatives(lambda x: allgather_cp_sharded_tensor(x, mesh["x"]), x)

    for x, g, second in run(body, TWO).results:
        np.testing.assert_array_equal(g, 2 * 3 * x**2)
        np.testing.assert_array_equal(second, 2 * g * 2 * 6 * x)


@pytest.mark.parametrize("border", [5, 10, 0])
def test_logits_that_are_looked_up(border):
    """Rank 0 has the columns before `border`, rank 1 the others; one of them may have none."""
    full, ids = integers(2, 3, 10), torch.tensor([0, 4, 5, 9, 4, 12]).expand(2, 3, 6).clone()

    def looked_up(z):
        return torch.where(ids < 10, z.gather(-1, ids.clamp_max(9)), 0.0)

    def body(mesh, case):
        group = mesh["x"]
        start, end = [(0, border), (border, 10)][group.rank()]
        z = full[..., start:end].clone().requires_grad_()
        vocab = {"vocab_start_index": start, "vocab_end_index": end}
        return second_derivatives(lambda z: gather_logits_at_global_indices(z, ids, group, **vocab), z)

    want = second_derivatives(looked_up, full.clone().requires_grad_())
    results = run(body, TWO).results
    for number in range(2):
        np.testing.assert_array_equal(np.concatenate([of_rank[number] for of_rank in results], axis=-1), want[number])
