"""Sentinels: schemes with one mistake each, which the harness must catch and a broken harness lets pass."""

import jax
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import summed
from shardproof import Cost, scheme, values


def declared(function, reference, inputs, outputs, **more):
    return scheme(
        **{
            "reference": reference, "mesh": {"tp": (2,)}, "inputs": inputs, "outputs": outputs,
            "draw": {name: values("normal") for name in inputs}, "dtypes": ("float32",), **more,
        }
    )(function)  # fmt: skip


class Twice(torch.autograd.Function):
    """Right forward, and twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


class InPlace(torch.autograd.Function):
    """Right, but the cotangent is another's."""

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


def unfinished(mesh, x):
    """The second gradient never comes."""
    return x.detach() * 1 + 0 * x.detach()


def missing_sum(mesh, x):
    """Half of the ranks' terms stay where they are."""
    return x * 1


def whole_on_each(mesh, x):
    """Where the ranks' terms should add up to it."""
    return x * 1


def one_rank_answers(mesh, x):
    return x * 1 if mesh.rank("tp") == 0 else x * 0


def order_of_stripes(mesh, x):
    """As if position 2r + i lay on rank r, where i + 2r does."""
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
    "value": declared(off_by_a_thousandth, same, PIECES, "b/tp", nograd=("x",)),
    "gradient": declared(twice_the_gradient, same, PIECES, "b/tp"),
    "second output": declared(second_output_wrong, same_and_still_double, PIECES, ("b/tp", "b/tp")),
    "no gradient": declared(unfinished, same, PIECES, "b/tp"),
    "sum": declared(missing_sum, same, {"x": "b tp=P"}, "b tp=I"),
    "doubled sum": declared(whole_on_each, same, {"x": "b tp=I"}, "b tp=P"),
    "copy": declared(one_rank_answers, same, {"x": "b tp=I"}, "b tp=I"),
    "order": declared(order_of_stripes, same, {"x": "b/tp:striped"}, "b tp=I", nograd=("x",)),
    "cotangent": declared(modified_cotangent, lambda x: 2.0 * x, PIECES, "b/tp"),
    "input": declared(modified_input, lambda x: 2.0 * x, PIECES, "b/tp"),
    "cost": declared(
        chatty, same, {"x": "b tp=P"}, "b tp=I", cost=lambda c: Cost(forward={"all_reduce": (1, 4 * c.b)})
    ),
    "last bit": declared(last_bit, identity, {"x": "b tp=I"}, "b tp=I"),
    "not a number": declared(not_a_number, identity, PIECES, "b/tp", nograd=("x",)),
}  # fmt: skip
