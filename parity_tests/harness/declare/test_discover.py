"""Schemes of a folder are found in the project's own files, and no other files are searched."""

import os
import sys
from pathlib import Path

import pytest

from parity_tests.specimens.user_files import HEAD
from shardproof.declare import discover

SCHEME = (
    HEAD
    + """
@scheme(reference=double, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp")
def NAME(mesh, x):
    return x * 2
"""
)


def written(path: Path, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCHEME.replace("NAME", name))


def test_a_folder_is_searched_without_installed_packages(tmp_path: Path) -> None:
    project = tmp_path / ".hidden_above" / "project"
    written(project / "first.py", "first")
    written(project / "inner" / "second.py", "second")
    for foreign in (".venv/lib", "lib/site-packages", "node_modules", "__pycache__"):
        written(project / foreign / "foreign.py", "foreign")
    assert [scheme.name for scheme in discover.find([str(project)])] == ["first", "second"]


def test_a_root_directory_is_not_a_project() -> None:
    with pytest.raises(discover.UnusableTarget) as caught:
        discover.find(["/"])
    assert str(caught.value) == "/ is a whole disk; give a file, or the folder of a project"


def test_a_mistake_without_a_line_has_no_line_in_its_message(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_bytes(b"x = 1\0\n")
    with pytest.raises(discover.UnusableTarget, match=r"null bytes$"):
        discover.find([str(file)])


def test_loops_of_links_and_pipes_are_no_files(tmp_path: Path) -> None:
    loop, pipe = tmp_path / "loop.py", tmp_path / "pipe.py"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    written(tmp_path / "scheme.py", "one")
    with pytest.raises(
        discover.UnusableTarget, match=r"loop.py: (is a loop of symbolic links; give a file|no such file)"
    ):
        discover.find([str(loop)])
    with pytest.raises(discover.UnusableTarget, match=r"pipe.py: is a pipe or a device; give a file$"):
        discover.find([str(pipe)])
    assert [scheme.name for scheme in discover.find([str(tmp_path)])] == ["one"]


def test_a_file_is_read_and_not_the_bytecode_of_an_older_text(tmp_path: Path) -> None:
    """As of two texts that are copied, or checked out, with the same times."""
    file, text = tmp_path / "copied.py", "from shardproof import scheme\nFACTOR = 2\n"
    for factor in (2, 3):
        file.write_text(text.replace("2", str(factor)))
        os.utime(file, (0, 0))
        module = discover.module_of_file(str(file))
        assert factor == module.FACTOR
        del sys.modules[module.__name__]
    assert not (tmp_path / "__pycache__").exists()
