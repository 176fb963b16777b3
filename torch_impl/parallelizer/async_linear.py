"""Linear layers between a sharded sequence and sharded features: products overlap with transfers.

A ring of n ranks moves the sequence in n blocks. While a block travels to the next rank, this rank multiplies the one
that it has: a product hides a transfer that takes less time. The values equal all_gather and product, and product and
reduce_scatter, up to the order of sums. Source: arXiv 2205.05198 (sequence parallelism) and
ASPLOS 2023, doi 10.1145/3567955.3567959 (overlap by decomposition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torch_impl.collectives import large_tensors, no_autocast
from torch_impl.collectives.lengths import lengths_to_gather, lengths_to_scatter
from torch_impl.collectives.plain import accumulator, start_messages
from torch_impl.contract import Group, Rejected, Sharded, contract, dtype_name
from torch_impl.contract.derivatives import first_derivative_only


@contract
def all_gather_linear(
    x: Sharded[Tensor, "b s/tp i"],
    weight: Sharded[Tensor, "o/tp i"],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    lengths: Sequence[int] | None = None,
) -> Sharded[Tensor, "b s o/tp"]:
    """The product of all positions of `x` with this rank's columns: x W^T, for a column-wise layer.

    Rank r has `lengths[r]` positions of the sequence, 0 included; without `lengths` all ranks have the same number.
    Products run in the dtype of x, also under autocast; sums over ranks and blocks in float32 or wider. Backward
    gathers the positions again, for d W alone, instead of saving them. The weight requires grad on every rank or on
    none, and so does x. Add a bias to the result.

    Cost:   forward tp - 1 sends and recvs of a shard of x. Backward tp - 1 of a shard of d x, which travels as float32
            for bfloat16 and float16, and tp - 1 of a shard of x if weight requires grad. Saves x and weight by
            reference.
    Errors: TypeError if tp_group is not a ProcessGroup, or x or weight is not floating; ValueError if x and weight
            differ in i or dtype, or lengths do not fit the group or x.
    Source: arXiv 2205.05198.
    """
    _check_dtypes(x, weight)
    (product,) = all_gather_linears(x, [weight], tp_group, lengths_to_gather("lengths", lengths, x, 1, tp_group))
    return product


def all_gather_linears(
    x: Tensor, weights: Sequence[Tensor], group: ProcessGroup, lengths: list[int]
) -> tuple[Tensor, ...]:
    """The products of `all_gather_linear` with several weights, from one ring. It costs as much as for one weight."""
    return _AllGatherLinears.apply(x, group, lengths, *weights)


@contract
def linear_reduce_scatter(
    x: Sharded[Tensor, "b s i/tp"],
    weight: Sharded[Tensor, "o i/tp"],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    lengths: Sequence[int] | None = None,
) -> Sharded[Tensor, "b s/tp o"]:
    """This rank's positions of the product x W^T, summed over the ranks' features, for a row-wise layer.

    Rank r of `tp_group` receives `lengths[r]` positions of the sequence, 0 included; without `lengths` all ranks
    receive the same number. Products run in the dtype of x, also under autocast; sums over ranks and blocks in float32
    or wider. One ring in backward serves d x and d W. x requires grad on every rank or on none, and so does the weight.
    Add a bias, `tp=R`, to the result.

    Cost:   forward tp - 1 sends and recvs of a shard of the result, bfloat16 and float16 as float32; backward tp - 1 of
            a shard of its cotangent. Saves x and weight by reference.
    Errors: as `all_gather_linear`; ValueError without lengths for a sequence that tp does not divide.
    Source: arXiv 2205.05198.
    """
    _check_dtypes(x, weight)
    return _LinearReduceScatter.apply(x, weight, tp_group, lengths_to_scatter("lengths", lengths, x, 1, tp_group))


class _AllGatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, lengths: list[int], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.lengths = group, lengths
        ctx.save_for_backward(x, *weights)
        products: list[list[Tensor]] = [[x] * len(lengths) for _ in weights]
        with no_autocast(x.device):
            for source, block in _blocks_of_ranks(x, group, lengths):
                for of_weight, weight in zip(products, weights, strict=True):
                    of_weight[source] = F.linear(block, weight)
        return tuple(torch.cat(of_weight, 1) for of_weight in products)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, _, _, *of_weights = ctx.needs_input_grad
        blocks = [cotangent.split(ctx.lengths, 1) for cotangent in cotangents]
        d_x, sums = None, [_SumOfProducts() if is_needed else None for is_needed in of_weights]

        def term(rank: int) -> Tensor:
            return _added(of_weight[rank] @ weight for of_weight, weight in zip(blocks, weights, strict=True))

        with no_autocast(x.device):
            if of_x:
                d_x = _sum_of_ranks(term, ctx.group, ctx.lengths)
            if any(of_weights):
                # Only this rank's positions were saved.
                for source, block in _blocks_of_ranks(x, ctx.group, ctx.lengths):
                    for of_weight, total in zip(blocks, sums, strict=True):
                        if total is not None:
                            total.add(of_weight[source], block)
        return d_x, None, None, *(None if total is None else total.rounded() for total in sums)


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, lengths: list[int]) -> Tensor:
        ctx.group, ctx.lengths = group, lengths
        ctx.save_for_backward(x, weight)
        blocks = x.split(lengths, 1)
        with no_autocast(x.device):
            return _sum_of_ranks(lambda rank: F.linear(blocks[rank], weight), group, lengths)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        blocks, products = x.split(ctx.lengths, 1), [x] * len(ctx.lengths)

        d_weight = _SumOfProducts()
        with no_autocast(x.device):
            for source, block in _blocks_of_ranks(cotangent, ctx.group, ctx.lengths):
                if of_x:
                    products[source] = block @ weight
                if of_weight:
                    d_weight.add(block, blocks[source])
        return torch.cat(products, 1) if of_x else None, d_weight.rounded() if of_weight else None, None, None


def _blocks_of_ranks(
    x: Float[Tensor, "b l i"], group: ProcessGroup, lengths: Sequence[int]
) -> Iterator[tuple[int, Float[Tensor, "b _ i"]]]:
    """(rank, its block) of every rank, this one first. The next block arrives while the caller works on one."""
    rank, world, block = group.rank(), group.size(), x.contiguous()
    for step in range(world):
        source = (rank + step) % world
        following, works = block, []
        if step + 1 < world:
            shape = (len(x), lengths[(source + 1) % world], x.shape[2])
            following = large_tensors.empty(shape, x.dtype, x.device)
            works = _start_shift(block, following, -1, group)
        yield source, block
        for work in works:
            work.wait()
        block = following


def _added(terms: Iterable[Tensor]) -> Tensor:
    """The sum of terms, in float32 or wider, rounded once."""
    first, *rest = terms
    if not rest:
        return first
    total = first.to(accumulator(first.dtype))
    for each in rest:
        total = total + each
    return total.to(first.dtype)


def _sum_of_ranks(term: Callable[[int], Tensor], group: ProcessGroup, lengths: Sequence[int]) -> Tensor:
    """This rank's block of the sum over ranks, where `term(r)` is this rank's term "b l i" of rank r's block.

    The sum for a block travels through all ranks and ends at the rank that keeps it. While one sum travels, this rank
    computes its term of the next.
    """
    rank, world = group.rank(), group.size()
    own = term((rank - 1) % world)
    total = own.to(accumulator(own.dtype)).contiguous()
    for step in range(1, world):
        target = (rank - 1 - step) % world
        arriving = large_tensors.empty((len(own), lengths[target], own.shape[2]), total.dtype, total.device)
        works = _start_shift(total, arriving, 1, group)
        own = term(target)
        for work in works:
            work.wait()
        total = arriving.add_(own)
    return total.to(own.dtype)


class _SumOfProducts:
    """The sum of g^T x over pairs of blocks "b l o" and "b l i", in float32 or wider, rounded once."""

    total: Tensor | None = None

    def add(self, g: Tensor, x: Tensor) -> None:
        product = g.flatten(0, 1).mT @ x.flatten(0, 1)
        self.dtype = product.dtype
        self.total = product.to(accumulator(product.dtype)) if self.total is None else self.total.add_(product)

    def rounded(self) -> Float[Tensor, "o i"]:
        """The sum in the dtype of the products; at least one pair has been added."""
        assert self.total is not None
        return self.total.to(self.dtype)


def _start_shift(sent: Tensor, received: Tensor, shift: int, group: ProcessGroup) -> list[Work]:
    """Start to send one tensor to rank r + shift and to receive another from rank r - shift; empty ones stay."""
    rank, world = group.rank(), group.size()
    to = [((rank + shift) % world, sent)] if sent.numel() else []
    source = [((rank - shift) % world, received)] if received.numel() else []
    return start_messages(to, source, group)


def _check_dtypes(x: Tensor, weight: Tensor) -> None:
    if weight.dtype != x.dtype:
        raise Rejected(f"weight is {dtype_name(weight)} but x is {dtype_name(x)}; convert one of them")
