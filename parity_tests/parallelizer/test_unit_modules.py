"""Classes from dotted paths, one error for each kind of bad path, and the modules of classes that become units."""

import collections.abc
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

from parity_tests.parallelizer.nested_modules import Enclosing, Inner, Nested
from parity_tests.parallelizer.styled import Norm
from shardproof.declare.case import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer import import_classes_from_paths, nvfsdp_strategy_parallelize

NAME = "parallelizer.import_classes_from_paths: class_paths"


class Outer:
    class Inner:
        value = 3


CLASSES = [torch.nn.Linear, torch.nn.Module, dict, collections.abc.Mapping, Outer, Outer.Inner, CaseSpec]


NESTED = {
    "": "Nested",
    "first": "Enclosing",
    "first.inner": "Inner",
    "first.inner.linear": "Linear",
    "first.inner.norm": "Norm",
    "first.inner.weightless": "LayerNorm",
    "first.head": "Linear",
    "second": "Inner",
    "second.linear": "Linear",
    "second.norm": "Norm",
    "second.weightless": "LayerNorm",
    "head": "Linear",
}
HAVE_PARAMETERS = ("Linear", "Norm")  # of their own
UNIT_CLASSES = {
    **{cls.__name__: f"{cls.__module__}.{cls.__name__}" for cls in (Enclosing, Inner, Nested, Norm)},
    "Linear": "torch.nn.Linear",
    "GRU": "torch.nn.GRU",  # of which the model has no instance
}
REJECTION = "nvfsdp_unit_modules: "


def outermost_instances(first, second, apart):
    """The names of the units: the model, and instances that are inside of no other; REJECTION of another class."""
    classes = {first, second}
    if "GRU" in classes:
        return REJECTION
    of_classes = [name for name, kind in NESTED.items() if kind in classes]

    def is_unit(name):
        if not name:
            return True
        if apart:
            return NESTED[name] in HAVE_PARAMETERS
        return name in of_classes and not any(
            name.startswith(f"{outer}.") or not outer for outer in of_classes if outer != name
        )

    return [name for name in NESTED if is_unit(name)]


UNITS = {
    "first": st.sampled_from(tuple(UNIT_CLASSES)),
    "second": st.sampled_from(tuple(UNIT_CLASSES)),
    "apart": st.booleans(),
    "strategy": st.sampled_from(("optim_grads_params", "optim", "no_shard")),
}


@settings(max_examples=few(25))
@given(ranks=st.sampled_from((1, 2)), **UNITS)
def test_units_of_nested_classes(ranks, first, second, apart, strategy):
    """Which modules are units where two classes are passed, or each module with parameters is to be one."""
    paths = [UNIT_CLASSES[first], UNIT_CLASSES[second]]

    def body(mesh, case):
        try:
            model = nvfsdp_strategy_parallelize(
                Nested(), mesh.device_mesh, paths, None, strategy, disable_bucketing=apart
            )
        except ValueError as error:
            return str(error)[: len(REJECTION)]
        return [name for name in NESTED if isinstance(model.get_submodule(name), FSDPModule)]

    seen = run(body, CaseSpec(scheme="units", mesh={"dp_shard": ranks})).results
    assert seen == (outermost_instances(first, second, apart),) * ranks


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
def test_values_that_are_no_list_of_strings(paths, message):
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
