"""The CUDA path of one block without a GPU: the operations take these arguments and give these shapes.

On the meta device: values are not computed, which needs a GPU.

Parity of attention whose blocks are computed by plain operations, few rows at a time.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity_tests.context_parallel.test_block_schedule import packed_attention_by_keys
from shardproof import check_cases
from torch_impl.collectives import accumulator
from torch_impl.context_parallel import block_kernels, blockwise_attention
from torch_impl.context_parallel.block_schedule import Block
from torch_impl.context_parallel.blockwise_attention import RunningAttention

SHAPES = {  # b, h, hk, queries, keys, p
    "as many keys": (2, 4, 4, 16, 16, 64),
    "grouped heads": (1, 8, 2, 24, 24, 64),
    "fewer keys": (1, 8, 2, 24, 7, 64),
    "odd sizes": (3, 2, 1, 5, 9, 40),
}
MASKS = ("none", "causal", "keys", "pairs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_dtypes(name, masked, dtype):
    b, h, hk, queries, keys, p = SHAPES[name]
    q = torch.empty(b, queries, h, p, dtype=dtype, device="meta").transpose(1, 2)
    k, v = torch.empty(keys, 2, b, hk, p, dtype=dtype, device="meta").permute(1, 2, 3, 0, 4).unbind()
    rows = {"keys": 1, "pairs": queries}.get(masked)
    mask = None if rows is None else torch.empty(b, 1, rows, keys, dtype=torch.bool, device="meta")
    settings = mask, masked == "causal", 0.125
    out, lse = block_kernels.cuda_forward(q, k, v, *settings)
    gradients = block_kernels.cuda_backward(
        torch.empty_like(q), q, k, v, torch.empty_like(q), lse.contiguous(), *settings
    )
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == (b, h, queries) and lse.dtype == accumulator(dtype)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert {x.dtype for x in gradients} == {dtype}


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has which is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_causal_block_needs_no_number_for_each_pair(dtype):
    q, k, v = torch.empty(3, 1, 2, 4096, 8, dtype=dtype, device="meta").unbind()
    with Largest() as largest:
        out, lse = block_kernels.cuda_forward(q, k, v, None, True, 0.5)
        block_kernels.cuda_backward(out, q, k, v, out, lse, None, True, 0.5)
    assert 0 < largest.numbers <= q.numel()


HALF, WIDE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


BY_HAND = [
    (HALF, False, 16, 64, (8, 0), "flash"),
    (HALF, False, 16, 208, (9, 0), "flash"),
    (HALF, False, 16, 208, (8, 9), "efficient"),
    (HALF, False, 16, 208, (12, 0), "efficient"),
    (HALF, False, 16, 256, (8, 6), "flash"),
    (HALF, True, 16, 64, (8, 0), "efficient"),
    (HALF, False, 8, 64, (8, 0), "efficient"),
    (HALF, False, 16, 512, (8, 0), "efficient"),
    (torch.float16, False, 16, 64, (7, 5), "efficient"),
    (HALF, False, 16, 64, (7, 5), "plain"),
    (HALF, False, 16, 36, (8, 0), "plain"),
    (WIDE, False, 16, 64, (7, 0), "efficient"),
    (WIDE, False, 16, 6, (8, 0), "plain"),
    (DOUBLE, False, 16, 64, (9, 0), "plain"),
]
# Widths above 192 and up to 224 on devices with little shared memory; 256 is the widest of all.
BY_HAND += [(HALF, False, 16, 200, capability, "flash") for capability in ((8, 0), (8, 5), (8, 10), (9, 0), (11, 9))]
BY_HAND += [(HALF, False, 16, 200, capability, "efficient") for capability in ((8, 6), (8, 9), (12, 0), (12, 1))]
BY_HAND += [(HALF, False, 16, width, (8, 6), "flash") for width in (8, 192, 232, 256)]
BY_HAND += [(HALF, False, 16, width, (8, 6), "efficient") for width in (224, 264)]
BY_HAND += [(WIDE, False, 16, width, (8, 0), "efficient") for width in (4, 12)]
BY_HAND += [(torch.float16, False, 16, 4, (8, 0), "plain"), (HALF, False, 16, 64, (7, 9), "plain")]
QUERIES = 16
# Whether flash attention takes a block, and whether memory-efficient attention does, which takes all that flash takes.
TAKEN = {"flash": (True, True), "efficient": (False, True), "plain": (False, False)}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "masked", "keys", "width", "capability", "takes"), BY_HAND)
def test_kernels_that_take_a_block(dtype, masked, keys, width, capability, takes, is_causal):
    """As many keys as queries are needed by a causal block alone."""
    q, k = (torch.empty(1, 1, size, width, dtype=dtype, device="meta") for size in (QUERIES, keys))
    mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device="meta") if masked else None
    flash = block_kernels._flash_supports(q, k, mask, is_causal, capability)
    expected = takes if is_causal or keys == QUERIES else "flash"
    assert (flash, block_kernels._efficient_supports(q, capability)) == TAKEN[expected]


@pytest.mark.parametrize(("dtype", "masked", "keys", "width", "capability", "takes"), BY_HAND)
def test_which_operation_takes_a_causal_block(dtype, masked, keys, width, capability, takes, monkeypatch):
    q, k = (torch.empty(1, 1, rows, width, dtype=dtype, device="meta") for rows in (QUERIES, keys))
    mask = torch.ones(1, 1, QUERIES, keys, dtype=torch.bool, device="meta") if masked else None
    calls = []
    for name, operation in {"FLASH": "flash", "EFFICIENT": "efficient"}.items():
        for way in (name, f"{name}_BACKWARD"):
            plain = getattr(block_kernels, way)
            monkeypatch.setattr(
                block_kernels, way, lambda *x, op=plain, label=operation, **y: (calls.append(label), op(*x, **y))[1]
            )
    monkeypatch.setattr(block_kernels, "_capability", lambda x: capability)
    out, lse = block_kernels.cuda_forward(q, k, k, mask, True, 0.5)
    block_kernels.cuda_backward(out, q, k, k, out, lse.contiguous(), mask, True, 0.5)
    assert calls == ([] if takes == "plain" else [takes] * 2)


def test_a_mask_as_addends():
    q, none = torch.empty(2, 3, 2, 4), -torch.inf
    assert block_kernels._bias(q, None) is None
    last = torch.tensor([True, True, False]).expand(2, 1, 1, 3)
    assert torch.equal(block_kernels._bias(q, last), torch.tensor([0, 0, none]).expand(2, 3, 2, 3))
    assert block_kernels._bias(q, last).stride(2) % block_kernels.BIAS_COLUMNS == 0


@pytest.mark.parametrize("left", [torch.nan, torch.inf, 3.0])
def test_results_of_a_query_that_sees_nothing_are_not_merged(left, monkeypatch):
    """On the CPU it leaves 0; others may leave anything. Keys that come before or after count alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=generator).unbind()
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, False, False], [False] * 4])[None, None]
    fully_masked = ~mask.any(-1)
    parts = (
        Block(slice(0, 4), slice(0, 4), mask=mask, fully_masked=fully_masked),
        Block(slice(0, 4), slice(0, 4), is_causal=True),
    )

    def merged(order):
        running = RunningAttention(q)
        for block in order:
            running.add(q, torch.stack([k, v]), block, blockwise_attention.SoftmaxOptions(0.5))
        return running.out, running.lse

    plain = blockwise_attention._forward

    def forward(*args):
        out, lse = plain(*args)
        return (out if args[3].fully_masked is None else out.masked_fill(fully_masked[..., None], left)), lse

    orders = parts, parts[::-1], parts[:1]
    expected = [merged(order) for order in orders]
    monkeypatch.setattr(blockwise_attention, "_forward", forward)
    for order, both in zip(orders, expected, strict=True):
        assert all(map(torch.equal, merged(order), both))


@pytest.mark.slow
def test_parity_of_plain_operations(monkeypatch):
    """Packed sequences have triangles, windows, runs that are filled up and queries that a block leaves blind."""

    def forward(q, k, v, block, logits):
        return block_kernels.plain_forward(q, k, v, block.mask, block.is_causal, logits.scale)

    def backward(query_side, k, v, lse, block, logits):
        cotangent, q, out = query_side
        return block_kernels.plain_backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, logits.scale)

    monkeypatch.setattr(blockwise_attention, "_forward", forward)
    monkeypatch.setattr(blockwise_attention, "_backward", backward)
    monkeypatch.setattr(block_kernels, "ROWS", 3)

    check_cases(packed_attention_by_keys, 30)


def test_a_query_that_sees_nothing_has_no_output_and_no_lse():
    q = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False] * 3, [False, True, True]])[None, None]
    out, lse = block_kernels.plain_forward(q, q, q, mask, False, 0.5)
    assert out[0, 0, :, 0].ne(0).tolist() == [True, False, True]
    assert lse.isfinite().tolist() == [[[True, False, True]] * 2] and (lse[..., 1] == -torch.inf).all()


def test_a_mask_of_one_row_serves_every_query(monkeypatch):
    monkeypatch.setattr(block_kernels, "ROWS", 3)
    x = torch.linspace(-2, 3, 3 * 2 * 4 * 7 * 2, dtype=torch.float64).sin().view(3, 2, 4, 7, 2)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])[:, None, None]
    results = []
    for seen in (mask, mask.expand(-1, -1, 7, -1)):
        out, lse = block_kernels.plain_forward(*x, seen, False, 0.5)
        results.append((out, lse, *block_kernels.plain_backward(out, *x, out, lse, seen, False, 0.5)))
    assert all(torch.equal(one, every) for one, every in zip(*results, strict=True))


@pytest.mark.parametrize("keys", [5, 7, 9])
def test_causal_is_a_triangle_from_the_top_left(monkeypatch, keys):
    monkeypatch.setattr(block_kernels, "ROWS", 3)
    q = torch.linspace(-2, 3, 4 * 7 * 2, dtype=torch.float64).sin().view(1, 4, 7, 2)
    k, v = torch.linspace(-1, 4, 2 * 2 * keys * 2, dtype=torch.float64).cos().view(2, 1, 2, keys, 2)
    results = []
    for seen, is_causal in ((None, True), (torch.ones(7, keys).tril().bool()[None, None], False)):
        out, lse = block_kernels.plain_forward(q, k, v, seen, is_causal, 0.5)
        results.append((out, lse, *block_kernels.plain_backward(out, q, k, v, out, lse, seen, is_causal, 0.5)))
    assert all(torch.equal(triangle, mask) for triangle, mask in zip(*results, strict=True))


def test_scores_are_stored_for_few_rows():
    heads, size = 2, 8 * block_kernels.ROWS
    q, k, v = torch.empty(3, 1, heads, size, 4, dtype=torch.float64, device="meta").unbind()
    with Largest() as largest:
        out, lse = block_kernels.plain_forward(q, k, v, None, True, 0.5)
        block_kernels.plain_backward(out, q, k, v, out, lse, None, True, 0.5)
    assert largest.numbers == heads * block_kernels.ROWS * size


def test_autocast_changes_nothing():
    x = torch.linspace(-2, 3, 3 * 2 * 4 * 7 * 2).sin().view(3, 2, 4, 7, 2)
    results = []
    for is_cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            out, lse = block_kernels.plain_forward(*x, None, True, 0.5)
            results.append((out, lse, *block_kernels.plain_backward(out, *x, out, lse, None, True, 0.5)))
    assert all(map(torch.equal, *results))
