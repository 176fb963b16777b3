"""Faults of the Triton kernels: what is kept from block to block, what is written where, which rows are taken.

They have schemes of their own, which only Triton's interpreter can run: `parity_tests/kernels/test_kills.py` plants
them, and they are not in the catalogue.
"""

from parity_tests.injected_bugs.injected_bug import InjectedBug

FROM_BLOCK_TO_BLOCK = (
    InjectedBug(
        name="sum of the blocks before not brought to the new maximum",
        kind="statistic",
        at="kernels:_statistics",
        old="rest = weight * rest + others",
        new="rest = rest + others",
        expect="value: ",
    ),
    InjectedBug(
        name="largest term of the blocks before forgotten",
        kind="statistic",
        at="kernels:_statistics",
        old="(tops - 1.0) + weight, tops)",
        new="tops - 1.0, tops)",
        expect="value: ",
    ),
    InjectedBug(
        name="largest term of every block left out",
        kind="statistic",
        at="kernels:_statistics",
        old="tl.where(top > largest, (tops - 1.0) + weight, tops)",
        new="(tops - 1.0) + tl.where(top > largest, weight, 0.0)",
        expect="value: ",
    ),
    InjectedBug(
        name="depths of the blocks before not lowered",
        kind="statistic",
        at="kernels:_statistics",
        old="weight * (depth + (1.0 + rest) * lowered)",
        new="weight * depth",
        expect="value: ",
    ),
    InjectedBug(
        name="largest equal logits counted once",
        kind="statistic",
        at="kernels:_statistics",
        old="tops = tl.sum(tl.where(z == top, terms, 0.0), 0)",
        new="tops = tl.max(tl.where(z == top, terms, 0.0), 0)",
        expect="value: ",
    ),
    InjectedBug(
        name="last column of a row not read",
        kind="border",
        at="kernels:_statistics",
        old="mask=columns < v, other",
        new="mask=columns < v - 1, other",
        expect="value: ",
    ),
    InjectedBug(
        name="row with no column here answers with its first",
        kind="border",
        at="kernels:_statistics",
        old="z_t = tl.load(of_row + column * column_stride, mask=column >= 0, other=float",
        new="z_t = tl.load(of_row + tl.maximum(column, 0) * column_stride, mask=(slot < k) & (v > 0), other=float",
        expect="value: ",
    ),
    InjectedBug(
        name="differences of logits in bfloat16",
        kind="precision",
        at="kernels:_statistics",
        old="depths = z - shift",
        new="depths = (z - shift).to(tl.bfloat16).to(heat.dtype)",
        expect="value: ",
    ),
)

GRADIENTS = (
    InjectedBug(
        name="columns counted from the start of the block",
        kind="border",
        at="kernels:_gradient",
        old="tl.where(columns == column, at_id, gradient)",
        new="tl.where(columns - start == column, at_id, gradient)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="target in the last column of a block not seen",
        kind="border",
        at="kernels:_gradient",
        old="(column < start + STEP)",
        new="(column < start + STEP - 1)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="kernel forgets the temperature of the gradient",
        kind="scale",
        at="kernels:_gradient",
        old="gradient = gradient / heat\n    written_to = out + row * out_row_stride + places",
        new="gradient = gradient * 1.0\n    written_to = out + row * out_row_stride + places",
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="one minus exp where it cancels",
        kind="precision",
        at="kernels:_one_minus_exp",
        old="tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))",
        new="1.0 - tl.exp(x)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="power series too short",
        kind="precision",
        at="kernels:_one_minus_exp",
        old="for i in tl.static_range(15):\n        series = 1.0 + series * x / (16 - i)",
        new="for i in tl.static_range(3):\n        series = 1.0 + series * x / (4 - i)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="kernel forgets the mean of the entropy's slope",
        kind="statistic",
        at="kernels:_log_p_and_slope",
        old="(tl.maximum(depths, LOWEST) - tl.load(depth + row))",
        new="tl.maximum(depths, LOWEST)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="masked columns multiplied by minus infinity",
        kind="border",
        at="kernels:_log_p_and_slope",
        old="(tl.maximum(depths, LOWEST) - tl.load(depth + row))",
        new="(depths - tl.load(depth + row))",
        expect="gradient: not finite",
    ),
    InjectedBug(
        name="cotangents of other ids left out at an id",
        kind="statistic",
        at="kernels:_gradient_at_ids",
        old="gradient = _one_minus_exp(log_p) * gradient - of_others",
        new="gradient = _one_minus_exp(log_p) * gradient",
        expect="gradient: ",
    ),
    InjectedBug(
        name="second kernel writes at the ids of the first row",
        kind="border",
        at="kernels:_gradient_at_ids",
        old="written_to = out + row * out_row_stride + column * out_column_stride",
        new="written_to = out + column * out_column_stride",
        expect="gradient: ",
    ),
)

TAKEN_ROWS = (
    InjectedBug(
        name="index read one place too early",
        kind="order",
        at="kernels:gather_kernel",
        old="tl.load(index + place, mask",
        new="tl.load(index + tl.maximum(place - 1, 0), mask",
        expect="value: ",
    ),
    InjectedBug(
        name="rows of the first batch for all",
        kind="order",
        at="kernels:gather_kernel",
        old="source + outer * outer_stride",
        new="source + outer * 0",
        expect="value: ",
    ),
    InjectedBug(
        name="gradient of taken rows from the last to the first",
        kind="order",
        at="kernels:_RowsAt.backward",
        old="index_add(ctx.dim, index, cotangent)",
        new="index_add(ctx.dim, index.flip(0), cotangent)",
        expect="gradient: ",
    ),
)

BUGS = (*FROM_BLOCK_TO_BLOCK, *GRADIENTS, *TAKEN_ROWS)
