"""The reference manual is whole: every public name, every reference, every scheme stands in it."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import shardproof
from parity_tests.docstrings import HOMES, exported
from parity_tests.pages import ROOT
from shardproof.declare import discover

REFERENCE = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))}
EVERYTHING = "\n".join(REFERENCE.values())
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)(?:\(\))?((?:\n +:.*)*)", re.MULTILINE)
DIRECTIVES = DIRECTIVE.findall(EVERYTHING)
OPTIONS = {name: options for kind, name, options in DIRECTIVES if kind == "module"}
ALONE = {name for kind, name, _ in DIRECTIVES if kind != "module"}


def listed(options: str, name: str) -> set[str] | None:
    """The names of an option, an empty set where it stands alone; None where it is not there."""
    match = re.search(rf":{name}:(.*)", options)
    return match and {part.strip() for part in match[1].split(",") if part.strip()}


def is_shown(home: str, name: str, of: object) -> bool:
    """Whether the build puts a name on a page: through its package, or alone; a constant where a page says it."""
    where = str(getattr(of, "__module__", ""))
    if {f"{home}.{name}", f"{where}.{name}"} & ALONE:
        return True
    if not callable(of):
        return f"`{name}`" in EVERYTHING
    options = OPTIONS.get(home)
    if options is None or listed(options, "members") is None or listed(options, "imported-members") is None:
        return False
    private = listed(options, "private-members")
    allowed = not name.startswith("_") or private == set() or name in (private or ())
    return allowed and name not in (listed(options, "exclude-members") or ())


@pytest.mark.parametrize("home", HOMES)
def test_every_exported_name_has_its_place(home):
    again = {name for name, of in exported("torch_impl.layouts").items()}  # mamba exports these once more
    hidden = [name for name, of in exported(home).items() if not is_shown(home, name, of)]
    assert [name for name in hidden if home == "torch_impl.layouts" or name not in again] == []


def test_a_name_that_is_left_out_would_be_seen():
    def newcomer():
        """Of nowhere."""

    assert not is_shown("torch_impl.nowhere", "newcomer", newcomer)
    assert not is_shown("torch_impl.layouts", "A_CONSTANT", 3)
    assert is_shown("torch_impl.layouts", "newcomer", newcomer)


def test_names_that_users_import_have_a_place():
    names = {name for name in shardproof.__all__ if not isinstance(getattr(shardproof, name), ModuleType)}
    assert {f"shardproof.{name}" for name in names} <= ALONE


def test_every_reference_has_its_place():
    files = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("jax_ref/*/*.py")]
    modules = {".".join(path.parts) for path in files if path.name != "__init__"}
    assert {name for name in OPTIONS if name.startswith("jax_ref.")} == modules


def test_the_tables_of_schemes_have_each_of_them():
    spec = importlib.util.spec_from_file_location("scheme_table", ROOT / "docs" / "scheme_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    folders = re.findall(r'^HTML\(table\("(\w+)"\)\)$', REFERENCE["schemes.md"], re.MULTILINE)
    tables, schemes = "".join(map(table.table, folders)), discover.built_in()
    assert sorted(folders) == sorted({table.folder_of(scheme) for scheme in schemes})
    assert tables.count("<tr><td") == len(schemes) > 0
    assert [scheme.name for scheme in schemes if f"<code>{table.breakable(scheme.name)}</code>" not in tables] == []
    assert tables.count(">not declared<") == sum(scheme.cost is None for scheme in schemes)
