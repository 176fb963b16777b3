"""Bugs injected into the kernels are caught by the drawn examples of the schemes that run on them."""

import pytest

from parity_tests.evidence.injected_bugs import report
from parity_tests.evidence.injected_bugs.catalogue import IN_KERNELS
from parity_tests.evidence.injected_bugs.runner import EXAMPLES, BugRunner, run_bugs
from parity_tests.kernels import schemes
from parity_tests.kernels.device import INTERPRETED

# Only rows of which one target is all but certain show it, which 40 draws may lack; a test has one:
# test_softmax_gradient.py::test_a_target_that_is_all_but_certain_keeps_its_digits.
CAUGHT_BY_HAND = "one minus exp where it cancels"
SCHEMES = (schemes.logprob_in_steps, schemes.triton_gather_logprob)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="not run: a rank's tensors are on the CPU")
@pytest.mark.timeout(900)
def test_drawn_examples_catch_the_bugs():
    outcomes = run_bugs(IN_KERNELS, BugRunner(EXAMPLES, schemes=SCHEMES, with_baseline=False))
    text = "\n".join(report.closing(outcomes, EXAMPLES))
    survivors = {outcome.bug.name for outcome in outcomes if not outcome.caught}
    assert survivors <= {CAUGHT_BY_HAND}, text
    assert [outcome.bug.name for outcome in outcomes if outcome.note == "wrong"] == [], text
