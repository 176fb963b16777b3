"""A report as a notebook shows it: its text and its figure once, and nothing besides."""

import pytest
import rich.console

from shardproof.cli.wrong_schemes import WRONG_SCHEMES, gather_that_keeps_the_layout
from shardproof.verify_one_case import verify_case


@pytest.fixture(scope="module")
def report():
    return verify_case(gather_that_keeps_the_layout, gather_that_keeps_the_layout.case(b=1, s=16, dtype="float32"))


def test_the_text_is_the_same_in_a_notebook(report, monkeypatch, capsys):
    outside = str(report)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(report) == outside
    assert capsys.readouterr().out == ""


def test_the_page_has_text_and_figure(report):
    page = report._repr_html_()
    assert WRONG_SCHEMES[2].expect in page
    assert page.count("<pre>") == 1
    assert page.count("<figure>") == 2 * len(report.tensors)


def test_the_representation_is_one_line(report):
    assert repr(report) == "<report gather_that_keeps_the_layout: mismatch, cp=4 b=1 s=16 float32 seed=0>"
