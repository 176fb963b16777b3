"""The kinds of the values in a function that ranks run."""

import pytest

from shardproof import scheme
from shardproof.experiments.running_lines import running_functions


class Layer:
    def __init__(self, placement):
        self.placement = placement

    def scaled(self, x):
        return x * self.placement.tp.size()


class Placement:
    def __init__(self, tp):
        self.tp = tp


def of_a_layer(mesh, x):
    return Layer(Placement(mesh["tp"])).scaled(x)


def test_the_group_that_a_field_of_a_field_holds():
    declaration = scheme(reference=lambda x: 2.0 * x, inputs={"x": "b/tp"}, outputs="b/tp", mesh={"tp": (1, 2)})(
        of_a_layer
    )
    functions = running_functions(declaration, declaration.case(tp=2))
    assert functions[Layer.scaled.__code__].kinds["self.placement.tp"] == "group"


@pytest.mark.parametrize(("file", "is_own"), [("<ipython-input-3-5e1b>", True), ("<generated>", False)])
def test_a_cell_of_a_session_has_lines_and_generated_code_has_none(file, is_own):
    names = {}
    exec(compile("def doubled(mesh, x):\n    return 2.0 * x\n", file, "exec"), names)
    declaration = scheme(reference=lambda x: 2.0 * x, inputs={"x": "b/tp"}, outputs="b/tp", mesh={"tp": (1, 2)})(
        lambda mesh, x: names["doubled"](mesh, x)
    )
    functions = running_functions(declaration, declaration.case(tp=2))
    assert (names["doubled"].__code__ in functions) == is_own
