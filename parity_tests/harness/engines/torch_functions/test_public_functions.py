"""A function that torch adds to torch.distributed is a red test here, before it is a user's surprise on lockstep.

Every public function has the same result and rows on lockstep and on gloo, or is rejected, or communicates nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as older
import torch.distributed.pipelining as pipelining
import torch.distributed.tensor as tensor
import torch.distributed.tensor.parallel as parallel
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parity_tests.harness.engines.torch_functions.cases import CASES, MESH, RUN, SIZE, full_name, numbers, plain
from parity_tests.harness.engines.torch_functions.every import all_called, called
from parity_tests.harness.engines.torch_functions.layers import MICROBATCHES, network
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.ledger import RunResult

pytestmark = [
    # Names of torch 2.11 are deprecated in 2.13 and 2.14, and are run nevertheless.
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Use `set_gradient_divide_factor` instead:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu:UserWarning"),
]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

# Names of a later torch than 2.11, the oldest that is supported.
SINCE = {
    (2, 13): (
        "distributed.all_gather_single distributed.reduce_scatter_single distributed.record_comm "
        "functional_collectives.all_gather_single functional_collectives.all_gather_single_autograd "
        "functional_collectives.all_gather_single_coalesced functional_collectives.reduce_scatter_single "
        "functional_collectives.reduce_scatter_single_autograd functional_collectives.reduce_scatter_single_coalesced "
        "functional_collectives.isend_inplace functional_collectives.irecv_inplace "
        "functional_collectives.batch_p2p_ops_inplace nn.functional._deprecated "
        "nn.functional._not_supported_under_compile fsdp.DataParallelMeshDims FSDPModule.reset_iter_state "
        "FSDPModule.set_reduce_scatter_unused_params FSDPModule.set_reduce_scatter_max_input_buffers "
        "FSDPModule.set_separate_reduce_scatter_group FSDPModule.set_symm_mem_for_comm"
    ),
    (2, 14): (
        "distributed.gather_single distributed.gather_into_tensor distributed.get_backend_impl distributed.set_timeout "
        "functional_collectives.reduce_scatter_inplace tensor.linspace tensor.logspace"
    ),
}

# Functions that torch or lockstep rejects on a CPU: the call, and the sentence on lockstep.
REJECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "distributed.split_group": (lambda mesh: dist.split_group(mesh["tp"], [[0, 1]]), "not safe to split"),
    "distributed.shrink_group": (lambda mesh: dist.shrink_group([1], mesh["tp"]), "not support shrinking"),
    "distributed.monitored_barrier": (lambda mesh: dist.monitored_barrier(), "GLOO"),  # a method of gloo's own
    "functional_collectives.batch_p2p_ops_inplace": (
        lambda mesh: functional.batch_p2p_ops_inplace(["isend"], [1], [0], [numbers(2)], dist.group.WORLD.group_name),
        "No backend type associated with device type cpu",  # of compiled code; the gloo engine rejects it too
    ),
    "tensor.rand": (lambda mesh: drawn(tensor.rand, mesh), ""),  # an assertion without a message: DTensor has no
    "tensor.randn": (lambda mesh: drawn(tensor.randn, mesh), ""),  # generator for the shards of a CPU
}


def drawn(function: Any, mesh: Any) -> Any:
    return function(5, 6, device_mesh=mesh.device_mesh, placements=[Shard(0), Replicate()])


# Functions that gloo lacks: the sentence of its rejection, and each rank's result on lockstep.
GATHERED = [torch.cat([numbers(2, 3, rank=rank) for rank in range(SIZE)]) if at == 1 else None for at in range(SIZE)]
EXCHANGED = [[numbers(2 * SIZE, 3, rank=rank).chunk(SIZE)[at] for rank in range(SIZE)] for at in range(SIZE)]
BEYOND_GLOO = {
    "distributed.gather_single": ("Backend gloo does not support gather_single", GATHERED),
    "distributed.gather_into_tensor": ("Backend gloo does not support gather_single", GATHERED),
}
if TORCH < (2, 13):  # gloo has it in 2.13
    BEYOND_GLOO["distributed.all_to_all"] = ("Backend gloo does not support alltoall", EXCHANGED)

# Functions that torch carries out by other collectives on gloo.
OTHER_CALLS_ON_GLOO = ("nn.functional.all_gather", "nn.functional.all_to_all")

# Functions without communication on a CPU, or that only the start of a process calls.
SILENT = {
    "ask or set what is true of the build or the process": (
        "distributed.GroupName distributed.get_debug_level distributed.set_debug_level "
        "distributed.set_debug_level_from_env distributed.get_default_backend_for_device "
        "distributed.get_node_local_rank distributed.is_available distributed.is_backend_available "
        "distributed.is_gloo_available distributed.is_mpi_available distributed.is_nccl_available "
        "distributed.is_torchelastic_launched distributed.is_ucc_available distributed.is_xccl_available "
        "distributed.supports_complex distributed.breakpoint"
    ),
    "name the backend, which is another on each engine": "distributed.get_backend distributed.get_backend_config",
    "start the ranks, as the engine does before a function runs": (
        "distributed.init_process_group distributed.rendezvous distributed.register_rendezvous_handler"
    ),
    "are called by autograd, in the cases with a gradient": " ".join(
        full_name(functional, name)
        for name in vars(functional)
        if name.endswith(("_backward", "_setup_context")) and not name.startswith("_")
    ),
    "warn or raise under torch.compile": "nn.functional._deprecated nn.functional._not_supported_under_compile",
    "change a table of DTensor, which ranks have each for itself only in a scheme's `around`; see test_rank_globals": (
        "tensor.parallel.loss_parallel"
    ),
    "are types: placements, policies and settings, or a class that a function of the same module makes": (
        "tensor.DTensor tensor.Partial tensor.Placement tensor.Replicate tensor.Shard "
        "tensor.parallel.ParallelStyle fsdp.CPUOffloadPolicy fsdp.DataParallelMeshDims fsdp.FSDPModule "
        "fsdp.MixedPrecisionPolicy fsdp.OffloadPolicy pipelining.Pipe pipelining.SplitPoint"
    ),
    "are FSDP of torch 1, which tests of watched code run": (
        "fsdp.BackwardPrefetch fsdp.CPUOffload fsdp.FullOptimStateDictConfig fsdp.FullStateDictConfig "
        "fsdp.FullyShardedDataParallel fsdp.LocalOptimStateDictConfig fsdp.LocalStateDictConfig fsdp.MixedPrecision "
        "fsdp.OptimStateDictConfig fsdp.OptimStateKeyType fsdp.ShardedOptimStateDictConfig "
        "fsdp.ShardedStateDictConfig fsdp.ShardingStrategy fsdp.StateDictConfig fsdp.StateDictSettings "
        "fsdp.StateDictType"
    ),
    "trace a module; its stages communicate as PipelineStage does": (
        "pipelining.pipeline pipelining.pipe_split pipelining.build_stage"
    ),
    "ask a mesh for what it was made of": (
        "DeviceMesh.device_type DeviceMesh.mesh DeviceMesh.mesh_dim_names DeviceMesh.ndim DeviceMesh.shape "
        "DTensor.device_mesh DTensor.placements"
    ),
    "need the streams or the memory of a GPU": (
        "FSDPModule.set_post_optim_event FSDPModule.set_allocate_memory_from_process_group_for_comm "
        "FSDPModule.set_symm_mem_for_comm"
    ),
}


def callables(module: Any) -> list[str]:
    """Public functions of a module without a list of its names; types of torch.distributed have tests of their own."""
    return [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n)) and not is_type(module, n)]


def is_type(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name), type)


def functions(module: Any) -> list[str]:
    own = inspect.getmembers(module, lambda value: inspect.isfunction(value) and value.__module__ == module.__name__)
    return [name for name, _ in own]


def attributes(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


OWNERS = (
    (dist, callables(dist)),
    (functional, [name for name in functions(functional) if not name.startswith("_")]),
    (older, functions(older)),
    (DeviceMesh, attributes(DeviceMesh)),
    (tensor, tensor.__all__),
    (DTensor, attributes(DTensor)),
    (parallel, parallel.__all__),
    (fsdp, fsdp.__all__),
    (fsdp.FSDPModule, attributes(fsdp.FSDPModule)),
    (nn.parallel, ["DistributedDataParallel"]),
    (pipelining, pipelining.__all__),
)
PUBLIC = {full_name(owner, name) for owner, names in OWNERS for name in names}
WITHOUT_COMMUNICATION = {name for names in SILENT.values() for name in names.split()}
LATER = {name for torch_version, names in SINCE.items() if torch_version > TORCH for name in names.split()}


def test_every_public_function_is_known():
    """A name that is missing here is new in this torch: give it a case, or say why it needs none."""
    assert sorted(PUBLIC - set(RUN) - set(REJECTED) - WITHOUT_COMMUNICATION) == []


def test_names_that_this_torch_lacks_come_from_a_later_one():
    known = set(RUN) | set(REJECTED) | WITHOUT_COMMUNICATION
    assert sorted(known - PUBLIC) == sorted(LATER)


def run_case(name: str, engine: str = "lockstep") -> RunResult:
    return run(lambda mesh, case: called(name, mesh), CaseSpec("public_functions", MESH), engine, quiet_s=60.0)


@pytest.mark.fast_values(16)
@pytest.mark.parametrize("name", sorted(set(CASES) - set(BEYOND_GLOO)))
def test_lockstep_and_gloo_agree(name):
    ours, theirs = run_case(name), run_case(name, "gloo")
    assert [value for value in (*ours.results, *theirs.results) if str(value).startswith("raises ")] == []
    assert ours.results == theirs.results
    if name not in OTHER_CALLS_ON_GLOO:
        assert [ours.ledger.of(rank) for rank in range(SIZE)] == [theirs.ledger.of(rank) for rank in range(SIZE)]


@pytest.mark.parametrize("name", sorted(set(CASES) & set(BEYOND_GLOO)))
def test_lockstep_has_functions_that_gloo_lacks(name):
    sentence, expected = BEYOND_GLOO[name]
    assert all(sentence in value for value in run_case(name, "gloo").results)
    assert run_case(name).results == tuple(map(plain, expected))


@pytest.fixture(scope="module")
def in_order_of_ranks() -> tuple[dict[str, Any], ...]:
    return run(all_called, CaseSpec("public_functions", MESH)).results


@pytest.mark.parametrize("schedule", (1, 2, 3))
def test_values_do_not_depend_on_the_interleaving(schedule, in_order_of_ranks):
    interleaved = run(all_called, CaseSpec("public_functions", MESH, schedule=schedule)).results
    for ours, expected in zip(interleaved, in_order_of_ranks, strict=True):
        assert [name for name in CASES if ours[name] != expected[name]] == []


def test_the_pipelines_gradients_are_not_all_zero():
    model = nn.Sequential(*[network(1, seed=number) for number in range(4)])
    (model(numbers(2 * MICROBATCHES, 4, rank=1)) * numbers(2 * MICROBATCHES, 4, rank=2)).sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(set(REJECTED) & PUBLIC))
def test_a_rejection_says_why(name):
    call, sentence = REJECTED[name]

    def body(mesh: Any, case: CaseSpec) -> str:
        with pytest.raises((RuntimeError, ValueError, TypeError, AssertionError)) as caught:
            call(mesh)
        return str(caught.value)

    assert all(sentence in message for message in run(body, CaseSpec("public_functions", MESH)).results)
