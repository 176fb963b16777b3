"""Classes from dotted paths: round trips, order, and one error for each kind of bad path."""

import collections.abc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity_tests.harness.declare.case import CaseSpec
from torch_impl.parallelizer import import_classes_from_paths

NAME = "parallelizer.import_classes_from_paths: class_paths"


class Outer:
    class Inner:
        value = 3


CLASSES = [torch.nn.Linear, torch.nn.Module, dict, collections.abc.Mapping, Outer, Outer.Inner, CaseSpec]


def path_of(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


@given(st.lists(st.sampled_from(CLASSES)))
def test_paths_become_classes_in_order(classes):
    assert import_classes_from_paths([path_of(cls) for cls in classes]) == classes


@given(st.text() | st.lists(st.text("abc.", min_size=1), min_size=1).map(".".join) | st.sampled_from(["os.path", "."]))
def test_any_text_is_a_class_or_an_error_of_value(text):
    with pytest.raises(ValueError, match=r"class_paths\[0\]="):
        import_classes_from_paths([text])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (None, "=None is None; pass a list of paths"),
        ("torch.nn.Linear", "='torch.nn.Linear' is a str; pass a list of paths"),
        ([3], "[0]=3 is an int; a path is a string"),
        (["torch.nn.Linear", b"x"], "[1]=b'x' is a bytes; a path is a string"),
    ],
)
def test_what_is_no_list_of_strings(paths, message):
    with pytest.raises(TypeError) as caught:
        import_classes_from_paths(paths)
    assert str(caught.value) == NAME + message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Linear", "is not the dotted path of a class, such as 'torch.nn.Linear'"),
        ("torch..Linear", "is not the dotted path of a class, such as 'torch.nn.Linear'"),
        ("no_such_module.Linear", "no module 'no_such_module'; install it or correct the path"),
        ("torch.nn.Linearr", "module 'torch.nn' has no attribute 'Linearr'; nearest: 'Linear'"),
        ("torch.nn.Linear.Inner", "class 'torch.nn.Linear' has no attribute 'Inner'"),
        ("torch.nn.functional.relu", "is a function, not a class"),
        ("torch.nn.functional", "is a module, not a class"),
    ],
)
def test_a_path_of_no_class(path, message):
    with pytest.raises(ValueError) as caught:
        import_classes_from_paths(["torch.nn.Module", path])
    assert str(caught.value).startswith(f"{NAME}[1]={path!r}: {message}")


def test_the_import_error_is_the_cause():
    with pytest.raises(ValueError) as caught:
        import_classes_from_paths(["no_such_module.Linear"])
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ValueError) as caught:
        import_classes_from_paths(["torch.nn.Linearr"])
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("line", ["import a_module_that_is_not_there", "raise ImportError('broken')", "1 / 0"])
def test_an_error_inside_of_a_module_passes_through(line, tmp_path, monkeypatch):
    (tmp_path / "a_broken_module.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ImportError, ZeroDivisionError), match=r"a_module_that_is_not_there|broken|division"):
        import_classes_from_paths(["a_broken_module.Name"])
    assert "a_broken_module" not in sys.modules
