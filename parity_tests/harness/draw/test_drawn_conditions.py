"""Drawn conditions: the tensors that are strided views, the dtypes with autocast, and a module's exclusions."""

import sys
from types import ModuleType

import pytest

from shardproof import scheme
from shardproof.declare.conditions import excluded_by_default
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case


@scheme(
    reference=lambda a, b: (2.0 * a, 2.0 * b),
    mesh={"tp": (1, 2)},
    inputs={"a": "b v/tp", "b": "b v/tp"},
    outputs=("b v/tp", "b v/tp"),
)
def doubled(mesh, a, b):
    return 2 * a, 2 * b


def test_tensors_are_strided_alone_or_each_in_its_own_way():
    cases = [draw_case(doubled, seeded_chooser(seed), {}, seed=seed, with_conditions=True) for seed in range(400)]
    views = [case.conditions["strided"] for case in cases if "strided" in case.conditions]
    tensors = ["a", "b", "cotangent out[0]", "cotangent out[1]"]
    assert {tuple(view) for view in views if len(view) == 1} == {(tensor,) for tensor in tensors}
    assert any(len(view) == 4 for view in views)
    assert any("a" not in view and len(set(view.values())) == 2 for view in views)


def test_autocast_is_drawn_in_float32_alone():
    """Autocast does not change float64, and casts to 16 bits."""
    for dtype in ("float32", "bfloat16", "float64"):
        right = scheme(
            reference=lambda x: x, mesh={"tp": (1,)}, inputs={"x": "b tp=R"}, outputs="b tp=R", dtypes=(dtype,),
            excluded_conditions=(),
        )(lambda mesh, x: x.clone())  # fmt: skip
        drawn = [draw_case(right, seeded_chooser(seed), {}, seed=seed, with_conditions=True) for seed in range(60)]
        assert any("autocast" in case.conditions for case in drawn) == (dtype == "float32")


def test_a_module_or_its_nearest_package_states_the_exclusions_of_its_schemes(monkeypatch):
    for name, excluded in (("house", ("frozen",)), ("house.room", None), ("house.room.shelf", ("unused",))):
        module = ModuleType(name)
        if excluded is not None:
            vars(module)["EXCLUDED_CONDITIONS"] = excluded
        monkeypatch.setitem(sys.modules, name, module)
    assert excluded_by_default("house.room.book") == ("frozen",)
    assert excluded_by_default("house.room.shelf") == ("unused",)
    by_default = ("inference_mode", "overwritten", "int32", "autocast", "recomputed", "second_derivative")
    assert excluded_by_default("another") == by_default
    vars(sys.modules["house"])["EXCLUDED_CONDITIONS"] = "frozen"

    def doubled(mesh, x):
        return x * 2

    doubled.__module__ = "house"
    with pytest.raises(ValueError, match="excluded_conditions is the text 'frozen'; write "):
        scheme(reference=lambda x: x * 2, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp")(doubled)
