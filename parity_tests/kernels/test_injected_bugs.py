"""Bugs injected into the kernels are caught by the drawn examples of the schemes that run on them."""

import pytest

from parity_tests.injected_bugs import report
from parity_tests.injected_bugs.catalogue.kernels import BUGS
from parity_tests.injected_bugs.runner import EXAMPLES, BugRunner, run_bugs
from parity_tests.kernels import schemes
from parity_tests.kernels.device import INTERPRETED

SCHEMES = (
    schemes.logprob_in_steps,
    schemes.triton_gather_logprob,
    schemes.triton_cut_sequence,
)


@pytest.mark.skipif(not INTERPRETED, reason="not run: a rank's tensors are on the CPU")
@pytest.mark.timeout(900)
def test_drawn_examples_catch_the_bugs():
    outcomes = run_bugs(BUGS, BugRunner(EXAMPLES, schemes=SCHEMES))
    text = "\n".join(report.closing(outcomes, EXAMPLES))
    assert [outcome.bug.name for outcome in outcomes if not outcome.caught] == [], text
    assert [outcome.bug.name for outcome in outcomes if outcome.note == "wrong"] == [], text
