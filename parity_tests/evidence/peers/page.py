"""docs/findings.md: each defect with the scheme that shows it, then the right functions, by project and version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from parity_tests.evidence.page import anchor, bullets, joined, markdown_table, written_by
from parity_tests.evidence.peers.contracts import CONTRACTS, RIGHT
from parity_tests.evidence.peers.findings import FINDINGS, PROJECTS, Finding, expected
from parity_tests.evidence.peers.outcome import Outcome

INTRODUCTION = """# Findings in other projects

Functions of other projects, each called as its user calls it, judged by `shardproof verify` against a reference that is
written from the mathematics. Corrections are welcome: if a scheme does not call a function as its manual says, the
mistake is ours.

Every script below runs without Shardproof, on the versions named. Under it are the lines that it printed. Lines that
begin with a rank are sorted, and the library's log is left out.
"""


def text(outcomes: Sequence[Outcome], versions: Mapping[str, str], printed: Mapping[str, str]) -> str:
    """The page. `versions` are by folder, `printed` is the output of each script."""
    return joined(
        INTRODUCTION,
        written_by("make peers"),
        "## Results that differ from the mathematics",
        contents(),
        *(_finding(number, each, outcomes, versions, printed) for number, each in enumerate(FINDINGS, 1)),
        "## Calls that a function does not take",
        bullets(f"{each.project}: {each.what}." for each in CONTRACTS),
        "## What is right",
        "Every drawn case within its budget: values, gradients, and the ranks' agreement, on each engine that a "
        "project was judged on.",
        *(_right(folder, outcomes, version) for folder, version in versions.items()),
    )


def contents() -> str:
    """A row for each finding, with its project and a link to its section."""
    headings = [f"{number}. {each.title}" for number, each in enumerate(FINDINGS, 1)]
    rows = [(f"[{text}](#{anchor(text)})", each.project) for text, each in zip(headings, FINDINGS, strict=True)]
    return markdown_table(("finding", "project"), rows)


def _finding(
    number: int,
    finding: Finding,
    outcomes: Iterable[Outcome],
    versions: Mapping[str, str],
    printed: Mapping[str, str],
) -> str:
    example_outcomes = [
        each for each in outcomes if expected(each.scheme) is finding and each.verdict == finding.verdict
    ]
    smallest = min(
        (each for each in example_outcomes if each.smallest), key=lambda each: len(each.smallest), default=None
    )
    case = "" if smallest is None else f"`{smallest.smallest}` of `{smallest.name}`"
    if smallest is not None and smallest.wrong:
        case += f", wrong in {', '.join(f'`{label}`' for label in smallest.wrong)}"
    rows = [
        ("version", f"{finding.project} {versions[finding.folder]}; {finding.since}"),
        ("where", ", ".join(f"`{line}`" for line in finding.lines)),
        ("smallest case", case),
        ("until it is mended", finding.meanwhile),
        ("in a sentence", finding.says),
        ("issue", finding.issue or "none is known to us"),
        ("script", f"the one below, by `torchrun --nproc-per-node {finding.ranks}` and its path"),
    ]
    table = markdown_table(("", ""), [row for row in rows if row[1]])
    script = f"```{{literalinclude}} ../parity_tests/evidence/peers/scripts/{finding.script}.py\n:language: python\n```"
    output = f"```text\n{printed[finding.script]}\n```"
    return joined(f"### {number}. {finding.title}", finding.what, table, script, output)


def _right(folder: str, outcomes: Iterable[Outcome], version: str) -> str:
    """The schemes of a project that are equal on every engine it was judged on, file by file."""
    verdicts: dict[str, set[str]] = {}
    engines: dict[str, None] = {}
    for each in outcomes:
        if each.scheme.startswith(f"{folder}/"):
            verdicts.setdefault(each.scheme, set()).add(each.verdict)
            engines[each.engine] = None
    right = [scheme for scheme, verdict_set in verdicts.items() if verdict_set == {RIGHT}]
    by_file: dict[str, list[str]] = {}
    for scheme in right:
        file, _, name = scheme.partition("::")
        by_file.setdefault(file.partition("/")[2], []).append(f"`{name}`")
    lines = bullets(f"{file}: {', '.join(names)}" for file, names in by_file.items())
    heading = f"### {PROJECTS[folder]} {version}: {len(right)} of {len(verdicts)}"
    return joined(heading, f"On {' and '.join(engines)}:", lines)
