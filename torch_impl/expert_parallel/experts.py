"""The experts of one rank: SwiGLU of rows that are sorted by expert, as two grouped products.

A grouped product multiplies each run of rows by the matrix of its expert. It is one call of `torch._grouped_mm` where
that runs, and a product for each expert elsewhere, with the same gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_impl.collectives import accumulator, no_autocast
from torch_impl.contract import OneOf, Rejected, Sharded, ShardedInt, contract, dtype_name
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.expert_parallel.dispatch import SortedChoices

BACKENDS = ("auto", "grouped_mm", "eager")
GroupedBackend = Annotated[Literal["auto", "grouped_mm", "eager"], OneOf(BACKENDS)]
ALIGNMENT = 16  # bytes that a row of each operand of torch._grouped_mm is a multiple of
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


@contract
def grouped_product(
    x: Sharded[Tensor, "n d"],
    weight: Sharded[Tensor, "e d m"],
    counts: ShardedInt[Tensor, "e"],
    *,
    backend: GroupedBackend = "auto",
) -> Sharded[Tensor, "n m"]:
    """x[i] @ weight[e], for each row i of expert e: the first counts[0] rows are of expert 0, and so on.

        x "n d", weight "e d m", counts "e"   ->   "n m"

    counts add up to n; an expert may have no rows, and all rows may be of one. Gradients of the weight are summed in
    float32 or wider over the rows and rounded once, and are zeros for an expert without rows. `backend` "grouped_mm" is
    `torch._grouped_mm`, for float32, bfloat16 and float16 with d and m multiples of 16 bytes; "auto" is that where it
    runs, else "eager", a product for each expert, which reads counts on the host.

    Cost:   no collective. 2 n d m operations forward, 4 n d m backward. Saves x and weight.
    Errors: TypeError for dtypes that differ; ValueError for shapes that do not fit, a backend that cannot run, or, on a
            CPU, counts that do not add up. On a GPU that is not looked at, since a read would wait for the device.
    """
    check_alike(x=x, weight=weight)
    _check_some_expert("weight", weight)
    if type(counts) is Tensor and counts.is_cpu and not torch.compiler.is_compiling():
        _check_counts(counts.tolist(), len(x))
    implementation = checked_grouped_backend(backend, x, weight)
    return _GroupedProduct.apply(x, weight, counts, implementation)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's experts, and the implementation of each of the two products."""

    gate_up: Tensor
    down: Tensor
    implementations: tuple[str, str]

    def sums(self, x: Tensor, gates: Tensor, choices: SortedChoices, dtype: torch.dtype) -> Tensor:
        """The sum over the choices of each token of what their experts make of it, times their gates, in `dtype`."""
        rows, wide = choices.rows(x), accumulator(x.dtype)
        gates_of_rows = gates.flatten().index_select(0, choices.order).to(wide)
        if x.dtype == torch.float16:  # its range may not include a hidden column times the gate
            outputs = self.outputs(rows, choices.counts).to(wide) * gates_of_rows[:, None]
        else:
            outputs = self.outputs(rows, choices.counts, gates_of_rows)
        return choices.sums(outputs.to(torch.promote_types(outputs.dtype, dtype))).to(dtype)

    def outputs(self, rows: Tensor, counts: Tensor, gates: Tensor | None = None) -> Tensor:
        """(g * silu(x A) * (x B)) C of rows sorted by expert, with their gates g in float32 or wider, 1 without any.

        A and B are the halves of gate_up's columns. A gate multiplies f columns and not the d of the output, and its
        gradient needs no output.
        """
        first, second = self.implementations
        wide_hidden = _GroupedProduct.apply(rows, self.gate_up, counts, first).to(accumulator(rows.dtype))
        gate, up = wide_hidden.chunk(2, -1)
        hidden = silu(gate) * up
        if gates is not None:
            hidden = hidden * gates[:, None]
        return _GroupedProduct.apply(hidden.to(rows.dtype), self.down, counts, second)


def checked_weights(x: Tensor, gate_up: Tensor, down: Tensor, backend: str) -> ExpertWeights:
    """The weights, if they go with x: what signatures do not say.

    Errors: TypeError for dtypes that differ; ValueError for other devices, no expert, gate_up without twice the columns
            that down has rows, or a backend that cannot run.
    """
    check_alike(x=x, gate_up=gate_up, down=down)
    _check_some_expert("gate_up", gate_up)
    columns, rows = gate_up.shape[-1], down.shape[-2]
    if columns != 2 * rows:
        sizes = f"gate_up has {columns} columns, down {rows} rows"
        raise Rejected(f"{sizes}; pass gate and up side by side, twice as many columns as rows")
    first, second = (checked_grouped_backend(backend, x, weight) for weight in (gate_up, down))
    return ExpertWeights(gate_up, down, (first, second))


def _check_some_expert(name: str, weight: Tensor) -> None:
    """Errors: ValueError for the weight of no expert."""
    if not len(weight):
        raise Rejected(f"{name} is {list(weight.shape)}, of no expert; give each rank one or more")


def _check_counts(counts: list[int], rows: int) -> None:
    """Errors: ValueError for a negative count, or counts that do not add up to the rows."""
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
    """The implementation that `backend` means for these operands, 'grouped_mm' or 'eager'.

    Errors: ValueError for "grouped_mm" where it does not run.
    """
    problem = _grouped_mm_problem(x, weight)
    if backend == "grouped_mm" and problem:
        raise Rejected(f"backend='grouped_mm' {problem}; use 'auto' or 'eager'")
    return "eager" if backend == "eager" or problem else "grouped_mm"


def _grouped_mm_problem(x: Tensor, weight: Tensor) -> str | None:
    """Why torch._grouped_mm does not take these operands and those of its backward; None if it does."""
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
        of_x = _product(cotangent, weight.transpose(1, 2), counts, ctx.implementation) if needs_x else None
        of_weight = _outer_products(x, cotangent, counts, ctx.implementation) if needs_weight else None
        return of_x, of_weight, None, None


def _product(x: Tensor, weight: Tensor, counts: Tensor, implementation: str) -> Tensor:
    """Each run of rows times its matrix."""
    with no_autocast(x.device):
        if implementation == "grouped_mm":
            return torch._grouped_mm(x.contiguous(), _with_dense_rows(weight), offs=_ends(counts))
        runs = x.split(counts.tolist())
        return torch.cat([run @ matrix for run, matrix in zip(runs, weight.unbind(), strict=True)])


def _outer_products(x: Tensor, y: Tensor, counts: Tensor, implementation: str) -> Tensor:
    """Of each run of rows x^T y, [e, d, m], summed in float32 or wider and rounded once."""
    with no_autocast(x.device):
        if implementation == "grouped_mm":  # sums in float32, whatever the dtype
            return torch._grouped_mm(x.contiguous().t(), y.contiguous(), offs=_ends(counts))
        wide, lengths = accumulator(x.dtype), counts.tolist()
        pairs = zip(x.to(wide).split(lengths), y.to(wide).split(lengths), strict=True)
        return torch.stack([a.t() @ b for a, b in pairs]).to(x.dtype)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).int()


def _with_dense_rows(weight: Tensor) -> Tensor:
    """The matrices, or a copy of them, with rows or columns side by side, which torch._grouped_mm asks for."""
    if weight.is_contiguous() or weight.transpose(1, 2).is_contiguous():
        return weight
    return weight.contiguous()
