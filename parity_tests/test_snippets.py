"""Each Python block that a reader copies into a file runs, with nothing but the files that its page names."""

from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.pages import ROOT, Block, blocks, is_complete, pages
from shardproof.declare.discover import schemes_of_file

EXAMPLE = ROOT / "docs" / "examples" / "my_scheme.py"
SNIPPETS = [
    block for page in pages() if is_complete(page) for block in blocks(page) if block.language in ("python", "py")
]


def replay_file() -> str:
    """The line of a replay file that another file imports."""
    (scheme,) = schemes_of_file(str(EXAMPLE))
    return f"CASE = {scheme.case(cp=2, tp=1).json!r}\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that blocks import: the README's scheme, the worked example and a replay of it."""
    (tmp_path / "my_logprob.py").write_text(next(each.text for each in SNIPPETS if each.page == "README.md"))
    (tmp_path / "my_scheme.py").write_text(EXAMPLE.read_text())
    (tmp_path / "replay_975d73c9.py").write_text(replay_file())
    return tmp_path


def arguments(block: Block, file: Path) -> tuple[str, ...]:
    """How a reader runs the file: its tests with pytest, its schemes with `shardproof verify`, or as a script."""
    if "\ndef test_" in block.text:
        return "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name
    if "@scheme(" in block.text:
        return "-m", "shardproof", "verify", file.name
    return (file.name,)


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_a_block_runs_as_a_file(block, folder):
    file = folder / "test_copied.py"
    file.write_text(block.text)
    done = warm_python.run(*arguments(block, file), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_blocks_of_the_first_pages_are_among_them():
    assert {"README.md", "docs/index.md", "docs/how-to/quickstart.md"} <= {block.page for block in SNIPPETS}
