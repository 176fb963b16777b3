"""Parity of grouped_product, by torch._grouped_mm and by a product for each expert."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import Cost, drawn, scheme, values
from torch_impl.expert_parallel import grouped_product
from torch_impl.expert_parallel.dispatch import SortedChoices


def product_with_own_matrix(x, weight, counts):
    """Multiply every row by every matrix, and keep the product with the row's own matrix by a mask."""
    ends = jnp.cumsum(counts)
    row = jnp.arange(len(x))
    is_its = (row[:, None] < ends[None, :]) & (row[:, None] >= (ends - counts)[None, :])
    return jnp.einsum("nd,edm,ne->nm", x, weight, is_its.astype(x.dtype))


def rows_per_expert(generator, shape, case):
    """The number of rows of each expert: some have none, or one has all."""
    if generator.random() < 0.3:
        return np.where(np.arange(shape[0]) == generator.integers(shape[0]), case.n, 0)
    ends = np.sort(generator.integers(0, case.n + 1, size=shape[0] - 1))
    return np.diff(ends, prepend=0, append=case.n)


@scheme(
    reference=product_with_own_matrix,
    mesh={"ep": (1,)},
    contract=grouped_product,
    inputs={"x": "n d ep=R", "weight": "e d m ep=R", "counts": "e"},
    outputs="n m ep=R",
    dims={"n": (8, 5, 1), "d": (8, 4, 3), "m": (8, 5), "e": (4, 3, 1)},
    draw={
        "x": values("normal", "ties", "zeros"),
        "weight": values("normal", "ties"),
        "counts": drawn(rows_per_expert, integer=True),
    },
    dtypes=("float32", "bfloat16", "float64", "float16"),
    reduction=("d",),
    sums="float32",
    rank_options={"backend": ("auto", "eager"), "autocast": (False, True)},
    cost=lambda c: Cost(),
)
@pytest.mark.cases(60)
def grouped(mesh, x, weight, counts: Int[Tensor, "e"], backend, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return grouped_product(x, weight, counts, backend=backend)


COUNTS = torch.tensor([3, 0, 5])


def operands(dtype, d=16, m=8):
    x = torch.linspace(-1, 2, 8 * d).sin().view(8, d).to(dtype)
    return x.requires_grad_(), torch.linspace(-2, 2, 3 * d * m).cos().view(3, d, m).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_grouped_kernel_where_it_runs(dtype, monkeypatch):
    calls = []
    kernel = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: calls.append(a[0].shape) or kernel(*a, **k))
    x, weight = operands(dtype)
    torch.autograd.grad(grouped_product(x, weight, COUNTS).sum(), (x, weight))
    assert len(calls) == 3
    grouped_product(x, weight, COUNTS, backend="eager")
    grouped_product(*operands(torch.float64), COUNTS)
    grouped_product(*operands(dtype, m=3), COUNTS)
    assert len(calls) == 3


@pytest.mark.parametrize(("d", "m"), [(16, 0), (0, 16)])
def test_auto_takes_matrices_without_rows_or_columns(d, m):
    assert grouped_product(*operands(torch.float32, d, m), COUNTS).tolist() == [[0.0] * m] * 8
    with pytest.raises(ValueError, match="backend='grouped_mm' needs rows of a multiple of 16 bytes"):
        grouped_product(*operands(torch.float32, d, m), COUNTS, backend="grouped_mm")


@pytest.mark.parametrize("backend", ["grouped_mm", "eager"])
def test_a_weights_gradient_is_summed_in_float32(backend):
    """The sum of 4,096 ones: in bfloat16 it would stop at 256."""
    x = torch.ones(4096, 8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    y = grouped_product(x, weight, torch.tensor([4096, 0]), backend=backend)
    (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert gradient[0].eq(4096).all() and gradient[1].eq(0).all()


def test_autocast_changes_no_dtype():
    x, weight = operands(torch.float32)
    with torch.autocast("cpu"):
        y = grouped_product(x, weight, COUNTS, backend="eager")
    assert y.dtype == torch.float32 and torch.equal(y, grouped_product(x, weight, COUNTS, backend="eager"))


def test_a_second_derivative_is_an_error():
    x, weight = operands(torch.float64)
    y = grouped_product(x, weight, COUNTS)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient cannot be differentiated again"):
        gradient.sum().backward()


def test_rows_and_sums_are_linear_and_differentiated_twice():
    """d/dc of <d/dx <rows(x), c>, v> is rows(v), and the same holds for `sums`; sums of whole numbers are exact."""
    choices = SortedChoices(torch.tensor([3, 0, 5, 1]), torch.tensor([4]), tokens=3, slots=2)
    x, rows = torch.arange(9.0).view(3, 3), torch.arange(12.0).view(4, 3)
    directions = [
        (choices.rows, x, rows),
        (choices.sums, rows, x),
    ]
    for apply, value, cotangent in directions:
        value, cotangent = value.clone().requires_grad_(), cotangent.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(apply(value), value, cotangent, create_graph=True)
        v = torch.ones_like(gradient).cumsum(0)
        (second,) = torch.autograd.grad(gradient, cotangent, v)
        assert torch.equal(second, apply(v))
