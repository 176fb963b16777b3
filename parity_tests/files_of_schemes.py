"""The test files that built-in schemes need: the part of this folder that a wheel has."""

from __future__ import annotations

import ast
from pathlib import Path


def files_of_schemes(root: Path) -> list[Path]:
    """The files that declare schemes of a component, and the files of tests that they import, directly or not."""
    tests = root / "parity_tests"
    components = [folder for folder in sorted(tests.iterdir()) if (root / "torch_impl" / folder.name).is_dir()]
    declaring = [file for folder in components for file in folder.glob("test_*.py") if "scheme(" in file.read_text()]
    needed, new = set[Path](), set(declaring)
    while new:
        needed |= new
        new = {imported for file in new for imported in _imported(file, root)} - needed
    packages = {folder / "__init__.py" for file in needed for folder in file.parents if folder.is_relative_to(tests)}
    return sorted({*needed, *(file for file in packages if file.is_file())})


def _imported(file: Path, root: Path) -> set[Path]:
    """The files of tests that a file imports, or whose modules it names in a string."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            names |= {module, module.rpartition(".")[0]}
    ours = [name for name in names if name.startswith("parity_tests.") and "\n" not in name and len(name) < 100]
    files = {root / f"{name.replace('.', '/')}.py" for name in ours}
    return {path for path in files if path.is_file()}
