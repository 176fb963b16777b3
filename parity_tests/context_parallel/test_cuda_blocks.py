"""The CUDA path of one block without a GPU: the operations take these arguments and give these shapes.

On the meta device: values are not computed, which needs a GPU.
"""

import pytest
import torch

from torch_impl.context_parallel import cuda_blocks

SHAPES = {  # b, h, hk, queries, keys, p
    "as many keys": (2, 4, 4, 16, 16, 64),
    "grouped heads": (1, 8, 2, 24, 24, 64),
    "fewer keys": (1, 8, 2, 24, 7, 64),
    "odd sizes": (3, 2, 1, 5, 9, 40),
}
MASKS = ("none", "causal", "keys", "pairs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_dtypes(name, masked, dtype):
    b, h, hk, queries, keys, p = SHAPES[name]
    q = torch.empty(b, queries, h, p, dtype=dtype, device="meta").transpose(1, 2)
    k, v = torch.empty(keys, 2, b, hk, p, dtype=dtype, device="meta").permute(1, 2, 3, 0, 4).unbind()
    rows = {"keys": 1, "pairs": queries}.get(masked)
    mask = None if rows is None else torch.empty(b, 1, rows, keys, dtype=torch.bool, device="meta")
    given = mask, masked == "causal", 0.125
    out, lse = cuda_blocks.forward(q, k, v, *given)
    gradients = cuda_blocks.backward(torch.empty_like(q), q, k, v, torch.empty_like(q), lse.contiguous(), *given)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == (b, h, queries) and lse.dtype == torch.float32
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert {x.dtype for x in gradients} == {dtype}


@pytest.mark.parametrize(
    ("dtype", "masked", "keys", "width", "takes"),
    [
        (torch.bfloat16, False, 16, 64, True),
        (torch.float32, False, 16, 64, False),
        (torch.bfloat16, True, 16, 64, False),
        (torch.bfloat16, False, 8, 64, False),
        (torch.bfloat16, False, 16, 36, False),
        (torch.bfloat16, False, 16, 512, False),
    ],
)
def test_which_operation_takes_a_causal_block(dtype, masked, keys, width, takes):
    q, k = (torch.empty(1, 1, rows, width, dtype=dtype) for rows in (16, keys))
    mask = torch.ones(1, 1, 16, keys, dtype=torch.bool) if masked else None
    assert cuda_blocks._flash_takes(q, k, mask, True) is takes


def test_a_mask_as_addends():
    q, k = torch.empty(2, 3, 2, 4), torch.empty(2, 1, 3, 4)
    none = -torch.inf
    above = torch.tensor([[0, none, none], [0, 0, none]]).expand(2, 3, 2, 3)
    assert cuda_blocks._bias(q, k, None, False) is None
    assert torch.equal(cuda_blocks._bias(q, k, None, True), above)
    last = torch.tensor([True, True, False]).expand(2, 1, 1, 3)
    assert torch.equal(cuda_blocks._bias(q, k, last, False), torch.tensor([0, 0, none]).expand(2, 3, 2, 3))
    assert cuda_blocks._bias(q, k, last, False).stride(2) % cuda_blocks.BIAS_COLUMNS == 0
