"""Verdicts of an earlier command, in the files that this command is to write.

A command's first act, before it imports anything slow, is to write there that it has not come to its end: no signal may
leave a verdict of yesterday. If it ends without writing them, as after a wrong option, they get its status. This file
imports nothing slow.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest

from shardproof.endings.exit_status import BY_SIGNAL

VERBS = ("verify", "replay", "tour", "trace", "train")
OPTIONS = ("--json", "--html", "--junit")
HELP = ("-h", "--help")
NOT_ENDED = "the command has not come to its end"
ENDED = "the command has ended without a verdict, with status {status}; its standard error says why"
_KILLED = BY_SIGNAL + signal.SIGKILL
_STATUS = '"status": {}'
_JSON = (
    f'{{{_STATUS.format(_KILLED)}, "reports": [], "not_run": {{}}, "not_judged": {{"the command": "{NOT_ENDED}"}}, '
    '"not_offered": {}}'
)
_JUNIT = (
    '<testsuite name="shardproof" tests="1" failures="0" errors="1" skipped="0" time="0.000">'
    f'<testcase name="the command"><error message="{NOT_ENDED}" /></testcase></testsuite>'
)
# How an earlier verdict begins, a word that it has, and its replacement. The command itself checks all other files.
_FORMS = {
    "--json": ("{", '"status"', _JSON),
    "--html": ("<!doctype html>", "shardproof", f"<!doctype html><title>shardproof: not judged</title>{NOT_ENDED}"),
    "--junit": ("<testsuite", "shardproof", _JUNIT),
}
_OF_TRAINING = ("[", '"verdict"', _JSON)


def mark(arguments: Sequence[str]) -> list[str]:
    """Write that this command has not ended where it has verdicts to write; returns those files."""
    verb, *rest = arguments or [""]
    if verb not in VERBS or any(word in HELP for word in rest) or _is_other_rank(rest):
        return []
    marked: list[str] = []
    for option, path in _outputs(rest):
        begin, word, text = _OF_TRAINING if (verb, option) == ("train", "--json") else _FORMS[option]
        with suppress(OSError, ValueError):  # told by the command's own checks
            before = _read(path)
            if before.lower().startswith(begin) and word in before and not _is_input(path, rest):
                _write(path, text)
                marked.append(os.path.abspath(path))
    return marked


def settle(files: Sequence[str], status: object) -> None:
    """Write the status of a command that has ended into the files that it has not written."""
    if not status:
        return  # nothing is judged, so nothing is equal
    number = status if isinstance(status, int) else 1
    for path in files:
        with suppress(OSError, ValueError):
            before = _read(path)
            if NOT_ENDED in before:
                text = before.replace(NOT_ENDED, ENDED.format(status=number))
                _write(path, text.replace(_STATUS.format(_KILLED), _STATUS.format(number), 1))


def _outputs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option of a file, with its path."""
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if word == "--":
            return
        option, has_path, path = word.partition("=")
        path = path if has_path else after
        if option in OPTIONS and not path.startswith("-"):
            yield option, path


def _is_input(path: str, words: Sequence[str]) -> bool:
    """Whether another argument names the same file."""
    named = [word.partition("=")[2] if word.startswith("--") else word.partition("::")[0] for word in words]
    return sum(name != "" and os.path.realpath(name) == os.path.realpath(path) for name in named) > 1


def _is_other_rank(words: Sequence[str]) -> bool:
    """Whether rank 0 of a launcher writes the files; many a job's environment has a rank without one."""
    return os.environ.get("RANK", "0") != "0" and any("torchrun" in word for word in words)


def _read(path: str) -> str:
    if not os.path.isfile(path):  # a pipe would be read for ever
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    """In one step, so that the file is never half new."""
    path = os.path.realpath(path)
    beside = f"{path}.{os.getpid()}"
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(f"{text.rstrip()}\n")
        os.chmod(beside, os.stat(path).st_mode & 0o7777)
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            os.unlink(beside)
