"""A signal that asks a command to end costs no verdict: what is judged is printed, and all files are written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parity_tests import warm_python
from parity_tests.slow import slow_but
from parity_tests.specimens.user_files import LOCKSTEP, RIGHT, TIMES_RANKS, written
from shardproof.cli import session
from shardproof.endings.exit_status import BY_SIGNAL, EQUAL, INTERRUPTED, MISMATCH, RANK_FAILED, USAGE
from shardproof.report import summary
from shardproof.report.summary import VerifyOptions

# Tests in the background inherit that these are ignored.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
from shardproof import main
main()
"""
LIMIT_S = 240.0
WAITS = """
def waiting(mesh, x):
    WAITING.touch()
    time.sleep(600)
declare(waiting)
"""
HEAD = "import pathlib, re, signal, time\nWAITING = pathlib.Path('waiting').absolute()\n"
HOLDS_THE_INTERPRETER = WAITS.replace("time.sleep(600)", "re.match('(a+)+$', 'a' * 40 + 'b')")
# Its reference waits once it is asked for a smaller case than the first.
WAITS_FOR_A_SMALLER_CASE = """
first = []
def reference(x):
    first.append(len(x))
    if len(x) != first[0]:
        WAITING.touch()
        time.sleep(600)
    return 2.0 * x
def wrong(mesh, x):
    return x * 2 * mesh.size("tp")
declare(wrong, reference=reference, dims={"b": (8, 4, 2)})
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ended(number, *parts, is_of_all=True, to="out.json"):
    """Output and JSON of a command that gets a signal while a scheme waits, or sends it to itself."""
    Path("out.json").write_text('{"status": 0}')  # of an earlier command
    file = written("schemes.py", *parts, **LOCKSTEP)
    command = [sys.executable, "-c", MAIN, "verify", file, "--mesh", "tp=2", "--examples", "2", "--json", to]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + LIMIT_S
        while not Path("waiting").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if process.poll() is None:
            (os.killpg if is_of_all else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=LIMIT_S)
    sentence = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    last = f"shardproof: {sentence}; what was not printed was not judged\n"
    assert err.endswith(last) and (to == "-" or err == last)
    assert process.returncode == (INTERRUPTED if number == signal.SIGINT else -number)
    record = json.loads(out if to == "-" else Path(to).read_text())
    assert record["status"] == BY_SIGNAL + number
    return out, record


def verdicts(record):
    return {report["scheme"].rpartition(":")[2]: report["verdict"] for report in record["reports"]}


SENT = [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, False)]
# As batch systems send them, to one process or to all, before a job's time is over.
SENT += [(signal.SIGUSR1, False), (signal.SIGUSR1, True), (signal.SIGUSR2, True)]
SENT += [(signal.SIGXCPU, False), (signal.SIGALRM, False), (signal.SIGQUIT, True)]


@pytest.mark.parametrize(("number", "is_of_all"), slow_but([SENT[0], SENT[-1]], SENT))
def test_what_is_judged_is_printed(number, is_of_all):
    out, record = ended(number, HEAD, TIMES_RANKS, WAITS, RIGHT, is_of_all=is_of_all)
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert verdicts(record) == {"wrong": "mismatch"}
    assert record["not_judged"] == {"waiting": f"scheme 'waiting': {how} before it was judged"}
    assert record["not_run"] == {"right": "the command ended before its turn"}
    assert "MISMATCH" in out and out.splitlines()[-1] == "3 schemes, 1 mismatch, 1 not run, 1 not judged."


KILLS_ITSELF = """
def alarmed(mesh, x):
    import os
    if mesh.rank("tp") == 1:
        os.kill(os.getpid(), signal.{name})
        time.sleep(600)
    return 2.0 * x
declare(alarmed)
"""


@pytest.mark.parametrize("name", slow_but(["SIGINT", "SIGXCPU"], ["SIGTERM", "SIGINT", "SIGXCPU", "SIGQUIT"]))
def test_a_signal_of_a_scheme_to_itself_is_its_own_failure(name):
    file = written("schemes.py", HEAD, TIMES_RANKS, KILLS_ITSELF.replace("{name}", name), RIGHT, **LOCKSTEP)
    done = warm_python.run(
        "-m", "shardproof", "verify", file, "--mesh", "tp=2", "--examples", "2", "--json", "out.json"
    )
    assert done.returncode == RANK_FAILED, done
    record = json.loads(Path("out.json").read_text())
    assert verdicts(record) == {"wrong": "mismatch", "alarmed": "died", "right": "equal"}
    assert f"rank 1 was killed by {name}" in done.stdout


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"


@pytest.mark.parametrize(("head", "scheme"), slow_but([(DEAF, WAITS)], [(DEAF, WAITS), ("", HOLDS_THE_INTERPRETER)]))
def test_a_command_that_cannot_print_has_another_do_it(head, scheme):
    """A user's code resets the signal, as scripts that train do, or holds the interpreter."""
    out, record = ended(signal.SIGTERM, HEAD, head, TIMES_RANKS, scheme, RIGHT)
    assert verdicts(record) == {"wrong": "mismatch"}
    assert {*record["not_judged"], *record["not_run"]} == {"waiting", "right"}
    assert "MISMATCH" in out
    if not head:
        assert "it did not end when it was asked to; it was at schemes.py:" in record["not_judged"]["waiting"]


def test_a_failure_that_is_made_smaller_is_printed_as_it_was_found():
    out, record = ended(signal.SIGTERM, HEAD, WAITS_FOR_A_SMALLER_CASE)
    assert verdicts(record) == {"wrong": "mismatch"} and Path(record["reports"][0]["replay"]).is_file()
    assert "not examined further: ended by SIGTERM" in out


def test_before_the_first_scheme_the_files_say_that_nothing_was_judged():
    out, record = ended(signal.SIGINT, HEAD, "WAITING.touch()\ntime.sleep(600)\n", RIGHT)
    assert out == "" and record["reports"] == []


def test_standard_output_has_the_json_alone():
    _, record = ended(signal.SIGTERM, HEAD, TIMES_RANKS, WAITS, to="-")
    assert verdicts(record) == {"wrong": "mismatch"}


def test_files_are_written_also_where_nothing_is_judged():
    out, record = ended(signal.SIGTERM, HEAD, DEAF, WAITS)
    assert out == "" and record["reports"] == []


KILLS = """
def killing(mesh, x):
    import os
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
declare(killing)
"""


def test_no_verdict_of_an_earlier_command_is_left():
    """A file of yesterday would say today that all is equal."""
    files = ("out.json", "out.xml", "out.html")
    command = ("-m", "shardproof", "verify", "schemes.py", "--examples", "1", "--mesh", "tp=2")
    command += ("--json", files[0], "--junit", files[1], "--html", files[2])
    written("schemes.py", HEAD, RIGHT, **LOCKSTEP)
    assert warm_python.run(*command).returncode == EQUAL and all(Path(file).is_file() for file in files)
    written("schemes.py", HEAD, RIGHT, KILLS, **LOCKSTEP)
    assert warm_python.run(*command).returncode == -signal.SIGKILL
    record, suite = json.loads(Path(files[0]).read_text()), ElementTree.parse(files[1]).getroot()
    assert (record["status"], record["reports"]) == (BY_SIGNAL + signal.SIGKILL, [])
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    assert all("the command has not come to its end" in Path(file).read_text() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["replay", "trace"])
def test_no_json_of_an_earlier_command_is_left(verb):
    written("schemes.py", "import os\n" + HEAD, TIMES_RANKS, **LOCKSTEP)
    assert warm_python.run("-m", "shardproof", "verify", "schemes.py", "--examples", "1").returncode == MISMATCH
    [replay] = Path().glob("replay_*.py")
    Path("out.json").write_text('{"status": 0}')
    with Path("schemes.py").open("a") as file:
        file.write("os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n")
    target = replay if verb == "replay" else "schemes.py"
    done = warm_python.run("-m", "shardproof", verb, str(target), "--json", "out.json")
    assert done.returncode == -signal.SIGKILL
    assert json.loads(Path("out.json").read_text())["status"] == BY_SIGNAL + signal.SIGKILL


EDITS_ITSELF = """
def waiting(mesh, x):
    pathlib.Path(__file__).write_text("(")
    WAITING.touch()
    time.sleep(600)
declare(waiting)
"""
HANGS_AGAIN = "if WAITING.exists():\n    time.sleep(600)\n"


AGAIN = [("", EDITS_ITSELF), (HANGS_AGAIN, WAITS)]


@pytest.mark.parametrize(("head", "scheme"), slow_but(AGAIN[:1], AGAIN))
def test_a_file_that_cannot_be_imported_again_costs_no_verdict(head, scheme):
    out, record = ended(signal.SIGTERM, HEAD, DEAF, head, TIMES_RANKS, scheme)
    assert verdicts(record) == {"wrong": "mismatch"} and "MISMATCH" in out


# Both are called by the command, between two schemes and after the last. As a terminal does, they signal all processes.
INTERRUPTS = """
import os
from rich.progress import Progress
def interrupt(*_):
    os.killpg(0, signal.SIGINT)
Progress.advance = Progress.stop = interrupt
"""


def test_an_interrupt_between_two_schemes_and_a_second_one():
    out, record = ended(signal.SIGINT, HEAD, INTERRUPTS, TIMES_RANKS, RIGHT)
    assert verdicts(record) == {"wrong": "mismatch"} and "MISMATCH" in out
    assert {*record["not_judged"], *record["not_run"]} == {"right"}


def test_files_are_written_before_anything_is_printed(monkeypatch):
    """A reader of standard output may take nothing for ever."""
    is_written = []
    monkeypatch.setattr(summary, "show", lambda *_: is_written.append(Path("out.json").exists()))
    options = VerifyOptions(examples=1, json="out.json", fixed={"tp": 1, "b": 2})
    assert session.verify([written("right.py", RIGHT, **LOCKSTEP)], options) == EQUAL
    assert is_written == [True]


EARLIER = {
    "out.json": '{"status": 0, "reports": []}',
    "out.html": "<!DOCTYPE html><title>shardproof</title>equal",
    "out.xml": '<testsuite name="shardproof" tests="1" failures="0" errors="0" />',
}
TO_EARLIER = ("--json", "out.json", "--html=out.html", "--junit", "out.xml")


def with_earlier(*arguments):
    """The process of a command whose files have the verdicts of an earlier one."""
    for file, text in EARLIER.items():
        Path(file).write_text(text)
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_no_earlier_verdict_is_left_by_a_signal_during_the_imports(number):
    with with_earlier("verify", written("schemes.py", RIGHT, **LOCKSTEP), *TO_EARLIER) as process:
        deadline = time.monotonic() + LIMIT_S
        while Path("out.xml").read_text() == EARLIER["out.xml"] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == (INTERRUPTED if number == signal.SIGINT else -number)
    record, suite = json.loads(Path("out.json").read_text()), ElementTree.parse("out.xml").getroot()
    assert record["status"] in (BY_SIGNAL + number, BY_SIGNAL + signal.SIGKILL) and record["not_judged"]
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")


MISTAKES = [("missing.py",), ("schemes.py", "--profile", "none"), ("schemes.py", "--seed", "one")]


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_leaves_its_status_in_every_file(arguments):
    written("schemes.py", RIGHT, **LOCKSTEP)
    with with_earlier("verify", *arguments, *TO_EARLIER) as process:
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == json.loads(Path("out.json").read_text())["status"] == USAGE
    assert all("without a verdict, with status 2" in Path(file).read_text() for file in EARLIER)


def test_help_leaves_the_files_of_an_earlier_command():
    with with_earlier("verify", "--help", *TO_EARLIER) as process:
        process.communicate(timeout=LIMIT_S)
    assert {file: Path(file).read_text() for file in EARLIER} == EARLIER
