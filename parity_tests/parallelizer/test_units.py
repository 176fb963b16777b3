"""Which modules are sharded as one unit."""

from torch import nn

from torch_impl.parallelizer.units import blocks, units


class Tree(nn.Module):
    """Modules by name."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def linear():
    return nn.Linear(2, 2)


def test_elements_of_lists_and_of_numbered_dicts():
    first, second, third, inner = linear(), linear(), Tree(experts=nn.ModuleList([linear()])), linear()
    model = Tree(
        embed=linear(),
        layers=nn.ModuleList([first, nn.ModuleList([inner]), nn.Identity(), first]),
        stage=Tree(layers=nn.ModuleDict({"7": second, "3": third})),
        heads=nn.ModuleDict({"main": linear()}),
    )
    assert blocks(model) == [first, inner, second, third]  # the experts of a block are inside it
    assert units(model) == [[first], [inner], [second], [third]]


def test_a_stage_of_one_layer_has_one_unit():
    only = linear()
    assert units(Tree(layers=nn.ModuleDict({"0": only}), head=linear())) == [[only]]
    assert units(Tree(layers=nn.ModuleDict(), head=linear())) == []


def test_blocks_that_share_a_parameter_are_one_unit():
    a, b, c, d = linear(), linear(), linear(), linear()
    c.weight = a.weight
    assert units(Tree(layers=nn.ModuleList([a, b, c, d]))) == [[b], [a, c], [d]]
    d.bias = b.bias
    assert units(Tree(layers=nn.ModuleList([a, b, c, d]))) == [[a, c], [b, d]]


def test_a_block_that_shares_with_the_rest_is_left_to_the_root():
    a, b, head = linear(), linear(), linear()
    head.weight = b.weight
    assert units(Tree(layers=nn.ModuleList([a, b]), head=head)) == [[a]]


def test_a_model_without_lists_is_the_root_alone():
    assert units(nn.Sequential(linear(), linear())) == []
    assert blocks(nn.ModuleList([linear()])) == []
