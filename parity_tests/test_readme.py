"""The README's scheme, its two reports, its commands and its links are true."""

import inspect
import json
import pydoc
import re
import runpy
from pathlib import Path

import pytest

from parity_tests.pages import IMAGE
from parity_tests.pages import blocks as blocks_of_page
from parity_tests.specimens.documented_console import replaced, run_as_shown, shape

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [block.text for block in blocks_of_page("README.md") if block.language == language]


def test_the_scheme_and_its_reports(tmp_path):
    (source, _), (difference,), (right, wrong) = blocks("python"), blocks("diff"), blocks("console")
    file = tmp_path / "my_logprob.py"
    file.write_text(source)
    _, printed, documented = run_as_shown(right, tmp_path)
    assert printed == documented
    file.write_text(replaced(source, difference))
    _, printed, documented = run_as_shown(wrong, tmp_path)
    assert printed == documented


@pytest.mark.slow
def test_the_landing_page_shows_the_verdict_of_its_scheme(tmp_path):
    source, difference, wrong = (
        block.text for block in blocks_of_page("docs/index.md") if block.language in ("python", "diff", "console")
    )
    (tmp_path / "row_parallel.py").write_text(replaced(source, difference))
    _, printed, documented = run_as_shown(wrong, tmp_path)
    of_types = [line for line in printed if line.startswith("  types: ")]  # with the extra types only
    assert [line for line in printed if line not in of_types] == documented


def test_a_row_is_distinguished_from_a_sentence():
    assert shape("  equal     out  6.5e-08  2.4e-07  0.27  (0,1) float32\n") == ["out equal"]
    assert shape("  MISMATCH  d/d x  6.5e-08  2.4e-09  27    (0,1)") == ["  MISMATCH d/d x 6.5e-08 2.4e-09 27 (0,1)"]
    assert shape("    out: off by 2\nreplay: replay_00ff00ff.py") == ["    out: off by 2", "replay: replay_#.py"]


def test_its_commands_are_targets():
    (commands,) = blocks("sh")
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", commands, re.MULTILINE)
    assert targets == ["verify", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_its_help_on_a_function_names_the_parameters_of_the_example():
    (name,) = re.findall(r"`python -c 'help\(\"([\w.]+)\"\)'`", README)
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "my_functions.py"))[name.rpartition(".")[2]]
    keywords = set(inspect.getfullargspec(example).kwonlyargs)
    assert keywords and all(f" {keyword}:" in pydoc.render_doc(name) for keyword in keywords)


LINKS = re.findall(r"\]\(([^)#]+)\)", README) + IMAGE.findall(README)


@pytest.mark.parametrize("link", sorted(set(LINKS)))
def test_its_links_lead_somewhere(link):
    assert (ROOT / link).exists()


# Measurements: the table is the benchmarks' page in short, with two digits of each time.

OF_THE_PAGE = {
    "`vocab_parallel_logprob`": "ours",
    "the same, gradient in place": "ours, gradient in place",
    "Megatron-core, overwrites the logits": "megatron-core",
    "DTensor `loss_parallel`": "DTensor loss_parallel",
    "logits gathered, then one device's lines": "logits gathered, then whole",
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


def measured(dtype: str) -> dict[str, str]:
    """The last run's figures of each arm."""
    sections = json.loads((ROOT / "docs" / "benchmarks.json").read_text())["sections"]
    figures = [figure for section in sections for figure in section["figures"]]
    start = f"logprob, {dtype}: "
    return {each["name"].removeprefix(start): each["measured"] for each in figures if each["name"].startswith(start)}


@pytest.mark.parametrize("name", OF_THE_PAGE)
def test_the_page_states_the_measurements(name):
    (row,) = [cells(line) for line in README.splitlines() if line.startswith(f"| {name} |")]
    _, collectives, sent, memory, time, error = row
    summary, in_bfloat16 = (measured(dtype)[OF_THE_PAGE[name]] for dtype in ("float32", "bfloat16"))
    assert f"; {collectives}, {sent} bytes per rank;" in summary
    digits = len(memory.partition(".")[2])
    assert f"{float(re.search(r'memory ([^;]+);', summary)[1]):.{digits}f}" == memory
    assert f"error {error} budgets;" in in_bfloat16
    ratio = re.search(r"; ([\d.]+) \([\d.]+ to [\d.]+\) times ours", summary)
    assert f"{float(ratio[1]) if ratio else 1:.2g}" == time


LANDING = (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize(
    ("page", "figures", "sentence"),
    [
        ("injected-bugs.md", r"^- (\d+ of \d+) \(.* caught within", "{} [injected bugs]"),
        ("injected-bugs.md", r"^- (\d+) of \d+ .* by a test of one shape", "one shape on two ranks catches {} |"),
        ("false-alarms.md", r"^- (\d+) false alarms", "{} [false alarms]"),
        ("false-alarms.md", r"^- \d+ false alarms in (\d+) examples", "in {} examples |"),
        ("../README.md", r"^\| Megatron-core.* \| ([\d.]+) \| [\d.]+ \|$", "Megatron-core takes {} times our CPU time"),
        ("../README.md", r"^\| DTensor.* \| ([\d.]+) \| [\d.]+ \|$", "DTensor {} times ("),
    ],
)
def test_the_landing_page_states_the_figures_of_other_pages(page, figures, sentence):
    (figure,) = re.findall(figures, (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert sentence.format(figure) in LANDING


def test_the_landing_page_counts_the_findings():
    numbers = re.findall(r"^### (\d+)\. ", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)
    assert f"| {numbers[-1]} [findings]" in LANDING
