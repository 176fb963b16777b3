"""Parity of the CUDA path of one block, on a CPU with stand-ins for the kernels."""

import pytest

from parity_tests.context_parallel.cuda_kernels import CudaKernels
from parity_tests.context_parallel.one_block import OneBlock, masked
from parity_tests.context_parallel.test_plain_attention import ONE_BLOCK
from shardproof import scheme


class _OnCuda(OneBlock):
    """Forward and backward with stand-ins in place of the kernels."""

    @staticmethod
    def forward(ctx, *arguments):
        with CudaKernels():
            return OneBlock.forward(ctx, *arguments)

    @staticmethod
    def backward(ctx, cotangent):
        with CudaKernels():
            return OneBlock.backward(ctx, cotangent)


@scheme(
    **ONE_BLOCK,
    # p: without a mask flash attention takes rows of 8 numbers; no kernel takes rows of 4 numbers in 16 bits.
    # i, j: 33 queries are more than a block of an lse has; the number of keys is the same or another.
    dims={"b": (2,), "h": (4,), "g": (2, 4), "i": (5, 33), "j": (5, 33), "p": (8, 4)},
    dtypes=("bfloat16", "float32"),
)
@pytest.mark.cases(3, engine="gloo")
@pytest.mark.cases(25)
def attention_by_kernels_of_cuda(mesh, q, k, v, seen, rule):
    return masked(_OnCuda, q, k, v, seen, rule)
