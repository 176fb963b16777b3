"""What was promised and what was measured, in short: read from the pages that the measuring programs write."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """A figure of docs/benchmarks.json; `outcome` is one of OUTCOMES."""

    section: str
    name: str
    promised: str
    measured: str
    outcome: str


OUTCOMES = ("kept", "missed", "not judged", "no promise")


def benchmarks() -> dict[str, Any]:
    """The last run of the benchmarks."""
    return json.loads((DOCS / "benchmarks.json").read_text())


def rows() -> list[Row]:
    """Every figure of the benchmarks, in order."""
    return [
        Row(section["title"], figure["name"], figure["promised"], figure["measured"], _outcome(figure))
        for section in benchmarks()["sections"]
        for figure in section["figures"]
    ]


def _outcome(figure: dict[str, Any]) -> str:
    open_outcome = "no promise" if figure["promised"] == "-" else "not judged"
    return {True: "kept", False: "missed", None: open_outcome}[figure["is_met"]]


def counts() -> str:
    """A Markdown table: of each section how many promises were kept, missed, not judged."""
    figures = rows()
    sections = dict.fromkeys(row.section for row in figures)
    lines = [f"| | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for section in (*sections, ""):
        of_section = [row.outcome for row in figures if section in ("", row.section)]
        name = section or "**all**"
        lines.append(f"| {name} | {' | '.join(str(of_section.count(outcome)) for outcome in OUTCOMES)} |")
    return "\n".join(lines)


def missed() -> str:
    """A Markdown table of the promises that were missed, and of those that could not be judged."""
    lines = ["| figure | promised | measured |", "|---|---|---|"]
    lines += [
        f"| {row.name} | {row.promised} | {row.measured} |" for row in rows() if row.outcome in ("missed", "not judged")
    ]
    return "\n".join(lines)


def measured_on() -> str:
    """When and where the benchmarks ran."""
    return benchmarks()["on"]


def injected() -> str:
    """What the run of all injected bugs says of itself, as a list; its date; how many survivors nobody explains."""
    text = (DOCS / "injected-bugs.md").read_text()
    shares = re.findall(r"^- \d+ of \d+ .*$", text, re.MULTILINE)
    (stamp,) = re.findall(r"^Written by `make bugs` on (.*)\.$", text, re.MULTILINE)
    survivors = re.findall(r"^- survived: (.*)$", text, re.MULTILINE)
    unexplained = sum("NOT EXPLAINED" in survivor for survivor in survivors)
    last = f"- {len(survivors)} survived, of which {unexplained} without an explanation."
    return "\n".join([*shares, last, "", f"Run on {stamp}."])


def mutants() -> str:
    """What the run of sampled mutants says of itself, as a list, and its date."""
    text = (DOCS / "mutants.md").read_text()
    shares = re.findall(r"^- \d+ of \d+ .*$", text, re.MULTILINE)
    (stamp,) = re.findall(r"^Written by `make mutants` on (\S*) ", text, re.MULTILINE)
    return "\n".join([*shares, "", f"Run on {stamp}."])


def false_alarms() -> str:
    """What the run of right code says of itself, as a list, and its date."""
    text = (DOCS / "false-alarms.md").read_text()
    figures = re.findall(r"^- \d+ .*\.$", text, re.MULTILINE)
    (stamp,) = re.findall(r"^Written by `make alarms` on (\S*) ", text, re.MULTILINE)
    return "\n".join([*figures, "", f"Run on {stamp}."])


def located() -> str:
    """What the run of located bugs says of itself."""
    (sentence,) = re.findall(r"^\d+ bugs: .*$", (DOCS / "located.md").read_text(), re.MULTILINE)
    return sentence
