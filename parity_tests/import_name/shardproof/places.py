"""Where the code stands: this package, and beside it production, references and the tests that declare schemes.

A wheel puts all of them into one folder. In a clone this package stands inside the tests' folder.
"""

from pathlib import Path

SHARDPROOF = Path(__file__).resolve().parent
ROOT = SHARDPROOF.parents[2] if SHARDPROOF.parent.name == "import_name" else SHARDPROOF.parent
TESTS = ROOT / "parity_tests"
TORCH_IMPL = ROOT / "torch_impl"
SOURCES = (ROOT / "jax_ref", TORCH_IMPL, TESTS, SHARDPROOF)  # of the built-in schemes
SEARCHED = tuple(dict.fromkeys((str(SHARDPROOF.parent), str(ROOT))))  # where Python finds all of them


def component_folders() -> list[Path]:
    """The tests' folder of each component of production."""
    return [folder for folder in sorted(TESTS.iterdir()) if (TORCH_IMPL / folder.name / "__init__.py").is_file()]
