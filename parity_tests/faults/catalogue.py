"""All faults, and the kinds that have a component to live in."""

from parity_tests.faults import collectives, layouts, recreated, vocab_parallel
from parity_tests.faults.fault import KINDS

CATALOGUE = (*collectives.FAULTS, *layouts.FAULTS, *vocab_parallel.FAULTS, *recreated.FAULTS)
WITHOUT_A_COMPONENT = {"random": "no scheme draws random numbers"}
APPLICABLE = tuple(kind for kind in KINDS if kind not in WITHOUT_A_COMPONENT)
