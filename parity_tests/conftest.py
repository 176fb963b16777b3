"""What every test of the suite shares: Hypothesis's profiles, and a header that says what is under test."""

import os
from importlib.metadata import version

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from hypothesis import settings

from parity_tests.harness import strategy

strategy.register_profiles()
settings.load_profile("dev")  # --hypothesis-profile=ci overrides it


def pytest_report_header() -> str:
    return f"torch {version('torch')}, jax {version('jax')}, Hypothesis profile {strategy.profile()}"
