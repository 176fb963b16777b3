"""Parity of the norm and of clipping over every mesh; costs, rejections, and gradients that are left alone."""

import math
import re
from contextlib import nullcontext

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from jax_ref.optimizers import clipped
from parity_tests.optimizers.parameters import distributed, local, parameter
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.optimizers import clip_grad_norm_, clipping, gradient_norm

# None: left out, so that the default counts
NORMS = {"norm_type": (2.0, 1.0, math.inf, 3.0, None), "max_norm": (0.5, 1e4, 0.0, math.inf),
         "error_if_nonfinite": (False, True)}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64")


def reference(gradients, max_norm, norm_type, error_if_nonfinite):
    """The norm twice, from `gradient_norm` and from the call that clips or raises, and the clipped gradients."""
    total, after = clipped(gradients, max_norm, 2.0 if norm_type is None else norm_type)
    if error_if_nonfinite:
        after = {name: jnp.where(jnp.isfinite(total), x, gradients[name]) for name, x in after.items()}
    return {"norm": total, "norm_before": total, **after}


def declaration(mesh, gradients, dims, **more):
    names = tuple(f"gradients.{name}" for name in gradients)
    replicated = " ".join(f"{axis}=I" for axis in mesh)
    return dict(
        reference=reference,
        mesh=mesh,
        inputs={"gradients": gradients},
        outputs={"norm": replicated, "norm_before": replicated, **gradients},
        dims=dims,
        draw=dict.fromkeys(names, values("normal", "zeros", "ties", "nan")),
        nograd=names,
        options=NORMS,
        dtypes=DTYPES,
        sums="float32",
        reduction=tuple(dims),
        **more,
    )


def norms_and_gradients(parameters, counted, max_norm, norm_type, error_if_nonfinite, uncounted=(), **settings):
    """The norm of the counted gradients, from `gradient_norm` and from clipping, and all gradients after clipping.

    Every rank raises for a norm that is not finite, whichever rank has the gradient, and leaves its gradients alone.
    """
    order = () if norm_type is None else (norm_type,)
    norm_before = gradient_norm(counted, *order, **settings)
    if norm_type is not None:
        settings["norm_type"] = norm_type
    norm, is_rejected = norm_before, error_if_nonfinite and not norm_before.isfinite()
    with pytest.raises(RuntimeError, match="skip the step") if is_rejected else nullcontext():
        norm = clip_grad_norm_(
            counted, max_norm, uncounted=uncounted, error_if_nonfinite=error_if_nonfinite, **settings
        )
    return {
        "norm": norm,
        "norm_before": norm_before,
        **{
            name: torch.zeros_like(parameter) if parameter.grad is None else local(parameter.grad)
            for name, parameter in parameters.items()
        },
    }


# Dense layers over FSDP and tensor parallelism

DENSE = {"both": (Shard(0), Shard(1)), "rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(0)),
         "replicated": (Replicate(), Replicate())}  # fmt: skip


def dense_cost(case):
    """Over each axis, `gradient_norm` and clipping each send one float64 for each set of axes that shards a parameter.

    If both axes have several ranks, an axis is in two such sets: alone, and with the other axis.
    """
    axes = [axis for axis in ("dp", "tp") if case.mesh[axis] > 1]
    return Cost(forward={f"all_reduce/{axis}": (2, 2 * 8 * len(axes)) for axis in axes})


@scheme(
    **declaration(
        {"dp": (1, 2, 3), "tp": (1, 2)},
        {"both": "a/dp b/tp", "rows": "e/dp tp=I", "columns": "f/tp dp=I", "replicated": "o dp=I tp=I"},
        {"a": (6,), "b": (2,), "e": (6,), "f": (4,), "o": (1, 3)},
        cost=dense_cost,
    )
)
def clipped_over_fsdp_and_tp(mesh, gradients, max_norm, norm_type, error_if_nonfinite):
    parameters = {name: parameter(x, mesh.device_mesh, DENSE[name]) for name, x in gradients.items()}
    return norms_and_gradients(parameters, list(parameters.values()), max_norm, norm_type, error_if_nonfinite)


def over_two_axes():
    common = declaration(
        {"dp": (1, 2, 3), "tp": (1, 2)},
        {"both": "a/dp b/tp", "replicated": "o dp=I tp=I"},
        {"a": (6,), "b": (2,), "o": (2,)},
    )
    return {**common, "rank_options": {"is_whole": (False, True)}}


@scheme(**over_two_axes())
def clipped_over_two_axes(mesh, gradients, max_norm, norm_type, error_if_nonfinite, is_whole):
    """No parameter is sharded over tp alone, or only gradients are sharded."""
    parameters = {name: parameter(x, mesh.device_mesh, DENSE[name], is_whole=is_whole) for name, x in gradients.items()}
    return norms_and_gradients(parameters, list(parameters.values()), max_norm, norm_type, error_if_nonfinite)


# Experts on a mesh of their own


@scheme(
    **declaration(
        {"edp": (1, 2), "ep": (1, 2, 4)},
        {"dense": "a/edp/ep", "experts": "e/ep f edp=I", "sharded_experts": "e/ep g/edp", "router": "e edp=I ep=I"},
        {"a": (8,), "e": (4,), "f": (3,), "g": (2,)},
    )
)
@pytest.mark.cases(6, engine="gloo")
def clipped_with_experts(mesh, gradients, max_norm, norm_type, error_if_nonfinite):
    meshes = {
        "dense": (mesh.device_mesh, (Shard(0), Shard(0))),
        "experts": (mesh.device_mesh["ep"], (Shard(0),)),
        "sharded_experts": (mesh.device_mesh, (Shard(1), Shard(0))),
        "router": (mesh.device_mesh["edp"], (Replicate(),)),
    }
    parameters = {name: parameter(x, *meshes[name]) for name, x in gradients.items()}
    return norms_and_gradients(parameters, list(parameters.values()), max_norm, norm_type, error_if_nonfinite)


# Stages of a pipeline, with a weight that the first and the last share


@scheme(
    **declaration(
        {"pp": (1, 2, 3), "tp": (1, 2)},
        {"layers": "l/pp f/tp", "tied": "v/tp pp=I", "replicated": "l/pp tp=I"},
        {"l": (6,), "f": (4,), "v": (4,)},
    )
)
def clipped_over_stages(mesh, gradients, max_norm, norm_type, error_if_nonfinite):
    tp = mesh.device_mesh["tp"]
    parameters = {
        "layers": parameter(gradients["layers"], tp, (Shard(1),)),
        "tied": parameter(gradients["tied"], tp, (Shard(0),)),
        "replicated": parameter(gradients["replicated"], tp, (Replicate(),)),
    }
    is_first = mesh.rank("pp") == 0
    counted = [x for name, x in parameters.items() if name != "tied" or is_first]
    uncounted = [] if is_first else [parameters["tied"]]
    stages = {"pp": mesh["pp"], "uncounted": uncounted}
    return norms_and_gradients(parameters, counted, max_norm, norm_type, error_if_nonfinite, **stages)


# Shards that are plain tensors, as in Megatron's layers


PLAIN = {"columns": "f/tp d", "replicated": "d tp=I"}
LARGE = dict.fromkeys((f"gradients.{name}" for name in PLAIN), values("normal", "zeros", "ties", "nan", "large"))
# For p = 3 the exponent 1 / p is rounded, and sum ** (1 / p) multiplies that error by log(sum), in torch too.
EXACT = {**NORMS, "norm_type": (1.0, 2.0, 4.0, math.inf)}


@scheme(
    **{
        **declaration({"tp": (1, 2, 4, 5, 7)}, PLAIN, {"f": (140,), "d": (3,)}),  # each number of ranks divides f
        "draw": LARGE,
        "options": EXACT,
    }
)
def clipped_plain_shards(mesh, gradients, max_norm, norm_type, error_if_nonfinite):
    parameters = {name: parameter(x) for name, x in gradients.items()}
    sharded = {id(parameters["columns"])}
    sharding = {"sharding_groups": lambda each: (mesh["tp"],) if id(each) in sharded else ()}
    twice = [*parameters.values(), parameters["replicated"]]  # as a weight under two names
    both = {"uncounted": parameters["columns"]}  # counted and clipped once
    return norms_and_gradients(parameters, twice, max_norm, norm_type, error_if_nonfinite, **both, **sharding)


UNLIKE = {"rows": "e/tp:ragged d", "wide": "g/tp:ragged", "replicated": "d tp=I"}
# No NaN: clipping by a NaN norm makes a zero gradient NaN, but a missing gradient stays 0.
FINITE = dict.fromkeys((f"gradients.{name}" for name in UNLIKE), values("normal", "zeros", "ties"))


@scheme(**{**declaration({"tp": (1, 2, 3, 4)}, UNLIKE, {}), "draw": FINITE})
def clipped_unlike_shards(mesh, gradients, max_norm, norm_type, error_if_nonfinite):
    """Shards of different lengths, some of them empty, and of two dtypes. The first parameter has no gradient.

    A rank whose shard is zeros has no gradient for it.
    """
    parameters = {name: parameter(x.double() if name == "wide" else x) for name, x in gradients.items()}
    sharded = [parameters["rows"], parameters["wide"]]
    for each in sharded:
        each.grad = each.grad if each.grad.any() or not each.grad.numel() else None
    shard_ids = {id(each) for each in sharded}
    sharding = {"sharding_groups": lambda each: (mesh["tp"],) if id(each) in shard_ids else ()}
    counted = [nn.Parameter(torch.zeros(2)), *parameters.values()]
    return norms_and_gradients(parameters, counted, max_norm, norm_type, error_if_nonfinite, **sharding)


SCHEMES = (
    clipped_over_fsdp_and_tp,
    clipped_over_two_axes,
    clipped_with_experts,
    clipped_over_stages,
    clipped_plain_shards,
    clipped_unlike_shards,
)
test_parity = parity(SCHEMES, lockstep=25)


# Below, all ranks shard the same tensors; 1-norms of integers are exact in any order.

GRADIENTS = [torch.arange(-4.0, 8.0).view(6, 2), torch.arange(5.0), torch.tensor([[3.0]])]
ONE_NORM = sum(each.abs().sum().item() for each in GRADIENTS)


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="clipping", mesh=mesh))


@pytest.mark.parametrize(
    "placements",
    [
        [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())],
        [(Replicate(), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())],
    ],
)
@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}])
def test_uneven_and_empty_shards_count_once(mesh, placements):
    def body(mesh, case):
        sharded = [distributed(x, mesh.device_mesh, list(p)) for x, p in zip(GRADIENTS, placements, strict=True)]
        plain, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        plain.grad = torch.tensor([0.0, 2.0])
        everything = [*sharded, plain, without]
        return gradient_norm(everything, 1.0).item(), gradient_norm(everything, math.inf).item()

    assert set(on_mesh(body, **mesh).results) == {(ONE_NORM + 2, 7.0)}


def test_equal_meshes_are_one():
    """DTensor's caches may give a gradient one of two equal meshes, and another one on the next rank."""

    def body(mesh, case):
        again = init_device_mesh(mesh.device_mesh.device_type, (2,), mesh_dim_names=("dp",))
        places = [mesh.device_mesh, again if mesh.rank("dp") else mesh.device_mesh]
        return gradient_norm([distributed(torch.ones(4), place, [Shard(0)]) for place in places], 1.0).item()

    outcome = on_mesh(body, dp=2)
    assert set(outcome.results) == {8.0}
    assert sum(row.op == "all_reduce" for row in outcome.ledger.of(0)) == 1


def test_a_rank_without_a_gradient_takes_part():
    """No token was routed to the experts of rank 0."""

    def body(mesh, case):
        expert = distributed(torch.ones(4), mesh.device_mesh, [Shard(0)])
        if mesh.rank("ep") == 0:
            expert.grad = None
        return clip_grad_norm_([expert], 1e4, 1.0).item()

    assert set(on_mesh(body, ep=2).results) == {2.0}


def test_partial_sums_are_rejected_before_anything_is_sent():
    def body(mesh, case):
        created = nn.Parameter(distribute_tensor(torch.zeros(2), mesh.device_mesh, [Replicate()]))
        created.grad = DTensor.from_local(torch.ones(2), mesh.device_mesh, [Partial()])
        with pytest.raises(ValueError, match=re.escape("(Partial(sum),), a sum that is not computed yet; reduce it")):
            clip_grad_norm_([created], 1.0)
        return local(created.grad).tolist()

    outcome = on_mesh(body, tp=2)
    assert outcome.results == ([1.0, 1.0],) * 2
    assert not [row for row in outcome.ledger.of(0) if row.op == "all_reduce"]


def norm_with_bad_rank_1(mesh, case):
    created = nn.Parameter(torch.zeros(2))
    created.grad = torch.tensor([1.0, case.options["bad"] if mesh.rank("dp") == 1 else 2.0])
    sharding = lambda parameter: [mesh["dp"]]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"the norm of order inf is (nan|inf)"):
        clip_grad_norm_(created, 1.0, math.inf, error_if_nonfinite=True, sharding_groups=sharding)
    return gradient_norm(created, math.inf, sharding_groups=sharding).item()


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.nan])
def test_the_largest_gradient_is_not_finite_on_one_rank(bad, engine):
    """A maximum of floats over processes drops a NaN."""
    case = CaseSpec(scheme="clipping", mesh={"dp": 2}, options={"bad": bad})
    results = run(norm_with_bad_rank_1, case, engine=engine).results
    assert [str(norm) for norm in results] == [str(abs(bad))] * 2


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(bad):
    """With error_if_nonfinite every rank raises and keeps its gradient, even a rank with a finite shard."""

    def body(mesh, case):
        created = distributed(torch.tensor([1.0, 1.0, bad, 1.0]), mesh.device_mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="skip the step, or pass error_if_nonfinite=False"):
            clip_grad_norm_([created], 1.0, error_if_nonfinite=True)
        before = local(created.grad).clone()
        norm = clip_grad_norm_([created], 1.0)
        return before, norm, local(created.grad)

    plain = nn.Parameter(torch.zeros(4))
    plain.grad = torch.tensor([1.0, 1.0, bad, 1.0])
    want = torch.nn.utils.clip_grad_norm_([plain], 1.0)
    (first, norm, _), (second, _, _) = results = on_mesh(body, dp=2).results
    assert torch.equal(torch.cat([first, second]).nan_to_num(9.0), torch.tensor([1.0, 1.0, bad, 1.0]).nan_to_num(9.0))
    assert torch.equal(norm.nan_to_num(), want.nan_to_num())
    assert torch.equal(torch.cat([after for _, _, after in results]).nan_to_num(), plain.grad.nan_to_num())


def test_large_and_narrow_gradients_neither_overflow_nor_stall():
    large = [parameter(torch.tensor([1.5e19])) for _ in range(2)]  # the sum of squares is beyond float32
    assert gradient_norm(large).isfinite()
    narrow = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    narrow.grad = torch.ones_like(narrow)
    assert gradient_norm([narrow]).item() == 64.0


def test_no_parameters_have_the_norm_zero():
    assert gradient_norm([]).item() == clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda")],
)
def test_a_stage_without_parameters_adds_its_zero_on_the_device_of_the_group(backends, device, monkeypatch):
    """NCCL rejects CPU tensors: this rank would raise, and the other ranks would wait for it."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    assert clipping._device_of(object()).type == device
    assert clipping._device_of(None).type == "cpu"


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_stage_without_parameters_takes_part(engine):
    def body(mesh, case):
        parameters = [with_gradient(torch.tensor([3.0, 4.0]))] if mesh.rank("pp") else []
        return gradient_norm(parameters, pp=mesh["pp"]).item()

    assert run(body, CaseSpec("clipping", {"pp": 2}), engine).results == (5.0, 5.0)


def with_gradient(gradient):
    created = nn.Parameter(torch.zeros_like(gradient))
    created.grad = gradient
    return created


PLAIN = nn.Parameter(torch.zeros(1))


REJECTED = [
    ({"norm_type": 0.0}, "optimizers.clip_grad_norm_: norm_type=0.0 must be positive; pass 1.0, 2.0 or math.inf"),
    ({"norm_type": "2"}, "norm_type='2' is a str, not a number; pass 1.0, 2.0 or math.inf"),
    ({"norm_type": math.nan}, "norm_type=nan must be positive; pass 1.0, 2.0 or math.inf"),
    ({"max_norm": -1.0}, "optimizers.clip_grad_norm_: max_norm=-1.0 must be at least 0; pass a number such as 1.0"),
    ({"max_norm": math.nan}, "optimizers.clip_grad_norm_: max_norm=nan must be at least 0; pass a number"),
    ({"max_norm": torch.tensor(1.0)}, "is a Tensor, not a number; pass a number such as 1.0"),
    ({"parameters": None}, "clip_grad_norm_: parameters is a NoneType; pass tensors, as model.parameters() gives"),
    ({"parameters": nn.Linear(1, 1)}, "parameters is a Linear; pass tensors, as model.parameters() gives"),
    ({"parameters": {"w": PLAIN}}, "parameters is a dict; pass tensors, as model.parameters() gives"),
    ({"parameters": list(nn.Linear(1, 1).named_parameters())}, "parameters[0] is a tuple; pass tensors, as"),
    (
        {"uncounted": [PLAIN, 3]},
        "clip_grad_norm_: uncounted[1] is a int; pass tensors, as model.parameters() gives",
    ),
    (
        {"sharding_groups": []},
        "sharding_groups is not a function; pass a function from a parameter to a list of groups",
    ),
    ({"sharding_groups": lambda _: None}, "sharding_groups of parameters[0] returned None; return a list of"),
    (
        {"sharding_groups": lambda _: [-100]},
        "returned [-100]; return a list of ProcessGroups that contain this rank",
    ),
    (
        {"parameters": with_gradient(torch.eye(2).to_sparse())},
        "the gradient of parameters is sparse_coo; pass dense",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED)
def test_rejected(changes, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        clip_grad_norm_(**{"parameters": [PLAIN], "max_norm": 1.0, **changes})


def test_one_tensor_infinity_and_complex_gradients_are_as_in_torch():
    for gradient in (torch.tensor([3.0, 4.0]), torch.tensor([3.0 + 4.0j, 0.0])):
        for max_norm in (1.0, math.inf):
            ours, theirs = with_gradient(gradient.clone()), with_gradient(gradient.clone())
            norm = clip_grad_norm_(ours, max_norm)
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm)) and norm.dtype == torch.float32
            assert torch.equal(ours.grad, theirs.grad)


def test_a_high_order_stays_in_range():
    assert gradient_norm(with_gradient(torch.full((4,), 2.0**7)), 20) == torch.tensor(2.0**7 * 4.0 ** (1 / 20))
    assert gradient_norm(with_gradient(torch.full((1,), 2.0**-40)), 4).item() == 2.0**-40
