"""What a run says about a failing tensor: nothing that the drawn values explain by themselves."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch.distributed as dist

from parity_tests.harness.verdict import judge
from shardproof import scheme


def above_the_greatest(x):
    top = x.max(-1, keepdims=True)
    return jnp.where(jnp.isfinite(top), x - jnp.where(jnp.isfinite(top), top, 0.0), 0.0)


def noted(x, waits):
    """The headline on the output of x - max(x), whose maximum is taken by a collective that is waited for, or not."""

    def of_ranks(mesh, x):
        top = x.amax(-1, keepdim=True)
        work = dist.all_reduce(top, op=dist.ReduceOp.MAX, group=mesh["tp"], async_op=True)
        if waits:
            work.wait()
        out = x - top
        work.wait()
        return out

    declaration = scheme(
        reference=above_the_greatest, mesh={"tp": (2,)}, inputs={"x": "b v/tp"}, outputs="b v/tp", nograd=("x",)
    )(of_ranks)
    return judge(declaration, declaration.case(b=1, v=4, dtype="float32"), arrays={"x": np.array([x])}).notes["out"][0]


def test_a_nan_of_finite_values_may_be_a_buffer_that_was_read_too_early():
    assert "; read before its wait: all_reduce at test_gather.py:" in noted([1.0, 2.0, 3.0, 4.0], waits=False)


@pytest.mark.parametrize("x", [[-np.inf] * 4, [np.inf] * 4])
def test_a_nan_where_infinities_were_drawn_is_their_difference(x):
    assert noted(x, waits=True) == "not finite first at (0,0), rank 0"
