"""shardproof: bad input of every kind ends in one sentence on standard error and status 2."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.specimens.user_files import LOCKSTEP, RIGHT, WRONG, written
from shardproof import places
from shardproof.declare import discover

MISTAKES = {
    "axis": (
        RIGHT.replace("(right)", "(right, inputs={'x': 'b/tq'})"),
        "bad.py:9: scheme 'right': spec 'b/tq' (input 'x'): axis 'tq' is not in mesh (tp); "
        "did you mean 'tp'?",
    ),
    "gradient type": (
        RIGHT.replace("(right)", "(right, outputs='b')"),
        "bad.py:9: scheme 'right': spec 'b' (output 'out'): axis 'tp' shards no dim and has no type; "
        "write tp=R (gradients add up), tp=I (same gradient) or tp=P (values add up)",
    ),
    "arity": (
        RIGHT.replace("(right)", "(right, reference=lambda x, y: x)"),
        "bad.py:9: scheme 'right': takes (x) but reference <lambda> takes (x, y); "
        "its argument 'y' is not an input of the scheme (x): rename it or add it",
    ),
    "float32": (
        RIGHT.replace("(right)", "(right, reference=lambda x: x.astype(jnp.float32))"),
        "scheme 'right': reference <lambda> (bad.py:15) returned float32 for 'out' from float64 inputs; "
        "drop the cast, the reference states the mathematics in float64",
    ),
    "reference raises": (
        RIGHT.replace("(right)", "(right, reference=lambda x: x + nothing)"),
        "scheme 'right': reference <lambda> raised NameError at bad.py:15: name 'nothing' is not defined",
    ),
    "a reference called reference raises": (
        RIGHT.replace("declare(right)", "def reference(x):\n    return x + no\ndeclare(right, reference=reference)"),
        "scheme 'right': the reference raised NameError at bad.py:16: name 'no' is not defined",
    ),
    "broadcast": (
        RIGHT.replace("(right)", "(right, reference=lambda x: (x[:, None] + jnp.ones(3))[:, :2])"),
        "scheme 'right': reference <lambda> (bad.py:15) returned (1, 2) for 'out', 'b/tp' says (1,)",
    ),
    "two of one name": (
        RIGHT + RIGHT.replace("x * 2", "x * 3"),
        "cannot import bad.py:9: scheme 'right': is defined in line 13 and again in line 17; "
        "give one another name",
    ),
    "layout": (
        RIGHT.replace(
            "(right)",
            "(right, inputs={'x': 'b/tp:lost'}, outputs='b/tp:lost', layouts={'lost': lambda n, w: [[0]] * w})",
        ),
        "scheme 'right': layout 'lost' is not a partition of 10 positions over 2 ranks: "
        "missing [1, 2, 3, 4, 5, 6, 7, 8] and 1 more, repeated [0]",
    ),
    "layout raises": (
        RIGHT.replace(
            "(right)",
            "(right, inputs={'x': 'b/tp:own'}, outputs='b/tp:own', layouts={'own': lambda n, w: no})",
        ),
        "scheme 'right': layout 'own' raised NameError at bad.py:15: name 'no' is not defined",
    ),
    "cost raises": (
        RIGHT.replace("(right)", "(right, cost=lambda c: no)"),
        "scheme 'right': its cost raised NameError at bad.py:15: name 'no' is not defined",
    ),
    "syntax": ("def f(:\n", "cannot import bad.py:12: SyntaxError: invalid syntax"),
    "import": (
        "import not_installed\n",
        "cannot import bad.py:12: ModuleNotFoundError: No module named 'not_installed'",
    ),
    "exception": ("1 / 0\n", "cannot import bad.py:12: ZeroDivisionError: division by zero"),
    "nothing": ("", "bad.py: declares no scheme; decorate a function with @scheme"),
}  # fmt: skip


@pytest.mark.fast_values(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_that_is_wrong(shardproof, mistake):
    body, sentence = MISTAKES[mistake]
    status, out, err = shardproof("verify", written("bad.py", body), "--examples", "2")
    assert (status, out, err) == (2, "", f"shardproof: {sentence}\n")


DECORATOR = "\ndeclares = scheme(reference=double)\n"  # whose result is called with no function
SEVERAL = [(("bad.py", "wrong.py"), "import"), ((".",), "nothing"), (("bad.py::right", "wrong.py"), "exception")]


@pytest.mark.parametrize(("targets", "mistake"), SEVERAL)
def test_a_file_that_cannot_be_imported_costs_no_verdict_of_another(shardproof, targets, mistake):
    body, sentence = MISTAKES[mistake]
    written("bad.py", body, DECORATOR if mistake == "nothing" else RIGHT), written("wrong.py", WRONG, **LOCKSTEP)
    status, out, _ = shardproof("verify", *targets, "--examples", "2", "--json", "o.json")
    record = json.loads(Path("o.json").read_text())
    assert (status, [report["verdict"] for report in record["reports"]]) == (1, ["mismatch"])
    assert list(record["not_judged"].values()) == [sentence] and f"not judged: {sentence}" in out


TYPO = RIGHT.replace("right", "typo").replace("(typo)", "(typo, outputs='b/tq')")
TYPO_SAYS = "bad.py:9: scheme 'typo': spec 'b/tq' (output 'out'): axis 'tq' is not in mesh (tp); did you mean 'tp'?"
UNKNOWN = RIGHT.replace("right", "unknown").replace("declare(unknown)", "scheme(refrence=double)(unknown)")


@pytest.mark.slow
def test_a_declaration_that_is_wrong_costs_its_own_scheme_alone(shardproof):
    unknown = "bad.py:19: scheme 'unknown': scheme has no keyword 'refrence'; did you mean reference=?"
    file, command = written("bad.py", TYPO, UNKNOWN, RIGHT), ("verify", "bad.py", "--examples", "2")
    status, out, err = shardproof(*command, "--json", "o.json")
    assert (status, err) == (2, "")
    assert f"not judged: {TYPO_SAYS}" in out.splitlines() and f"not judged: {unknown}" in out.splitlines()
    assert out.splitlines()[-1] == "3 schemes, 0 mismatches, 0 not run, 2 not judged."
    record = json.loads(Path("o.json").read_text())
    assert [report["verdict"] for report in record["reports"]] == ["equal"]
    assert record["not_judged"] == {"typo": TYPO_SAYS, "unknown": unknown}
    assert shardproof("verify", f"{file}::right", "--examples", "2")[0] == 0
    assert shardproof("verify", f"{file}::right", "--examples", "2", "--mesh", "tp=2", "--engine", "gloo")[0] == 0
    assert shardproof("verify", f"{file}::typo") == (2, "", f"shardproof: {TYPO_SAYS}\n")
    assert shardproof("draw", f"{file}::typo") == (2, "", f"shardproof: {TYPO_SAYS}\n")
    assert shardproof("draw", f"{file}::right")[0] == 0


@pytest.mark.slow
def test_a_declaration_that_is_wrong_raises_where_its_file_is_run():
    done = warm_python.run(written("bad.py", TYPO, RIGHT))
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ValueError: {TYPO_SAYS.partition(': ')[2]}"


@pytest.mark.slow
def test_a_replay_runs_beside_a_declaration_that_is_wrong(shardproof):
    file = written("bad.py", TYPO, WRONG)
    assert shardproof("verify", file, "--examples", "2")[0] == 1
    [replay] = map(str, Path().glob("replay_*.py"))
    assert shardproof("replay", replay)[0] == 1


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("rms.py",), "verify rms.py"),
        (("rms.py::rms", "--option", "a=b c"), "verify rms.py::rms --option 'a=b c'"),
        (("some/replay_0123abcd.py",), "replay some/replay_0123abcd.py"),
    ],
)
def test_a_file_in_place_of_a_verb(shardproof, words, remedy):
    sentence = f"shardproof: {words[0]}: is a file, not a verb; write shardproof {remedy}\n"
    assert shardproof(*words) == (2, "", sentence)


SIZES = "scheme 'right': "
NO_OPTION = "there is no option --tp; write --mesh tp=2 for a mesh axis, or --dim tp=2 for a dim"


@pytest.mark.fast_values(11)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mesh", "tp=x"), "--mesh 'tp=x' is not NAME=NUMBER with a whole number of at least 1, such as tp=4"),
        (("--mesh", "tp"), "--mesh 'tp' is not NAME=NUMBER with a whole number of at least 1, such as tp=4"),
        (("--mesh", "tp=-1"), "--mesh 'tp=-1' is not NAME=NUMBER with a whole number of at least 1, such as tp=4"),
        (("--mesh", "tp=2,tp=4"), "--mesh 'tp=4' says 'tp' a second time; give each size once"),
        (("--mesh", "tp=0"), SIZES + "tp=0; sizes are integers >= 1"),
        (("--mesh", "tq=2"), SIZES + "--mesh tq=2: 'tq' is not a mesh axis (tp)"),
        (("--mesh", "b=2"), SIZES + "--mesh b=2: 'b' is a dim; write --dim b=2"),
        (("--dim", "tp=2"), SIZES + "--dim tp=2: 'tp' is a mesh axis; write --mesh tp=2"),
        (("--mesh", "tp=65"), SIZES + "no mesh of tp=65 has 64 ranks or fewer, which is the limit"),
        (("--dim", "b=1.5"), "--dim 'b=1.5' is not NAME=NUMBER with a whole number of at least 0, such as s=16"),
        (("--dim", "b=-1"), "--dim 'b=-1' is not NAME=NUMBER with a whole number of at least 0, such as s=16"),
        (
            ("--dim", "b=1000000000000"),
            "--dim 'b=1000000000000' needs 8000 GB for a row of float64, more than there is; make it smaller",
        ),
        (("--dim", "b=²"), "--dim 'b=²' is not NAME=NUMBER with a whole number of at least 0, such as s=16"),
        (
            ("--mesh", "tp=2", "--dim", "b=3"),
            SIZES + "b=3 cannot be sharded by contiguous over tp=2 (needs a multiple of 2); pad to 4",
        ),
        (("--tp", "2"), "--tp '2': " + NO_OPTION),
        (("--tp=2",), "--tp '2': " + NO_OPTION),
        (("--option", "scale=true"), "--option 'scale=true': write True, as in Python"),
        (("--option", "scale"), "--option 'scale' is not NAME=VALUE, such as temperature=2.0"),
        (("--option", "scale=2"), SIZES + "'scale' is not a mesh axis, dim or option (tp, b)"),
        (("--engine", "mpi"), "--engine 'mpi' is not one of lockstep, gloo, nccl, torchrun"),
        (("--profile", "long"), "--profile 'long' is not one of quick, fast, dev, ci, nightly"),
        (("--dtype", "float8"), "--dtype 'float8' is not one of float64, float32, bfloat16, float16"),
        (("--json", "no/such/out.json"), "--json no/such/out.json: there is no folder no/such"),
        (("--json", "out"), "--json out: a file of JSON ends in .json; without a path it is standard output"),
        (("--html", "no/such/out.html"), "--html no/such/out.html: there is no folder no/such"),
        (("--html", "out.txt"), "--html out.txt: a page ends in .html; - is standard output"),
        (("--replay-dir", "right.py"), "--replay-dir 'right.py' is a file; give a folder"),
        (("--junit", "no/such/out.xml"), "--junit no/such/out.xml: there is no folder no/such"),
        (
            ("--json", "-", "--junit", "-"),
            "--json - --junit -: standard output takes one of them; give the other a file",
        ),
    ],
)
def test_arguments_that_are_wrong(shardproof, arguments, sentence):
    status, out, err = shardproof("verify", written("right.py", RIGHT), *arguments)
    assert (status, out, err) == (2, "", f"shardproof: {sentence}\n")


@pytest.mark.parametrize("verb", [("verify", "right.py"), ("train",), ("trace",)])
@pytest.mark.parametrize("seed", [str(2**32), "-1", "x"])
def test_a_seed_that_is_none(shardproof, verb, seed):
    written("right.py", RIGHT)
    sentence = f"shardproof: --seed '{seed}' is not a whole number from 0 to {2**32 - 1}\n"
    assert shardproof(*verb, f"--seed={seed}") == (2, "", sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--examples", "0"), "--examples '0' is not a whole number of at least 1"),
        (("--timeout", "x"), "--timeout 'x' is not a number of at least 0.1"),
    ],
)
def test_a_number_that_an_option_does_not_take(shardproof, arguments, sentence):
    assert shardproof("verify", *arguments) == (2, "", f"shardproof: {sentence}\n")


def test_ids_need_a_vocabulary(shardproof):
    taken = """
def taken(mesh, table, ids):
    return table[ids]
declare(taken, reference=lambda table, ids: table[ids], inputs={"table": "v tp=R", "ids": "b/tp"},
        draw={"ids": token_below("v")})
"""
    written("ids.py", taken)
    sentence = "shardproof: scheme 'taken': v=0 leaves no id to draw; give v=1 or more\n"
    assert shardproof("verify", "ids.py", "--dim", "v=0,b=2") == (2, "", sentence)
    assert shardproof("verify", "ids.py", "--dim", "v=2,b=2", "--mesh", "tp=1")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("verify", "none.py"), "none.py: no such file"),
        (("verify", "empty"), "empty: no file below declares a scheme (none has '@scheme')"),
        (
            ("verify", "no_such_scheme"),
            "no_such_scheme: no file and no scheme of this name (shardproof list --all shows all)",
        ),
        (
            ("verify", "there"),
            "there: no file and no scheme of this name; did you mean there.py? (shardproof list --all shows all)",
        ),
        (("schedule", "none.csv"), "schedule 'none.csv' does not exist; pass the path of a CSV file"),
        (("list", "no_such_*"), "no_such_*: no scheme of this name (shardproof list --all shows all)"),
        (("draw", "none.py"), "none.py: no such file"),
        (("replay", "none.py"), "cannot read none.py: No such file or directory"),
        (("timeline", "none.py"), "cannot read none.py: No such file or directory"),
    ],
)  # fmt: skip
def test_targets_that_are_not_there(shardproof, arguments, sentence, monkeypatch):
    Path("empty").mkdir()
    Path("there.py").touch()
    monkeypatch.setattr("shardproof.declare.discover.built_in", lambda: [])
    status, out, err = shardproof(*arguments)
    assert (status, out, err) == (2, "", f"shardproof: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (("verify", "right.py", "--examples", "1", "--json", "full.json"), "full.json"),
        (("schedule", "zbv", "--pp", "2", "--microbatches", "2", "--csv", "full.csv"), "full.csv"),
        (("schedule", "zbv", "--pp", "2", "--microbatches", "2", "--figure", "full.png"), "full.png"),
        (("draw", "right.py", "--figure", "full.svg"), "full.svg"),
    ],
)
def test_a_full_disk_is_reported_with_the_file(shardproof, arguments, file):
    written("right.py", RIGHT)
    Path(file).symlink_to("/dev/full")
    status, _, err = shardproof(*arguments)
    assert (status, err) == (2, f"shardproof: {file}: {os.strerror(errno.ENOSPC)}\n")


def test_a_full_disk_hides_no_mismatch(shardproof):
    written("wrong.py", WRONG)
    Path("full.json").symlink_to("/dev/full")
    for arguments in (("verify", "wrong.py", "--mesh", "tp=2", "--examples", "1"), ("replay",)):
        replays = [str(path) for path in Path().glob("replay_*.py")]
        status, out, err = shardproof(*arguments, *replays, "--json", "full.json", "--html", "page.html")
        assert (status, err) == (1, f"shardproof: full.json: {os.strerror(errno.ENOSPC)}\n")
        assert "MISMATCH" in out and Path("page.html").is_file()
        Path("page.html").unlink()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (RIGHT, "other.py is not a replay file: CASE or SOURCE is missing"),
        ("CASE = dict()\nSOURCE = 'a.py'", "other.py is not a replay file: CASE or SOURCE is missing"),
        ("CASE = (", "cannot read other.py: '(' was never closed (other.py, line 1)"),
        ("CASE = 'half'\nSOURCE = 'a.py'", "other.py: CASE cannot be read: Expecting value: line 1 column 1 (char 0)"),
        ("CASE = '{}'\nSOURCE = 'a.py'", "other.py: CASE cannot be read: case: missing keys mesh, scheme"),
    ],
)
@pytest.mark.parametrize("verb", ["replay", "timeline"])
def test_files_that_are_no_replay(shardproof, verb, text, sentence):
    Path("other.py").write_text(text)
    status, out, err = shardproof(verb, "other.py")
    assert (status, out, err) == (2, "", f"shardproof: {sentence}\n")


@pytest.mark.parametrize("verb", ["verify", "replay", "timeline"])
def test_a_pipe_in_place_of_a_file(shardproof, verb):
    os.mkfifo("pipe.py")
    status, out, err = shardproof(verb, "pipe.py")
    assert (status, out) == (2, "") and err.startswith("shardproof: pipe.py: is a pipe or a device; give a ")


def test_a_loop_of_symbolic_links_in_place_of_a_file(shardproof):
    Path("loop.py").symlink_to("loop.py")
    status, out, err = shardproof("verify", "loop.py")
    assert (status, out, err) == (2, "", "shardproof: loop.py: is a loop of symbolic links; give a file\n")


def test_a_replay_file_that_is_no_text(shardproof):
    Path("other.py").write_bytes(b"CASE = \xff")
    status, out, err = shardproof("replay", "other.py")
    assert (status, out) == (2, "") and err.startswith("shardproof: cannot read other.py: 'utf-8' codec can't decode")


@pytest.mark.parametrize("arguments", [("frobnicate",), ("verify", "--egnine", "gloo"), ("draw",)])
def test_usage_errors_of_the_parser(shardproof, arguments):
    status, _, err = shardproof(*arguments)
    assert status == 2
    assert err.startswith("Usage: ") and "Error: " in err


# In a process of its own


@pytest.mark.slow
def test_the_module_is_the_command():
    written("bad.py", MISTAKES["axis"][0])
    run = subprocess.run(
        [sys.executable, "-m", "shardproof", "verify", "bad.py"],
        capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"shardproof: {MISTAKES['axis'][1]}\n"


def test_a_component_whose_package_is_missing_is_named_and_left_out(monkeypatch, tmp_path):
    folder = tmp_path / "parity_tests" / "parallelizer"
    folder.mkdir(parents=True)
    (folder / "test_wanting.py").write_text("import transformers.nothing_of_this_name  # scheme(\n")
    for module in (places, discover):
        monkeypatch.setattr(module, "TESTS", tmp_path / "parity_tests")
    monkeypatch.setattr(discover, "_import_file", lambda path: exec(path.read_text(), {}))
    assert discover.built_in() == []
    assert discover.left_out() == {
        "parity_tests/parallelizer/test_wanting.py": "needs transformers; pip install -e '.[hf]' in the clone"
    }


@pytest.mark.parametrize("mistake", ["axis", "gradient type", "two of one name"])
def test_a_message_fits_the_columns_that_are_set_and_a_pipe_gets_one_line(shardproof, monkeypatch, mistake):
    text, sentence = MISTAKES[mistake]
    written("bad.py", text)
    assert shardproof("verify", "bad.py")[2] == f"shardproof: {sentence}\n"
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = shardproof("verify", "bad.py")[2].splitlines()
        assert len(lines) > 1 and max(map(len, lines)) <= columns
        assert " ".join(" ".join(lines).split()) == f"shardproof: {sentence}"


def test_a_broken_line_keeps_quotes_and_commands_whole(shardproof, monkeypatch):
    written("bad.py", MISTAKES["axis"][0].replace("b/tq", "b c/tq"))
    for columns in range(60, 100, 4):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert "'b c/tq'" in shardproof("verify", "bad.py")[2]
        message = shardproof("bad.py")[2]
        assert "shardproof verify bad.py" in message and max(map(len, message.splitlines())) <= columns
