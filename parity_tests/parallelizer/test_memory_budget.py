"""Compiled blocks with a memory budget: a smaller budget saves fewer bytes, and gradients stay bitwise the same."""

import warnings

import pytest
import torch
from torch import nn

from parity_tests.parallelizer import small_net, test_multimodal
from parity_tests.parallelizer.training import broken
from parity_tests.rejections import rejected
from torch_impl.parallelizer import fsdp2_strategy_parallelize
from torch_impl.parallelizer.blocks import compile_blocks

BACKEND = "aot_eager"  # partitions graphs as inductor does, and needs no C compiler, which a machine may lack


class Activations(nn.Module):
    """Linear layers and pointwise functions, whose results backward needs; each is as large as the input."""

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
    """The bytes that a forward saves, without parameters and input, and all gradients; budget None does not compile."""
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
            saved[storage.data_ptr()] = (tensor, storage.nbytes())  # keep the tensor, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(x).square().sum()
    loss.backward()
    return sum(size for _, size in saved.values()), [p.grad for p in net.parameters()]


def test_fewer_bytes_are_saved_and_no_gradient_changes():
    x = torch.linspace(-1, 2, 64 * 8, dtype=torch.float64).view(64, 8)
    _, eager = step(None, x)
    results = {budget: step(budget, x) for budget in (1.0, 0.5, 0.0)}
    whole, half, inputs = (saved for saved, _ in results.values())
    assert whole > half > inputs
    assert all(torch.equal(a, b) for _, gradients in results.values() for a, b in zip(gradients, eager, strict=True))


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_backward_uses_the_dropout_mask_of_the_forward(budget):
    """The mask is read from the block's output; the weight's gradient sums the elements that it kept."""
    torch.compiler.reset()
    net = Tower(d=6, blocks=1, dropout=0.5).double()
    compile_blocks(net, BACKEND, budget)
    x = torch.linspace(-1, 2, 60, dtype=torch.float64).view(10, 6)
    with pytest.warns(UserWarning, match=r"dropout draws random numbers, and a recomputation would draw others"):
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
RANDOM_CALLS = {  # name: (call, whether it draws random numbers)
    "dropout of 0": (lambda x: nn.functional.dropout(x, p=0.0, training=True), False),
    "dropout in evaluation": (lambda x: nn.functional.dropout(x, 0.5, False), False),
    "dropout": (lambda x: nn.functional.dropout(x), True),
    "dropout of features": (lambda x: nn.functional.dropout1d(x, 0.5), True),
    "attention": (lambda x: ATTEND(x, x, x), False),
    "attention with dropout": (lambda x: ATTEND(x, x, x, dropout_p=0.5), True),
    "attention with positional dropout": (lambda x: ATTEND(x, x, x, None, 0.5), True),
    "noise": (lambda x: x + torch.rand_like(x), True),
    "noise in place": (lambda x: x * torch.empty(3, 4).bernoulli_(0.5), True),
    "no noise": (lambda x: x.exp() + x.mean(), False),
}


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_what_draws_numbers(name):
    call, draws = RANDOM_CALLS[name]
    torch.compiler.reset()
    net = Tower(4, 1)
    net.blocks[0] = Attention(call)
    compile_blocks(net, BACKEND, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        net(torch.ones(1, 3, 4)).sum().backward()
    assert any("draws random numbers" in str(each.message) for each in caught) is draws


def test_blocks_outside_of_the_scopes_have_no_budget():
    """A backend records the budget that is in force when it compiles each part."""
    seen = []

    def backend(graph, inputs):
        import torch._functorch.config as partitioner

        seen.append(partitioner.activation_memory_budget)
        return graph

    torch._dynamo.register_backend(backend, "recorder")
    net = test_multimodal.Net(2).requires_grad_(True)
    torch.compiler.reset()
    compile_blocks(net, "recorder", 0.25, ("language",))
    for part in (net.visual, net.language, net.visual):
        torch.compiler.reset()  # else the parts share one graph, as their layers are alike
        part.layers[0](torch.ones(1, 2))
    assert seen == [1.0, 0.25, 1.0]


def budgeted(**options):
    switches = {"activation_checkpointing": "memory_budget", "enable_compile": True, "compile_backend": BACKEND}
    return lambda mesh: fsdp2_strategy_parallelize(small_net.Net(), mesh.device_mesh, **{**switches, **options})


NAME = "parallelizer.fsdp2_strategy_parallelize:"
REMEDY = "pass a number from 0 (only a block's inputs are saved) to 1 (as without a budget)"
REJECTED = [
    (
        "not compiled",
        budgeted(enable_compile=False),
        f"{NAME} activation_checkpointing='memory_budget' needs a compiler; pass enable_compile=True, or "
        "activation_checkpointing='selective'",
    ),
    (
        "a backend without a partitioner",
        budgeted(compile_backend="eager"),
        f"{NAME} compile_backend='eager' has no partitioner, which 'memory_budget' needs; pass one of "
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
        f"{NAME} memory_budget=1.5 is not in [0, 1]; {REMEDY}",
    ),
    (
        "below zero",
        budgeted(memory_budget=-0.5),
        f"{NAME} memory_budget=-0.5 is not in [0, 1]; {REMEDY}",
    ),
    (
        "not a number",
        budgeted(memory_budget="half"),
        f"{NAME} memory_budget='half' is a str; {REMEDY}",
        TypeError,
    ),
]
test_rejection = rejected({"dp_shard": 2}, REJECTED)
