"""What every test of the suite shares: Hypothesis profiles, a folder of its own, the command, what the header says."""

import os
import sys
from importlib.metadata import version

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import pytest
from hypothesis import settings

from parity_tests.harness.draw import strategy
from parity_tests.harness.draw.reproducible import make_draws_reproducible

make_draws_reproducible()
strategy.register_profiles()
settings.load_profile("dev")  # --hypothesis-profile=ci overrides it


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test runs in an empty folder, where the replay files of failing cases may lie."""
    monkeypatch.chdir(tmp_path_factory.mktemp("case"))


@pytest.fixture
def shardproof(monkeypatch, capsys):
    """The command, run in this process: status, standard output, standard error."""
    from parity_tests.cli.app import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardproof", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        output = capsys.readouterr()
        return left.value.code or 0, output.out, output.err

    return call


def pytest_report_header() -> str:
    return f"torch {version('torch')}, jax {version('jax')}, Hypothesis profile {strategy.profile()}"
