"""Attention's closed forms equal its schemes' declared costs, counted message by message from query and key pairs."""

import numpy as np
import pytest

from parity_tests.context_parallel.attention_schemes import dense_cost, usp_cost
from shardproof.cost import sheet
from shardproof.cost.attention_forms import over_one_axis, over_two_axes
from shardproof.cost.candidates import Setting
from shardproof.cost.evaluated import busiest
from shardproof.cost.exchanges import compared


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 6, 8])
def test_forms_are_for_the_busiest_rank(cp, causal, dtype):
    dims = {"b": 2, "s": 48, "h": 24, "g": 2, "p": 4}
    there = compared("attention", Setting({"cp": cp}, dims, sheet.read("h100"), dtype))
    assert len(there.candidates) >= 2
    rules = np.array([causal]), np.array([0])
    for candidate in there.candidates:
        case = candidate.case
        if "cp" in case.mesh:
            listed, form = dense_cost("dual_chunk_swap")(case, *rules), over_one_axis(causal)(case)
        else:
            listed, form = usp_cost(case, *rules), over_two_axes(causal)(case)
        most = busiest(listed if isinstance(listed, list) else [listed])
        assert (form.forward, form.backward) == (most.forward, most.backward), candidate.label


@pytest.mark.parametrize("causal", [True, False])
def test_products_of_pairs_that_are_seen(causal):
    dims = {"b": 2, "s": 48, "h": 24, "g": 2, "p": 4, "causal": causal}
    there = compared("attention", Setting({"cp": 4}, dims, sheet.read("h100")))
    pairs = 48 * 49 // 2 if causal else 48 * 48
    product = 2 * 2 * 24 * 4 * pairs // 4  # b, h, p: multiplications and additions, a fourth of them
    assert {candidate.products for candidate in there.candidates} == {(2 * product, 5 * product)}
