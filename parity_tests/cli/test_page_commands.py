"""The commands on pages run as shown; the others are listed, with the test that runs them or the reason why none can.

That each is one that its program can read is asked in `test_pages.py`.
"""

import re
import shutil
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.pages import ROOT, blocks, commands, pages
from parity_tests.slow import every
from parity_tests.specimens.user_files import LOCKSTEP, TIMES_RANKS, written
from shardproof.declare.discover import schemes_of_file

NOT_HERE = {
    r"make .*": "steps of .ci/run",
    r"pip install .*": "makes an environment; the Makefile's targets do it with the same extras",
    r"python -m venv .*|uv .*|conda .*|\. \.venv/bin/activate": "makes an environment, as pip install does",
    r"export .*": "of the line after it",
    r"(shardproof verify|pytest) my_linear\.py.*|python replay_c2f3370c\.py": "test_quickstart.py",
    r"(\.venv/bin/)?python -m pytest .*": "the suite itself",
    r"python -m parity_tests\.evidence\.injected_bugs .*": "test_catalogue.py injects some of them, `make bugs` all",
    r"python -m parity_tests\.evidence\.benchmarks .*": "`make bench`",
    r"shardproof verify my_(logprob|scheme)\.py( --mesh tp=4| --html verdict\.html)?": "test_readme.py and "
    "test_worked_example.py; cli/test_app.py writes a page",
    r"shardproof verify row_parallel\.py": "test_readme.py, of the landing page",
    r"pytest my_scheme\.py .*": "test_pytest_plugin.py, of smaller files",
    r"shardproof verify my_megatron\.py( --engine gloo)?": "peers/megatron_core/test_example.py",
    r"shardproof verify [a-z_]+": "test_every_scheme.py judges every built-in scheme",
    r"shardproof train .*": "training/test_session.py, over fewer steps",
    r"shardproof trace --mesh .*": "training/test_traced.py",
    r"shardproof trace my_pair\.py.*": "cli/test_trace.py",
    r"shardproof verify .* --engine nccl": "a GPU; without one it is not run, as cli/test_app.py asks",
    r"torchrun --standalone --nproc-per-node 2 .* verify .*": "test_worked_example.py",
    r"torchrun --standalone --nproc-per-node [48] .*": "as many ranks are too many for two cores, with GPUs or without",
    r"torchrun --nnodes 2 .*": "two hosts; training/test_torchrun.py makes two of one, as namespaces or over loopback",
}
OF_THE_HELP = "docs/reference/command-line.md"  # the examples of --help; tests of cli/ run the verbs with smaller ones
SHOWN = [
    (block, command)
    for page in pages()
    if page != OF_THE_HELP
    for block in blocks(page)
    if block.language in ("console", "sh")
    for command in map(" ".join, commands(block))
]
RUN = [command for _, command in SHOWN if not any(re.fullmatch(pattern, command) for pattern in NOT_HERE)]


def test_commands_that_do_not_run_here_are_on_a_page():
    commands = [command for _, command in SHOWN]
    assert [pattern for pattern in NOT_HERE if not any(re.fullmatch(pattern, each) for each in commands)] == []


def recorded(**of_scheme):
    """A replay file, as a failing case leaves it, under the name that pages give it."""
    (wrong,) = schemes_of_file(written("wrong.py", TIMES_RANKS, **of_scheme))
    wrong.verify(examples=1, tp=2)
    (left,) = Path().glob("replay_*.py")
    (name,) = {word for command in RUN for word in command.split() if word.startswith("replay_")}
    left.rename(name)
    return wrong.name


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("command", every(3, sorted(set(RUN))))
def test_a_command_runs_as_it_is_shown(command, shardproof):
    for example in (ROOT / "docs" / "examples").glob("my_*"):
        shutil.copy(example, example.name)
    wrong = recorded(**({} if "gloo" in command else LOCKSTEP)) if "replay_" in command else None
    program, *arguments = command.split()
    if program == "shardproof":
        status, out, err = shardproof(*arguments)
    else:
        start = ("-m", "torch.distributed.run") if program == "torchrun" else ()
        done = warm_python.run(*start, *arguments)
        status, out, err = done.returncode, done.stdout, done.stderr
    is_again = wrong is not None and "timeline" not in command
    assert (status, err) == (int(is_again), "")
    assert out.strip() and (not is_again or wrong in out)
