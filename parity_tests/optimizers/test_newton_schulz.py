"""Newton-Schulz: parity, invariances, owners of matrices, the route that sends fewer bytes, and rejections."""

import re

import pytest
import torch
from jaxtyping import Int
from torch import Tensor
from torch.distributed.tensor import Shard

from jax_ref.optimizers import newton_schulz as reference
from parity_tests.optimizers.parameters import distributed
from shardproof import CaseSpec, Cost, check_cases, integers, scheme, values
from shardproof.engines.engines import run
from torch_impl.optimizers import Muon, fewest_bytes, newton_schulz
from torch_impl.optimizers.newton_schulz import owners

LARGE = 2.0**80  # its square overflows float32


def scaled_reference(x, steps, factor):
    return reference(factor * x, 5 if steps is None else steps)


@scheme(
    reference=scaled_reference,
    mesh={"dp": (1,)},
    contract=newton_schulz,
    inputs={"x": "b m n"},
    dims={"b": (1, 3), "m": (1, 2, 5), "n": (1, 3)},
    draw={"x": values("normal", "zeros", "ties", "tiny")},
    nograd=("x",),
    options={"steps": (5, 1, None), "factor": (1.0, LARGE)},
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("m", "n"),
    sums="float32",
    cost=lambda case: Cost(),
)
def newton_schulz_on_one_device(mesh, x, steps, factor):
    return newton_schulz(factor * x, **({} if steps is None else {"steps": steps}))


def cheaper_routes(sharded, other, world, steps, itemsize):
    """1 where "sharded" sends less. Both counts of bytes are multiplied by 2 * world, so that they are integers."""
    steps, itemsize = 5 if steps is None else steps, 4 if itemsize is None else itemsize
    to_owners = 2 * sharded * other * itemsize
    added = world * (2 * 8 + steps * other * (other + 1) * max(itemsize, 4))
    return (to_owners > added).astype(sharded.dtype)


@scheme(
    reference=cheaper_routes,
    mesh={"dp": (1, 2)},
    inputs={"sharded": "k/dp", "other": "k/dp", "world": "k/dp"},
    outputs="k/dp",
    dims={"k": (16,)},
    draw={"sharded": integers(1, 60), "other": integers(1, 4), "world": integers(1, 4)},
    options={"steps": (None, 1, 3), "itemsize": (None, 2, 8)},
)
def routes_of_matrices(mesh, sharded, other, world, steps, itemsize) -> Int[Tensor, "k/dp"]:
    """Sizes are small, so that both routes sometimes send equally many bytes."""
    given = {name: size for name, size in (("steps", steps), ("itemsize", itemsize)) if size is not None}
    sizes = zip(sharded.tolist(), other.tolist(), world.tolist(), strict=True)
    return sharded.new_tensor([fewest_bytes(*each, **given) == "sharded" for each in sizes])


@pytest.mark.parametrize(
    "declared_scheme", [newton_schulz_on_one_device, routes_of_matrices], ids=lambda each: each.name
)
def test_parity(declared_scheme):
    check_cases(declared_scheme, 20)


X = torch.linspace(-1.0, 2.0, 24).view(2, 4, 3).cos()


def test_a_transposed_matrix_has_the_transposed_result():
    assert torch.equal(newton_schulz(X.mT), newton_schulz(X).mT)


def test_the_scale_of_a_matrix_does_not_matter():
    """Powers of two are exact; the square of the largest overflows float32."""
    for power in (-20, 3, 70):
        assert torch.equal(newton_schulz(X * 2.0**power), newton_schulz(X))


def test_autocast_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16):
        result = newton_schulz(X.float())
    assert torch.equal(result, newton_schulz(X.float()))


def test_singular_values_come_near_1():
    x = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    values_before = torch.linspace(0.05, 1.0, 16)
    after = torch.linalg.svdvals(newton_schulz(x * values_before))
    assert after.min() > 0.6 and after.max() < 1.3  # where the polynomial's orbits end


def test_owners_take_turns_and_share_the_work():
    assert owners([(4, 4)] * 5, 3) == [0, 1, 2, 0, 1]
    assert owners([(2, 2), (64, 64), (2, 2), (64, 64)], 2) == [0, 0, 1, 1]
    assert owners([(8, 8), (4, 4), (4, 4), (4, 4)], 2) == [0, 1, 1, 1]  # three small ones cost less than the large one
    assert owners([(3, 5)], 1) == [0]


# Bytes sent, by the ledger

SIZES = [(8, 4), (64, 2), (3, 7), (40, 3)]  # sharded dim, other dim


def muon_step(mesh, case):
    """One step of Muon on one matrix for each size of the case."""
    matrices = [torch.ones(size) + torch.eye(*size) for size in case.options["sizes"]]
    parameters = [distributed(each, mesh.device_mesh, [Shard(0)]) for each in matrices]
    Muon(parameters, route=case.options["route"]).step()


def rows_of(route, sizes, world):
    case = CaseSpec(scheme="muon", mesh={"dp": world}, options={"route": route, "sizes": sizes})
    op = {"owners": "all_to_all", "sharded": "all_reduce"}[route]
    ledger = run(muon_step, case).ledger
    return [[row for row in ledger.of(rank) if row.op == op] for rank in range(world)]


def mean_bytes_sent(route, size, world):
    """The mean bytes that leave a rank: without its own part of an all_to_all, and with a ring for an all_reduce."""
    total = 0.0
    for rank, rows in enumerate(rows_of(route, [size], world)):
        for row in rows:
            if route == "owners":
                itemsize = row.bytes_in // max(sum(row.splits[0]), 1)
                total += sum(n for to, n in enumerate(row.splits[0]) if to != rank) * itemsize
            else:
                total += 2 * (world - 1) / world * row.bytes_in
    return total / world


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_the_rule_takes_the_route_that_sends_less(size, world):
    routes = {route: mean_bytes_sent(route, size, world) for route in ("owners", "sharded")}
    assert fewest_bytes(*size, world) == min(routes, key=routes.get)


def test_uneven_matrices_have_the_stated_bytes_on_every_rank():
    """Owners: a rank sends its rows of all matrices, then all rows of its own. "sharded" sums norms and triangles."""
    world = 3
    owner = owners(SIZES, world)
    longest = [-(-s // world) for s, _ in SIZES]
    for rank, rows in enumerate(rows_of("owners", SIZES, world)):
        shards = [min(n, max(s - rank * n, 0)) * k for (s, k), n in zip(SIZES, longest, strict=True)]
        owned = [s * k for i, (s, k) in enumerate(SIZES) if owner[i] == rank]
        assert [row.bytes_in for row in rows] == [4 * sum(shards), 4 * sum(owned)]
    triangles = sum(k * (k + 1) // 2 for _, k in SIZES)
    for rows in rows_of("sharded", SIZES, world):
        assert [row.bytes_in for row in rows] == [8 * len(SIZES)] + [4 * triangles] * 5


REJECTED = [
    ({"x": [1.0]}, "optimizers.newton_schulz: x is a list; pass a Tensor"),
    ({"x": torch.ones(3)}, "optimizers.newton_schulz: x is [3]; its dims must be [... m n]; reshape it to these"),
    ({"x": torch.ones(2, 2, dtype=torch.int64)}, "optimizers.newton_schulz: x is int64; it must be floating"),
    ({"x": X, "steps": 0}, "optimizers.newton_schulz: steps=0 must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_rejected(arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        newton_schulz(**arguments)


def test_sizes_are_positive():
    with pytest.raises(ValueError, match=re.escape("optimizers.fewest_bytes: world=0 must be at least 1")):
        fewest_bytes(4, 4, 0)
