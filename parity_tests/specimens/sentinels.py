"""Sentinels: schemes with one mistake each, which the harness must catch and a broken harness lets pass."""

import jax
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import summed
from shardproof import Cost, scheme, values


def sentinel(function, reference, inputs, outputs, **more):
    return scheme(
        **{
            "reference": reference, "mesh": {"tp": (2,)}, "inputs": inputs, "outputs": outputs,
            "draw": {name: values("normal") for name in inputs}, "dtypes": ("float32",), **more,
        }
    )(function)  # fmt: skip


class Twice(torch.autograd.Function):
    """The forward is right; the backward returns twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


class InPlace(torch.autograd.Function):
    """The gradient is right, but the backward writes to a cotangent that it does not own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.mul_(2)


def off_by_a_thousandth(mesh, x):
    return x * 1.001


def twice_the_gradient(mesh, x):
    return Twice.apply(x)


def second_output_wrong(mesh, x):
    return x * 1, x.detach() * 3


def without_gradient(mesh, x):
    """The result is right, but x gets no gradient."""
    return x.detach() * 1 + 0 * x.detach()


def missing_sum(mesh, x):
    """Each rank returns its own term of the sum."""
    return x * 1


def whole_on_each(mesh, x):
    """Each rank returns the whole result; the ranks should return terms that add up to it."""
    return x * 1


def one_rank_answers(mesh, x):
    return x * 1 if mesh.rank("tp") == 0 else x * 0


def order_of_stripes(mesh, x):
    """Joins the shards as if they were contiguous; they are striped."""
    gathered = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(gathered, x.detach().contiguous(), group=mesh["tp"])
    return torch.cat(gathered)


def modified_cotangent(mesh, x):
    return InPlace.apply(x)


def modified_input(mesh, x):
    y = x * 2
    x.data.add_(1.0)
    return y


def chatty(mesh, x):
    return summed(x, mesh["tp"]) + 0 * summed(x, mesh["tp"]).detach()


def last_bit(mesh, x):
    y = x * 1
    return y + (torch.nextafter(y, y + 1) - y).detach() if mesh.rank("tp") == 1 else y


def not_a_number(mesh, x):
    return x / (x - x) * 0 if mesh.rank("tp") == 1 else x * 1


def same(x):
    return x * 1.0


def identity(x):
    return x


def same_and_still_double(x):
    return x, jax.lax.stop_gradient(2.0 * x)


PIECES = {"x": "b/tp"}
SENTINELS = {
    "value": sentinel(off_by_a_thousandth, same, PIECES, "b/tp", nograd=("x",)),
    "gradient": sentinel(twice_the_gradient, same, PIECES, "b/tp"),
    "second output": sentinel(second_output_wrong, same_and_still_double, PIECES, ("b/tp", "b/tp")),
    "no gradient": sentinel(without_gradient, same, PIECES, "b/tp"),
    "sum": sentinel(missing_sum, same, {"x": "b tp=P"}, "b tp=I"),
    "doubled sum": sentinel(whole_on_each, same, {"x": "b tp=I"}, "b tp=P"),
    "copy": sentinel(one_rank_answers, same, {"x": "b tp=I"}, "b tp=I"),
    "order": sentinel(order_of_stripes, same, {"x": "b/tp:striped"}, "b tp=I", nograd=("x",)),
    "cotangent": sentinel(modified_cotangent, lambda x: 2.0 * x, PIECES, "b/tp"),
    "input": sentinel(modified_input, lambda x: 2.0 * x, PIECES, "b/tp"),
    "cost": sentinel(
        chatty, same, {"x": "b tp=P"}, "b tp=I", cost=lambda c: Cost(forward={"all_reduce": (1, 4 * c.b)})
    ),
    "last bit": sentinel(last_bit, identity, {"x": "b tp=I"}, "b tp=I"),
    "not a number": sentinel(not_a_number, identity, PIECES, "b/tp", nograd=("x",)),
}  # fmt: skip
