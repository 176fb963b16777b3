"""The experts of one rank: a gated unit on rows sorted by expert, computed by two grouped products.

A grouped product multiplies each run of rows by its expert's matrix. It is one call of `torch._grouped_mm` where that
runs, and otherwise one product for each expert, with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_impl.collectives import accumulator, no_autocast
from torch_impl.contract import Instance, Number, OneOf, Rejected, Sharded, ShardedInt, check, contract, dtype_name
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.expert_parallel.dispatch import SortedChoices

BACKENDS = ("auto", "grouped_mm", "eager")
GroupedBackend = Annotated[Literal["auto", "grouped_mm", "eager"], OneOf(BACKENDS)]
ALIGNMENT = 16  # bytes; torch._grouped_mm takes rows of a multiple of it
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


@contract
def grouped_product(
    x: Sharded[Tensor, "n d"],
    weight: Sharded[Tensor, "e d m"],
    counts: ShardedInt[Tensor, "e"],
    *,
    backend: GroupedBackend = "auto",
) -> Sharded[Tensor, "n m"]:
    """Multiply each row of x by its expert's matrix: the first counts[0] rows by weight[0], and so on.

    counts add up to n; an expert may have no rows or all of them. Gradients of the weight are summed over the rows in
    float32 or wider and rounded once, and are zeros for an expert without rows. `backend` "grouped_mm" is
    `torch._grouped_mm`, for float32, bfloat16 and float16 with d and m multiples of 16 bytes; "eager" computes a
    product for each expert, which reads counts on the host; "auto" is "grouped_mm" where it runs, else "eager".

    Cost:   no collective. 2 n d m operations forward, 4 n d m backward. Saves x and weight.
    Errors: TypeError for dtypes that differ; ValueError for shapes that do not fit, a backend that cannot run, or, on a
            CPU, counts that do not add up. On a GPU counts are not checked: a read would wait for the device.
    """
    check_alike(x=x, weight=weight)
    _check_some_expert("weight", weight)
    if type(counts) is Tensor and counts.is_cpu and not torch.compiler.is_compiling():
        _check_counts(counts.tolist(), len(x))
    implementation = checked_grouped_backend(backend, x, weight)
    return _GroupedProduct.apply(x, weight, counts, implementation)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gated unit of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped.

    gate is at most `limit`, up is between -limit and limit; a clamped number has no gradient. The columns of gate_up
    alternate: column 2 i is the gate and 2 i + 1 the up of hidden column i, so that a shard has both.

    Errors: TypeError for an alpha or a limit that is not a number; ValueError unless it is positive.
    """

    alpha: float = 1.702
    limit: float = 7.0

    @contract("expert_parallel.ClampedSwiGLU")
    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            check(Number(0, above=True), name, getattr(self, name))

    def __call__(self, columns: Tensor) -> Tensor:
        gate, up = columns[..., ::2].clamp(max=self.limit), columns[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def swiglu(columns: Tensor) -> Tensor:
    """silu(gate) * up: the gates are the first half of the columns, the ups the second."""
    gate, up = columns.chunk(2, -1)
    return silu(gate) * up


Activation = Annotated[ClampedSwiGLU, Instance(ClampedSwiGLU, "pass a ClampedSwiGLU, or None for SwiGLU")]


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's experts, the unit between them, and the implementation of each product."""

    gate_up: Tensor
    down: Tensor
    implementations: tuple[str, str]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    unit: Callable[[Tensor], Tensor] = swiglu

    def sums(self, x: Tensor, gates: Tensor, choices: SortedChoices, dtype: torch.dtype) -> Tensor:
        """The sum of the experts' outputs for each token, weighted by its gates, in `dtype`."""
        rows, wide = choices.rows(x), accumulator(x.dtype)
        gates_of_rows = gates.flatten().index_select(0, choices.order).to(wide)
        if x.dtype == torch.float16:  # a hidden column times its gate may leave float16's range
            outputs = self.outputs(rows, choices.counts).to(wide) * gates_of_rows[:, None]
        else:
            outputs = self.outputs(rows, choices.counts, gates_of_rows)
        return choices.sums(outputs.to(torch.promote_types(outputs.dtype, dtype))).to(dtype)

    def outputs(self, rows: Tensor, counts: Tensor, gates: Tensor | None = None) -> Tensor:
        """g * (unit(x A + a) C + c) for rows sorted by expert, with gates g in float32 or wider, 1 by default.

        A is gate_up, C is `down`, a and c are their biases. The gate multiplies the f hidden columns rather than the d
        output columns, so that its gradient does not need the output. With a bias c the result is float32 or wider.
        """
        first, second = self.implementations
        wide_columns = _GroupedProduct.apply(rows, self.gate_up, counts, first).to(accumulator(rows.dtype))
        if self.gate_up_bias is not None:
            wide_columns = wide_columns + _row_biases(self.gate_up_bias, counts, len(rows))
        hidden = self.unit(wide_columns)
        if gates is not None:
            hidden = hidden * gates[:, None]
        outputs = _GroupedProduct.apply(hidden.to(rows.dtype), self.down, counts, second)
        if self.down_bias is None:
            return outputs
        biases = _row_biases(self.down_bias, counts, len(rows))
        return outputs + (biases if gates is None else biases * gates[:, None])


def _row_biases(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The bias of each row's expert, in float32 or wider; its gradient is summed there and rounded once."""
    experts = torch.arange(len(bias), device=bias.device)
    expert_of_row = experts.repeat_interleave(counts, output_size=rows)
    return bias.to(accumulator(bias.dtype)).index_select(0, expert_of_row)


def checked_weights(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    backend: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ClampedSwiGLU | None = None,
) -> ExpertWeights:
    """Check the weights beyond their contracts, and choose the products' implementations.

    Errors: TypeError for dtypes that differ; ValueError for different devices, no expert, gate_up without twice as many
            columns as down has rows, or a backend that cannot run.
    """
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check_alike(x=x, gate_up=gate_up, down=down, **{name: bias for name, bias in biases.items() if bias is not None})
    _check_some_expert("gate_up", gate_up)
    columns, rows = gate_up.shape[-1], down.shape[-2]
    if columns != 2 * rows:
        sizes = f"gate_up has {columns} columns, down {rows} rows"
        raise Rejected(f"{sizes}; pass gate and up side by side, twice as many columns as rows")
    first, second = (checked_grouped_backend(backend, x, weight) for weight in (gate_up, down))
    unit = swiglu if activation is None else activation
    return ExpertWeights(gate_up, down, (first, second), gate_up_bias, down_bias, unit)


def _check_some_expert(name: str, weight: Tensor) -> None:
    """Errors: ValueError for a weight without experts."""
    if not len(weight):
        raise Rejected(f"{name} is {list(weight.shape)} and has no expert; give each rank one or more")


def _check_counts(counts: list[int], rows: int) -> None:
    """Errors: ValueError for a negative count, or counts that do not add up to the number of rows."""
    if min(counts, default=0) < 0 or sum(counts) != rows:
        listed = f"{counts[:8]}{'...' if len(counts) > 8 else ''}"
        raise Rejected(f"counts={listed} must be at least 0 and add up to n={rows}, the rows of x")


def check_alike(**tensors: Tensor) -> None:
    """Errors: TypeError unless all tensors have the dtype of the first, ValueError unless they are on its device."""
    (name, first), *other_tensors = tensors.items()
    for other, x in other_tensors:
        if x.dtype != first.dtype:
            differing = f"{other} is {dtype_name(x)} but {name} is {dtype_name(first)}"
            raise Rejected(f"{differing}; pass one dtype", TypeError)
        if x.device != first.device:
            raise Rejected(f"{other} is on {x.device} but {name} on {first.device}; pass one device")


def checked_grouped_backend(backend: str, x: Tensor, weight: Tensor) -> str:
    """The implementation of `backend` for these operands: 'grouped_mm' or 'eager'.

    Errors: ValueError for "grouped_mm" where it does not run.
    """
    problem = _grouped_mm_problem(x, weight)
    if backend == "grouped_mm" and problem:
        raise Rejected(f"backend='grouped_mm' {problem}; use 'auto' or 'eager'")
    return "eager" if backend == "eager" or problem else "grouped_mm"


def _grouped_mm_problem(x: Tensor, weight: Tensor) -> str | None:
    """The reason why torch._grouped_mm does not take these operands, forward or backward; None if it does."""
    if not hasattr(torch, "_grouped_mm"):
        return "needs torch._grouped_mm, which this torch lacks"
    if x.dtype not in SUPPORTED:
        return f"has no {dtype_name(x)}"
    if any(not size or size * x.element_size() % ALIGNMENT for size in weight.shape[1:]):
        return f"needs rows of a multiple of {ALIGNMENT} bytes, weight is {list(weight.shape)}"
    return None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, implementation: str) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.implementation = implementation
        return _product(x, weight, counts, implementation)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x_gradient = _product(cotangent, weight.transpose(1, 2), counts, ctx.implementation) if needs_x else None
        weight_gradient = _outer_products(x, cotangent, counts, ctx.implementation) if needs_weight else None
        return x_gradient, weight_gradient, None, None


def _product(x: Tensor, weight: Tensor, counts: Tensor, implementation: str) -> Tensor:
    """Multiply each run of rows by its expert's matrix."""
    with no_autocast(x.device):
        if implementation == "grouped_mm":
            return torch._grouped_mm(x.contiguous(), _with_dense_rows(weight), offs=_ends(counts))
        runs = x.split(counts.tolist())
        return torch.cat([run @ matrix for run, matrix in zip(runs, weight.unbind(), strict=True)])


def _outer_products(x: Tensor, y: Tensor, counts: Tensor, implementation: str) -> Tensor:
    """x^T y for each run of rows, [e, d, m], summed in float32 or wider and rounded once."""
    with no_autocast(x.device):
        if implementation == "grouped_mm":  # sums in float32, whatever the dtype
            return torch._grouped_mm(x.contiguous().t(), y.contiguous(), offs=_ends(counts))
        wide, lengths = accumulator(x.dtype), counts.tolist()
        pairs = zip(x.to(wide).split(lengths), y.to(wide).split(lengths), strict=True)
        return torch.stack([a.t() @ b for a, b in pairs]).to(x.dtype)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).int()


def _with_dense_rows(weight: Tensor) -> Tensor:
    """The matrices with contiguous rows or columns, which torch._grouped_mm requires; copied if need be."""
    if weight.is_contiguous() or weight.transpose(1, 2).is_contiguous():
        return weight
    return weight.contiguous()
