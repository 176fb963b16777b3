"""Mixtures of experts under ep, tp and FSDP: every gradient, clipping and a step equal one process's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from jax_ref import expert_parallel as reference
from parity_tests.parallelizer.expert_families import MAX_NORM, OF_FAMILY, alone, chosen, mixture, on_rank
from parity_tests.parallelizer.expert_net import BALANCE, ExpertNet, Z, plan
from parity_tests.parallelizer.families import empty
from parity_tests.parallelizer.steps import reduced_loss
from parity_tests.parallelizer.training import broken_steps, full_arrays, parallelized
from parity_tests.rejections import check_rejection, rejected
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize
from torch_impl.parallelizer.expert_sharding import _equal_parts
from torch_impl.parallelizer.expert_validation import validate_experts
from torch_impl.parallelizer.mesh_axes import mesh_axes
from torch_impl.parallelizer.tp_styles import Experts

EVEN = 4  # positions, which tp divides
AXES = "dp_shard=I cp=I ep=I tp=I"  # a parameter is whole on each rank, and so is its gradient
PARAMETERS = {
    "router": f"e d {AXES}",
    "gate_up": f"e two f d {AXES}",
    "down": f"e d f {AXES}",
    "shared_up": f"g d {AXES}",
    "shared_down": f"d g {AXES}",
    "head": f"o d {AXES}",
}


def of_one_batch(x, parameters, k):
    router, gate_up, down, shared_up, shared_down, head = (parameters[name] for name in PARAMETERS)
    logits = x @ router.T
    gates, experts, probabilities = reference.softmax_top_k(logits, k, norm_topk_prob=True)
    routed = reference.mixture(x, gates, experts, gate_up.transpose(0, 3, 1, 2), down.transpose(0, 2, 1))
    y = (x + routed + jax.nn.silu(x @ shared_up.T) @ shared_down.T) @ head.T
    balance, z = reference.balance_loss(probabilities, experts), reference.z_loss(logits)
    return jnp.mean(y**2) + BALANCE * balance + Z * z


def of_both_batches(x, parameters, k, mesh):
    """The loss; the bits of the gates that reach the experts; of each expert, the columns that a rank stores."""
    d, ranks = x.shape[-1], mesh["dp_shard"] * mesh["cp"]
    facts = jnp.asarray([64, d if d % ranks else d // ranks], x.dtype)
    return of_one_batch(x[0], parameters, k) + of_one_batch(x[1], parameters, k), facts


def sequences_can_be_sharded(case):
    local = case.t // (case.dp_shard * case.cp * case.ep)
    return local % case.tp == 0 or not case.in_sequence_shards


@scheme(
    reference=of_both_batches,
    mesh={"dp_shard": (1, 2), "cp": (1, 2), "ep": (1, 2), "tp": (1, 2)},
    inputs={"x": "m t/dp_shard/cp/ep d", "parameters": PARAMETERS},
    outputs=(AXES, f"facts {AXES}"),
    dims={"facts": (2,), "m": (2,), "two": (2,), "e": (4, 8), "d": (4, 7), "f": (4, 3), "g": (8,), "o": (3,)},
    draw=dict.fromkeys(("x", *(f"parameters.{name}" for name in PARAMETERS)), values("normal")),
    options={"k": (2, 1, 3)},
    rank_options={"recomputed": (False, True), "resharded": (None, False), "in_sequence_shards": (False, True)},
    assume=sequences_can_be_sharded,
    nograd=("x",),
    dtypes=("float32", "float64"),
    roundings=6,
    reduction=("t", "d", "e", "f"),
)
@pytest.mark.cases(2, engine="gloo")
@pytest.mark.cases(10)
def step_of_sharded_experts(mesh, x, parameters, k, recomputed, resharded, in_sequence_shards):
    axes = mesh_axes(mesh.device_mesh)
    p = {**parameters, "gate_up": parameters["gate_up"].flatten(1, 2)}
    names = ("router.weight", "experts.gate_up_proj", "experts.down_proj", "shared_up.weight", "shared_down.weight")
    named = {f"blocks.0.mixture.{name}": p[leaf] for name, leaf in zip(names, PARAMETERS, strict=False)}
    named["head.weight"] = p["head"]
    facts = {}

    def local_loss(*tensors):
        net = ExpertNet({name: x.contiguous() for name, x in zip(named, tensors, strict=True)}, k)
        net.blocks[0].mixture.experts.register_forward_pre_hook(note_gates)
        model = fsdp2_strategy_parallelize(
            net, mesh.device_mesh, MixedPrecisionPolicy(param_dtype=x.dtype), plan(),
            activation_checkpointing=recomputed, reshard_after_forward=resharded, sequence_parallel=in_sequence_shards,
        )  # fmt: skip
        facts["columns"] = net.blocks[0].mixture.experts.gate_up_proj.to_local().shape[2]
        return model, [model.loss(batch, mesh.total("t"), axes.loss_mesh.get_group()) for batch in x]

    def note_gates(module, arguments):
        facts["bits"] = torch.finfo(arguments[2].dtype).bits

    loss = reduced_loss(axes, named, local_loss)
    return loss, x.new_tensor([facts["bits"], facts["columns"]])


MESHES = [
    {"ep": 2},
    {"ep": 2, "tp": 2},
    {"dp_shard": 2, "ep": 2},
    {"tp": 2},
    {"dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
]
OTHERS = [
    ("qwen3_moe", {"ep": 4}),
    ("deepseek_v3", {"dp_replicate": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 1, "cp": 2, "ep": 2}),
    ("mixtral", {"ep": 1}),
    ("gpt_oss", {"dp_replicate": 2, "ep": 2}),
    ("gpt_oss", {"dp_shard": 2, "ep": 2, "tp": 2}),
    ("gpt_oss", {"dp_shard": 1, "ep": 1, "tp": 2}),
]


def on_mesh(mesh, body, engine="lockstep"):
    return run(lambda view, case: body(view), CaseSpec("experts", mesh, dtype="float64"), engine)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("family", OF_FAMILY)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_step_matches_one_process(family, mesh):
    ranks = on_mesh(mesh, lambda view: on_rank(view, family)).results
    assert broken_steps(alone(family), mesh, ranks) == []
    assert alone(family).norm > MAX_NORM


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), OTHERS, ids=str)
def test_one_step_on_other_meshes(family, mesh):
    ranks = on_mesh(mesh, lambda view: on_rank(view, family)).results
    assert broken_steps(alone(family), mesh, ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_FAMILY)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_one_step_of_sharded_sequences(family, mesh):
    """A layer with experts gathers the sequence for its router, whose losses are over all positions."""
    ranks = on_mesh(mesh, lambda view: on_rank(view, family, length=EVEN, sequence_parallel=True)).results
    assert broken_steps(alone(family, EVEN), mesh, ranks) == []


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_experts_of_a_block_itself_cannot_have_shards_of_the_sequence(mesh):
    def call(view):
        block = nn.ModuleDict({"experts": Biased(replaced())})
        plan = {"h.0.experts": Experts({"gate_up_proj": "packed_colwise", "down_proj": "rowwise"})}
        model = nn.ModuleDict({"h": nn.ModuleList([block])})
        fsdp2_strategy_parallelize(model, view.device_mesh, tp_shard_plan=plan, sequence_parallel=True)

    check_rejection(
        mesh,
        "experts of a block",
        call,
        "sequence_parallel=True: 'h.0.experts' of a block has experts; their choices and gates would cover "
        "only this rank's positions; pass False, or put router and experts into one layer",
    )


@pytest.mark.slow
def test_one_step_on_processes():
    mesh = {"ep": 2, "tp": 2}
    ranks = on_mesh(mesh, lambda view: on_rank(view, "deepseek_v3"), "gloo").results
    assert broken_steps(alone("deepseek_v3"), mesh, ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("switches", [{"activation_checkpointing": True}, {"reshard_after_forward": False}], ids=str)
def test_saving_memory_changes_no_bit(switches):
    plain, saving = (
        on_mesh({"dp_shard": 2, "ep": 2}, lambda view, s=s: on_rank(view, "qwen3_moe", **s)).results[0]
        for s in ({}, switches)
    )
    assert plain.loss == saving.loss
    assert all(np.array_equal(plain.weights[name], saving.weights[name]) for name in plain.weights)


LOCAL = {"gate_up_proj_bias": (1, 10), "down_proj_bias": (2, 6)}  # of [4, 20] and of [4, 12]


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_FAMILY)
def test_names_and_values_stay_as_they_were(family):
    """Full values by the names of the unsharded model; each dim of a stack is sharded over one axis.

    A bias of columns has no width that FSDP could shard, and one of the width no columns for tp.
    """
    want = full_arrays(mixture(family))

    def body(view):
        model = parallelized()(mixture(family), view.device_mesh)
        stacks = {name: p for name, p in model.named_parameters() if ".experts." in name}
        return full_arrays(model), {name: tuple(p.to_local().shape) for name, p in stacks.items()}

    for values_, shapes in on_mesh({"dp_shard": 2, "ep": 2, "tp": 2}, body).results:
        assert all(np.array_equal(values_[name], want[name]) for name in {**want, **values_})
        for name, local in shapes.items():
            assert local == LOCAL.get(name.rpartition(".")[2], tuple(size // 2 for size in want[name].shape)), name


# By class, the modules that transformers computes in float32 in a float64 model, and families.py in float64.
NARROW = {
    "qwen3_moe": {"Qwen3MoeRMSNorm", "Qwen3MoeRotaryEmbedding", "Qwen3MoeTopKRouter"},
    "mixtral": {"MixtralRMSNorm", "MixtralRotaryEmbedding", "MixtralTopKRouter"},
    "gpt_oss": {"GptOssRMSNorm", "GptOssRotaryEmbedding"},
    "deepseek_v3": {"DeepseekV3RMSNorm", "DeepseekV3RotaryEmbedding", "DeepseekV3TopkRouter"},
}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_where_transformers_computes_in_float32(family):
    """A module narrows if its outputs are others, from the same inputs, once whoever asks for float32 gets float64."""
    wide, narrow = mixture(family), empty(chosen(family))
    narrow.set_experts_implementation("eager")
    narrow.load_state_dict(wide.state_dict())
    found = set()
    for name, module in narrow.named_modules():
        if not list(module.children()):
            module.register_forward_hook(_comparing(wide.get_submodule(name), found), with_kwargs=True)
    narrow(input_ids=torch.arange(12).view(2, 6))
    assert found == NARROW[family]


def _comparing(wide, found):
    def compare(module, args, kwargs, outputs):
        both = [x if isinstance(x, tuple) else (x,) for x in (outputs, wide(*args, **kwargs))]
        if any(not torch.equal(one, other) for one, other in zip(*both, strict=True)):
            found.add(type(module).__name__)

    return compare


class Biased(nn.Module):
    """Experts with one more parameter than the two stacks."""

    def __init__(self, change):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(4, 6, 2)), nn.Parameter(torch.zeros(4, 2, 3))
        self.act_fn = nn.SiLU()
        change(self)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def replaced(**attributes):
    def change(module):
        for name, value in attributes.items():
            setattr(module, name, value)

    return change


REJECTED = {
    "has 'gate_up_proj_bias' beside its stacks, which is not sharded over ep; use tp alone": replaced(
        gate_up_proj_bias=nn.Parameter(torch.zeros(4, 6))
    ),
    "has stacks [4, 5, 2] and [4, 2, 3], not [e, 2f, d] and [e, d, f]; use tp alone": replaced(
        gate_up_proj=nn.Parameter(torch.zeros(4, 5, 2))
    ),
    "has 3 experts, which ep does not divide; use an ep that does": replaced(
        gate_up_proj=nn.Parameter(torch.zeros(3, 6, 2)), down_proj=nn.Parameter(torch.zeros(3, 2, 3))
    ),
    "has the activation GELU, and experts over ep are gated by silu; use tp alone": replaced(act_fn=nn.GELU()),
    "is not called with hidden_states, top_k_index, top_k_weights; use tp alone": replaced(forward=lambda x: x),
}


test_experts_that_are_rejected = rejected(
    {"ep": 2},
    [
        (
            message,
            lambda mesh, change=change: fsdp2_strategy_parallelize(
                nn.ModuleDict({"experts": Biased(change)}), mesh.device_mesh
            ),
            f"device_mesh: ep=2, and 'experts' {message}",
        )
        for message, change in REJECTED.items()
    ],
)


@given(experts=st.integers(1, 16), ep=st.integers(1, 8))
def test_experts_that_ep_does_not_divide_are_rejected_and_no_others(experts, ep):
    """Before any rank sends anything: a model's shapes and the mesh's size suffice."""
    sizes = {"gate_up_proj": (experts, 6, 2), "down_proj": (experts, 2, 3)}
    model = nn.ModuleDict({"experts": Biased(replaced(**{n: nn.Parameter(torch.zeros(s)) for n, s in sizes.items()}))})
    if experts % ep == 0:
        assert list(validate_experts(model, ep)) == ["experts"]
        return
    with pytest.raises(ValueError, match=f"ep={ep}, and 'experts' has {experts} experts, which ep does not divide"):
        validate_experts(model, ep)


@given(tokens=st.integers(0, 20), tp=st.integers(1, 8))
def test_ranks_have_equally_many_tokens_or_one_more(tokens, tp):
    lengths = _equal_parts(tokens, tp)
    assert len(lengths) == tp and sum(lengths) == tokens and max(lengths) - min(lengths) <= 1


def test_a_model_without_experts_is_rejected():
    check_rejection(
        {"ep": 2},
        "no experts",
        lambda mesh: fsdp2_strategy_parallelize(nn.Linear(2, 2), mesh.device_mesh),
        "device_mesh: ep=2, and Linear has no experts in stacks gate_up_proj and down_proj; "
        "use dp_shard in place of ep",
    )


def test_experts_that_share_a_stack_are_rejected():
    def call(mesh):
        first, second = Biased(replaced()), Biased(replaced())
        second.down_proj = first.down_proj
        fsdp2_strategy_parallelize(nn.ModuleDict({"first": first, "second": second}), mesh.device_mesh)

    sentence = "'first' shares 'down_proj' with another module; untie it, or use tp alone"
    check_rejection({"ep": 2}, "tie", call, f"device_mesh: ep=2, and {sentence}")


def test_a_frozen_stack_stays_frozen():
    def body(view):
        experts = Biased(replaced())
        experts.down_proj.requires_grad_(False)
        model = fsdp2_strategy_parallelize(nn.Sequential(experts), view.device_mesh)
        return {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    trained = {"0.gate_up_proj": True, "0.down_proj": False}
    assert on_mesh({"ep": 2}, body).results == (trained, trained)


def test_a_stage_of_a_pipeline_may_have_no_experts():
    """Over ep it is sharded as over data: each rank has half of the rows."""

    def body(view):
        model = fsdp2_strategy_parallelize(nn.Linear(2, 4, bias=False), view.device_mesh, MixedPrecisionPolicy())
        return tuple(model.weight.to_local().shape)

    assert on_mesh({"pp": 2, "ep": 2}, body).results == ((2, 2),) * 4
