"""Findings in peers: a sample in torch's own losses, which needs no further package; the tables, scripts and page."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from parity_tests.evidence.injected_bugs.first_notes import FALSE, NOTHING, TRUE, truth
from parity_tests.evidence.injected_bugs.injected_bug import KINDS
from parity_tests.evidence.peers import first_notes
from parity_tests.evidence.peers.contracts import CONTRACTS, RIGHT
from parity_tests.evidence.peers.findings import FINDINGS, PROJECTS, expected
from parity_tests.evidence.peers.outcome import FOLDER, Outcome, identifier, outcome
from parity_tests.evidence.peers.page import contents, text
from shardproof.declare.discover import scheme_of_file, schemes_of_file
from shardproof.engines.ledger import base
from shardproof.experiments.edited_lines import OR_CALLED
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.verification import verify

ROOT = FOLDER.parents[2]
PAGE = ROOT / "docs" / "findings.md"
LOSSES = FOLDER / "torch" / "losses.py"
MODULES = {"megatron_core": "megatron"}  # folders with another name than their module
LONGEST_SCRIPT = 32  # lines


def files(folder: str) -> list[Path]:
    return [file for file in sorted((FOLDER / folder).glob("*.py")) if "scheme(" in file.read_text()]


def installed() -> list[str]:
    return [folder for folder in PROJECTS if importlib.util.find_spec(MODULES.get(folder, folder)) is not None]


def judged(name: str, engine: str = "lockstep") -> Outcome:
    return outcome(scheme_of_file(str(LOSSES), name), LOSSES, engine, examples=4)


@pytest.mark.slow
def test_a_finding_is_seen_where_it_is_expected():
    found = judged("mse_loss_mean_even")
    assert (found.verdict, found.wrong) == ("mismatch", ("d/d x",)) and found.is_expected
    assert found.smallest.startswith("dp=2 n=2 c=1")


@pytest.mark.slow
def test_the_first_note_of_a_finding_is_true():
    name = "mse_loss_mean_even"
    ((scheme, finding),) = (each for each in first_notes.findings_of(LOSSES) if each[0].name == name)
    note = first_notes.first_note(scheme)
    assert note is not None and truth(finding.kind, note) == TRUE and truth("order", note) == FALSE


def test_a_note_on_a_project_is_true_only_on_the_wrong_lines():
    (finding,) = (finding for finding in FINDINGS if finding.script == "torch_scan")
    notes = [
        f"{RIGHT_ONCE}{line} leaves out `f(x)`" for line in (base(finding.lines[0]), "functional.py:8", "scans.py:26")
    ]
    said = [first_notes.truth_for(finding, note) for note in (*notes, notes[-1] + OR_CALLED)]
    assert said == [TRUE, FALSE, FALSE, NOTHING]


def test_every_line_of_a_finding_in_torch_exists():
    lines = [line.split(":") for each in FINDINGS if each.project == "torch" for line in each.lines]
    installed_in = Path(importlib.util.find_spec("torch").origin).parents[1]
    assert [file for file, number in lines if len((installed_in / file).read_text().splitlines()) < int(number)] == []


def test_every_finding_has_the_kind_of_an_injected_bug():
    assert [finding for finding in FINDINGS if finding.kind not in KINDS] == []


@pytest.mark.slow
def test_right_functions_are_right():
    assert [judged(name).verdict for name in ("l1_loss_mean_even", "poisson_nll_loss_mean_uneven")] == [RIGHT] * 2


@pytest.mark.slow
def test_a_verdict_on_a_dtensors_backward_leaves_no_thread_dead(tmp_path):
    """Repairing a line hands DTensors to collectives, and unfinished ones are waited for."""
    report = verify(scheme_of_file(str(LOSSES), "mse_loss_mean_even"), examples=20, replay_folder=str(tmp_path))
    assert report.verdict == "mismatch"


def test_gloo_agrees():
    assert judged("mse_loss_mean_even", "gloo").is_expected


@pytest.mark.filterwarnings("ignore")  # warnings of a peer's import are not ours
@pytest.mark.parametrize("folder", installed())
def test_every_entry_names_schemes_that_exist(folder):
    names = [identifier(file, scheme.name) for file in files(folder) for scheme in schemes_of_file(str(file))]
    seen = {id(expected(name)) for name in names}
    of_folder = [entry for entry in (*FINDINGS, *CONTRACTS) if entry.schemes[0].startswith(f"{folder}/")]
    assert [entry for entry in of_folder if id(entry) not in seen] == []


def test_every_entry_is_of_a_file_that_exists():
    globs = [glob for entry in (*FINDINGS, *CONTRACTS) for glob in entry.schemes]
    assert [glob for glob in globs if not (FOLDER / glob.partition("::")[0]).with_suffix(".py").exists()] == []
    assert expected("torch/losses::l1_loss_mean_even") is None


def imports(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        name.split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }


def test_a_script_is_short_and_plain():
    scripts = {path.stem: path for path in (FOLDER / "scripts").glob("*.py")}
    assert set(scripts) == {finding.script for finding in FINDINGS}
    for path in scripts.values():
        assert len(path.read_text().splitlines()) <= LONGEST_SCRIPT, path
        assert not imports(path) & {"shardproof", "parity_tests", "torch_impl", "jax_ref", "jax"}, path


def test_the_page_shows_every_finding_with_its_script_and_what_it_printed():
    page = PAGE.read_text()
    assert f"\n\n{contents()}\n\n### 1. " in page
    for number, finding in enumerate(FINDINGS, 1):
        section = page.partition(f"### {number}. {finding.title}\n")[2].partition("\n### ")[0]
        assert finding.what in section and f"scripts/{finding.script}.py" in section
        assert re.search(r"```text\n\S", section), finding.title


def test_the_page_has_300_schemes_of_twelve_projects():
    counts = re.findall(r"^### (\S+) \S+: (\d+) of (\d+)$", PAGE.read_text(), re.MULTILINE)
    assert {project for project, _, _ in counts} == set(PROJECTS.values()) and len(counts) >= 12
    assert sum(int(every) for _, _, every in counts) >= 300


def test_a_page_names_what_is_wrong_and_what_is_right():
    name = "torch/losses::mse_loss_mean_even"
    outcomes = [
        Outcome(name, "lockstep", "mismatch", "mismatch", "dp=2 n=2 c=1 float32", ("d/d x",)),
        Outcome("torch/losses::l1_loss_mean_even", "lockstep", RIGHT, RIGHT),
        Outcome("torch/losses::l1_loss_mean_even", "gloo", "stalled", RIGHT),
        Outcome("torch/losses::kl_div_mean_even", "gloo", RIGHT, RIGHT),
    ]
    page = text(outcomes, dict.fromkeys(PROJECTS, "1.0"), {finding.script: "printed" for finding in FINDINGS})
    assert "`dp=2 n=2 c=1 float32` of `mse_loss_mean_even`, wrong in `d/d x`" in page
    assert "### torch 1.0: 1 of 3\n\nOn lockstep and gloo:\n\n- losses: `kl_div_mean_even`\n" in page
