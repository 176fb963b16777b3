"""Parity of the CUDA path of one block, on a CPU with stand-ins for the kernels."""

import pytest

from parity_tests.context_parallel.cuda_kernels import CudaKernels
from parity_tests.context_parallel.one_block import RULES, OneBlock, two_keys_or_more
from parity_tests.context_parallel.test_plain_attention import of_one_block
from shardproof import scheme, values


class _OnCuda(OneBlock):
    """Forward and backward among the stand-ins."""

    @staticmethod
    def forward(ctx, *arguments):
        with CudaKernels():
            return OneBlock.forward(ctx, *arguments)

    @staticmethod
    def backward(ctx, cotangent):
        with CudaKernels():
            return OneBlock.backward(ctx, cotangent)


@scheme(
    reference=of_one_block,
    mesh={"tp": (1, 2)},
    inputs={"q": "b h/tp i p", "k": "b g/tp j p", "v": "b g/tp j p", "seen": "b i j tp=I"},
    outputs="b h/tp i p",
    # Rows of 8 numbers are for flash attention where there is no mask, of 4 in 16 bits for no kernel; more queries than
    # a block of an lse has; as many keys as queries and not.
    dims={"b": (2,), "h": (4,), "g": (2, 4), "i": (5, 33), "j": (5, 33), "p": (8, 4)},
    nograd=("seen",),
    draw={**dict.fromkeys("qkv", values("normal", "ties", "zeros")), "seen": two_keys_or_more},
    options={"rule": RULES},
    dtypes=("bfloat16", "float32"),
    reduction=("j", "p", "i"),
    roundings=3,
)
@pytest.mark.cases(3, engine="gloo")
@pytest.mark.cases(25)
def attention_by_kernels_of_cuda(mesh, q, k, v, seen, rule):
    masks = {"keys": seen[:, None, :1] > 0, "pairs": seen[:, None] > 0}
    return _OnCuda.apply(q, k, v, masks.get(rule), rule == "causal")
