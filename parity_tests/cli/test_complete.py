"""Shell completion: each shell's protocol, and the words that are offered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardproof.cli import complete
from shardproof.cli.app import VERBS, app
from shardproof.declare.case import ENGINES
from shardproof.places import TESTS
from shardproof.training.run import ATTENTION, AXES, MAMBA
from torch_impl.pipelining.named_schedules import RULES

# The command under the name that it is installed by.
SHARDPROOF = f"""#!{sys.executable}
import sys
sys.argv[0] = "shardproof"
from shardproof.cli.app import main
main()
"""
SLOW = ("torch", "jax", "transformers")


def completed(words, shell="zsh"):
    """The completions offered for the last word."""
    if shell == "bash":
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    else:
        environment = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(
        app, prog_name="shardproof", env={**environment, "_SHARDPROOF_COMPLETE": f"complete_{shell}"}
    )
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_verbs_and_options(shell):
    offered = completed("shardproof t", shell)
    assert all(verb in offered for verb in VERBS if verb.startswith("t")) and "verify" not in offered
    assert "--microbatches" in completed("shardproof schedule --mic", shell)


def test_files_are_the_shells_where_nothing_is_offered():
    assert completed("shardproof plan some") == "_files\n"


def bash(words):
    return completed(words, "bash").split()


def test_targets():
    for name in ("my_scheme.py", "replay_00ff00ff.py", "mine.csv"):
        Path(name).touch()
    assert bash("shardproof verify vocab_parallel_logp")[0] == "vocab_parallel_logprob"
    assert bash("shardproof verify my_") == bash("shardproof trace my_") == ["my_scheme.py"]
    assert bash("shardproof replay ") == bash("shardproof timeline re") == ["replay_00ff00ff.py"]
    assert bash("shardproof list my_") == ["my_scheme.py"]
    assert bash("shardproof schedule ") == [*RULES, "mine.csv"] and bash("shardproof schedule zb") == ["zbVZeroBubble"]


def test_schemes_that_are_offered_are_declared():
    offered = complete.targets("")
    assert len(offered) == len(set(offered)) > 50
    declared = "".join(file.read_text() for file in TESTS.glob("*/test_*.py"))
    assert all(f"def {name}(" in declared for name in offered)


def test_values():
    assert bash("shardproof verify x --engine ") == list(ENGINES)
    assert bash("shardproof verify x --profile n") == ["nightly"]
    assert bash("shardproof verify x --dtype b") == ["bfloat16"]
    assert bash("shardproof train --mamba ") == list(MAMBA)
    assert bash("shardproof trace --attention ") == list(ATTENTION)


def test_sizes_of_a_mesh():
    assert complete.meshes("tp=2,c") == ["tp=2,cp=2", "tp=2,cp=4"]
    assert not any("tp=" in size.rpartition(",")[2] for size in complete.meshes("tp=2,"))
    assert bash("shardproof train --mesh dp_r") == ["dp_replicate=2", "dp_replicate=4"]
    assert {size.partition("=")[0] for size in complete.training_meshes("")} == {"dp", *AXES}


def test_bash_itself_completes(tmp_path):
    """The script that --show-completion prints, sourced, and called as bash calls it."""
    program = tmp_path / "shardproof"
    program.write_text(SHARDPROOF)
    program.chmod(0o755)
    lines = (
        'eval "$(_SHARDPROOF_COMPLETE=source_bash shardproof)"',
        "COMP_WORDS=(shardproof verify x --engine g) COMP_CWORD=4",
        "_shardproof_completion shardproof",
        'echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("gloo\n", "")


def test_nothing_slow_is_loaded_for_a_word():
    offers = [
        name for name, member in vars(complete).items() if callable(member) and member.__module__.endswith("complete")
    ]
    names = [name for name in offers if not name.startswith("_") and name not in ("of_run", "profiles")]
    assert len(names) == 9
    lines = ["import sys", "from shardproof.cli import app, complete"]
    lines += [f"complete.{name}('')" for name in names]
    lines += [f"sys.exit(','.join(name for name in {SLOW} if name in sys.modules) or 0)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
