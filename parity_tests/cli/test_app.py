"""shardproof: every verb, every exit status."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import settings

from parity_tests import warm_python
from parity_tests.specimens.user_files import LOCKSTEP, RAISING, RIGHT, SCALED, TIMES_RANKS, WRONG, written
from shardproof.cli import session
from shardproof.declare.discover import schemes_of_file
from shardproof.draw import profiles
from shardproof.endings.exit_status import EQUAL, RANK_FAILED
from shardproof.verification import VALUE_EXAMPLES


def closing(out):
    return out.rstrip().splitlines()[-1]


# Exit statuses


def test_a_timeout_limits_a_rank_that_reaches_no_collective(shardproof):
    waits = "import time\ndef waits(mesh, x):\n    time.sleep(0.8)\n    return x * 2\ndeclare(waits)\n"
    file = written("waits.py", waits, **LOCKSTEP)
    status, out, _ = shardproof("verify", file, "--mesh", "tp=1", "--timeout", "0.2")
    assert status == RANK_FAILED and "stalled: rank 0 has reached no collective for 0.2 s" in out
    assert shardproof("verify", file, "--mesh", "tp=1", "--examples", "1", "--timeout", "9")[0] == EQUAL


def test_a_limit_ends_the_drawing_of_cases_and_says_so(shardproof):
    slow = "import time\ndef slow(mesh, x):\n    time.sleep(0.05)\n    return x * 2\ndeclare(slow)\n"
    status, out, _ = shardproof("verify", written("slow.py", slow), "--examples", "400", "--limit", "0.5")
    drawn, missing = (int(re.search(rf"(\d+) {words}", out)[1]) for words in ("examples   ", "of 400 examples, at the"))
    assert status == EQUAL and drawn + missing == 400 and 0 < drawn < 40
    assert f"not drawn: {missing} of 400 examples, at the limit of 0.5 s" in out


def test_a_long_scheme_is_named_where_no_progress_bar_does(shardproof, monkeypatch):
    monkeypatch.setattr(session, "LONG_S", 0.1)
    slow = "import time\ndef slow(mesh, x):\n    time.sleep(0.3)\n    return x * 2\ndeclare(slow)\n"
    _, _, err = shardproof("verify", written("slow.py", slow), "--examples", "1")
    assert err == "shardproof: slow, scheme 1 of 1, has run for 0.1 s; --limit SECONDS ends it after a case\n"


def test_0_all_equal(shardproof):
    status, out, err = shardproof("verify", written("right.py", RIGHT), "--examples", "5")
    assert (status, err) == (0, "")
    assert out.startswith("right    tp=1 tp=2   lockstep   5 examples   float32")
    assert closing(out) == "1 scheme, 0 mismatches, 0 not run."


@pytest.mark.slow
def test_1_a_mismatch(shardproof):
    status, out, err = shardproof("verify", written("wrong.py", RIGHT, WRONG), "--examples", "5")
    assert (status, err) == (1, "")
    assert closing(out) == "2 schemes, 1 mismatch, 0 not run."
    [replay] = [path.name for path in Path().glob("replay_*.py")]
    assert f"replay: python {replay}" in out
    assert "MISMATCH" in out and "    off by the constant factor 1.5" in out


def test_3_a_rank_that_fails_is_worse_than_a_mismatch(shardproof):
    file = written("raises.py", RAISING, TIMES_RANKS, RIGHT, **LOCKSTEP)
    status, out, _ = shardproof("verify", file, "--examples", "2", "--mesh", "tp=2")
    assert status == 3
    assert "RuntimeError: no such thing" in out
    assert closing(out) == "3 schemes, 1 mismatch, 1 with a failed rank, 0 not run."


def test_4_nothing_ran(shardproof):
    status, out, err = shardproof("verify", written("gpus.py", RIGHT), "--engine", "nccl", "--mesh", "tp=2")
    assert (status, err) == (4, "")
    assert out.splitlines() == [
        "not run: right: nccl needs a GPU, none is here",
        "1 scheme, 0 mismatches, 1 not run.",
    ]


@pytest.mark.slow
def test_schemes_that_did_not_run_are_reported_with_the_others(shardproof):
    narrow = RIGHT.replace("right", "narrow").replace("(narrow)", "(narrow, engines=('gloo',))")
    status, out, _ = shardproof("verify", written("engines.py", RIGHT, narrow, SCALED), "--option", "scale=3.0")
    assert status == 0
    assert "not run: right: has no mesh axis, dim or option 'scale'" in out
    assert "not run: narrow: has no mesh axis, dim or option 'scale'" in out
    assert closing(out) == "3 schemes, 0 mismatches, 2 not run."
    assert "not run: narrow: is declared for gloo only" in shardproof("verify", "engines.py", "--examples", "1")[1]


@pytest.mark.slow
def test_meshes_that_do_not_divide_the_sizes_are_counted_and_named(shardproof):
    reason = "b=7 cannot be sharded by contiguous over tp=2 (needs a multiple of 2); pad to 8"
    status, out, _ = shardproof("verify", written("right.py", RIGHT), "--dim", "b=7", "--json", "out.json")
    assert status == 0 and f"  left out: tp=2: {reason}" in out.splitlines()
    assert "  left out: all meshes but tp=1, which shards nothing" in out.splitlines()
    assert closing(out) == "1 scheme, 0 mismatches, 0 not run, 1 mesh left out."
    assert json.loads(Path("out.json").read_text())["reports"][0]["left_out"] == {"tp=2": reason}
    wide = RIGHT.replace("right", "wide").replace("(wide)", "(wide, mesh={'tp': (1, 2, 4)})")
    status, out, _ = shardproof("verify", written("two.py", RIGHT, wide), "--dim", "b=7")
    assert status == 0 and f"left out: right, wide: tp=2: {reason}" in out.splitlines()
    assert closing(out) == "2 schemes, 0 mismatches, 0 not run, 3 meshes left out."
    out = shardproof("verify", "two.py", "--dim", "b=7", "-q")[1]
    assert out == "2 schemes, 0 mismatches, 0 not run, 3 meshes left out.\n"
    status, out, err = shardproof("verify", written("none.py", RIGHT, wide.replace("1, 2, 4", "2, 4")), "--dim", "b=7")
    assert (status, err) == (2, "") and "not judged: scheme 'wide': b=7 cannot be sharded by contiguous" in out
    assert closing(out) == "2 schemes, 0 mismatches, 0 not run, 1 not judged, 1 mesh left out."


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        (("--dim", "b=8"), {"b": 8}),
        (("--dim", "b=8", "--mesh", "tp=2"), {"b": 8, "tp": 2}),
    ],
)
def test_the_command_draws_as_many_cases_as_the_method(shardproof, options, fixed):
    file = written("right.py", RIGHT)
    shardproof("verify", file, *options, "--profile", profiles.profile(), "--json", "out.json")
    [report] = json.loads(Path("out.json").read_text())["reports"]
    [right] = schemes_of_file(file)
    assert report["examples"] == right.verify(**fixed).examples
    assert (report["examples"] == VALUE_EXAMPLES) == (len(fixed) == 2)  # with all of them given


def test_130_interrupted(shardproof, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "verify", interrupt)
    status, _, err = shardproof("verify", "right.py")
    assert (status, err) == (130, "shardproof: interrupted; what was not printed was not judged\n")


# Options of verify


def test_seed_and_examples(shardproof):
    written("right.py", RIGHT)
    run = ("verify", "right.py", "--examples", "4", "--dtype", "float64", "--mesh", "tp=2")
    outs = [shardproof(*run, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]
    assert "tp=2   lockstep   4 examples   float64" in outs[0]


def test_sizes_options_and_quiet(shardproof):
    status, out, _ = shardproof(
        "verify", written("scaled.py", SCALED), "--mesh", "tp=2", "--dim", "b=6", "--option", "scale=3.5", "--quiet"
    )
    assert (status, out) == (0, "1 scheme, 0 mismatches, 0 not run.\n")


def test_fail_fast(shardproof):
    run = "verify", written("order.py", TIMES_RANKS, RIGHT, **LOCKSTEP), "--examples", "1", "--mesh", "tp=2"
    assert closing(shardproof(*run, "--fail-fast")[1]).startswith("1 scheme, 1 ")
    assert closing(shardproof(*run)[1]).startswith("2 schemes, 1 ")


def test_json_and_junit(shardproof):
    """JSON on standard output; test_exits.py reads it from a file."""
    written("both.py", RIGHT, TIMES_RANKS, **LOCKSTEP)
    status, out, err = shardproof(
        "verify", "both.py", "--examples", "1", "--mesh", "tp=2", "--json", "-", "--junit", "out.xml"
    )
    assert status == 1
    record = json.loads(out)
    assert record["status"] == 1 and [r["verdict"] for r in record["reports"]] == ["equal", "mismatch"]
    assert closing(err) == "2 schemes, 1 mismatch, 0 not run."
    suite = ElementTree.parse("out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


@pytest.mark.slow
def test_a_page(shardproof):
    written("both.py", RIGHT, WRONG)
    status, out, _ = shardproof("verify", "both.py::wrong", "--mesh", "tp=2", "--dim", "b=4", "--html", "out.html")
    assert (status, out.splitlines()[-2:]) == (1, ["1 scheme, 1 mismatch, 0 not run.", "page: out.html"])
    [replay] = [path.name for path in Path().glob("replay_*.py")]
    page = Path("out.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and f"python {replay}" in page and "<title>wrong: mismatch" in page
    status, out, err = shardproof("replay", replay, "--html", "-")
    assert status == 1 and out.startswith("<!DOCTYPE html>") and "MISMATCH" in err and "page: " not in err
    assert closing(shardproof("replay", replay, "--html", "out.html")[1]) == "page: out.html"
    _, out, err = shardproof("replay", replay, "--html", "out.html", "--json")
    assert json.loads(out)["status"] == 1 and closing(err) == "page: out.html"
    _, out, err = shardproof("verify", "both.py", "--examples", "1", "--html", "out.html", "--json")
    assert json.loads(out)["status"] == 1 and closing(err) == "page: out.html"
    assert "page: " not in shardproof("verify", "both.py", "--examples", "1", "--html", "out.html", "--quiet")[1]
    _, out, _ = shardproof("verify", "both.py", "--mesh", "tp=2", "--dim", "b=4", "--html", "-")
    assert "<title>2 schemes, 1 mismatch, 0 not run." in out


@pytest.mark.slow
def test_replays_go_where_they_are_told(shardproof):
    written("wrong.py", WRONG)
    _, out, _ = shardproof("verify", "wrong.py", "--mesh", "tp=2", "--dim", "b=4", "--replay-dir", "some/replays")
    [replay] = [str(path) for path in Path("some/replays").glob("replay_*.py")]
    assert f"replay: python {replay}" in out and not list(Path().glob("replay_*.py"))
    assert shardproof("replay", replay)[0] == 1


@pytest.mark.slow
def test_a_function_that_prints_does_not_break_the_json(shardproof):
    """On ranks that are threads and on those that are processes, which judge a mismatch again."""
    written("prints.py", WRONG, "import os\nprint('of the module')\nos.system('echo of a process')\n")
    command = ("-m", "shardproof.cli.app", "verify", "prints.py", "--examples", "1", "--json", "-")
    completed = warm_python.run(*command)
    assert json.loads(completed.stdout)["status"] == completed.returncode == 1
    assert "of the module" in completed.stderr and "of a process" in completed.stderr


def test_a_folder(shardproof):
    Path("many/deep").mkdir(parents=True)
    written("many/right.py", RIGHT, "# @scheme\n")
    written("many/deep/scaled.py", SCALED, "# @scheme\n")
    Path("many/notes.py").write_text("1 / 0\n")
    assert closing(shardproof("verify", "many", "--examples", "1")[1]) == "2 schemes, 0 mismatches, 0 not run."


def test_a_file_in_a_package_imports_its_neighbours(shardproof):
    package = Path("its_own_package")
    package.mkdir()
    for name in ("__init__.py", "numbers.py"):
        (package / name).write_text("TWO = 2\n")
    file = written(package / "right.py", "from .numbers import TWO\n", RIGHT.replace("x * 2", "x * TWO"))
    status, out, err = shardproof("verify", str(file), "--examples", "2")
    assert (status, err) == (0, ""), out
    assert shardproof("verify", str(file), "--engine", "gloo", "--examples", "1", "--mesh", "tp=2")[0] == 0


def test_a_later_declaration_does_not_belong_to_the_file(shardproof):
    file = written(
        "later.py", RIGHT, "\n\ndef test_more():\n    def within(mesh, x):\n        return x * 2\n    declare(within)\n"
    )
    (first,) = schemes_of_file(file)
    first.fn.__globals__["test_more"]()
    assert schemes_of_file(file) == [first]


def test_a_run_leaves_the_profile_as_it_was(shardproof):
    before = settings.get_current_profile_name()
    shardproof("verify", written("right.py", RIGHT), "--examples", "1", "--profile", "nightly")
    assert settings.get_current_profile_name() == before


# The other verbs


def test_schemes_of_parts_that_are_not_public_are_listed_with_all(shardproof):
    public, everything = (set(shardproof("list", "-q", *more)[1].split()) for more in ((), ("--all",)))
    others = everything - public
    assert public < everything and "vocab_parallel_logprob" in public
    assert {"filtered_by_lists", "numbered_in_blocks"} <= others
    status, _, err = shardproof("list", "filtered_by_lists")
    assert (status, err) == (
        2,
        "shardproof: filtered_by_lists: no public scheme of this name; --all shows the others\n",
    )
    assert shardproof("list", "filtered_by_lists", "--all", "-q")[1] == "filtered_by_lists\n"


def test_the_list_fits_into_80_columns_where_they_are_set(shardproof, monkeypatch):
    whole = shardproof("list", "--all")[1]
    monkeypatch.setenv("COLUMNS", "80")
    broken = shardproof("list", "--all")[1]
    assert max(map(len, broken.splitlines())) <= 80 < max(map(len, whole.splitlines()))
    assert broken.split() == whole.split()
    rest = [after for before, after in pairwise(broken.splitlines()) if before.strip() in ("verifies", "reference")]
    assert rest and all(re.match(r"    \S", line) for line in rest)


def test_list(shardproof):
    status, out, _ = shardproof("list", "vocab_parallel_logprob")
    assert status == 0
    assert "vocab_parallel_logprob" in out and "b s v/tp:ragged" in out
    [record] = json.loads(shardproof("list", "vocab_parallel_logprob", "--json")[1])
    assert record["inputs"]["logits"] == "b s v/tp:ragged"
    assert json.loads(shardproof("list", "--json", "-q")[1])[0].keys() == record.keys()
    out = shardproof("list", "vocab_parallel_logprob", "--json", "out.json")[1]
    assert json.loads(Path("out.json").read_text()) == [record] and out.startswith("vocab_parallel_logprob\n")


def test_schemes_are_listed_by_the_function_that_they_verify(shardproof):
    package, name = "torch_impl.vocab_parallel", "DistributedCrossEntropy"
    listed = shardproof("list", name, "-q")[1].split()
    assert {"distributed_cross_entropy", "cross_entropy_near_its_end"} <= set(listed)
    assert listed == shardproof("list", f"{package}.{name}", "-q")[1].split()
    records = json.loads(shardproof("list", name, "--json")[1])
    assert all(f"{package}.{name}" in record["verifies"] for record in records)
    assert "; did you mean " in shardproof("list", "DistributedCrossEntropie")[2]
    assert shardproof("list", name)[1].count(f"  verifies   {package}.{name}\n") == len(listed)


def test_a_word_finds_the_schemes_whose_names_or_functions_contain_it(shardproof):
    listed = shardproof("list", "entropy", "-q")[1].split()
    assert {"chunked_distributed_entropy", "cross_entropy_near_its_end", "logprob_with_entropy"} <= set(listed)
    assert shardproof("list", "distributedCross", "-q") == shardproof("list", "DistributedCrossEntropy", "-q")
    assert shardproof("list", "filtered_by_li")[0] == 2  # no public scheme, as for the whole name


@pytest.mark.parametrize(
    ("words", "schemes"),
    [
        ("clipping", {"clipped_with_experts"}),
        ("ring attention", {"attention_in_dual_chunk_swap", "packed_attention_in_stripes"}),
        ("attention Ring", {"attention_in_dual_chunk_swap", "packed_attention_in_stripes"}),
        ("ulysses", {"attention_in_dual_chunk_swap"}),
    ],
)
def test_words_of_the_table_of_functions_find_their_schemes(shardproof, words, schemes):
    listed = set(shardproof("list", words, "-q")[1].split())
    assert schemes <= listed and not {"vocab_parallel_logprob", "all_reduce"} & listed
    assert shardproof("list", f"{words} nosuchword", "-q")[:2] == (2, "")


def test_list_of_a_file_or_a_folder(shardproof):
    Path("below").mkdir()
    file = written("below/two.py", RIGHT, WRONG)
    for target, names in ((file, ["right", "wrong"]), ("below", ["right", "wrong"]), (f"{file}::wrong", ["wrong"])):
        assert shardproof("list", target, "-q") == (0, "".join(f"{name}\n" for name in names), "")
    [record] = json.loads(shardproof("list", f"{file}::right", "--json")[1])
    assert (record["inputs"], record["mesh"]) == ({"x": "b/tp"}, {"tp": [1, 2]})
    assert shardproof("list", "absent.py") == (2, "", "shardproof: absent.py: no such file\n")


def test_draw(shardproof):
    status, out, _ = shardproof(
        "draw", written("right.py", RIGHT), "--mesh", "tp=2", "--dim", "b=4", "--figure", "out.svg"
    )
    assert status == 0
    assert out == "right\nmesh tp=2\nx  b/tp\n  b/tp  0011\n-> out  b/tp\n  b/tp  0011\n\n"
    assert "<svg" in Path("out.svg").read_text()


@pytest.mark.slow
def test_replay_and_timeline(shardproof):
    shardproof("verify", written("wrong.py", WRONG), "--mesh", "tp=2", "--dim", "b=4")
    [replay] = [path.name for path in Path().glob("replay_*.py")]
    status, out, _ = shardproof("replay", replay, "--repeat", "2")
    assert status == 1 and out.count("MISMATCH") == 4
    assert shardproof("replay", replay, "--engine", "nccl")[0] == 4
    status, out, _ = shardproof("timeline", replay, "--out", "trace.json")
    assert (status, out) == (0, "0 collectives of 2 ranks written to trace.json\n")
    assert json.loads(Path("trace.json").read_text()) == {"traceEvents": []}
    status, _, err = shardproof("timeline", replay, "--out", "no/such/trace.json")
    assert (status, err) == (2, "shardproof: --out no/such/trace.json: there is no folder no/such\n")


def test_a_reference_may_broadcast_as_jax_does(shardproof):
    biased = """
def biased(mesh, x, w, b):
    return x @ w + b
declare(biased, reference=lambda x, w, b: x @ w + b, draw={},
        inputs={"x": "n/tp d", "w": "d f tp=R", "b": "f tp=R"}, outputs="n/tp f")
"""
    assert shardproof("verify", written("biased.py", biased), "--examples", "4")[0] == 0
