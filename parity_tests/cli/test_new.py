"""shardproof new: the file passes ruff, names the missing parts, and verifies once the reference is written."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Annotated

import pytest
import torch

from parity_tests import warm_python
from parity_tests.pages import ROOT, blocks
from shardproof.cli.inferred import from_annotations

EXAMPLE = ROOT / "docs" / "examples" / "my_function.py"
OUT = "scheme_scaled_logits.py"
RAISES = '    raise NotImplementedError("write the reference of scaled_logits")'

ANNOTATED = """
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def scaled_logits(
    mesh, hidden: Float[Tensor, "b d tp=R"], weight: Annotated[DTensor, "d v", Shard(1)], *, device_mesh, tp_group, k=2
) -> Float[Tensor, "b v/tp"]:
    assert device_mesh is mesh.device_mesh and tp_group.size() == mesh.size("tp")
    return k * hidden @ weight.to_local()
"""
PLAIN = """
import torch


def scaled_logits(table, ids):
    return table[ids]


def inputs(mesh):
    return torch.randn(5, 3), torch.tensor([[4, 0]])


def too_few(mesh):
    return (torch.randn(5, 3),)


def nothing(group):
    return group
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Copy the example to the test's own working folder, and forget the module that an earlier test imported."""
    monkeypatch.delitem(sys.modules, "my_function", raising=False)
    shutil.copy(EXAMPLE, "my_function.py")


def fill_and_verify(reference):
    """Write the reference; the output of verify in a process that has imported no other my_function.py."""
    text = Path(OUT).read_text()
    assert text.count(RAISES) == 1
    Path(OUT).write_text(text.replace(RAISES, f"    return {reference}"))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'parity_tests' / 'import_name'}"}
    done = warm_python.run("-m", "shardproof", "verify", OUT, "--examples", "4", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ruff_complaints():
    """ruff's complaints about the file, with the default line length and more than the default rules."""
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    programs = (["check", "--select", "E,F,I,UP,B,SIM,RUF"], ["format", "--check"])
    commands = [[ruff, *program, "--isolated", OUT] for program in programs]
    done = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
    return [each.stdout for each in done if each.returncode]


@pytest.mark.slow
def test_the_example_is_written_as_the_page_shows_and_verifies_once_it_is_filled(shardproof):
    status, out, err = shardproof("new", "my_function.py::scaled_logits", "--inputs", "inputs", "--mesh", "tp=2")
    assert (status, err) == (0, "")
    assert out == f"{OUT}: write the reference; then shardproof verify {OUT}\n"
    (shown,) = (b.text for b in blocks("docs/how-to/start-from-a-function.md") if b.language == "text")
    assert Path(OUT).read_text().endswith(shown) and ruff_complaints() == []
    status, _, err = shardproof("verify", OUT)
    assert status == 2 and "raised NotImplementedError at scheme_scaled_logits.py:" in err
    assert err.endswith("write the reference of scaled_logits\n")
    assert "1 scheme, 0 mismatches, 0 not run." in fill_and_verify("2.0 * hidden @ weight")


@pytest.mark.slow
def test_annotations_are_read(shardproof):
    Path("my_function.py").write_text(ANNOTATED)
    status, out, _ = shardproof("new", "my_function.py::scaled_logits")
    assert (status, out) == (0, f"{OUT}: write the reference; then shardproof verify {OUT}\n")
    text = Path(OUT).read_text()
    assert '"hidden": "b d tp=R",' in text and '"weight": "d v/tp",' in text and 'outputs="b v/tp",' in text
    assert "(mesh, hidden, weight, device_mesh=mesh.device_mesh, tp_group=mesh[mesh.axes[0]])" in text
    assert "1 scheme, 0 mismatches, 0 not run." in fill_and_verify("2.0 * hidden @ weight")


def test_integers_are_drawn_below_the_largest_seen(shardproof):
    Path("my_function.py").write_text(PLAIN)
    assert shardproof("new", "my_function.py::scaled_logits", "--inputs", "inputs")[0] == 0
    text = Path(OUT).read_text()
    assert '"table": "a b tp=I",' in text and '"ids": "c d",' in text and 'outputs="c d b tp=I",' in text
    assert 'draw={"ids": integers(0, 4)},' in text and ruff_complaints() == []


@pytest.mark.parametrize("engine", ["lockstep", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_file_whose_name_cannot_be_a_module_is_imported_by_its_path(engine, shardproof):
    Path("my_function.py").rename("13_x.py")
    assert shardproof("new", "13_x.py::scaled_logits", "--inputs", "inputs", "--mesh", "tp=2")[0] == 0
    assert ruff_complaints() == []
    text = Path(OUT).read_text().replace(RAISES, "    return 2.0 * hidden @ weight")
    Path(OUT).write_text(text)
    status, out, err = shardproof("verify", OUT, "--examples", "2", "--engine", engine)
    assert status == 0, out + err


def test_an_unknown_spec_stays_open_and_is_rejected_by_name(shardproof):
    status, out, _ = shardproof("new", "my_function.py::scaled_logits")
    assert status == 0 and out.startswith(
        f"{OUT}: write the reference, the spec of hidden, the spec of weight, the spec of the result; then "
    )
    assert ruff_complaints() == []
    status, _, err = shardproof("verify", OUT)
    assert status == 2 and "spec '?' (input 'hidden'): is left open; write its dims and which of them an axis" in err


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("my_function.py",), 2, "my_function.py: names no function; write my_function.py::function"),
        (("my_function.py::scaled",), 2, "my_function.py::scaled: no function of this name; did you mean scaled_log"),
        (("my_function.py::scaled_logits", "--out", "my_function.py"), 2, "my_function.py already exists; give an"),
        (("my_function.py::scaled_logits", "--out", "x.txt"), 2, "--out x.txt: a scheme is in a Python file"),
        (("my_function.py::scaled_logits", "--mesh", "tp=999"), 2, "--mesh has 999 ranks; the limit is 64"),
        (("my_function.py::inputs",), 2, "my_function.py::inputs: takes no tensor; name a function that takes tensors"),
        (("my_function.py::scaled_logits", "--inputs", "input"), 2, "::input: no function of this name; did you mean"),
        (("none.py::scaled_logits",), 2, "none.py: no such file"),
    ],
)
def test_a_rejection_is_one_sentence(shardproof, arguments, status, sentence):
    got, out, err = shardproof("new", *arguments)
    assert (got, out) == (status, "") and sentence in err and len(err.splitlines()) == 1
    assert not Path(OUT).exists()


def test_inputs_that_do_not_fit_are_one_sentence(shardproof):
    Path("my_function.py").write_text(PLAIN)
    status, _, err = shardproof("new", "my_function.py::scaled_logits", "--inputs", "too_few")
    assert status == 2 and len(err.splitlines()) == 1
    assert "my_function.py::too_few: " in err and "the inputs are 1, the function takes 2 (table, ids)" in err


RETURNS_A_DICT = """
from os.path import join
from textwrap import dedent

def statistics(x):
    return {"total": x.sum(-1), "largest": x.amax(-1)}

def inputs(mesh):
    import torch
    return {"x": torch.ones(2, 4)}
"""


def test_a_function_that_returns_a_dict(shardproof):
    Path("of_a_dict.py").write_text(RETURNS_A_DICT)
    status, out, err = shardproof("new", "of_a_dict.py::statistics", "--inputs", "inputs", "--mesh", "tp=2")
    assert (status, err) == (0, "")
    text = Path("scheme_statistics.py").read_text()
    assert 'outputs={"total": "a tp=I", "largest": "a tp=I"},' in text
    assert "the spec of" not in out


def test_functions_that_the_file_imports_are_not_its_own(shardproof):
    Path("of_a_dict.py").write_text(RETURNS_A_DICT)
    for name in ("dedent", "join", "nothing"):
        status, _, err = shardproof("new", f"of_a_dict.py::{name}")
        assert status == 2 and "it has inputs, statistics)" in err


def test_types_of_spmd_types_in_annotations_become_specs():
    st = pytest.importorskip("spmd_types")
    hints = {
        "x": Annotated[torch.Tensor, "b d", {"dp": st.S(0), "tp": st.R}],
        "w": Annotated[torch.Tensor, "d v", {"dp": st.I, "tp": st.S(-1)}],
        "terms": Annotated[torch.Tensor, "b v", {"dp": st.S(0), "tp": st.P}],
        "without_names": Annotated[torch.Tensor, {"dp": st.S(0), "tp": st.P}],
        "varying": Annotated[torch.Tensor, "b v", {"dp": st.V, "tp": st.P}],
        "of_one_axis": Annotated[torch.Tensor, "b v", {"dp": st.S(0)}],
    }

    def function(): ...

    function.__annotations__ = hints
    specs = {name: guess.spec for name, guess in from_annotations(function, ["dp", "tp"]).items()}
    assert specs == {"x": "b/dp d tp=R", "w": "d v/tp dp=I", "terms": "b/dp v tp=P", "without_names": "?"}
