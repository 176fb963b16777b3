"""A user's code that exits, crashes or hangs the process costs its own verdict alone: status 3, with file and line."""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parity_tests import warm_python
from parity_tests.specimens import user_files
from parity_tests.specimens.user_files import LOCKSTEP, RIGHT
from parity_tests.specimens.user_files import TIMES_RANKS as WRONG
from shardproof.cli import session
from shardproof.endings.exit_status import INTERNAL, INTERRUPTED, MISMATCH, RANK_FAILED, USAGE
from shardproof.report import summary
from shardproof.report.summary import Outcome, VerifyOptions

LIMIT_S = 600.0
PATH = os.pathsep.join(entry for entry in sys.path if entry)
IMPORTS = "import contextlib, ctypes, os, sys, threading\nfrom shardproof import drawn\n"
written = functools.partial(user_files.written, **LOCKSTEP)


def declared(name, body="return x * 2", at="", **how):
    """A scheme; `at` is the code of a function `bad`, which the keywords refer to."""
    bad = f"def bad_{name}(*arguments):\n    {at}\n" if at else ""
    keywords = ", ".join(f"{key}={value.replace('bad', f'bad_{name}')}" for key, value in how.items())
    return f"{bad}def {name}(mesh, x):\n    {body}\ndeclare({name}, dims={{'b': (8,)}}, {keywords})\n"


def line_of(file, text):
    """The number of the only line of a file with this text."""
    [number] = [number for number, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line]
    return number


def run(*arguments):
    """Status, standard output and standard error of a command in a new process."""
    done = warm_python.run(*arguments)
    return done.returncode, done.stdout, done.stderr


def verified(*arguments):
    return run("-m", "shardproof", "verify", *arguments)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Each scheme exits in another function; its status occurs in no other line.
EXITS = {
    "in_reference": declared("in_reference", at="sys.exit(11)", reference="lambda x: bad(x)"),
    "in_assume": declared("in_assume", at="sys.exit(12)", assume="lambda case: bad(case)"),
    "in_draw": declared("in_draw", at="sys.exit(13)", draw="{'x': drawn(lambda generator, shape: bad())}"),
    "in_cost": declared("in_cost", at="sys.exit(14)", cost="lambda case: bad(case)"),
    "in_process": declared("in_process", at="os._exit(15)", reference="lambda x: bad(x)"),
    "in_context": declared("in_context", at="sys.exit(16)", around="lambda mesh: bad(mesh)"),
    "in_rank": declared("in_rank", body="os._exit(17)"),
}


INTERRUPTS = {name: re.sub(r"\w+\._?exit\(1", "raise KeyboardInterrupt(1", text) for name, text in EXITS.items()}


@pytest.mark.parametrize(("raising", "error"), [(EXITS, "SystemExit"), (INTERRUPTS, "KeyboardInterrupt")])
def test_only_the_scheme_that_exits_is_not_judged(raising, error):
    file = written("exits.py", IMPORTS, *raising.values(), WRONG, RIGHT)
    status, out, _ = verified(file, "--mesh", "tp=2", "--json", "out.json")
    record = json.loads(Path("out.json").read_text())
    assert (status, record["status"]) == (RANK_FAILED, RANK_FAILED)
    verdicts = {report["scheme"].rpartition(":")[2]: report["verdict"] for report in record["reports"]}
    assert verdicts == {"in_context": "raised", "in_rank": "raised", "wrong": "mismatch", "right": "equal"}
    assert set(record["not_judged"]) == set(raising) - {"in_context", "in_rank"}
    for name in raising:
        [code] = re.findall(r"\w+\(1\d\)", raising[name])
        at = f"exits.py:{line_of(file, code)}"
        failure = next((report["failure"] for report in record["reports"] if report["scheme"].endswith(name)), None)
        sentence = record["not_judged"].get(name) or failure.replace('", line ', ":")
        assert f"raised {error}" in sentence and at in sentence, sentence
    assert out.splitlines()[-1] == "9 schemes, 1 mismatch, 2 with a failed rank, 0 not run, 5 not judged."


DEATHS = {
    "crashing_reference": (
        declared("crashing_reference", at="ctypes.string_at(21 - 21)", reference="lambda x: bad(x)"),
        "the process of the command was killed by SIGSEGV at {at}",
    ),
    "crashing_rank": (
        declared("crashing_rank", body="ctypes.string_at(22 - 22)"),
        "died: rank 0 was killed by SIGSEGV at {at}; it was last seen so: computes, nothing issued yet",
    ),
    "thread_of_a_rank": (
        declared("thread_of_a_rank", at="os._exit(23)", body="threading.Thread(target=bad_thread_of_a_rank).start()"),
        "died: rank 0 left with exit code 23 by os._exit(23) at {at}; it was last seen so: computes, nothing issued "
        "yet",
    ),
}


def test_a_death_costs_one_verdict_and_all_files_are_written():
    parts = [text.replace("start()", "start()\n    threading.Event().wait()") for text, _ in DEATHS.values()]
    file = written("dies.py", IMPORTS, RIGHT, *parts, WRONG)
    files = {"--json": "out.json", "--junit": "out.xml", "--html": "out.html"}
    status, out, err = verified(file, "--mesh", "tp=2", "--examples", "2", *itertools.chain(*files.items()))
    record = json.loads(Path("out.json").read_text())
    assert (status, record["status"], err) == (RANK_FAILED, RANK_FAILED, "")
    verdicts = {report["scheme"].rpartition(":")[2]: report for report in record["reports"]}
    died = [name for name in DEATHS if name != "crashing_reference"]
    assert {name: report["verdict"] for name, report in verdicts.items()} == {
        "right": "equal", "wrong": "mismatch", **dict.fromkeys(died, "died")
    }  # fmt: skip
    said = record["not_judged"] | {name: f"scheme '{name}': {verdicts[name]['failure']}" for name in died}
    for (name, (text, sentence)), number in zip(DEATHS.items(), ("21 - 21", "22 - 22", "_exit(23)"), strict=True):
        at = f"dies.py:{line_of(file, number)}"
        assert said[name].splitlines()[0] == f"scheme '{name}': {sentence.format(at=at)}", text
    assert "not judged: scheme 'crashing_reference'" in out
    assert "5 schemes, 1 mismatch, 2 with a failed rank, 0 not run, 1 not judged." in out
    assert all(Path(verdicts[name]["replay"]).is_file() for name in died)
    cases = ElementTree.parse("out.xml").getroot().findall("testcase")
    assert [case.get("name") for case in cases if case.find("error") is not None] == ["crashing_reference"]
    assert all(name in Path("out.html").read_text() for name in DEATHS)


IMPORT = {
    "sys.exit(31)": "it exits at leaves.py:{line}; run that code only if __name__ == '__main__'",
    "os._exit(32)": "it exits by os._exit(32), which ends the process of the command at leaves.py:{line}; run "
    "that code only if __name__ == '__main__'",
    "ctypes.string_at(33 - 33)": "the process of the command was killed by SIGSEGV at leaves.py:{line}",
}


def test_a_file_that_hides_a_module_of_python_and_exits_gives_no_status_0():
    Path("json.py").write_text("raise SystemExit(0)")
    command = [sys.executable, "-m", "shardproof", "verify", written("wrong.py", WRONG)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": PATH}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    sentence = f"shardproof: {Path('json.py').absolute()}:1 exits when it is imported; give the file another name\n"
    assert (done.returncode, done.stderr) == (RANK_FAILED, sentence)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("call", IMPORT)
def test_an_import_that_exits_costs_only_the_schemes_below_it(call):
    file = written("leaves.py", IMPORTS, WRONG, f"{call}\n", RIGHT)
    other = written("other.py", RIGHT.replace("right", "right_elsewhere"))
    status, out, _ = verified(file, other, "--mesh", "tp=2", "--json", "out.json")
    record = json.loads(Path("out.json").read_text())
    verdicts = {report["scheme"].rpartition(":")[2]: report["verdict"] for report in record["reports"]}
    before = {} if "string_at" in call else {"wrong": "mismatch"}
    assert (status, verdicts) == (RANK_FAILED, {**before, "right_elsewhere": "equal"})
    sentence = IMPORT[call].format(line=line_of(file, call))
    assert record["not_judged"] == {"leaves.py": f"cannot import leaves.py: {sentence}"}
    assert f"not judged: cannot import leaves.py: {sentence}" in out


def test_an_exit_function_that_exits_is_reported_after_the_verdict():
    file = written("at_exit.py", RIGHT, "import atexit, os\natexit.register(lambda: os._exit(0))\n")
    status, out, err = verified(file, "--mesh", "tp=2", "--examples", "1")
    assert status == RANK_FAILED
    assert out.splitlines()[-1] == "1 scheme, 0 mismatches, 0 not run."
    at = f"at_exit.py:{line_of(file, 'register')}"
    assert f"shardproof: an atexit function raised SystemExit at {at}: os._exit(0), which ends" in err


def test_a_rank_that_holds_the_interpreter_is_stalled():
    body = "mesh.rank('tp') and __import__('re').match('(a+)+$', 'a' * 60 + 'b')\n    return x * 2"
    file = written("holds.py", RIGHT, declared("holds", body=body))
    status, out, err = run("-c", QUIET, "verify", file, "--mesh", "tp=2", "--examples", "1")
    assert (status, err) == (RANK_FAILED, "")
    stalled = r"stalled: rank 1 has held the interpreter for \d+ s, in native code: it computes at holds.py:(\d+),"
    assert [int(line) for line in re.findall(stalled, out)] == [line_of(file, "(a+)+$")]
    assert out.splitlines()[-1] == "2 schemes, 0 mismatches, 1 with a failed rank, 0 not run."


# The command, with shorter limits for a rank that computes.
QUIET = """
import sys
from shardproof.engines import last_act, supervised
run = last_act._status_of
def shorter(call):
    from shardproof.engines import engines
    engines.LOCKSTEP_QUIET_S = 2.0
    return run(call)
supervised.MARGIN_S = 1.0
last_act._status_of = shorter
from shardproof import main
main()
"""


def test_a_message_that_cannot_be_printed_costs_nothing():
    raising = declared("raising", body=r"raise ValueError('\ud800 \x1b[31m \x00')")
    in_reference = declared("in_reference", at=r"raise ValueError('\udfff \x07')", reference="lambda x: bad(x)")
    file = written("foreign.py", IMPORTS, raising, in_reference, WRONG)
    files = {"--json": "out.json", "--junit": "out.xml", "--html": "out.html"}
    status, out, err = verified(file, "--mesh", "tp=2", *itertools.chain(*files.items()))
    assert (status, err) == (RANK_FAILED, "")
    assert r"ValueError: \ud800 \x1b[31m \x00" in out and r"\udfff \x07" in out and "MISMATCH" in out
    assert json.loads(Path("out.json").read_text())["status"] == RANK_FAILED
    assert len(ElementTree.parse("out.xml").getroot().findall("testcase")) == 3
    assert "\\ud800" in Path("out.html").read_text()


SHRINKING = {
    "raises": r"raise LookupError('too small')",
    "exits": "sys.exit(0)",
    "crashes": "ctypes.string_at(0)",
}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("how", SHRINKING)
def test_a_mismatch_is_not_lost_while_it_is_made_smaller(how):
    """The scheme is wrong for b=8 alone. Once b=8 has been drawn, drawing a smaller size fails."""
    seen = f"SEEN = set()\ndef small():\n    {SHRINKING[how]}\n"
    draw = "def own(generator, shape):\n    SEEN.add(*shape)\n    shape[0] < 8 and 8 in SEEN and small()\n"
    wrong = "def wrong(mesh, x):\n    return x * (2 * mesh.size('tp') if len(x) == 4 else 2)\n"
    alone = "excluded_conditions=('call_before', 'call_between')"  # other calls have other sizes
    of = f"declare(wrong, draw={{'x': drawn(own)}}, dims={{'b': (2, 4, 8)}}, {alone})\n"
    file = written("small.py", IMPORTS, seen, draw, "    return generator.standard_normal(shape)\n", wrong, of)
    status, out, _ = verified(file, "--mesh", "tp=2", "--json", "out.json")
    record = json.loads(Path("out.json").read_text())
    assert (status, [report["verdict"] for report in record["reports"]]) == (MISMATCH, ["mismatch"])
    assert record["reports"][0]["replay"] and "replay: python " in out
    at = f"small.py:{line_of(file, SHRINKING[how])}"
    died = f"not examined further: the process of the command was killed by SIGSEGV at {at}"
    assert (died in out) == (how == "crashes")


STOP = "class Stop(BaseException):\n    pass\n"  # asyncio and pytest have such exceptions, to end a task or skip a test


def test_a_base_exception_costs_its_own_verdict_alone(shardproof):
    in_reference = declared("in_reference", at="raise Stop('in a reference')", reference="lambda x: bad(x)")
    in_draw = declared("in_draw", at="raise Stop('in a draw')", draw="{'x': drawn(lambda generator, shape: bad())}")
    file = written("stops.py", IMPORTS, STOP, in_reference, in_draw, WRONG)
    status, out, err = shardproof("verify", file, "--mesh", "tp=2", "--examples", "1")
    assert (status, err) == (MISMATCH, "")
    for text in ("in a reference", "in a draw"):
        assert f"stops.py:{line_of(file, text)}" in out and text in out
    assert out.splitlines()[-1] == "3 schemes, 1 mismatch, 0 not run, 2 not judged."


def test_a_base_exception_at_import_is_one_sentence(shardproof):
    status, out, err = shardproof("verify", written("stops.py", STOP, "raise Stop('at import')\n"))
    line = line_of("stops.py", "at import")
    assert (status, out, err) == (USAGE, "", f"shardproof: cannot import stops.py:{line}: Stop: at import\n")


def test_what_is_written_stays_where_the_command_was_started(shardproof, tmp_path):
    (tmp_path / "below").mkdir()
    first = written("first.py", "import os\nos.chdir('below')\n", WRONG)
    second = written("second.py", RIGHT)
    status, out, err = shardproof("verify", first, second, "--mesh", "tp=2", "--examples", "1", "--json", "out.json")
    assert (status, err) == (MISMATCH, "")
    assert len(json.loads((tmp_path / "out.json").read_text())["reports"]) == 2
    [replay] = tmp_path.glob("replay_*.py")
    assert f"replay: python {replay.name}\n" in out and list((tmp_path / "below").iterdir()) == []


def test_a_full_disk_of_standard_output_costs_no_file(monkeypatch):
    file = written("right.py", RIGHT)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            session.verify([file], VerifyOptions(fixed={"tp": 2}, examples=1, json="out.json"))
    assert json.loads(Path("out.json").read_text())["status"] == 0


def test_two_schemes_of_one_name_are_two_verdicts():
    one, other = Outcome(), Outcome()
    one.reject("one:same", "scheme 'same': of one file", USAGE)
    other.reject("other:same", "scheme 'same': of another", RANK_FAILED)
    one.add(other)
    assert (one.status, list(one.not_judged)) == (RANK_FAILED, ["one:same", "other:same"])
    assert summary.closing(one) == "2 schemes, 0 mismatches, 0 not run, 2 not judged."


def test_an_expected_failure_names_one_scheme(shardproof):
    files = written("one.py", WRONG), written("other.py", WRONG)
    Path("expected.txt").write_text("wrong mismatch\n")
    status, _, err = shardproof("verify", *files, "--expected-failures", "expected.txt")
    assert status == USAGE
    assert "expected.txt:1: 2 schemes are called 'wrong'; write one.py::wrong and other.py::wrong" in err


def test_an_internal_error_is_not_blamed_on_a_scheme():
    program = "import shardproof.cli.scheme_list as table\ntable.show = lambda *arguments: {}['lost']\n"
    status, out, err = run("-c", f"{program}from shardproof import main\nmain()", "list")
    assert (status, out) == (INTERNAL, "")
    *_, last, sentence = err.splitlines()
    assert last == "KeyError: 'lost'"
    assert re.fullmatch(
        r"shardproof: internal error at .*: KeyError: 'lost'; please report it with its traceback", sentence
    )


def test_an_error_of_one_scheme_costs_the_others_nothing(shardproof):
    bad = declared("bad", at="return {}['no such key']", draw="{'x': drawn(lambda generator, shape: bad())}")
    file = written("keys.py", IMPORTS, bad, RIGHT)
    status, out, err = shardproof("verify", file, "--mesh", "tp=2", "--examples", "1")
    assert (status, err) == (USAGE, "")
    at = f"keys.py:{line_of(file, 'no such key')}"
    assert f"not judged: scheme 'bad': {at} raised KeyError: 'no such key'" in out
    assert out.splitlines()[-1] == "2 schemes, 0 mismatches, 0 not run, 1 not judged."


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_is_one_sentence(number):
    file = written("waits.py", "import time\nprint('importing', flush=True)\ntime.sleep(600)\n", RIGHT)
    source = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    source += "from shardproof import main\nmain()"
    command = [sys.executable, "-c", source, "verify", file]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout.readline() == "importing\n"
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=LIMIT_S)
    sentence = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (process.returncode, err) == (
        130 if number == signal.SIGINT else -number,
        f"shardproof: {sentence}; what was not printed was not judged\n",
    )


def test_a_function_of_numpy_that_the_file_replaces_gives_no_verdict():
    lie = "import numpy\nnumpy.abs = lambda values, *_, **__: numpy.zeros_like(values)\n"
    status, out, err = verified(written("lies.py", lie, WRONG), "--mesh", "tp=2", "--examples", "1")
    assert (status, out) == (USAGE, "")
    assert "scheme 'wrong': numpy.abs has been replaced, and verdicts are computed with it" in err


def test_a_mismatch_outlives_what_the_file_does_to_sys():
    lines = "import sys\nsys.exit = lambda *status: None\nsys.stdout.close()\n"
    status, out, _ = verified(written("wrong.py", lines, WRONG), "--mesh", "tp=2", "--examples", "1")
    assert status == MISMATCH  # although sys.exit does nothing
    assert "1 scheme, 1 mismatch, 0 not run." in out  # although the file has closed sys.stdout


@pytest.mark.slow
def test_a_function_that_closes_the_output_hides_no_verdict():
    body = "sys.__stdout__.close(); sys.__stderr__.close()\n    return x * 2 * mesh.size('tp')"
    status, out, _ = verified(written("closes.py", IMPORTS, declared("closes", body=body)), "--mesh", "tp=2")
    assert status == MISMATCH and out.splitlines()[-1] == "1 scheme, 1 mismatch, 0 not run."
    [replay] = Path().glob("replay_*.py")
    for arguments in ((str(replay),), ("-m", "shardproof", "replay", str(replay))):
        status, out, _ = run(*arguments)
        assert status == MISMATCH and "MISMATCH" in out


def test_an_only_scheme_whose_rank_ends_the_process_has_a_report_and_a_replay():
    file = written("dies.py", IMPORTS, declared("dies", body="ctypes.string_at(0)"))
    status, out, err = verified(file, "--mesh", "tp=2", "--examples", "2")
    assert (status, err) == (RANK_FAILED, "")
    assert f"died: rank 0 was killed by SIGSEGV at dies.py:{line_of(file, 'string_at')}" in out
    [replay] = Path().glob("replay_*.py")
    assert f"replay: python {replay}" in out
    status, out, err = run("-m", "shardproof", "replay", str(replay))
    assert status == RANK_FAILED and "died: rank 0 was killed by SIGSEGV" in out + err


def test_a_working_folder_that_is_removed_is_one_sentence():
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m shardproof verify ../wrong.py'
    there = {**os.environ, "PYTHONPATH": PATH}  # an empty entry would be the working folder
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=False, env=there)
    sentence = "shardproof: the working folder has been removed; change to one that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (USAGE, "", sentence)


@pytest.mark.slow
def test_no_file_that_we_open_gets_the_number_of_a_closed_output():
    crashing = declared("crashing", body="os.write(2, b'?' * 1000)\n    ctypes.string_at(0)")
    file = written("writes.py", IMPORTS, WRONG, crashing)
    closing = "import os, sys\nos.close(1); os.close(2)\nsys.stdout = sys.stderr = None\n"
    program = f"{closing}from shardproof import main\nmain()"
    status, *_ = run("-c", program, "verify", file, "--mesh", "tp=2", "--examples", "1", "--json", "out.json")
    assert status == RANK_FAILED
    record = json.loads(Path("out.json").read_text())
    assert [report["verdict"] for report in record["reports"]] == ["mismatch", "died"]


def test_what_is_judged_before_an_interrupt_is_printed():
    interrupts = "import signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(9)"
    stopping = declared("stopping", at=interrupts, reference="lambda x: bad(x)")
    status, out, err = verified(written("stops.py", IMPORTS, WRONG, stopping), "--mesh", "tp=2", "--examples", "1")
    assert (status, err) == (INTERRUPTED, "shardproof: interrupted; what was not printed was not judged\n")
    assert "MISMATCH" in out and "not judged: scheme 'stopping': interrupted before it was judged" in out


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("call", ["ctypes.CDLL(None)._exit(0)", "__import__('posix')._exit(0)"])
def test_a_rank_in_the_environment_hides_no_exit(call, monkeypatch):
    """Launchers other than torchrun set RANK too, but a command on lockstep is not one of their ranks."""
    monkeypatch.setenv("RANK", "0")
    status, out, err = verified(written("leaves.py", IMPORTS, declared("leaves", body=call)), "--mesh", "tp=2")
    assert status == RANK_FAILED and "left with exit code 0" in out + err
