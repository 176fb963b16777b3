"""The table of schemes: each name belongs to one file, and an import declares it once."""

import re
import sys

import pytest

from shardproof import scheme
from shardproof.declare.discover import TABLE, UnusableTarget, lookup, module_of_file, schemes_of_file


def function_in(file):
    space = {"__name__": "somebodys_module"}
    exec(compile("def doubled(mesh, x):\n    return x * 2\n", file, "exec"), space)
    return space["doubled"]


def doubled_scheme(function):
    return scheme(reference=lambda x: 2 * x, mesh={"tp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp")(function)


def test_the_table_keeps_one_scheme_per_name():
    first = doubled_scheme(function_in("a/b.py"))
    assert lookup("somebodys_module:doubled") is first
    with pytest.raises(ValueError) as caught:
        doubled_scheme(function_in("a/c.py"))
    assert str(caught.value) == "scheme 'doubled': is already declared in a/b.py:1"
    again = doubled_scheme(function_in("a/b.py"))
    assert lookup("somebodys_module:doubled") is again
    del TABLE["somebodys_module:doubled"]


@pytest.mark.parametrize("file", ["<ipython-input-3-5e1b>", "/var/ipykernel_17/22.py"])
def test_a_cell_run_again_replaces_its_scheme(file):
    doubled_scheme(function_in(file))
    again = doubled_scheme(function_in(file.replace("3", "4").replace("22", "23")))
    assert lookup("somebodys_module:doubled") is again
    del TABLE["somebodys_module:doubled"]


IN_A_LOOP = """
for factor in (2.0, 3.0):
    def scaled(mesh, x):
        return 3.0 * x
    scheme(reference=lambda x, k=factor: k * x, mesh={"tp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp")(scaled)
"""
IN_A_BRANCH = """
if True:
    @scheme(reference=lambda x: 2 * x, mesh={"tp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp")
    def scaled(mesh, x):
        return 3.0 * x
    @scheme(reference=lambda x: 3 * x, mesh={"tp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp")
    def scaled(mesh, x):
        return 3.0 * x
"""
DOUBLE_DECLARATIONS = {
    "loop": (
        IN_A_LOOP,
        "is declared twice by line 4, as in a loop; give each function another __name__ before scheme(...) takes it",
    ),
    "branch": (IN_A_BRANCH, "is defined in line 4 and again in line 7; give one another name"),
}


@pytest.mark.parametrize("case", DOUBLE_DECLARATIONS)
def test_one_import_declares_a_name_once(tmp_path, case):
    text, sentence = DOUBLE_DECLARATIONS[case]
    file = tmp_path / "declared_twice.py"
    file.write_text("from shardproof import scheme\n" + text)
    with pytest.raises(UnusableTarget) as caught:
        schemes_of_file(str(file))
    assert re.search(rf"declared_twice\.py:\d+: scheme 'scaled': {re.escape(sentence)}$", str(caught.value))


def test_a_module_imported_again_replaces_its_scheme(tmp_path):
    file = tmp_path / "imported_again.py"
    file.write_text("from shardproof import scheme\n" + IN_A_LOOP.replace("(2.0, 3.0)", "(3.0,)"))
    module = module_of_file(str(file))
    key = f"{module.__name__}:scaled"
    first = lookup(key)
    del sys.modules[module.__name__]
    module_of_file(str(file))
    assert lookup(key) is not first
    again = TABLE.pop(key)
    assert again.verify(tp=2, n=4, dtype="float32").ok
