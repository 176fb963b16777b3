"""The page of the command line, the examples under --help, and the options and JSON that both describe."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from parity_tests.specimens.user_files import LOCKSTEP, TIMES_RANKS, written
from shardproof.cli import page
from shardproof.cli.app import app
from shardproof.cli.expected import CAUSES
from shardproof.cli.help import EXAMPLES, JUDGING, STATUS
from shardproof.cli.shapes import SHAPES
from shardproof.draw.profiles import EXAMPLES as PROFILES
from shardproof.endings.exit_status import RANK_FAILED
from shardproof.engines.failure import Died
from shardproof.tracing import show as traces
from shardproof.tracing.comparison import Line
from shardproof.training import run, show
from shardproof.training.judged import Judged, Row

VERBS = typer.main.get_command(app).commands
NARROW = "80"  # columns
# Maps by the user's names: their keys do not belong to the shape.
BY_NAME = {
    "scalars",
    "mesh",
    "dims",
    "inputs",
    "outputs",
    "tensors",
    "owners",
    "types",
    "rows of a step",
    "not_run",
    "not_offered",
    "not_judged",
    "caught",
}
BY_NAME |= {"layouts", "lengths", "values", "options", "left_out", "conditions"}


def test_the_page_matches_the_command():
    assert page.PAGE.read_text() == page.page(), "run python -m shardproof.cli.page"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_stands_on_the_page(verb):
    section = page.PAGE.read_text().partition(f"\n## {verb}\n")[2].partition("\n## ")[0]
    for option in VERBS[verb].params:
        assert option.help, f"{verb}: {option.name} has no help"
        for flag in option.opts if option.param_type_name == "option" else ():
            assert f"`{flag}`" in section


def test_the_page_explains_dp_in_a_plan():
    assert "dp is short for dp_shard" in next(option for option in VERBS["plan"].params if option.name == "mesh").help


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_a_command(line):
    program, verb, *arguments = shlex.split(line)
    assert program == "shardproof" and line in EXAMPLES[verb]
    VERBS[verb].make_context(verb, arguments)


@pytest.mark.fast_values(5)
@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_statuses(shardproof, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", NARROW)
    monkeypatch.setenv("TERMINAL_WIDTH", NARROW)
    status, out, _ = shardproof(verb, "--help")
    assert status == 0 and 1 <= len(EXAMPLES[verb]) <= 3
    assert [line for line in out.splitlines() if len(line) > int(NARROW)] == []
    unfolded = re.sub(r" \\\n +", " ", out)  # as a shell joins lines
    assert all(f"\n    {line}\n" in unfolded for line in EXAMPLES[verb])
    statuses = STATUS if verb in JUDGING else {2: STATUS[2]}
    assert all(f"{number} {what}" in " ".join(out.split()) for number, what in statuses.items())
    assert shardproof(verb, "-h")[1] == out


def test_the_list_of_verbs_cuts_no_sentence(shardproof, monkeypatch):
    monkeypatch.setenv("COLUMNS", NARROW)
    monkeypatch.setenv("TERMINAL_WIDTH", NARROW)
    out = shardproof("--help")[1]
    assert "..." not in out.partition("Commands:")[2] and max(map(len, out.splitlines())) <= int(NARROW)


def test_every_failure_of_a_rank_is_listed_under_its_status():
    assert [cause for cause in CAUSES if cause not in STATUS[RANK_FAILED]] == []


def test_help_names_every_value():
    choices = {"--dtype": run.DTYPES, "--mamba": run.MAMBA, "--attention": run.ATTENTION}
    for verb, flags in {"train": choices, "trace": choices, "verify": {"--profile": PROFILES}}.items():
        helps = {flag: option.help for option in VERBS[verb].params for flag in option.opts}
        for flag, values in flags.items():
            assert [value for value in values if value not in helps[flag]] == []


def shape(x, name=""):
    """The keys and their contents: the first element of a list stands for all, and maps by name have one key."""
    if isinstance(x, dict) and name in BY_NAME:
        return {"*": next((shape(value) for value in x.values()), None)}
    if isinstance(x, dict):
        inner = {key: "rows of a step" if key == "rows" and "reference" in x else key for key in x}
        return {key: shape(value, inner[key]) for key, value in x.items()}
    if isinstance(x, list):
        return [shape(x[0])] if x and isinstance(x[0], dict) else []
    return None


def lacks(documented, real):
    """Keys that the page alone has, or the command alone; an empty list or map agrees with any."""
    if isinstance(documented, dict) and isinstance(real, dict):
        differing = set() if "*" in documented else documented.keys() ^ real.keys()
        return sorted(differing) + [
            at for key in documented.keys() & real.keys() for at in lacks(documented[key], real[key])
        ]
    if isinstance(documented, list) and isinstance(real, list):
        return lacks(documented[0], real[0]) if documented and real else []
    return []


def compared(verb, text):
    assert lacks(shape(json.loads(SHAPES[verb])), shape(json.loads(text))) == []


def test_shapes_that_differ_are_seen():
    documented = {"a": [{"b": 1}], "mesh": {"tp": 2}}
    assert lacks(shape(documented), shape({"a": [{"b": 2}], "mesh": {"cp": 1}})) == []
    assert lacks(shape(documented), shape({"a": [{"c": 2}], "mesh": {}})) == ["b", "c"]


def test_json_of_verdicts(shardproof):
    file = written("wrong.py", TIMES_RANKS, **LOCKSTEP)
    compared("verify", shardproof("verify", file, "--mesh", "tp=2", "--dim", "b=4", "--json", "-")[1])
    (replay,) = [path.name for path in Path().glob("replay_*.py")]
    status, out, err = shardproof("replay", replay, "--json", "-", "-q")
    assert (status, err) == (1, "wrong: mismatch\n")
    compared("replay", out)


def test_json_of_tables(shardproof):
    compared("list", shardproof("list", "vocab_parallel_logprob", "--json")[1])
    compared("draw", shardproof("draw", "vocab_parallel_logprob", "--json", "--mesh", "tp=2")[1])
    compared("schedule", shardproof("schedule", "zbv", "--pp", "2", "--microbatches", "2", "--json")[1])
    small = ("--option", "num_hidden_layers=1", "--mesh", "tp=2")
    compared("plan", shardproof("plan", "transformers.LlamaConfig", *small, "--json")[1])
    compared("cost", shardproof("cost", "attention", "--mesh", "cp=4", "--dim", "s=64,h=4,g=2", "--json")[1])


def test_json_of_the_training_run():
    steps = [Judged(0, 6.0, 6.0, {"loss": Row(float("inf"), 1e-9)})]
    ran = run.Run.on({"dp": 2})
    compared("train", show.as_json([(ran, steps)]))
    assert "Infinity" not in show.as_json([(ran, steps)])
    (failed,) = json.loads(show.as_json([(ran, Died("rank 1 ended", rank=1))]))
    assert (failed["verdict"], failed["failure"], failed["steps"]) == ("died", "died: rank 1 ended", [])


def test_json_of_a_trace(capsys):
    line = Line("output of ln", "forward", "ln", float("inf"), 1e-6, (0,), ("has another shape",))
    assert traces.write([traces.TraceReport("block", "in flax", [line])], "-") == 1
    out = capsys.readouterr().out
    compared("trace", out)
    assert json.loads(out)["traces"][0]["lines"][0]["error"] == "inf"


def test_names_alone(shardproof):
    status, out, _ = shardproof("list", "vocab_parallel_*", "--quiet")
    assert status == 0 and "vocab_parallel_logprob" in out.splitlines() and " " not in out
    assert all(name.startswith("vocab_parallel_") for name in out.split())


def test_a_table_in_a_pipe_has_all_its_columns(shardproof, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    first, second, third = shardproof("list", "vocab_parallel_logprob")[1].splitlines()[:3]
    assert first.split() == ["scheme", "mesh", "specs", "function,", "reference", "and", "file"]
    assert "tp: 1, 2, 3, 4" in second and "torch_impl.vocab_parallel.vocab_parallel_logprob" in second
    assert "jax_ref.vocab_parallel.reference.logprob" in third


@pytest.mark.parametrize("columns", ["80", None])
def test_a_narrow_terminal_or_a_pipe_stacks_schemes(shardproof, columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    blocks = [block.splitlines() for block in shardproof("list", "vocab_parallel_log*")[1].rstrip().split("\n\n")]
    assert {block[0] for block in blocks} >= {"vocab_parallel_logprob", "vocab_parallel_log_softmax"}
    assert all(block[1].startswith("  tp: 1, 2") for block in blocks)
    assert all(block[-2].startswith("  reference  jax_ref.vocab_parallel.reference.") for block in blocks)
    assert all(block[-1].startswith("  file       parity_tests/") and ".py:" in block[-1] for block in blocks)


def test_versions(shardproof):
    status, out, _ = shardproof("--version")
    assert status == 0 and out.startswith("shardproof ") and f"Python {sys.version.split()[0]}" in out
