"""Types as a second opinion: which line they name, what they leave open, and what is printed of them."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from shardproof import CaseSpec, scheme
from shardproof.cli.session import verify
from shardproof.line_types import opinion
from shardproof.report.report import Report
from shardproof.report.summary import VerifyOptions
from torch_impl.collectives import all_reduce
from torch_impl.collectives.reductions import as_replicated

needs_types = pytest.mark.skipif(not importlib.util.find_spec("spmd_types"), reason="the extra types is not installed")
linear = torch.nn.functional.linear


def reference(x, up, down):
    return jax.nn.relu(x @ up.T) @ down.T


MLP = dict(
    reference=reference,
    mesh={"tp": (1, 2)},
    inputs={"x": "n i tp=I", "up": "h/tp i", "down": "o h/tp"},
    outputs="n o tp=I",
    reduction=("h", "i"),
)


@scheme(**MLP)
def right(mesh, x, up, down):
    return all_reduce(linear(linear(as_replicated(x, mesh["tp"]), up).relu(), down), mesh["tp"])


@scheme(**MLP)
def without_the_sum_of_the_gradient(mesh, x, up, down):
    return all_reduce(linear(linear(x, up).relu(), down), mesh["tp"])


@scheme(**{**MLP, "reference": lambda x, up, down: jax.nn.relu(reference(x, up, down))})
def term_in_a_relu(mesh, x, up, down):
    terms = linear(linear(as_replicated(x, mesh["tp"]), up).relu(), down)
    return all_reduce(terms.relu(), mesh["tp"])


@scheme(**MLP)
def summed_twice(mesh, x, up, down):
    terms = linear(linear(as_replicated(x, mesh["tp"]), up).relu(), down)
    return all_reduce(all_reduce(terms, mesh["tp"], out="R"), mesh["tp"])


@scheme(**MLP)
def result_of_another_type(mesh, x, up, down):
    return all_reduce(linear(linear(as_replicated(x, mesh["tp"]), up).relu(), down), mesh["tp"], out="R")


@scheme(**MLP)
def operation_that_the_checker_does_not_know(mesh, x, up, down):
    hidden = linear(as_replicated(x, mesh["tp"]), up).relu()
    return all_reduce(linear(hidden.flip(-1), down), mesh["tp"])


@scheme(**MLP)
def term_in_a_wider_dtype(mesh, x, up, down):
    terms = linear(linear(as_replicated(x, mesh["tp"]), up).relu(), down)
    return all_reduce(terms.double(), mesh["tp"]).to(x.dtype)


@scheme(
    reference=lambda x: jnp.concatenate([x] * 2),
    mesh={"tp": (2,)},
    inputs={"x": "n tp=I"},
    outputs="copies/tp",
    dims={"copies": "2*n"},
)
def copies_as_shards(mesh, x):
    return as_replicated(x, mesh["tp"])


@scheme(
    reference=lambda x: x, mesh={"cp": (1, 2)}, inputs={"x": "s/cp:dual_chunk_swap"}, outputs="s/cp:dual_chunk_swap"
)
def permuted(mesh, x):
    return x * 1


def line(declared, text):
    """The number of the line of a scheme's function that contains a text."""
    lines = Path(declared.fn.__code__.co_filename).read_text().splitlines()
    first = declared.fn.__code__.co_firstlineno
    return next(number for number, each in enumerate(lines[first - 1 :], first) if text in each)


CLASHES = [
    (without_the_sum_of_the_gradient, "linear(x, up)", "tp=I beside another type in linear: its gradient lacks a sum"),
    (term_in_a_relu, "terms.relu()", "partial value over tp in relu"),
    (summed_twice, "all_reduce(all_reduce", "all_reduce over tp of a value of type R, it takes P"),
]


@needs_types
@pytest.mark.fast_values(1)
@pytest.mark.slow
@pytest.mark.parametrize(("declared", "text", "words"), CLASHES, ids=lambda value: getattr(value, "name", None))
def test_the_line_where_types_clash(declared, text, words):
    assert opinion.types_of(declared) == f"line {line(declared, text)}: {words}"


@needs_types
@pytest.mark.slow
def test_a_result_of_another_type_than_its_spec():
    assert opinion.types_of(result_of_another_type) == "output 'out' is tp=R, its spec says tp=I"


@needs_types
@pytest.mark.slow
def test_right_code_has_no_clash():
    for declared in (right, copies_as_shards):
        assert opinion.types_of(declared) == "types agree where they can be followed"


@needs_types
@pytest.mark.slow
def test_what_cannot_be_typed_is_no_clash():
    sentence = opinion.types_of(operation_that_the_checker_does_not_know)
    number = line(operation_that_the_checker_does_not_know, "hidden.flip")
    assert sentence.startswith(f"could not type line {number}: ") and not sentence.startswith(opinion.CLASHES)
    number = line(term_in_a_wider_dtype, "terms.double")
    assert opinion.types_of(term_in_a_wider_dtype).startswith(f"could not type line {number}: ")
    assert opinion.types_of(permuted) == "not typed: cp (dual_chunk_swap)"


@needs_types
def test_every_function_that_is_exported_has_a_rule():
    import torch_impl.collectives
    import torch_impl.context_parallel
    import torch_impl.expert_parallel
    import torch_impl.mamba
    import torch_impl.vocab_parallel
    from shardproof.line_types.rules import RULES

    packages = ("collectives", "context_parallel", "expert_parallel", "mamba", "vocab_parallel")
    exported = [each for package in packages for each in vars(getattr(torch_impl, package)).values()]
    functions = {each for each in exported if isinstance(each, type) and issubclass(each, torch.autograd.Function)}
    assert functions and sorted(each.__name__ for each in functions - set(RULES)) == []


def test_without_the_extra_the_report_stays_and_asking_is_an_error(monkeypatch):
    monkeypatch.setattr(opinion, "is_installed", lambda: False)
    monkeypatch.setattr("shardproof.cli.session.is_installed", lambda: False)
    failing = Report("m:f", CaseSpec(scheme="m:f", mesh={"tp": 2}), cost=("more calls",))
    assert opinion.with_types(right, failing, asked=False) is failing
    with pytest.raises(ValueError, match=r"--types needs spmd-types; install the extra types: pip install"):
        verify([], VerifyOptions(types=True))


def test_unasked_only_a_clash_of_a_failing_scheme_is_told(monkeypatch):
    monkeypatch.setattr(opinion, "is_installed", lambda: True)
    equal = Report("m:f", CaseSpec(scheme="m:f", mesh={"tp": 2}))
    failing, told = replace(equal, cost=("more calls",)), "line 3: partial value over tp in relu"
    monkeypatch.setattr(opinion, "types_of", lambda declared, case: told)
    assert opinion.with_types(right, equal, asked=False) is equal
    assert opinion.with_types(right, failing, asked=False).types == told
    assert f"  types: {told}" in str(opinion.with_types(right, failing, asked=False)).splitlines()
    monkeypatch.setattr(opinion, "types_of", lambda declared, case: "could not type line 3: flip")
    assert opinion.with_types(right, failing, asked=False) is failing
    asked = opinion.with_types(right, equal, asked=True)
    assert asked.types == "could not type line 3: flip" and asked.ok and asked.verdict == "equal"


def test_a_case_of_one_rank_is_typed_on_two():
    assert opinion.case_on_ranks(right).mesh == {"tp": 2}
    alone = scheme(reference=lambda x: x, mesh={"tp": (1,)}, inputs={"x": "n tp=I"}, outputs="n tp=I")(
        lambda mesh, x: x
    )
    with pytest.raises(ValueError, match="it has no mesh of two ranks"):
        opinion.case_on_ranks(alone)
    assert opinion.types_of(alone) == "could not type it: it has no mesh of two ranks"
