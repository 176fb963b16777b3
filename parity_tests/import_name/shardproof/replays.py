"""Replay files: one failing case that runs by itself on any engine, without Hypothesis."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.declare.case import ENGINES, CaseSpec
from shardproof.declare.discover import TABLE, declaring_file
from shardproof.draw import recorded
from shardproof.draw.size_choices import free_dims
from shardproof.endings.exit_status import EQUAL, MISMATCH, RANK_FAILED, NotJudged
from shardproof.endings.raised import first_line_of, pass_interrupt
from shardproof.engines.supervised import supervised
from shardproof.report.guard import guarded, own_output
from shardproof.report.out_path import naming
from shardproof.report.sentence import print_report

if TYPE_CHECKING:
    from shardproof.declare.declared import Declared
    from shardproof.report.report import Report

TEMPLATE = '''"""{verdict}

{report}

torch {torch}, jax {jax}, Python {python}
Run: python {name} [--engine gloo] [--repeat N]{pickle_note}
"""

from shardproof import replay

CASE = {case!r}
SOURCE = {source!r}
{implementation}
if __name__ == "__main__":
    raise SystemExit(replay(CASE, SOURCE, __file__{further}))
'''
CODE = '"""\n\nfrom shardproof import replay\n'  # the code after the report
IMPLEMENTATION = "IMPLEMENTATION = {!r}  # the scheme calls its functions in place of torch_impl's\n"
PICKLE_NOTE = """
The function was defined in a notebook; its pickle is {pickle}, beside this file. Reading a pickle runs code:
open it only if you trust its source."""


# The last replay that this process wrote, and its text, by folder, scheme, file and implementation.
written: dict[tuple[str, ...], tuple[Path, str]] = {}


def write_replay(scheme: Declared, report: Report, folder: str = ".") -> tuple[str, list[str]]:
    """Write `replay_<id>.py` for a failed report into a folder, creating it: (its path, the older files it replaces).

    It replaces the replay that this process wrote for another case of the scheme, unless that was renamed or edited.
    Any other file stays. A file of the same name is overwritten if it has the same case; else the name gets a number.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    pickled = None
    if not Path(scheme.file).is_file() or "ipykernel" in scheme.file:
        from shardproof.declare.travel import dumps

        pickled = dumps(scheme)
    names = (f"replay_{report.case.id}{number}.py" for number in chain(("",), map("_{}".format, count(2))))
    paths = (Path(folder) / name for name in names)
    files = ((path, _text(scheme, report, path, is_pickled=pickled is not None)) for path in paths)
    path, text = next((path, text) for path, text in files if _is_free(path, text, pickled))
    if pickled is not None:
        with naming(path.with_suffix(".pkl")):
            path.with_suffix(".pkl").write_bytes(pickled)
    try:
        with naming(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        path.unlink(missing_ok=True)  # a full disk keeps only the first part
        raise
    # The key has the declaring file, whether imported by name or read by path. A pickle's name depends on the case.
    declaration = (report.case.scheme, "") if pickled is not None else (scheme.name, declaring_file(scheme))
    target = scheme.implementation.target if scheme.implementation else ""
    key = (str(Path(folder).resolve()), *declaration, target)
    replaced = _remove(*written[key]) if key in written and written[key][0] != path else []
    written[key] = (path, path.read_text(encoding="utf-8"))
    return str(path), replaced


def _text(scheme: Declared, report: Report, path: Path, *, is_pickled: bool) -> str:
    import jax
    import torch

    pickle = f"{path.stem}.pkl"
    return TEMPLATE.format(
        verdict=f"{scheme.name}: {report.verdict}",
        report=str(report).replace("\\", "\\\\").replace('"""', "'''"),
        torch=torch.__version__,
        jax=jax.__version__,
        python=sys.version.split()[0],
        name=path.name,
        pickle_note=PICKLE_NOTE.format(pickle=pickle) if is_pickled else "",
        case=report.case.json,
        source=pickle if is_pickled else declaring_file(scheme),
        implementation=IMPLEMENTATION.format(scheme.implementation.target) if scheme.implementation else "",
        further=", implementation=IMPLEMENTATION" if scheme.implementation else "",
    )


def _is_free(path: Path, text: str, pickled: bytes | None) -> bool:
    """Whether a path is unused, or its file differs from this text only in the report."""
    beside = path.with_suffix(".pkl")
    if pickled is not None and os.path.lexists(beside) and not (beside.is_file() and beside.read_bytes() == pickled):
        return False
    if not path.is_file():
        return not os.path.lexists(path)
    return path.read_text(encoding="utf-8", errors="replace").partition(CODE)[2] == text.partition(CODE)[2]


def _remove(path: Path, text: str) -> list[str]:
    """Remove a replay and its pickle if nobody has edited it since `text` was written; returns the names removed."""
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        return []
    for suffix in (".py", ".pkl"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    return [path.name]


def constants_of(file: str | Path) -> dict[str, str]:
    """The string constants of a file, which is parsed but not run.

    Errors: OSError, SyntaxError, UnicodeDecodeError; ValueError for a pipe or a device, which may never end.
    """
    if Path(file).exists() and not Path(file).is_file() and not Path(file).is_dir():
        raise ValueError(f"{file}: is a pipe or a device; give a replay file")
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(Path(file).read_text(encoding="utf-8"), str(file)).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def case_of(text: str, file: str) -> CaseSpec:
    """The case of a replay file, from its JSON. Errors: ValueError, which names the file."""
    try:
        return CaseSpec.from_json(text)
    except ValueError as error:
        raise ValueError(f"{file}: CASE cannot be read: {error}") from None


def load_scheme(case: CaseSpec, source: str, replay_path: str, implementation: str | None = None) -> Declared:
    """The scheme of a replay, from its pickle or its declaring file, on its implementation."""
    scheme = _declared(case, source, replay_path)
    if implementation is None:
        return scheme
    from shardproof.implementation.substitution import NotOffered, on_implementation

    try:
        return on_implementation(scheme, implementation)
    except NotOffered as reason:
        raise ValueError(f"replay: scheme {scheme.name!r} is not offered any more: {reason}") from None


def _declared(case: CaseSpec, source: str, replay_path: str) -> Declared:
    from shardproof.declare.discover import declarations_of_file
    from shardproof.declare.failed_declaration import FailedDeclaration, FailedImport

    name = case.scheme.rpartition(":")[2]
    if source.endswith(".pkl"):
        return _unpickled(Path(replay_path).parent / source, name)
    if case.scheme in TABLE:
        return TABLE[case.scheme]
    beside = Path(replay_path).parent / Path(source).name
    if not Path(source).is_file() and beside.is_file():  # both files were moved, or sent to somebody
        source = str(beside)
    declarations = declarations_of_file(source)
    for candidate in declarations:
        if candidate.name == name and not isinstance(candidate, FailedImport):
            if isinstance(candidate, FailedDeclaration):
                raise ValueError(candidate.sentence)
            return candidate
    for candidate in declarations:
        if isinstance(candidate, FailedImport):  # its import exits, or has ended an earlier process
            raise NotJudged(candidate.sentence, candidate.status)
    raise ValueError(f"replay: {source} no longer declares scheme {name!r}")


def _unpickled(file: Path, name: str) -> Declared:
    """The scheme of this name in a file beside its replay. Errors: ValueError for a file that is gone or damaged."""
    import pickle

    from shardproof.declare.declared import Declared

    if not file.is_file():
        raise ValueError(f"replay: {file} is missing; it holds the function of this replay; put it beside the replay")
    try:
        scheme = pickle.loads(file.read_bytes())
    except BaseException as error:
        pass_interrupt(error)
        cause = f"{type(error).__name__}: {first_line_of(error)}"
        raise ValueError(
            f"replay: {file} cannot be read ({cause}); verify the scheme again to write another"
        ) from error
    if not isinstance(scheme, Declared) or scheme.name != name:
        held = f"scheme {scheme.name!r}" if isinstance(scheme, Declared) else f"a {type(scheme).__name__}"
        raise ValueError(f"replay: {file} holds {held}, but the case is of {name!r}; put back this replay's own pickle")
    return scheme


def _arguments(arguments: Sequence[str]) -> tuple[str | None, int]:
    """The options of a replay file that is run by hand: --engine NAME, --repeat N."""
    parser = argparse.ArgumentParser(description="Run one recorded case again.")
    engines = "lockstep, gloo, nccl or torchrun; default: the recorded engine"
    parser.add_argument("--engine", choices=ENGINES, metavar="NAME", help=engines)
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="number of runs; default: 1")
    parsed = parser.parse_args(arguments)
    return parsed.engine, max(parsed.repeat, 1)


def replay(
    case_json: str,
    source: str,
    file: str,
    arguments: Sequence[str] | None = None,
    implementation: str | None = None,
) -> int:
    """Run one recorded case and print its report; returns the exit status.

    The status is 0 if all is equal, 1 for a mismatch or an undecided case, 2 if it cannot be run, 3 if a rank failed, 4
    if this machine lacks a requirement of the engine.
    """
    engine, repeat = _arguments(sys.argv[1:] if arguments is None else arguments)
    return supervised(
        lambda: guarded(lambda: rerun(case_of(case_json, file), source, file, engine, repeat, implementation))
    )


def rerun(
    case: CaseSpec, source: str, file: str, engine: str | None, repeat: int, implementation: str | None = None
) -> int:
    """Verify a recorded case `repeat` times and print each report; returns the worst status."""
    status = EQUAL
    with own_output():
        scheme = load_scheme(case, source, file, implementation)
    for report in reruns(scheme, case, engine, repeat):
        print_report(report, sys.stdout)
        status = max(status, RANK_FAILED if report.failure is not None else EQUAL if report.ok else MISMATCH)
    return status


def reruns(scheme: Declared, case: CaseSpec, engine: str | None, repeat: int) -> Iterator[Report]:
    """The reports of a recorded case, verified `repeat` times; notes are tested on other cases."""
    from shardproof.compared import check_not_empty
    from shardproof.experiments.notes import check_notes
    from shardproof.experiments.special_values import name_values_to_avoid
    from shardproof.experiments.undecided import verify_or_undecided

    recorded.check(scheme, case)
    # A record sorts dims by name; a report lists them in the order of the declaration.
    declared = [*(name for name in free_dims(scheme) if name in case.dims), *case.dims]
    case = case.replace(dims={name: case.dims[name] for name in declared})
    chosen = engine or case.engine
    if chosen not in scheme.engines:
        raise ValueError(f"scheme '{scheme.name}': is declared for {', '.join(scheme.engines)} only, not {chosen}")
    for _ in range(repeat):
        with own_output():
            report = verify_or_undecided(scheme, case.replace(engine=chosen))
            if report.ok:
                check_not_empty(scheme, [report])
            else:
                report = check_notes(scheme, name_values_to_avoid(scheme, report))
        yield report
