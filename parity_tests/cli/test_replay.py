"""Replay files: written on a failure, run alone in a fresh process with the same row and the same status."""

import errno
import importlib
import json
import os
import pickle
import resource
import sys
from pathlib import Path

import pytest

from parity_tests import warm_python
from shardproof import check, replays, scheme, values
from shardproof.cli import listing
from shardproof.declare.discover import TABLE, UnusableTarget, schemes_of_file
from shardproof.declare.travel import dumps
from shardproof.endings.exit_status import MISMATCH, RANK_FAILED, USAGE
from shardproof.replays import write_replay
from shardproof.report.guard import guarded
from shardproof.report.report import ValueMismatch

SOURCE = """
from shardproof import scheme, values

def reference(x):
    return 2.0 * x

@scheme(reference=reference, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")})
def twice(mesh, x):
    return x * FACTOR
"""

LOCKSTEP = SOURCE.replace("draw=", 'engines=("lockstep",), draw=')  # its failures start no processes of gloo

SUMMED = """
import torch.distributed as dist
from shardproof import scheme, values

@scheme(reference=lambda x: x.sum(0), mesh={"tp": (1, 2)}, inputs={"x": "b/tp d"}, outputs="d tp=I", nograd=("x",),
        draw={"x": values("normal")})
def summed(mesh, x):
    total = x.sum(0)
    dist.all_reduce(total, dist.ReduceOp.AVG, group=mesh["tp"])
    return total
"""
REMEDY = "shardproof verify --replay-dir DIR writes it elsewhere"


def declared(factor="(2.0 * mesh.size('tp'))", file="twice.py", source=LOCKSTEP):
    """The path of a file with a scheme of that factor, and the scheme."""
    path = Path(file).resolve()
    path.write_text(source.replace("FACTOR", factor))
    [scheme] = schemes_of_file(str(path))
    return path, scheme


def forget(scheme):
    """As a process that has not seen the scheme."""
    del TABLE[scheme.key]
    sys.modules.pop(scheme.fn.__module__)


def status_of(file, engine=None):
    return guarded(lambda: listing.replay_file(str(file), engine, 1))


def rows(text):
    """The lines of a report about a tensor."""
    return [line for line in text.splitlines() if line.startswith(("  out ", "  d/d "))]


def alone(file, *arguments):
    """A replay file in a process of its own: status, report."""
    run = warm_python.run(file, *arguments)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.slow
def test_a_replay_file_runs_alone():
    path, scheme = declared()
    report = scheme.verify(tp=2, b=4)
    assert not report.ok and Path(report.replay) == Path(f"replay_{report.case.id}.py")
    text = Path(report.replay).read_text()
    assert text.startswith('"""twice: mismatch\n')
    assert str(report).splitlines()[2] in text and "torch " in text and "jax " in text
    assert f"SOURCE = {str(path)!r}" in text
    last = str(report).splitlines()[-1]  # the case and the command, on one line of 80 columns or on two
    assert last.endswith(f"replay: python {report.replay}") and (len(last) <= 80 or last.startswith("replay: "))
    status, output, complaint = alone(report.replay, "--repeat", "2")
    assert (status, complaint) == (1, "")
    assert rows(output) == 2 * rows(str(report))


EDITS = {
    "mesh": ({"tp": 2, "dp": 2}, "the case has mesh axes dp; scheme 'twice' has tp"),
    "dims": ({"c": 8}, "the case has dims c; scheme 'twice' has b"),
    "options": ({"scale": 2.0}, "the case has options scale; scheme 'twice' has none"),
    "layouts": ({"b/dp": {}}, "the case has layouts b/dp; scheme 'twice' has b/tp"),
    "values": ({"x": {"kind": "strange"}}, "kind 'strange' of 'x' is not one of normal, zeros, "),
    "conditions": ({"upside_down": True}, "the case has conditions upside_down; scheme 'twice' has strided, "),
}


def test_a_case_that_is_none_of_the_scheme_is_rejected(capsys):
    _, scheme = declared()
    report = scheme.verify(tp=2, examples=1)
    path, right = Path(report.replay), Path(report.replay).read_text()
    for part, (edited, sentence) in EDITS.items():
        path.write_text(right.replace(repr(report.case.json), repr(report.case.replace(**{part: edited}).json)))
        assert (part, status_of(path)) == (part, USAGE)
        assert f"shardproof: replay: {sentence}" in capsys.readouterr().err


def test_a_case_without_numbers_is_no_verdict(capsys):
    _, scheme = declared()
    report = scheme.verify(tp=2, b=2, examples=1)
    file, path = Path(report.replay).read_text(), Path("replay_empty.py")
    path.write_text(file.replace(repr(report.case.json), repr(report.case.replace(dims={"b": 0}).json)))
    assert status_of(path) == USAGE
    assert "every output is empty at tp=2 b=0 " in capsys.readouterr().err


NO_CASES = {
    "half of one": ("{", "Expecting property name"),
    "of another kind": ('{"scheme": 5, "mesh": {"tp": 2}}', "case: scheme is 5; it is a text"),
    "nested": ("[" * 100_000, "case: is nested too deep"),
}


@pytest.mark.parametrize("text", NO_CASES)
def test_a_case_that_is_none_is_rejected_on_each_route_by_the_name_of_its_file(text, capsys, monkeypatch):
    monkeypatch.setattr(replays, "supervised", lambda call: call())
    case, sentence = NO_CASES[text]
    Path("replay_mine.py").write_text(f"CASE = {case!r}\nSOURCE = 'mine.py'\n")
    assert replays.replay(case, "mine.py", "replay_mine.py", []) == status_of("replay_mine.py") == USAGE
    assert capsys.readouterr().err.count(f"shardproof: replay_mine.py: CASE cannot be read: {sentence}") == 2


def test_a_replay_lists_dims_as_declared():
    _, scheme = declared(file="swapped.py", source=LOCKSTEP.replace("b/tp", "s/tp b"))
    report = scheme.verify(tp=2, examples=1)
    [rerun] = listing.reruns(scheme, listing._recorded(report.replay)[0], None, 1)
    assert list(rerun.case.dims) == list(report.case.dims) == ["s", "b"]


def notes(text):
    """The notes under the rows of a report, with line breaks removed."""
    table, _, _ = text.partition("\n  protocol")
    return table.split("\n", 1)[1].split()


@pytest.mark.slow
def test_a_replay_prints_the_notes_of_the_failure():
    """Notes of a larger case, and none that other cases refute: the smallest case alone fits several."""
    Path("summed.py").write_text(SUMMED)
    [scheme] = schemes_of_file("summed.py")
    report = scheme.verify()
    assert "rests on a single element" not in str(report)
    status, again, _ = alone(report.replay)
    assert (status, notes(again)) == (1, notes(str(report)))


def test_a_mended_scheme_passes_its_replay():
    path, scheme = declared(file="mended.py")
    report = scheme.verify(tp=2, b=4)
    forget(scheme)
    path.write_text(SOURCE.replace("FACTOR", "2.0"))
    assert status_of(report.replay) == 0


def test_a_file_that_cannot_be_written_is_reported_and_leaves_nothing():
    """As on a full disk: the first bytes of a file are taken, the rest is not."""
    _, scheme = declared(file="unsaved.py")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        report = scheme.verify(tp=2, b=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert report.verdict == "mismatch" and report.replay is None
    file = f"replay_{report.case.id}.py"
    assert report.replay_error == f"{file}: {os.strerror(errno.EFBIG)}; {REMEDY}"
    assert list(Path().glob("replay_*")) == []


def test_a_folder_that_may_not_be_written_has_a_remedy(monkeypatch):
    """By a path that is refused: whoever is root may write in each folder."""
    _, scheme = declared(file="elsewhere.py")

    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "write_text", refused)
    report = scheme.verify(tp=2, b=4)
    assert f"Permission denied; {REMEDY}" in " ".join(str(report).split())


def test_no_file_is_written_where_all_is_equal():
    _, scheme = declared("2.0", "right.py")
    assert scheme.verify(tp=2, b=4).replay is None
    assert list(Path().glob("replay_*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("file", ["<ipython-input-3-0a1b2c>", "/var/ipykernel_31/4231.py"])
def test_a_notebook_function_is_pickled(file):
    """The cell's namespace is `__main__`, as a kernel's is, and nothing of it can be imported again."""
    cell = SOURCE.replace("FACTOR", "(SHIFT + 1.0 * mesh.rank('tp'))")
    space = {"__name__": "__main__", "SHIFT": 2.0}
    exec(compile(cell, file, "exec"), space)
    report = space["twice"].verify(tp=2, b=4)
    pickle = Path(report.replay).with_suffix(".pkl")
    assert pickle.is_file()
    text = Path(report.replay).read_text()
    assert f"its pickle is {pickle.name}, beside this file. Reading a pickle runs code:" in text
    assert listing.replay_file(report.replay, None, 1) == MISMATCH
    if file.startswith("<"):
        status, output, complaint = alone(report.replay, "--engine", "gloo")
        assert (status, complaint) == (1, "")
        assert rows(output) == rows(str(report))
    pickle.unlink()
    with pytest.raises(ValueError, match=rf"{pickle.name} is missing; it holds the function of this replay"):
        listing.replay_file(report.replay, None, 1)
    del TABLE["__main__:twice"]


DAMAGES = {
    "is cut off": (lambda scheme: dumps(scheme)[:100], "cannot be read ("),
    "is another pickle": (lambda scheme: pickle.dumps([1, 2]), "holds a list, but the case is of 'twice'"),
    "raises": (lambda scheme: b"cbuiltins\nint\n(S'two'\ntR.", "cannot be read (ValueError: invalid literal"),
}


def test_a_pickle_that_is_damaged_is_one_sentence(capsys):
    _, scheme = declared(file="pickled.py")
    for content, sentence in DAMAGES.values():
        Path("replay_mine.pkl").write_bytes(content(scheme))
        Path("replay_mine.py").write_text(f"CASE = {scheme.case(tp=2, b=4).json!r}\nSOURCE = 'replay_mine.pkl'\n")
        assert status_of("replay_mine.py") == USAGE
        assert f"shardproof: replay: replay_mine.pkl {sentence}" in capsys.readouterr().err


@pytest.mark.slow
def test_replays_are_deterministic():
    _, scheme = declared(file="again.py")
    first, second = (scheme.verify(tp=2, b=4, seed=3) for _ in range(2))
    assert first.replay == second.replay
    assert [tensor.ratio for tensor in first.tensors] == [tensor.ratio for tensor in second.tensors]
    assert str(first) == str(second)


def test_check_leaves_only_the_last_replay_file():
    @scheme(
        reference=lambda x: x * 2.0, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("ones")}
    )
    def tripled(mesh, x):
        return x * 3

    for b in (8, 4, 2):
        with pytest.raises(ValueMismatch) as caught:
            check(tripled.case(b=b))
    [left] = Path().glob("replay_*")
    assert f"replay: python {left.name}" in str(caught.value)
    assert json.loads(listing._recorded(str(left))[0].json)["dims"] == {"b": 2}


@pytest.mark.slow
def test_a_run_replaces_only_its_own_schemes_replay():
    """Renamed replays, and those for another file or scheme, stay."""
    _, scheme = declared(file="first.py")
    _, same_name = declared(file="second.py")
    renamed = Path(scheme.verify(tp=2, b=4).replay).rename("replay_keep.py")
    others = {Path(same_name.verify(tp=2, b=4).replay), renamed, Path("replay_0123abcd.py")}
    Path("replay_0123abcd.py").write_text("CASE = '{}'\n")
    reports = [scheme.verify(tp=2, b=b) for b in (8, 2, 4)]
    replays = [Path(report.replay) for report in reports]
    assert len(set(replays)) == 3
    assert str(reports[-1]).endswith(f"replay: python {replays[-1]} (in place of {replays[-2]})")
    assert set(Path().glob("replay_*.py")) == {replays[-1], *others}


@pytest.mark.slow
def test_a_replay_of_an_earlier_process_stays(monkeypatch):
    _, scheme = declared(file="earlier.py")
    report = scheme.verify(tp=2, b=4)
    monkeypatch.setattr(replays, "written", {})  # as in a new process
    again, other = write_replay(scheme, report), scheme.verify(tp=2, b=2)
    assert again == (report.replay, [])  # the same case is the same file
    assert other.replaced_replays == (report.replay,)  # which is this process's now
    monkeypatch.setattr(replays, "written", {})
    assert scheme.verify(tp=2, b=8).replaced_replays == ()
    assert Path(other.replay).exists()


def test_a_file_of_its_name_that_is_no_such_replay_stays(monkeypatch):
    _, scheme = declared(file="edited.py")
    report = scheme.verify(tp=2, b=4)
    file = Path(report.replay)
    edited = file.read_text() + "print('my own line')\n"
    file.write_text(edited)
    numbered = file.with_stem(f"{file.stem}_2")
    assert write_replay(scheme, report) == (str(numbered), [])
    numbered.unlink()
    numbered.symlink_to("nowhere")
    third, _ = write_replay(scheme, report)
    assert Path(third).stem == f"{file.stem}_3" and not Path("nowhere").exists()
    assert file.read_text() == edited
    assert status_of(third) == MISMATCH


@pytest.mark.slow
def test_a_file_that_is_imported_and_read_by_its_path_has_one_replay(monkeypatch):
    path, scheme = declared()
    first = Path(scheme.verify(tp=2, b=4).replay)
    forget(scheme)
    monkeypatch.syspath_prepend(path.parent)
    imported = importlib.import_module("twice").twice
    assert imported.key != scheme.key
    second = Path(imported.verify(tp=2, b=8).replay)
    assert second != first and list(Path().glob("replay_*.py")) == [second]
    forget(imported)


@pytest.mark.slow
def test_a_replay_that_was_moved_together_with_its_file():
    path, scheme = declared()
    file = Path(scheme.verify(tp=2, b=4).replay)
    forget(scheme)
    Path("elsewhere").mkdir()
    path.rename(Path("elsewhere") / path.name)
    moved = file.rename(Path("elsewhere") / file.name)
    assert status_of(moved) == MISMATCH


def test_a_report_full_of_quotes_is_still_a_file():
    path, scheme = declared("(1 / 0)", file="quotes.py")
    report = scheme.verify(tp=2, b=2)
    object.__setattr__(report, "notes", {})
    object.__setattr__(report.failure, "args", ('say """no""" \\ to \\n it\'s',))
    file, _ = write_replay(scheme, report)
    case, recorded = listing._recorded(file)
    assert (case, recorded.file) == (report.case, str(path))
    compile(Path(file).read_text(), file, "exec")


def test_statuses(capsys):
    _, scheme = declared("(1 / 0)", file="raises.py", source=SOURCE)
    report = scheme.verify(tp=2, b=2)
    assert status_of(report.replay) == 3
    assert status_of(report.replay, "nccl") == 4
    assert capsys.readouterr().err == "shardproof: not run: nccl needs a GPU, none is here\n"
    assert status_of(report.replay, "mpi") == 2
    assert status_of("nothing.py") == 2
    assert capsys.readouterr().err == (
        "shardproof: scheme 'twice': is declared for lockstep, gloo, nccl, torchrun only, not mpi\n"
        "shardproof: cannot read nothing.py: No such file or directory\n"
    )


def test_the_help_of_a_replay_says_what_its_options_do(capsys):
    with pytest.raises(SystemExit, match="0"):
        replays.replay("{}", "", "replay_975d73c9.py", ["--help"])
    options = [line.split(None, 2) for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert [name for name, *_ in options] == ["--engine", "--repeat"] and all(len(each) == 3 for each in options)


def test_a_file_that_is_no_replay():
    Path("other.py").write_text("CASE = 1\n")
    with pytest.raises(UnusableTarget) as caught:
        listing.replay_file("other.py", None, 1)
    assert str(caught.value) == "other.py is not a replay file: CASE or SOURCE is missing"


def test_a_scheme_that_is_gone(capsys):
    path, scheme = declared(file="gone.py")
    report = scheme.verify(tp=2, b=2)
    forget(scheme)
    path.write_text(SOURCE.replace("FACTOR", "2.0").replace("twice", "renamed"))
    assert status_of(report.replay) == 2
    assert capsys.readouterr().err == f"shardproof: replay: {path} no longer declares scheme 'twice'\n"
    path.unlink()
    assert status_of(report.replay) == 2
    assert capsys.readouterr().err == f"shardproof: {path}: no such file\n"


def test_an_import_that_ends_the_process_is_no_scheme_that_is_gone():
    path, scheme = declared(file="dies.py")
    report = scheme.verify(tp=2, b=2)
    path.write_text(f"import os, signal\nos.kill(os.getpid(), signal.SIGBUS)\n{SOURCE}")
    status, _, complaint = alone(report.replay)
    assert status == RANK_FAILED
    assert f"cannot import {path}: the process of the command was killed by SIGBUS" in complaint
