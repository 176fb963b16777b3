"""docs/reference/command-line.md, generated from the command: `python -m shardproof.cli.page` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from shardproof.cli.app import app
from shardproof.cli.help import EXAMPLES, STATUS
from shardproof.cli.shapes import SHAPES
from shardproof.places import ROOT

PAGE = ROOT / "docs" / "reference" / "command-line.md"
HEAD = """# The command line

`shardproof VERB --help` prints the same text. `python -m shardproof.cli.page` writes this page, and a test compares it
with the command's options.

| verb | does |
|---|---|
{verbs}

Before a verb: `--version`; `--install-completion` and `--show-completion` for bash, zsh, fish and PowerShell. They
complete verbs, options, names of schemes and schedules, engines, profiles, dtypes, mesh sizes and files.

| exit status | |
|---|---|
{statuses}

With several outcomes the worst status is returned: 70, then 3, then 1, then 2 for a scheme with an unusable reference.

- **Signals.** `verify` ends early on an interrupt, SIGTERM, SIGHUP or SIGQUIT, and on the signals by which a batch
  system announces the end of a job: SIGUSR1, SIGUSR2, SIGXCPU and SIGALRM. It prints the verdicts so far and writes
  its files, with the status 128 + N for signal N. After a signal other than an interrupt, the process ends by the same
  signal: a shell shows 143 for SIGTERM.
- **Code that ends or hangs.** A parent process watches the command. If code exits, crashes, holds the interpreter, or
  waits for two minutes, its own scheme gets no verdict, and the report names the line. The other schemes are judged.
- **torchrun.** The agent exits with 1, and its report shows the command's status. If a rank dies, the verdicts before
  its death are printed.
- **A full disk.** The files are lost; the verdicts are printed.
- **Output.** Verdicts and tables go to standard output; progress bars, and one sentence for an error, to standard
  error. Bars and colours appear on terminals only; `NO_COLOR=1` turns colours off there too. Long lines are
  broken on a terminal, and in a pipe if `COLUMNS` is set, such as `COLUMNS=80`.
- **A verdict at each save.** `verify FILE --watch` keeps a process that has imported torch and JAX. When you save the
  file, or a file that it imports outside of installed packages, a fork of this process verifies the schemes, the last
  failures first, and ends. So nothing of an earlier version remains in memory. A failing case is printed at once, in
  one line; its cause and the smallest case follow. After a failed import it waits for the next save. Ctrl-C ends the
  watch, with the status of the last verdict, or with 130 during a verdict.
- **Less and more output.** `-q` prints only failures and the closing line, `-v` prints more. Not every verb has them.
- **JSON.** `--json PATH` writes a file that ends in `.json`, besides what is printed. `--json -`, or `--json` at the
  end or before another option, puts the JSON on standard output, and all else on standard error. Keys are never
  removed; new ones may be added. A number that is not finite is text: `"inf"`.
- **Files.** `--figure PATH` is a picture, `--html PATH` a page, `--junit PATH` JUnit XML, `--csv PATH` a schedule, and
  `--out PATH` the file that the verb writes. One of the text files may be `-` for standard output. A path that cannot
  be written is rejected before anything runs.
- **Examples.** `my_scheme.py` is the file of [Verify your own scheme](../how-to/verify-your-own-scheme.md),
  `my_function.py` is in [Start from a function](../how-to/start-from-a-function.md), `my_pair.py` in
  [two modules](../how-to/use-flax-and-modules.md#where-two-modules-first-differ), and `my_sharded.py` in
  [Trace a sharded model](../how-to/trace-a-sharded-model.md).
"""


def page() -> str:
    """The text of the page."""
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    rows = "\n".join(f"| [`{name}`](#{name}) | {_sentence(verb.help)} |" for name, verb in verbs.items())
    statuses = "\n".join(f"| {status} | {what} |" for status, what in STATUS.items())
    return HEAD.format(verbs=rows, statuses=statuses) + "".join(_section(name, verb) for name, verb in verbs.items())


def _section(name: str, verb: Any) -> str:
    commands = "\n".join(f"$ {line}" for line in EXAMPLES[name])
    lines = [f"\n## {name}\n\n{_sentence(verb.help)}.\n\n```console\n{commands}\n```\n"]
    lines += ["| argument or option | meaning |", "|---|---|", *_rows(verb)]
    if name != "verify" and SHAPES.get(name) == SHAPES["verify"]:
        lines += ["\nIts JSON is the same as for [verify](#verify)."]
    elif name in SHAPES:
        lines += [f"\nIts JSON:\n\n```text\n{SHAPES[name].strip()}\n```"]
    return "\n".join(lines) + "\n"


def _rows(verb: Any) -> Iterator[str]:
    """A row for each argument and option, with its default if that is informative."""
    for each in verb.params:
        if each.param_type_name == "argument":
            syntax = f"`{each.name.upper()}{'...' if each.nargs == -1 else ''}`"
        else:
            flags = sorted(each.opts, key=lambda flag: (len(flag) > 2, flag))
            syntax = ", ".join(f"`{flag}`" for flag in flags) + ("" if each.is_flag else f" `{_metavar(each)}`")
        default = each.default
        default_text = f"; default `{default}`" if default not in (None, "", ()) and default is not False else ""
        yield f"| {syntax} | {_sentence(each.help)}{default_text} |"


def _metavar(option: Any) -> str:
    return option.metavar or {"int": "N", "float": "X"}.get(_kind(option), "NAME")


def _kind(option: Any) -> str:
    """int, float or str, for options of typer and of click."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None) or option.type.name
    words = getattr(annotation, "__name__", str(annotation))
    return "int" if "int" in words else "float" if "float" in words else "str"


def _sentence(text: str | None) -> str:
    """One line without its full stop, with table borders escaped."""
    return " ".join((text or "").split()).removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written", file=sys.stderr)
