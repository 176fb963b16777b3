"""The page on other libraries: its tables are current, the named code exists, and a changed argument would show."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import torch_impl.layouts as layouts
from parity_tests.docstrings import HOMES, exported

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def other_libraries():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import other_libraries

        yield other_libraries
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_page_is_what_the_program_writes(other_libraries):
    assert other_libraries.PAGE.read_text() == other_libraries.page()


def test_each_row_has_a_counterpart_or_says_what_to_do(other_libraries):
    rows = [row for module in other_libraries.modules() for row in module["rows"]]
    assert len(rows) > 100
    assert [row.there for row in rows if bool(row.here) == bool(row.instead)] == []
    for module in other_libraries.modules():
        names = [row.name for row in module["rows"]]
        assert len(set(names)) == len(names)


def test_code_in_the_instructions_exists(other_libraries):
    ours = {name: of for home in HOMES for name, of in exported(home).items()} | vars(layouts)
    rows = [row for module in other_libraries.modules() for row in module["rows"]]
    theirs = {row.name for row in rows} | {"replicated_with_grad_allreduce"}

    def exists(code):
        package, _, name = code.rpartition(".")
        if package.startswith("torch_impl."):
            return hasattr(importlib.import_module(package), name)
        first, _, attribute = code.partition(".")
        return first in theirs or (first in ours and (not attribute or hasattr(ours[first], attribute)))

    arguments = {x for of in ours.values() if inspect.isroutine(of) for x in inspect.signature(of).parameters}
    codes = {code for row in rows for code in re.findall(r"`([\w.]+)", row.instead + row.note)}
    assert len(codes) > 20
    assert sorted(code for code in codes - arguments if not exists(code)) == []


def test_a_changed_argument_would_show(other_libraries):
    there = other_libraries.signature_of("f(a, b=1, *, c=None, d)")
    differing = {
        "f(a, b=1, *, c=None, d)": [],
        "f(a, b=1, *, c=None, d, e=2)": ["also `e`"],
        "f(a, *, c=None, d)": ["without `b`"],
        "f(b, a=1, *, c=None, d)": ["in the order `b`, `a`", "`b` required"],
        "f(a, b=2, *, c, d)": ["`c` required", "`b=2`, there `1`"],
        "f(a, *, b=1, c=None, d)": ["`b` by keyword alone"],
    }
    found = {text: list(other_libraries.differing(there, other_libraries.signature_of(text), {})) for text in differing}
    assert found == differing
    renamed = list(
        other_libraries.differing(there, other_libraries.signature_of("f(x, b=1, *, c=None, d)"), {"a": "x"})
    )
    assert renamed == ["`a` is `x`"]


def test_names_that_the_other_library_lacks_are_listed(other_libraries, tmp_path):
    *_, module = (module for module in other_libraries.modules() if not module.get("part"))
    path = tmp_path / (module["name"].replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    gone, *kept = [row.there for row in module["rows"] if "." not in row.name and "(" in row.there]
    path.write_text("".join(f"def {line}: ...\n" for line in kept) + "def newcomer(x): ...\n")
    lines = list(other_libraries.changed(tmp_path))
    assert f"{module['name']}: {gone} is not there" in lines
    assert f"{module['name']}: newcomer(x) has no row" in lines
    assert not any(line in str(lines) for line in kept)
