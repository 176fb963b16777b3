"""Commands of the shell are timed together with their child processes, and a failing one is not timed."""

import io

import pytest

from parity_tests.evidence.benchmarks import saves, verdict

SPENDS = "import time; start = time.process_time()\nwhile time.process_time() - start < 0.3: pass"


def test_the_time_of_a_command_has_that_of_the_processes_it_starts():
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPENDS!r}]); print('done')"
    run = verdict.shell("-c", starts)
    assert run.output == "done\n" and run.cpu >= 0.3 and run.wall >= 0.3


def test_a_command_that_fails_is_not_timed():
    with pytest.raises(RuntimeError, match=r"python -c raise SystemExit\('no'\) ended with 1:\nno"):
        verdict.shell("-c", "raise SystemExit('no')")


def test_the_figures_of_commands(monkeypatch):
    commands = []

    def shell(*arguments):
        commands.append(arguments)
        output = "first\nsecond\nthird\nfourth\n" if arguments[-1] == "--quiet" else "16 examples in 3 s, 5% of it\n"
        return verdict.Run(output, cpu=2.0, wall=50.0)

    monkeypatch.setattr(verdict, "shell", shell)
    monkeypatch.setattr(saves, "_seconds", lambda _: {"right": [(0.5, 0.6)], "wrong": [(0.8, 3.0)]})
    figures = list(verdict.figures(rounds=3, schemes=2))
    assert [figure.name for figure in figures] == [
        "first verdict: `shardproof verify my_scheme.py`",
        "list: `shardproof list`",
        "draw: `shardproof draw vocab_parallel_logprob --mesh tp=4`",
        "from a save to the verdict of a right version",
        "from a save to the verdict of a wrong version",
        "examples of built-in schemes, no cache",
        "the tour of `make verify`",
    ]
    assert [figure.is_met for figure in figures] == [True, False, False, True, False, False, False]
    assert figures[5].measured == "8; 2 s for 16 examples" and figures[5].how.endswith("16 examples in 3 s, 5% of it")
    assert ("-m", "shardproof", "verify", "first", "third", "--examples", "8") in commands


@pytest.mark.slow
def test_each_save_has_a_time():
    right, wrong = saves.figures(4)
    assert "2 of 4 saves" in right.how and "2 of 4 saves" in wrong.how


def test_a_verdict_of_another_version_is_an_error():
    output = io.StringIO("1 scheme, 0 mismatches, 0 not run.\n0.4 s. Waiting; Ctrl-C ends.\n")
    with pytest.raises(RuntimeError, match="no ': mismatch in ' in the verdict"):
        saves._times(output, saves.VERDICTS["wrong"])
