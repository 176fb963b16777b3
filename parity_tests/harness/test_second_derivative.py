"""A second backward, and a backward of the gradient: the findings, and the functions that need not support them."""

import itertools

import numpy as np
import pytest
import torch

from shardproof import scheme
from shardproof.declare.case import SPARE
from shardproof.engines.second_derivative import SecondDerivative, imbalance
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_reduce
from torch_impl.contract.derivatives import first_derivative_only


def test_an_error_that_torch_gives_at_a_second_backward_is_no_finding():
    class Freed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.saved = [x]
            return 2 * x

        @staticmethod
        def backward(ctx, cotangent):
            if not ctx.saved:
                raise RuntimeError("Trying to backward through the graph a second time")
            ctx.saved.clear()
            return 2 * cotangent

    def doubled(mesh, x):
        return Freed.apply(x)

    declaration = scheme(
        reference=lambda x: 2.0 * x, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", dtypes=("float32",)
    )(doubled)  # fmt: skip
    assert verify_case(declaration, declaration.case(b=4).replace(conditions={"second_backward": True})).ok


def test_a_backward_that_overwrites_saved_tensors_is_no_finding():
    """torch rejects the second backward; overwriting saves memory and is right for training."""

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            gradient = 2 * torch.ones_like(x)
            ctx.save_for_backward(gradient)
            return 2 * x

        @staticmethod
        def backward(ctx, cotangent):
            (gradient,) = ctx.saved_tensors
            return gradient.mul_(cotangent)

    declaration = scheme(
        reference=lambda x: 2.0 * x, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", dtypes=("float32",)
    )(lambda mesh, x: Overwriting.apply(x))  # fmt: skip
    assert verify_case(declaration, declaration.case(b=4).replace(conditions={"second_backward": True})).ok


TYPES = ("R", "I", "P")


class Summed(torch.autograd.Function):
    """The sum over the ranks of a group; its second derivative lacks that sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, cotangent):
        return Own.apply(cotangent, ctx.group), None


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group, out="R")

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, None


class SummedOnce(Summed):
    """The sum over the ranks; its second derivative is the sum on the first rank alone, and zero elsewhere."""

    @staticmethod
    def backward(ctx, cotangent):
        return OwnOfFirst.apply(cotangent, ctx.group), None


class OwnOfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return all_reduce(cotangent, ctx.group, out="R") * (ctx.group.rank() == 0), None


def scheme_with_types(function, given, returned):
    """A scheme that applies `function` to an input of type `given`, and declares the result as of type `returned`."""
    return scheme(
        reference=lambda x: x, mesh={"tp": (3,)}, inputs={"x": f"b tp={given}"}, outputs=f"b tp={returned}",
        dtypes=("float64",), excluded_conditions=(),
    )(lambda mesh, x: function(x, mesh["tp"]))  # fmt: skip


def report_with_second_derivative(declaration, **more):
    return verify_case(declaration, declaration.case(b=4).replace(conditions={"second_derivative": True}, **more))


@pytest.mark.parametrize("returned", ["I", "R"])
@pytest.mark.parametrize("mesh", [{"tp": 3}, {SPARE: 2, "tp": 3}], ids=["alone", "inside"])
def test_a_sum_of_all_ranks_is_right(returned, mesh):
    declaration = scheme_with_types(lambda x, group: all_reduce(x, group, out=returned), "P", returned)
    report = report_with_second_derivative(declaration, mesh=mesh)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", TYPES)
def test_a_tensor_of_each_type_that_is_returned_is_right(kind):
    assert report_with_second_derivative(scheme_with_types(lambda x, group: 2 * x / 2, kind, kind)).ok


def test_a_sum_that_its_second_derivative_lacks_is_a_finding():
    declaration = scheme_with_types(Summed.apply, "P", "R")
    assert verify_case(declaration, declaration.case(b=4)).ok
    (sentence,) = report_with_second_derivative(declaration).hygiene
    assert sentence.startswith("the second derivative is wrong: the gradient times a direction is ")


def test_a_copy_that_the_second_derivative_lacks_is_a_finding():
    """The ranks' cotangents of an invariant output are equal, and so are their derivatives."""
    declaration = scheme_with_types(SummedOnce.apply, "P", "I")
    assert verify_case(declaration, declaration.case(b=4)).ok
    (sentence,) = report_with_second_derivative(declaration).hygiene
    assert sentence.startswith("the second derivative is wrong: the gradient times a direction is ")


@pytest.mark.parametrize("mark", [first_derivative_only, torch.autograd.function.once_differentiable])
def test_a_gradient_that_cannot_be_differentiated_is_no_finding(mark):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @mark
        def backward(ctx, cotangent):
            return (2 * cotangent,)

    report = report_with_second_derivative(scheme_with_types(lambda x, group: Doubled.apply(x) / 2, "I", "I"))
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_difference_above_the_root_of_the_roundoff_is_found(dtype):
    """This holds for any shares of the ranks. With a rank whose terms are missing or not finite, nothing is found."""
    roundoff = UNIT_ROUNDOFF[dtype]
    for size, share in itertools.product((1e-9, 1.0, 1e9), (0.0, 0.25, 1.0)):
        for times, is_found in ((0.5, False), (2.0, True)):
            off = times * np.sqrt(roundoff) * size
            ranks = [
                SecondDerivative(each * size / 2, each * size / 2 + off * part, each * size)
                for each, part in ((share, 0.5), (1.0 - share, 0.5))
            ]
            assert (imbalance(ranks, roundoff, 0.0) is not None) == is_found
            assert imbalance(ranks, roundoff, abs(off)) is None
            infinite = [SecondDerivative(sign * np.inf, 0.0, np.inf) for sign in (1.0, -1.0)]
            for unknown in ([None], [SecondDerivative(np.nan, 0.0, np.nan)], infinite):
                assert imbalance([*ranks, *unknown], roundoff, 0.0) is None
