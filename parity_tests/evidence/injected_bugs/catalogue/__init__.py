"""All injected bugs: texts, a file for each component of torch_impl. An entry is looked up by its name."""

from pathlib import Path

from parity_tests.evidence.injected_bugs.catalogue_file import read
from parity_tests.evidence.injected_bugs.injected_bug import KINDS

FOLDER = Path(__file__).parent
# Triton's kernels have schemes of their own, which only Triton's interpreter can run:
# `parity_tests/kernels/test_injected_bugs.py` injects their bugs, and they are not in CATALOGUE.
IN_KERNELS = read(FOLDER / "triton_kernels.diff")
CATALOGUE = tuple(bug for path in sorted(FOLDER.glob("*.diff")) for bug in read(path) if bug not in IN_KERNELS)
WITHOUT_A_COMPONENT = {"random": "no scheme draws random numbers"}
APPLICABLE = tuple(kind for kind in KINDS if kind not in WITHOUT_A_COMPONENT)
