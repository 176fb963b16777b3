"""The benchmark of dispatch and combine runs on few tokens, compares first, and reports its measurements."""

import pytest
import torch

from parity_tests.evidence.benchmarks import dispatch
from parity_tests.evidence.benchmarks.dispatch import MEGATRON, OURS, Combined, Sizes
from parity_tests.evidence.benchmarks.peer_arms import missing

FEW = Sizes(tokens=16, d=8, experts=4, k=2)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_pages", [True, False])
def test_figures_of_few_tokens(keeps_pages):
    over_wire, over_megatron = dispatch.figures_of(FEW, "float32", 2, 1, keeps_pages)
    assert over_wire.name.startswith("dispatch and combine over wire, float32, ")
    assert " times, by round " in over_wire.measured and "tokens=16 d=8 experts=4 k=2" in over_wire.how
    assert (over_wire.is_met is not None) is keeps_pages
    reason = missing(MEGATRON)
    assert over_megatron.measured == reason if reason else " times, by round " in over_megatron.measured


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("off_by", [1.0, torch.nan])
def test_a_dispatch_that_is_wrong_is_not_timed(which, off_by):
    tokens = dispatch._draw_tokens(FEW, 0, 2, torch.float32)
    k = FEW.k
    right = tokens.differentiated(lambda x, gates: Combined(k * x, x.repeat_interleave(k, 0), gates.flatten()))
    assert dispatch._compare(tokens, {OURS: right}) <= 1
    wrong = [x + off_by if i == which else x for i, x in enumerate(right)]
    with pytest.raises(RuntimeError, match="it is not timed"):
        dispatch._compare(tokens, {OURS: wrong})
