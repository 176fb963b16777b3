"""Which tests of this folder an ordinary run leaves to `test_devices.py`, which runs them where kernels can run."""

from parity_tests.kernels.files import ON_A_DEVICE

collect_ignore = list(ON_A_DEVICE)
