"""`shardproof verify FILE --watch`: a verdict at each save.

One process stays. It imports torch, JAX and this package, and no file of the user. At each save it forks. The fork
imports the file, prints the verdict and ends, so that the next one starts without anything of this version: no module,
no cache, no memory. The process itself uses neither torch nor JAX, because their first use starts threads, which a fork
does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from shardproof.cli import session
from shardproof.declare import discover
from shardproof.declare.case import SPARE
from shardproof.endings.exit_status import INTERRUPTED
from shardproof.engines.collector import freeze_heap
from shardproof.engines.processes import forks
from shardproof.engines.processes.rank_warnings import not_shown
from shardproof.engines.supervised import AFRESH, OUTDATED, supervised_in_turn
from shardproof.places import ROOT, SHARDPROOF
from shardproof.report.guard import guarded
from shardproof.report.report import IN_A_LARGER_WORLD, Report
from shardproof.report.sentence import Sentence
from shardproof.report.summary import Outcome, VerifyOptions

POLL_S = 0.04  # a save is noticed within it, and taken once the file has not changed for as long
PATIENCE_S = 10.0  # after which a verdict ends if its file has been saved meanwhile; a failure that is told ends it
MOST_NAMED = 3  # of the files that a target imports
IDLE_POLLS = 25  # until it counts as idle, and between two looks at this project's own files
# What every verdict needs; further modules of these packages are imported once a verdict has needed them. None starts
# a thread when it is imported.
NEEDED = (
    "jax.numpy",
    "shardproof.declaration",
    "shardproof.engines.lockstep.lockstep",
    "shardproof.experiments.smallest",
    "shardproof.second_opinion",
    "torch.fx.experimental.symbolic_shapes",
)
WARM = ("flax", "jax", "jaxlib", "mpmath", "numpy", "optax", "shardproof", "sympy", "torch", "transformers")
INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

Look = tuple[int, int, int] | None  # of a file: time of its last change, bytes, inode; None where there is none


@dataclass(frozen=True)
class Verdict:
    """What a fork tells: its status, and what it has learned about the schemes and their files."""

    status: int
    failed: tuple[str, ...] = ()  # keys of schemes
    files: tuple[str, ...] = ()  # of the user, imported for the verdict
    modules: tuple[str, ...] = ()  # of packages in WARM, likewise


def watch(targets: list[str], options: VerifyOptions) -> int:
    """Print the verdict now and after each save until Ctrl-C; returns the status of the last verdict.

    Errors: ValueError for options that a watch cannot keep.
    """
    _check(targets, options)
    _import(NEEDED)
    paths = [os.path.realpath(target.partition("::")[0]) for target in targets]
    own = Saves(_files_of_this_package)
    console = Console(stderr="-" in options.files.values())
    verdict = Verdict(INTERRUPTED)
    saved_ns = time.time_ns()
    try:
        while True:
            saves = Saves(partial(_files, paths, verdict.files))
            console.clear()  # on a terminal only
            freeze_heap()
            begun_ns = time.time_ns()
            before, verdict = verdict, replace(verdict, status=INTERRUPTED)
            verdict = _verdict(targets, options, before, saves)
            seconds = (time.time_ns() - saved_ns) / 1e9
            saves.add(verdict.files, unless_saved_since_ns=begun_ns)
            clock = "" if console.is_terminal else time.strftime("%H:%M:%S  ")  # a terminal shows one verdict at a time
            if verdict.status == OUTDATED:
                verdict = replace(verdict, status=INTERRUPTED)
                console.print(f"{clock}Ended after {seconds:.0f} s: a file has been saved meanwhile.", highlight=False)
            elif not options.quiet:
                console.print(Sentence(f"{clock}{seconds:.1f} s. {_waiting(targets, verdict)}"), soft_wrap=True)
            _import(verdict.modules)
            changed = next_saves(saves, own, when_idle=forks.start_ahead_of_forks)
            if changed is None:
                return AFRESH
            saved_ns = max([begun_ns, *(at.st_mtime_ns for file in changed if (at := _stat(file)) is not None)])
            _forget_bytecode(changed)
    except KeyboardInterrupt:
        _ignore_interrupts()
        return verdict.status


def _check(targets: list[str], options: VerifyOptions) -> None:
    if not targets:
        raise ValueError("--watch needs a target; give the file that you are working on")
    if options.engine == "torchrun":
        raise ValueError("--watch does not go with --engine torchrun, whose ranks end with the verdict; leave one out")
    if not sys.platform.startswith("linux"):
        raise ValueError("--watch needs Linux, where a process that has imported torch can be forked; leave it out")


def _verdict(targets: list[str], options: VerifyOptions, before: Verdict, saves: Saves) -> Verdict:
    """Verify in a fork. After an error, as in the syntax of a file, what was known before is still known."""
    with tempfile.TemporaryFile("w+") as told:
        is_outdated = partial(_is_outdated, saves, told, time.monotonic() + PATIENCE_S)
        status = supervised_in_turn(partial(_judge, targets, options, before, told), is_outdated)
        told.seek(0)
        try:
            news = json.loads(told.read())
        except ValueError:  # the fork has died before it told anything
            return replace(before, status=status, modules=())
    if news["failed"] is None:
        return replace(before, status=status, files=tuple({*before.files, *news["files"]}), modules=())
    return Verdict(status, *(tuple(news[name]) for name in ("failed", "files", "modules")))


def _is_outdated(saves: Saves, told: IO[str], patience_ends: float) -> bool:
    """Whether nobody waits for the rest: the file has been saved since, and the verdict takes long or is a failure."""
    is_over = time.monotonic() > patience_ends or os.fstat(told.fileno()).st_size > 0
    return is_over and saves.are_there


def _judge(targets: list[str], options: VerifyOptions, before: Verdict, told: IO[str]) -> int:
    """In the fork: print the verdict, and tell what the next one needs."""
    imported, outcomes = set(sys.modules), list[Outcome]()
    fails = id if options.quiet else partial(_tell_failure, told)

    def verify() -> int:
        try:
            return session.verify(targets, options, before.failed, fails=fails, judged=outcomes.append)
        except KeyboardInterrupt:
            _ignore_interrupts()
            return INTERRUPTED  # the process that stays says so

    try:
        return guarded(verify)
    finally:
        modules = [module for name, module in list(sys.modules.items()) if name not in imported]
        files = {file for module in modules if (file := _file_of(module)) and not _is_installed(file)}
        if not outcomes:  # a file could not be imported; the mistake may be in a file that it imports
            files |= {str(file) for target in targets for file in _beside(Path(target.partition("::")[0]))}
        news = {
            "failed": [key for outcome in outcomes for key in outcome.failed] if outcomes else None,
            "files": sorted(map(os.path.realpath, files)),
            "modules": [module.__name__ for module in modules if _is_warm(module)],
        }
        json.dump(news, told)
        told.flush()


def _tell_failure(told: IO[str], report: Report) -> None:
    """Print the first failing case at once: its cause and a smaller case take longer than the verdict."""
    print(file=told, flush=True)
    wrong = [tensor.label for tensor in report.tensors if not tensor.ok]
    verdict = f"{report.verdict} in {', '.join(wrong)}" if wrong and report.failure is None else report.verdict
    lines = [f"{report.scheme.rpartition(':')[2]}: {verdict} at {report.case_text}; looking for its cause"]
    if report.failure is not None:
        lines += [f"  {line}" for line in str(report.failure).splitlines()]
    if SPARE in report.case.mesh:
        lines.append(f"  {IN_A_LARGER_WORLD}")
    Console().print(Sentence("\n".join(lines)), soft_wrap=True)
    sys.stdout.flush()


def _ignore_interrupts() -> None:
    """A second one is the same, passed on by a parent that was interrupted too."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _beside(path: Path) -> list[Path]:
    return [file for file in path.parent.glob("*.py") if not _is_replay(file)]


def _is_replay(file: Path) -> bool:
    """Whether a verdict may have written it."""
    return file.name.startswith("replay_")


def _waiting(targets: list[str], verdict: Verdict) -> str:
    """The sentence that names the targets, and the first other files of the working folder that a save may be of."""
    given = [Path(target.partition("::")[0]).resolve() for target in targets]
    here = Path.cwd()
    files = [file for file in map(Path, verdict.files) if not any(file.is_relative_to(path) for path in given)]
    named = sorted(str(file.relative_to(here)) for file in files if file.is_relative_to(here))
    more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return f"Waiting for a save of {' or '.join([*targets, *named[:MOST_NAMED], *more])}; Ctrl-C ends."


class Saves:
    """Files, and how each looked when it was last looked at. `find` names the files, each time anew."""

    def __init__(self, find: Callable[[], Iterable[str]]) -> None:
        self._find = find
        self._seen = self._looks()

    def add(self, files: Iterable[str], unless_saved_since_ns: int) -> None:
        """Further files; one that was saved since then counts as changed: an earlier version may have been read."""
        for file in set(files) - self._seen.keys():
            look = _look(file)
            self._seen[file] = None if look is not None and look[0] >= unless_saved_since_ns else look

    def changed(self) -> list[str]:
        """Files that have changed, come or gone since the last call."""
        before, self._seen = self._seen, self._now()
        return [file for file, look in self._seen.items() if look != before.get(file)]

    @property
    def are_there(self) -> bool:
        """Whether `changed` would name a file."""
        return self._now() != self._seen

    def _now(self) -> dict[str, Look]:
        return self._looks() | {file: _look(file) for file in self._seen}

    def _looks(self) -> dict[str, Look]:
        return {file: _look(file) for file in self._find()}


def next_saves(saves: Saves, own: Saves, when_idle: Callable[[], object]) -> list[str] | None:
    """Wait for saves: the files, once none has changed for a moment; None if it is a file of this package.

    `when_idle` is called once, if no save comes at once.
    """
    polls, changed = 0, list[str]()
    while True:
        news = saves.changed()
        if changed and not news:
            return changed
        changed += news
        if polls % IDLE_POLLS == 0 and own.changed():
            return None
        if polls == IDLE_POLLS:
            when_idle()
        polls += 1
        time.sleep(POLL_S)


def _look(file: str) -> Look:
    at = _stat(file)
    return None if at is None else (at.st_mtime_ns, at.st_size, at.st_ino)


def _stat(file: str) -> os.stat_result | None:
    try:
        return os.stat(file)
    except OSError:
        return None


def _files(paths: Sequence[str], imported: Iterable[str]) -> Iterator[str]:
    """The files to look at: those given, those below the folders given, and those imported for the last verdict."""
    yield from imported
    for path in paths:
        if os.path.isdir(path):
            yield from (str(file) for file in discover.python_files(Path(path)) if not _is_replay(file))
        else:
            yield path


def _files_of_this_package() -> list[str]:
    """Files of this project that this process has imported: somebody may be editing a clone of it."""
    files = (_file_of(module) for module in list(sys.modules.values()))
    return [file for file in files if file and Path(file).is_relative_to(ROOT) and not _is_installed(file)]


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _is_installed(file: str) -> bool:
    return not INSTALLED.isdisjoint(Path(file).parts) or Path(file).is_relative_to(STANDARD_LIBRARY)


def _is_warm(module: Any) -> bool:
    """Whether a module is to be imported before the next fork; a user's own folder may hide a package."""
    file, name = _file_of(module), module.__name__.partition(".")[0]
    return file is not None and name in WARM and (_is_installed(file) or Path(file).is_relative_to(SHARDPROOF))


def _import(names: Iterable[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception), not_shown():  # created by its package, or not importable alone
                importlib.import_module(name)


def _forget_bytecode(files: Iterable[str]) -> None:
    """Remove what Python has compiled of these files: it takes two saves in a second for one if their sizes agree."""
    for file in files:
        with contextlib.suppress(OSError, NotImplementedError):
            os.unlink(cache_from_source(file))
