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


def test_a_link_to_a_folder_is_followed_once(tmp_path: Path) -> None:
    project = tmp_path / "project"
    written(project / "first.py", "first")
    written(tmp_path / "elsewhere" / "second.py", "second")
    written(tmp_path / "around.py", "around")
    for name, to in (("link", "../elsewhere"), ("again", "../elsewhere"), ("up", ".."), ("here", "."), ("lost", "no")):
        (project / name).symlink_to(to)
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


@pytest.mark.parametrize(
    ("head", "decorator"),
    [
        ("import shardproof\n", "@shardproof.scheme"),
        ("import shardproof as sp\n", "@sp.scheme"),
        ("from shardproof import scheme as verified\n", "@verified"),
        ("from functools import partial\nfrom shardproof import scheme\ndeclare = partial(scheme)\n", "@declare"),
    ],
)
def test_a_folder_is_searched_for_every_spelling_of_a_declaration(tmp_path: Path, head: str, decorator: str) -> None:
    written(tmp_path / "usual.py", "usual")
    text = SCHEME.replace(HEAD, "").replace("NAME", "unusual").replace("@scheme", decorator)
    (tmp_path / "unusual.py").write_text(f"{head}def double(x):\n    return 2.0 * x\n{text}")
    (tmp_path / "no_scheme.py").write_text("import shardproof as sp\nscheme = sp.lookup\nraise ValueError\n")
    assert [scheme.name for scheme in discover.find([str(tmp_path)])] == ["unusual", "usual"]


def test_a_scheme_of_a_function_of_another_file_is_of_the_file_that_declares_it(tmp_path: Path) -> None:
    (tmp_path / "lib_of_two.py").write_text("def imported(mesh, x):\n    return x * 2\n")
    (tmp_path / "maker_of_one.py").write_text(
        HEAD + "\ndef make(factor):\n    def made(mesh, x):\n        return factor * x\n    return declare(made)\n"
    )
    head = HEAD + "from lib_of_two import imported\nfrom maker_of_one import make\n"
    (tmp_path / "user.py").write_text(f"{head}declare(imported)\none = make(2)\n")
    found = discover.find([str(tmp_path / "user.py")])
    assert sorted(scheme.name for scheme in found) == ["imported", "made"]
    assert {discover.declaring_file(scheme) for scheme in found} == {str(tmp_path / "user.py")}
    (tmp_path / "second.py").write_text(f"{head}declare(imported)\n")
    with pytest.raises(discover.UnusableTarget, match=r"'imported': is already declared by .*user.py; give the"):
        discover.find([str(tmp_path / "second.py")])
    (tmp_path / "twice.py").write_text(
        (tmp_path / "user.py")
        .read_text()
        .replace("maker_of_one", "maker_of_two")
        .replace("declare(imported)", "make(1)")
    )
    (tmp_path / "maker_of_one.py").rename(tmp_path / "maker_of_two.py")
    with pytest.raises(discover.UnusableTarget, match=r"'made': is declared twice by line"):
        discover.find([str(tmp_path / "twice.py")])


def test_a_file_does_not_get_the_module_of_another_folder(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        written(tmp_path / folder / "scheme.py", folder)
        file = tmp_path / folder / "scheme.py"
        file.write_text(f"import between_{folder}\n{file.read_text()}")
        (tmp_path / folder / f"between_{folder}.py").write_text("import helper_of_both\n")
        (tmp_path / folder / "helper_of_both.py").write_text(f"FOLDER = {folder!r}\n")
    discover.find([str(tmp_path / "one")])
    with pytest.raises(
        discover.UnusableTarget,
        match=r"another module 'helper_of_both' is already imported, .*one/helper_of_both.py; verify the two by",
    ):
        discover.find([str(tmp_path / "two")])


def test_a_file_may_remove_its_own_folder_from_the_path(tmp_path: Path) -> None:
    file = tmp_path / "removing.py"
    written(file, "removing")
    file.write_text(f"import sys\nsys.path.remove({str(tmp_path)!r})\n{file.read_text()}")
    assert [scheme.name for scheme in discover.find([str(file)])] == ["removing"]
