"""Compiled blocks within a memory budget: saved bytes fall with it, and no gradient changes by a bit."""

import warnings

import pytest
import torch
from torch import nn

from parity_tests.parallelizer import small_net, test_multimodal
from parity_tests.parallelizer.training import broken
from parity_tests.rejections import rejected
from torch_impl.parallelizer import fsdp2_strategy_parallelize
from torch_impl.parallelizer.blocks import compile_blocks

BACKEND = "aot_eager"  # partitioned by the compiler, run by torch's operations: a machine may lack a C compiler


class Activations(nn.Module):
    """A chain of results that backward needs, each as large as the input, between two products."""

    def __init__(self, d, dropout=0.0):
        super().__init__()
        self.into, self.back = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.into(x).sin().exp().tanh()
        return x + self.dropout(self.back(self.into(y).sigmoid().cos()))


class Tower(nn.Module):
    def __init__(self, d=8, blocks=2, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Activations(d, dropout) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def step(budget, x, **options):
    """The bytes that a forward saves beside parameters and input, and every gradient; None compiles nothing."""
    torch.manual_seed(0)
    net = Tower(x.shape[-1], **options).to(x.dtype)
    torch.compiler.reset()
    if budget is not None:
        compile_blocks(net, BACKEND, budget)
    own = {p.untyped_storage().data_ptr() for p in (*net.parameters(), x)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (tensor, storage.nbytes())  # the tensor keeps the address taken
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(x).square().sum()
    loss.backward()
    return sum(size for _, size in saved.values()), [p.grad for p in net.parameters()]


def test_fewer_bytes_are_saved_and_no_gradient_changes():
    x = torch.linspace(-1, 2, 64 * 8, dtype=torch.float64).view(64, 8)
    _, eager = step(None, x)
    of_budget = {budget: step(budget, x) for budget in (1.0, 0.5, 0.0)}
    whole, half, inputs = (saved for saved, _ in of_budget.values())
    assert whole > half > inputs
    assert all(torch.equal(a, b) for _, gradients in of_budget.values() for a, b in zip(gradients, eager, strict=True))


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_numbers_that_a_block_draws_are_not_drawn_anew(budget):
    """The gradient of a weight is a sum over the elements that were kept, which the result shows."""
    torch.compiler.reset()
    net = Tower(d=6, blocks=1, dropout=0.5).double()
    compile_blocks(net, BACKEND, budget)
    x = torch.linspace(-1, 2, 60, dtype=torch.float64).view(10, 6)
    with pytest.warns(UserWarning, match=r"dropout draws numbers, which backward would draw anew"):
        dropped = net(x) - x
    (gradient,) = torch.autograd.grad(dropped.sum(), net.blocks[0].back.weight)
    (block,) = net.blocks
    y = block.into(block.into(x).sin().exp().tanh()).sigmoid().cos()
    kept = (dropped != 0).double() / 0.5
    assert 0 < kept.count_nonzero() < kept.numel()
    assert broken({"back": gradient}, {"back": kept.mT @ y.detach()}) == []


class Attention(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.ones(())), call

    def forward(self, x):
        return self.call(self.weight * x)


ATTEND = nn.functional.scaled_dot_product_attention
DRAWING = {
    "dropout of 0": (lambda x: nn.functional.dropout(x, p=0.0, training=True), False),
    "dropout in evaluation": (lambda x: nn.functional.dropout(x, 0.5, False), False),
    "dropout": (lambda x: nn.functional.dropout(x), True),
    "dropout of features": (lambda x: nn.functional.dropout1d(x, 0.5), True),
    "attention": (lambda x: ATTEND(x, x, x), False),
    "attention with dropout": (lambda x: ATTEND(x, x, x, dropout_p=0.5), True),
    "attention with dropout by place": (lambda x: ATTEND(x, x, x, None, 0.5), True),
    "noise": (lambda x: x + torch.rand_like(x), True),
    "noise in place": (lambda x: x * torch.empty(3, 4).bernoulli_(0.5), True),
    "no noise": (lambda x: x.exp() + x.mean(), False),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_draws_numbers(name):
    call, draws = DRAWING[name]
    torch.compiler.reset()
    net = Tower(4, 1)
    net.blocks[0] = Attention(call)
    compile_blocks(net, BACKEND, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        net(torch.ones(1, 3, 4)).sum().backward()
    assert any("draws numbers" in str(each.message) for each in caught) is draws


def test_blocks_outside_of_the_scopes_have_no_budget():
    """The budget that is in force while the graph of each part is compiled."""
    seen = []

    def backend(graph, inputs):
        import torch._functorch.config as partitioner

        seen.append(partitioner.activation_memory_budget)
        return graph

    torch._dynamo.register_backend(backend, "of_the_test")
    net = test_multimodal.Net(2).requires_grad_(True)
    torch.compiler.reset()
    compile_blocks(net, "of_the_test", 0.25, ("language",))
    for part in (net.visual, net.language, net.visual):
        torch.compiler.reset()  # linear layers share a graph
        part.layers[0](torch.ones(1, 2))
    assert seen == [1.0, 0.25, 1.0]


def budgeted(**options):
    switches = {"activation_checkpointing": "memory_budget", "enable_compile": True, "compile_backend": BACKEND}
    return lambda mesh: fsdp2_strategy_parallelize(small_net.Net(), mesh.device_mesh, **{**switches, **options})


NAME = "parallelizer.fsdp2_strategy_parallelize:"
REJECTED = [
    (
        "not compiled",
        budgeted(enable_compile=False),
        f"{NAME} activation_checkpointing='memory_budget' is decided by the compiler; pass enable_compile=True, or "
        "'selective'",
    ),
    (
        "a backend that saves what autograd saves",
        budgeted(compile_backend="eager"),
        f"{NAME} compile_backend='eager' does not decide what is saved, as 'memory_budget' needs; pass one of "
        "'inductor', 'aot_eager', 'aot_eager_decomp_partition'",
    ),
    (
        "without its mode",
        budgeted(memory_budget=0.3, activation_checkpointing="full"),
        f"{NAME} memory_budget=0.3 needs activation_checkpointing='memory_budget'; pass both, or leave it out",
    ),
    (
        "above one",
        budgeted(memory_budget=1.5),
        f"{NAME} memory_budget=1.5 is outside; pass a number from 0, a block's inputs alone, to 1",
    ),
    (
        "below zero",
        budgeted(memory_budget=-0.5),
        f"{NAME} memory_budget=-0.5 is outside; pass a number from 0, a block's inputs alone, to 1",
    ),
    (
        "no number",
        budgeted(memory_budget="half"),
        f"{NAME} memory_budget='half' is a str; pass a number from 0, a block's inputs alone, to 1",
        TypeError,
    ),
]
test_rejection = rejected({"dp_shard": 2}, REJECTED)
