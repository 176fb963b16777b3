"""The tools that build the pages: docstrings as sentences, package sizes, evidence in short; no browser is no pass."""

import importlib.util
import re
import sys
from importlib.metadata import distribution

import pytest

from parity_tests.pages import ROOT


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


docstring_layout = loaded("docstring_layout")
evidence = loaded("evidence")
in_a_browser = loaded("in_a_browser")
installed_sizes = loaded("installed_sizes")

DOCSTRING = """The sum of `x` over a_group, as `all_reduce` has it.

    x "a b/tp"  ->  "a b"

y[i] = sum_j x[j]

- one thing, which goes on
  here
- another

Cost:   1 all_reduce of
        a * b numbers.
    ring        n - 1 messages, and
                one more.
    gather      1 all_gather.
Errors: ValueError if x is empty."""


def test_a_docstring_is_sentences_boxes_and_fields():
    assert docstring_layout.as_rst(DOCSTRING.splitlines(), {"x"}) == [
        "\\The sum of ``x``\\  over a\\_group, as :py:obj:`all_reduce`\\  has it.",
        "",
        ".. code-block:: text",
        "",
        '   x "a b/tp"  ->  "a b"',
        "",
        ".. code-block:: text",
        "",
        "   y[i] = sum_j x[j]",
        "",
        "- \\one thing, which goes on here",
        "- \\another",
        "",
        ":Cost:",
        "   \\1 all\\_reduce of a \\* b numbers.",
        "",
        "   - ``ring``: \\n - 1 messages, and one more.",
        "   - ``gather``: \\1 all\\_gather.",
        "",
        "",
        ":Errors:",
        "   \\ValueError if x is empty.",
        "",
        "",
    ]


@pytest.mark.parametrize(
    "drawing",
    [
        ["    A0            [A0, A1]", "       A1     =>  [A0, A1]"],
        ["log p[t] = y[t] - lse,   lse = log sum_v exp(y_v)"],
        ["d z = (g_lp (1[v=t] - p)) / temperature"],
        ["student   log softmax over its logits, or else over", "          its k logits at the ids"],
    ],
)
def test_a_drawing_keeps_its_layout(drawing):
    first, blank, *lines = docstring_layout.as_rst(drawing)
    assert (first, blank) == (".. code-block:: text", "")
    assert [line.strip() for line in lines if line] == [line.strip() for line in drawing]


@pytest.mark.slow
def test_a_sentence_that_defines_a_letter_is_no_formula():
    assert docstring_layout.as_rst(["The l = s/cp positions of a rank", "d = 2 of them"]) == [
        "\\The l = s/cp positions of a rank d = 2 of them",
        "",
    ]


def test_the_size_of_an_installation_counts_its_requirements():
    production, absent = installed_sizes.closure("")
    verified, _ = installed_sizes.closure("verify")
    assert {"torch", "numpy", "jaxtyping"} <= production and not absent
    assert "jax" not in production and {"jax", "hypothesis", "rich"} <= verified
    files = distribution("jaxtyping").files
    assert installed_sizes.size_of("jaxtyping") == sum(file.locate().stat().st_size for file in files)
    assert installed_sizes.table().count("\n") == 1 + len(installed_sizes.EXTRAS)


def test_the_page_on_installation_has_the_sizes_without_a_build():
    page = installed_sizes.PAGE.read_text()
    rows = re.findall(r"^\| (`.*?`) \| (.*) \| \d+ \| [\d.]+ [MG]B \|$", page, re.MULTILINE)
    assert rows == [
        (f"`'.[{extras}]'`" if extras else "`.`", installed_sizes.PURPOSE[extras]) for extras in installed_sizes.EXTRAS
    ]
    versions = r"with Python [\d.]+,\ntorch \d[\w.+]+, jax [\d.]+\."
    assert re.search(rf"`make sizes` wrote this table on \d{{4}}-\d\d-\d\d {versions}", page)
    assert "torch" in re.search(r"The largest packages of .*", page)[0]
    assert "{code-cell}" not in page


@pytest.mark.slow
def test_sizes_are_written_anew_and_the_rest_of_the_page_stays():
    page = installed_sizes.PAGE.read_text()
    fresh = installed_sizes.with_section(page)
    before, _, after = page.partition(installed_sizes.HEADING)
    assert fresh.startswith(before + installed_sizes.HEADING)
    assert fresh.endswith(after[after.index("\n## ") :])
    assert installed_sizes.table() in fresh and fresh.count(installed_sizes.HEADING) == 1


def test_without_a_browser_the_pages_are_not_run(monkeypatch, capsys):
    monkeypatch.setattr(in_a_browser.shutil, "which", lambda name: None)
    assert in_a_browser.main() == 4
    assert "NOT RUN" in capsys.readouterr().out


def test_a_browser_without_pages_is_no_pass(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(in_a_browser.shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(in_a_browser, "BUILT", tmp_path)
    assert in_a_browser.main() == 1
    assert "not built" in capsys.readouterr().out


def test_a_measurement_that_sees_nothing_is_a_problem():
    view = {"page": in_a_browser.PLANTED, "width": 400, "problems": []}
    unseen = in_a_browser.of_row(view, "dark")
    assert len(unseen) == len(in_a_browser.DEFECTS)
    view["problems"] = [[kind, "something"] for kind in in_a_browser.DEFECTS]
    assert in_a_browser.of_row(view, "dark") == []
    view["page"] = "index.html"
    assert f"index.html 400 dark: {view['problems'][0][0]}: something" in in_a_browser.of_row(view, "dark")


def test_the_evidence_in_short_matches_the_pages():
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    outcomes = [row.outcome for row in evidence.rows()]
    assert outcomes.count("kept") == benchmarks.count(" | kept |\n") > 0
    assert outcomes.count("missed") == benchmarks.count(" | **missed** |\n")
    assert outcomes.count("not judged") == benchmarks.count(" | not judged |\n") > 0
    assert outcomes.count("no promise") == benchmarks.count(" | - |\n")
    last = evidence.counts().splitlines()[-1].split(" | ")[1:]
    assert [int(cell.strip(" |")) for cell in last] == [outcomes.count(name) for name in evidence.OUTCOMES]
    assert evidence.missed().count("\n") == 1 + outcomes.count("missed") + outcomes.count("not judged")
    injected = (ROOT / "docs" / "injected-bugs.md").read_text()
    shown = evidence.injected().splitlines()
    assert shown[0] in injected.splitlines()
    assert f"- {injected.count('- survived: ')} survived" in evidence.injected()
    for of_page, page in ((evidence.mutants(), "mutants"), (evidence.false_alarms(), "false-alarms")):
        figures = [line for line in of_page.splitlines() if line.startswith("- ")]
        assert len(figures) > 1 and set(figures) <= set((ROOT / "docs" / f"{page}.md").read_text().splitlines())
    assert evidence.located() in (ROOT / "docs" / "located.md").read_text()
    assert evidence.measured_on() in benchmarks
