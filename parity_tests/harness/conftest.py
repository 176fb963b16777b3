"""The command, run in the process of the tests."""

import sys

import pytest

from parity_tests.harness import cli


@pytest.fixture
def shardproof(monkeypatch, capsys):
    """The command, run in this process: status, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardproof", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return call
