"""A rejection raised inside a contracted function gets the function's name once, where it leaves the function."""

from __future__ import annotations

import ast
import inspect
import re
import traceback

import pytest
import torch
from torch import Tensor

from parity_tests import docstrings
from torch_impl.contract import PositiveInt, Rejected, Sharded, check, contract, contract_of
from torch_impl.contract.kinds import Instance


@contract("experts.top_k")
def top_k(logits: Sharded[Tensor, "... e"], k: PositiveInt) -> Tensor:
    check_k(k, logits.shape[-1])
    return logits.topk(k).values


def check_k(k, experts):
    if k > experts:
        raise Rejected(f"k={k} of e={experts} experts; choose at most e")


@contract("experts.routed")
def routed(logits: Sharded[Tensor, "... e"], choices: PositiveInt) -> Tensor:
    return top_k(logits, choices)


@contract
def converted(value):
    try:
        check(Instance(str, "pass a str"), "entries[2]", value)
        return int(value)
    except ZeroDivisionError:
        return None
    except ValueError as error:
        if isinstance(error, Rejected):
            raise
        raise Rejected(f"value={value!r} is not a number; pass digits", KeyError) from error


LOGITS = torch.zeros(2, 8)


def test_the_function_is_named_once():
    with pytest.raises(ValueError) as caught:
        top_k(LOGITS, 9)
    assert str(caught.value) == "experts.top_k: k=9 of e=8 experts; choose at most e"
    assert type(caught.value) is ValueError


def test_of_nested_functions_the_one_whose_arguments_are_named():
    """The sentence speaks of `k`, which is an argument of the inner function and not of the outer one."""
    with pytest.raises(ValueError) as caught:
        routed(LOGITS, 9)
    assert str(caught.value) == "experts.top_k: k=9 of e=8 experts; choose at most e"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, "contract.converted: entries[2]=3 is an int; pass a str"),
        ("x", KeyError, "contract.converted: value='x' is not a number; pass digits"),
    ],
)
def test_the_error_is_of_the_stated_type(value, error, message):
    with pytest.raises(error) as caught:
        converted(value)
    assert type(caught.value) is error and caught.value.args == (message,)


def test_the_cause_stays():
    with pytest.raises(KeyError) as caught:
        converted("x")
    assert isinstance(caught.value.__cause__, ValueError)


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match=r"^selected index k out of range$"):
        contract(lambda x: x.topk(9).values)(LOGITS)


def test_the_traceback_leads_from_the_call_to_the_line_that_rejects():
    """One line of the contract between the two, and no second traceback of the rejection without a name."""
    with pytest.raises(ValueError) as caught:
        top_k(LOGITS, 9)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == [inspect.currentframe().f_code.co_name, "entry", "top_k", "check_k"]
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


def test_a_compiled_function_rejects_in_the_same_words():
    compiled = torch.compile(top_k, backend="eager")
    assert torch.equal(compiled(LOGITS, 2), top_k(LOGITS, 2))
    for k in (9, 0):
        with pytest.raises(ValueError) as eager:
            top_k(LOGITS, k)
        with pytest.raises(ValueError) as caught:
            compiled(LOGITS, k)
        assert str(caught.value) == str(eager.value)


# No rejection leaves the library without a name.


def raises_rejected(function):
    """Whether it raises Rejected itself, or through functions that state no contract, `check` among them."""
    seen, todo = set(), [inspect.unwrap(function)]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        local = docstrings._local_imports(each)
        for node in ast.walk(docstrings._tree(each)):
            if isinstance(node, ast.Raise) and re.search("Rejected|rejection", ast.unparse(node)):
                return True
            if isinstance(node, (ast.Name, ast.Attribute)):
                value = docstrings._value(node, each, local)
                stated = {contract_of(value)} if value is not None else set()
                todo += [part for part in docstrings._called(value) if stated == {None} or part.__name__ == "backward"]
    return False


def entries(public):
    """The callables of a public function or class: the function, or the constructor and public methods."""
    if inspect.isfunction(public):
        return {"": public}
    if not inspect.isclass(public) or not public.__module__.startswith("torch_impl"):
        return {}
    called = ("__init__", "__post_init__", "__call__", "forward")
    methods = {name: getattr(each, "__func__", each) for name, each in vars(public).items()}
    return {
        name: each
        for name, each in methods.items()
        if inspect.isfunction(each) and (name in called or not name.startswith("_")) and name != "backward"
    }


@pytest.mark.parametrize("home", [home for home in docstrings.HOMES if home != "torch_impl.contract"])
def test_every_rejection_leaves_through_a_contract(home):
    unnamed = [
        f"{name}.{method}".rstrip(".")
        for name, public in docstrings.exported(home).items()
        for method, entry in entries(public).items()
        if not hasattr(entry, "__contract__") and raises_rejected(entry)
    ]
    assert unnamed == {"torch_impl.kernels": ["checked_backend"]}.get(home, [])  # other components validate with it


def test_a_rejection_without_a_contract_is_seen():
    assert raises_rejected(check_k) and not raises_rejected(routed.__wrapped__)
    assert contract_of(top_k) is not None
