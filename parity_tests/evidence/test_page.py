"""The common parts of the pages: tables, the line on the origin, and sections."""

import re

from parity_tests.evidence import page


def test_a_table():
    assert page.markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_line_on_the_origin():
    line = page.written_by("make bugs", "hypothesis", seed=3)
    versions = r"Python \S+, torch \S+, jax \S+, hypothesis \S+, seed 3\."
    assert re.fullmatch(rf"Written by `make bugs` on \d{{4}}-\d\d-\d\d with {versions}", line)
    assert page.written_by("make bugs").count(",") == 2


def test_a_section_is_replaced_or_added():
    text = page.joined("# Page", "", "text\n", "## One", "first", "## Two", "second")
    assert text == "# Page\n\ntext\n\n## One\n\nfirst\n\n## Two\n\nsecond\n"
    assert list(page.sections(text)) == ["", "One", "Two"] and page.joined(*page.sections(text).values()) == text
    assert page.with_section(text, "One", "other") == text.replace("first", "other")
    assert page.with_section(text, "Three", "third") == f"{text}\n## Three\n\nthird\n"


def test_a_table_of_each_component():
    text = page.tables("Bugs", ("bug",), [("b", ("1",)), ("a", ("2",)), ("b", ("3",))])
    assert text == "# Bugs\n\n## a\n\n| bug |\n| --- |\n| 2 |\n\n## b\n\n| bug |\n| --- |\n| 1 |\n| 3 |\n"


def test_a_page_is_written_into_a_new_folder(tmp_path, capsys):
    path = tmp_path / "build" / "page.md"
    assert page.read(path) == ""
    page.write("# Page\n", path)
    assert page.read(path) == "# Page\n" and capsys.readouterr().out == f"written: {path}\n"
