"""docs/reference/cost.md repeats the program's output, and its table of sheets the sheets' numbers."""

import pytest

from parity_tests.pages import ROOT, blocks, text_of
from shardproof.cost import exchanges, sheet

PAGE = "docs/reference/cost.md"
SHOWN = [block.text for block in blocks(PAGE) if block.language == "console"]


@pytest.mark.slow
@pytest.mark.parametrize("shown", SHOWN)
def test_the_page_shows_the_printed_text(shown, shardproof):
    command, _, output = shown.partition("\n")
    status, out, err = shardproof(*command.removeprefix("$ shardproof ").split())
    assert (status, err) == (0, "")
    assert out.strip() == output.strip()


def test_the_page_names_every_comparison_and_sheet():
    text = text_of(PAGE)
    assert all(f"| `{name}` |" in text for name in exchanges.COMPARISONS)
    for name in sheet.names():
        links = sheet.read(name)
        for number in (links.inside_bytes_per_second / 1e9, links.operations_per_second / 1e12):
            assert f"{number:g}e" in text


def test_the_example_of_a_sheet_can_be_read():
    example = sheet.read(str(ROOT / "docs" / "examples" / "my_links.toml"))
    assert (example.name, example.ranks_per_host) == ("two sockets", 2)
