"""The run of `shardproof train` step by step, and bugs to inject into its model."""

from parity_tests.injected_bugs.catalogue import CATALOGUE
from parity_tests.injected_bugs.patched_modules import PatchedModules as PatchedModules
from parity_tests.tracing.lines import first as first
from parity_tests.training.follow import ReferenceSteps as ReferenceSteps
from parity_tests.training.run import Run as Run
from parity_tests.training.session import followed as followed
from parity_tests.training.traced import known_of as known_of
from parity_tests.training.traced import trace as trace

BUGS = tuple(bug for bug in CATALOGUE if bug.component == "models")
