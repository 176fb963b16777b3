"""House rules that are tested: one component folder in each tree, names of files, no tolerance in a test, imports."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from parity_tests import warm_python

ROOT = Path(__file__).resolve().parents[1]
TREES = ("torch_impl", "jax_ref", "parity_tests")
PACKAGE = "parity_tests/import_name/shardproof"
TOLERANCES = {"atol", "rtol", "allclose", "assert_close", "assert_allclose", "approx"}
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

# Components without a reference, and why.
WITHOUT_A_REFERENCE = {
    "collectives": "one device has no collectives; their law is the adjoint identity",
    "kernels": "another way to compute a function of another component, which has the reference",
    "contract": "what the border of a component rejects; the reference takes arrays as they are",
}
WITHOUT_A_TEST_OF_ITS_OWN = {
    "dtype_name": "a part of messages; the messages are tested",
    "type_name": "a part of messages; the messages are tested",
    "no_autocast": "a context in which other functions compute, tested through them",
}
# Folders of parity_tests that are about no component: the package, its tests, and the evidence.
PACKAGE_FOLDERS = {"import_name", "harness", "cli", "cost", "tracing", "training", "specimens"}
OTHER_FOLDERS = {*PACKAGE_FOLDERS, "evidence"}


def python_files(tree: str) -> list[str]:
    """Paths relative to the tree, without packages' own files."""
    paths = sorted(path.relative_to(ROOT / tree).as_posix() for path in (ROOT / tree).rglob("*.py"))
    return [path for path in paths if not path.endswith("__init__.py")]


def components(tree: str) -> set[str]:
    """The component folders of a tree."""
    return {path.split("/")[0] for path in python_files(tree) if "/" in path} - OTHER_FOLDERS


@cache
def words_in(folder: Path) -> set[str]:
    """Every identifier in the Python files of a folder."""
    words: set[str] = set()
    for path in set(folder.rglob("*.py")) - {Path(__file__).resolve()}:
        words |= set(re.findall(r"\w+", path.read_text()))
    return words | {word.removeprefix("_") for word in words}


@cache
def references_used_in(path: Path) -> set[str]:
    """Names of `jax_ref` that a file imports, or reads as an attribute; in `jax_ref` itself, also plain names."""
    used: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        nodes = list(ast.walk(statement))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_ref"):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and path.is_relative_to(ROOT / "jax_ref"):
                names.add(node.id)
        used |= names - {getattr(statement, "name", None)}  # a function's call of itself is not a use
    return used


def public_functions(path: Path) -> list[str]:
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def test_a_component_is_one_folder_in_each_tree():
    assert components("torch_impl") - components("jax_ref") <= set(WITHOUT_A_REFERENCE)
    assert components("jax_ref") <= components("torch_impl")
    assert components("parity_tests") == components("torch_impl")


@pytest.mark.parametrize("component", sorted(components("torch_impl")))
def test_every_exported_function_is_in_a_test(component):
    package = ast.parse((ROOT / "torch_impl" / component / "__init__.py").read_text())
    exported = {
        alias.asname or alias.name for node in package.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    functions = {name for name in exported if name == name.lower()}
    assert sorted(functions - words_in(ROOT / "parity_tests") - set(WITHOUT_A_TEST_OF_ITS_OWN)) == []


@pytest.mark.parametrize("component", sorted(components("jax_ref")))
def test_every_reference_is_used(component):
    """A test or another reference uses it; an `__init__.py` that only exports its name does not count."""
    unused = {name for path in (ROOT / "jax_ref" / component).glob("*.py") for name in public_functions(path)}
    modules = [path for path in (ROOT / "jax_ref").rglob("*.py") if path.name != "__init__.py"]
    files = [*modules, *(ROOT / "parity_tests").rglob("*.py")]
    for path in sorted(files, key=lambda path: component not in path.parts):  # its own tests use most of them
        if not unused:
            break
        unused -= references_used_in(path)
    assert sorted(unused) == []


def test_words_in_strings_and_comments_are_no_use_of_a_reference(tmp_path):
    (tmp_path / "m.py").write_text('from jax_ref.x import a\nimport y\nb = y.c\n"""d"""\ne = "f"\nprint(e)  # g\n')
    assert references_used_in(tmp_path / "m.py") == {"a", "c"}


@pytest.mark.parametrize("tree", TREES)
def test_every_file_has_a_meaningful_name(tree):
    assert [path for path in python_files(tree) if NAMELESS & set(Path(path).with_suffix("").parts)] == []


def tolerances_in(source: str) -> set[str]:
    """Names and keyword arguments that are a tolerance; words in comments and strings are not."""
    if not any(word in source for word in TOLERANCES):  # most files: no need to separate their tokens
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} & TOLERANCES


def test_no_tolerance_in_a_test():
    tolerances = {
        path: tolerances_in((ROOT / "parity_tests" / path).read_text()) for path in python_files("parity_tests")
    }
    assert {path: names for path, names in tolerances.items() if names} == {}


def test_a_tolerance_would_be_detected():
    word = "".join(["a", "tol"])
    assert tolerances_in(f"check(x, {word}=1)  # rtol") == {word}
    assert tolerances_in("f(x)  # allclose\n'approx'") == set()


def imported(path: Path) -> set[str]:
    """The top-level packages a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("tree", "forbidden"),
    [
        ("torch_impl", {"jax", "flax", "jax_ref", "parity_tests", "shardproof"}),
        ("jax_ref", {"torch", "torch_impl", "parity_tests", "shardproof"}),
        (PACKAGE, {"parity_tests"}),
    ],
)
def test_imports_run_one_way(tree, forbidden):
    crossing = {path: imported(ROOT / tree / path) & forbidden for path in python_files(tree)}
    assert {path: names for path, names in crossing.items() if names} == {}


# The floors of the package, from the ground up: a file imports from its own floor and from those below it.
FLOORS = (
    "places",
    "lazy_names",
    "endings",
    "declare",
    "draw",
    "engines",
    "judge",
    "explain",
    "report",
    "compared",
    "verify_one_case",
    "experiments",
    "implementation",
    "replays",
    "second_opinion",
    "line_types",
    "verification",
    "declaration",
    "cost",
    "tracing",
    "training",
    "cli",
    "pytest_plugin",
    "__init__",
    "__main__",
)


# Imports upwards, made only when they are needed: a notebook's pictures of a case and a ledger, the pictures beside the
# index of schemes, the check whether a scheme of the index is public, and the ledger's rule for the line of an error.
UPWARD_IMPORTS = [
    "case.py: report",
    "discover.py: engines",
    "scheme_index.py: implementation",
    "scheme_index.py: report",
    "size_choices.py: engines",
    "exits.py: engines",
    "ledger.py: report",
]


def test_the_rooms_of_the_package_import_downwards():
    upwards = []
    for path in python_files(PACKAGE):
        floor = FLOORS.index(Path(path).with_suffix("").parts[0])
        for node in ast.walk(ast.parse((ROOT / PACKAGE / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardproof":
                rooms = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
                upwards += [f"{Path(path).name}: {room}" for room in rooms if room in FLOORS[floor + 1 :]]
    assert upwards == UPWARD_IMPORTS


def test_the_layouts_that_the_harness_trusts_are_numpy_alone():
    files = (ROOT / "jax_ref" / "layouts").glob("*.py")
    assert set().union(*map(imported, files)) <= {"numpy", "collections", "itertools", "jax_ref"}
    assert (ROOT / "jax_ref" / "__init__.py").read_text().strip() == ""


def test_modules_that_ranks_import_load_no_jax():
    needed = ["jax_ref.layouts", "shardproof.declare.spec", "shardproof.declare.case"]
    needed += ["shardproof.engines.engines", "shardproof.draw.inputs"]
    program = f"import sys, {', '.join(needed)}; sys.exit('jax' in sys.modules)"
    assert warm_python.run("-c", program, folder=ROOT, imported=warm_python.TORCH).returncode == 0
