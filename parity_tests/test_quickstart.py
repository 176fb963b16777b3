"""Every block of the quickstart runs, in the page's order, and prints what the page says."""

import re

import pytest

from parity_tests.pages import blocks
from parity_tests.specimens.documented_console import replaced, run_as_shown
from parity_tests.specimens.page_reader import read

PAGE = "docs/how-to/quickstart.md"
BLOCKS = blocks(PAGE)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The result of each command, by its first words; the file is written and changed where the page says so."""
    folder = tmp_path_factory.mktemp("quickstart")
    file, statuses, right = folder / "my_linear.py", {}, ""
    for block in BLOCKS:
        if block.language == "python":
            right = block.text
            file.write_text(right)
        elif block.language == "diff":
            file.write_text(replaced(right, block.text))
        else:
            command = block.text.partition("\n")[0].removeprefix("$ ")
            if "gloo" in command:  # the page says to undo the change first
                file.write_text(right)
            statuses[command] = run_as_shown(block.text, folder)
    return folder, statuses


def test_every_block_is_run():
    kinds = [block.language for block in BLOCKS]
    assert kinds == ["python", "console", "diff", "console", "console", "console", "console"]
    commands = [re.findall(r"^\$ ", block.text, re.MULTILINE) for block in BLOCKS if block.language == "console"]
    assert [len(each) for each in commands] == [1] * 5


@pytest.mark.slow
def test_each_command_ends_as_the_page_says(steps):
    statuses = {command: status for command, (status, _, _) in steps[1].items()}
    assert list(statuses.values()) == [0, 1, 1, 0, 0], statuses


@pytest.mark.slow
def test_each_output_matches_the_page(steps):
    documented = {command: (printed, page) for command, (_, printed, page) in steps[1].items() if page}
    assert len(documented) == 2
    for printed, page in documented.values():
        assert printed == page


@pytest.mark.slow
def test_the_bug_is_explained_in_the_report_too(steps):
    text = (steps[0] / "verdict.html").read_text()
    assert "each rank adds it before the sum" in text
    assert read(text).all("svg")
