"""An ordinary run does not collect these files: `test_devices.py` runs them in processes that can run kernels."""

from parity_tests.kernels.files import ON_A_DEVICE

collect_ignore = list(ON_A_DEVICE)
