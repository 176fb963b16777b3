"""The table of options: it is read from the code, it has every component, and what no scheme draws stands out."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def option_table():
    """The module of the page, which imports its neighbour."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import option_table

        yield option_table
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.mark.slow
def test_the_page_has_each_component_and_every_option(option_table):
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    sections = re.findall(r'^HTML\(table\("(\w+)"\)\)$', page, re.MULTILINE)
    assert sections == option_table.components()
    tables = "".join(map(option_table.table, sections))
    options = option_table.table_of_options()
    assert tables.count("<tr><td>") == len(options) > 200
    assert tables.count("<strong>no scheme</strong>") == sum(len(option.holes) for option in options)


def test_documented_values_are_those_of_the_annotation(option_table):
    from typing import Annotated, Literal

    from torch_impl.contract import OneOf

    cases = {
        Literal["a", "b"]: ("'a'", "'b'"),
        Annotated[str, OneOf(("x", "y"))]: ("'x'", "'y'"),
        bool: ("False", "True"),
        bool | None: ("None", "False", "True"),
        int | None: ("None", "given"),
    }
    assert {each: option_table.documented_values(each, None) for each in cases} == cases
    assert option_table.documented_values(int, 1) == ("the default", "another value")


def test_a_value_is_drawn_as_an_option_as_an_input_or_by_the_code(option_table):
    from parity_tests.pipelining.test_small_stages import simulated_messages
    from shardproof.implementation.public_names import PublicName

    simulate = PublicName("torch_impl.pipelining", "simulate")
    options = {option.name: option for option in option_table.options_of(simulate)}
    assert list(option_table.values_of(simulated_messages, options["times"])) == ["given"]
    assert list(option_table.values_of(simulated_messages, options["n_microbatches"])) == ["None"]
    options["times"].drawn["given"] = ["simulated_messages"]
    assert options["times"].holes == ["None"]
    assert "<strong>no scheme</strong>" in option_table.row(options["times"])
    assert ast.unparse(dict(option_table.arguments(simulated_messages.fn, simulate))["order"]) == "actions"


def test_a_condition_of_the_code_has_both_values(option_table):
    from parity_tests.vocab_parallel.test_logprob import logprob_with_entropy
    from shardproof.implementation.public_names import PublicName

    logprob = PublicName("torch_impl.vocab_parallel", "vocab_parallel_logprob")
    options = {option.name: option for option in option_table.options_of(logprob)}
    assert list(option_table.values_of(logprob_with_entropy, options["inference_only"])) == ["False", "True"]
