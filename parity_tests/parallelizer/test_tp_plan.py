"""Tensor-parallel plans applied to full models, and plans that must be rejected or warned of."""

import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from parity_tests.parallelizer import plain_modules as plain
from parity_tests.parallelizer.families import IGNORED, OWN, Chosen, Float64Throughout, batch, empty, model_of
from parity_tests.parallelizer.misuses import MISUSES, QWEN3, TIED, Tied, rejection
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.small_net import NAMES, Net
from parity_tests.parallelizer.styled import accumulated, styled
from parity_tests.parallelizer.training import PROMISED, broken_on_ranks, deviation, summed_loss
from shardproof import CaseSpec, scheme, token_below, values
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    to_cpu,
    translate_to_torch_parallel_style,
)
from torch_impl.parallelizer.tp_plan import apply_plan, check_plan

FOUR_KV_HEADS = (("num_key_value_heads", 4),)
MODELS = [Chosen(family, tied) for family in OWN for tied in (False, True)]
EXPERTS = {
    "qwen3_moe": (("num_experts", 4), ("moe_intermediate_size", 10), ("num_experts_per_tok", 2)),
    "mixtral": (("num_local_experts", 4), ("intermediate_size", 10), ("num_experts_per_tok", 2)),
}


def trained(model, ids, targets, times):
    """Loss, logits and the gradient of every parameter, in `times` backwards of some rows each."""
    count, loss, logits = int((targets != IGNORED).sum()), 0.0, []
    for rows, expected in zip(ids.chunk(times), targets.chunk(times), strict=True):
        logits.append(model(input_ids=rows).logits)
        part = summed_loss(logits[-1], expected) / count
        part.backward()
        loss += part.item()
    named = dict(model.named_parameters(remove_duplicate=False))
    outcome = {name: to_cpu(parameter.grad).numpy() for name, parameter in named.items()}
    return loss, torch.cat(logits).detach().numpy(), outcome


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("chosen", "tp"), [(chosen, tp) for chosen in MODELS for tp in (1, 2, 4) if tp > 1 or chosen.tied], ids=str
)
def test_every_gradient_matches_the_full_model(chosen, tp):
    """Vocabularies of 31 and 67 do not divide; four ranks need as many KV heads; one, two or three backwards."""
    chosen = Chosen(chosen.family, chosen.tied, FOUR_KV_HEADS) if tp == 4 else chosen
    ids, targets = batch(chosen, 3, 5)
    (want,) = reference(chosen, [(ids, targets)]).steps

    def body(mesh, case):
        with Float64Throughout():
            model = model_of(chosen)
            plan = get_hf_tp_shard_plan(model)
            check_plan(model, plan, mesh.device_mesh)
            apply_plan(model, plan, mesh.device_mesh)
            times = {1: 1, 2: 3, 4: 2}[tp]
            return trained(model, torch.from_numpy(ids), torch.from_numpy(targets), times)

    ranks = on_ranks(body, tp).results
    assert max(deviation(loss, want.loss) for loss, _, _ in ranks) <= PROMISED
    assert max(deviation(logits, want.logits) for _, logits, _ in ranks) <= PROMISED
    assert broken_on_ranks([outcome for _, _, outcome in ranks], want.gradients, {"tp": tp}) == []


@scheme(
    reference=plain.tied,
    mesh={"tp": (1, 2, 4)},
    inputs={"weight": "v d tp=I", "ids": "b", "cotangent": "b v tp=I", "weights": "n tp=I"},
    outputs=("b v tp=I", "v d tp=I"),
    dims={"b": (3,), "v": (7,), "d": (3,), "n": (3,)},
    rank_options={"times": (1, 2, 3)},
    nograd=("weight", "cotangent", "weights"),
    draw={"ids": token_below("v"), **dict.fromkeys(("weight", "cotangent", "weights"), values("normal", "ties"))},
    dtypes=("float64", "float32"),
    roundings=4,
)
@pytest.mark.cases(30)
def tied_embedding(mesh, weight, ids, cotangent, weights, times):
    """One gradient for the lookup and the head, and one parameter under two names."""
    module = styled(mesh, Tied(weight), {"table": "embedding_rowwise", "head": "colwise_gather_output"})
    y, _, outcome = accumulated(module, (ids,), cotangent, weights, times)
    return y, outcome["head.weight"]


def on_ranks(body, tp=2, **options):
    return run(body, CaseSpec(scheme="tp_plan", mesh={"tp": tp}, options=options))


@pytest.mark.fast_values(13)
@pytest.mark.parametrize("name", MISUSES)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_plan_is_rejected_on_every_rank_before_anything_is_sent(name, tp):
    ranks = on_ranks(lambda mesh, case: rejection(mesh, MISUSES[name]), tp)
    assert [message[: len(MISUSES[name].message.format(tp=tp))] for message in ranks.results] == [
        MISUSES[name].message.format(tp=tp)
    ] * tp
    assert ranks.ledger.rows == []


@given(st.data())
@settings(max_examples=few(40))
def test_an_edited_key_matches_or_is_rejected(data):
    """A key with a letter taken out, put in or changed is a module's, or an error that names the key."""
    key = data.draw(st.sampled_from(["model.layers.*.mlp.up_proj", "model.norm", "lm_head"]))
    at, letter = data.draw(st.integers(0, len(key) - 1)), data.draw(st.sampled_from("ab.*0_"))
    edited = data.draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + letter + key[at:], letter + key[1:]]))

    def body(mesh, case):
        model = empty(Chosen("llama"), device="meta")
        try:
            check_plan(model, {edited: translate_to_torch_parallel_style("replicate")}, mesh.device_mesh)
        except ValueError as error:
            return str(error)
        return [name for name, _ in model.named_modules() if len(name.split(".")) == len(edited.split("."))] != []

    first, second = on_ranks(body).results
    assert first == second and (first is True or f"key {edited!r} matches no module of LlamaForCausalLM" in first)


def test_a_mesh_of_two_axes_and_a_model_of_none_are_rejected():
    def body(mesh, case):
        plan = {"": translate_to_torch_parallel_style("colwise")}
        for model, axes, error, message in (
            (nn.Linear(2, 2), mesh.device_mesh, ValueError, "tp_mesh: has 2 axes ('dp', 'tp')"),
            ("a model", mesh.device_mesh["tp"], TypeError, "model is a str; pass a torch.nn.Module"),
            (nn.Linear(2, 2), None, TypeError, "tp_mesh is None; pass a torch DeviceMesh"),
        ):
            with pytest.raises(error, match=re.escape(message)):
                check_plan(model, plan, axes)
        return True

    assert run(body, CaseSpec(scheme="tp_plan", mesh={"dp": 2, "tp": 2})).results == (True,) * 4


def test_a_plan_is_applied_once():
    def body(mesh, case):
        model = empty(Chosen("llama"), device="meta")
        apply_plan(model, get_hf_tp_shard_plan(model), mesh.device_mesh)
        with pytest.raises(ValueError, match=r"'lm_head' already has DTensor parameters; apply a plan once"):
            apply_plan(model, get_hf_tp_shard_plan(model), mesh.device_mesh)
        return True

    ranks = on_ranks(body)
    assert ranks.results == (True, True) and ranks.ledger.rows == []


PHI = Chosen("phi", changes=(("qk_layernorm", True),))  # its own plan leaves the norms out


@pytest.mark.parametrize(("chosen", "norm"), [(QWEN3, "q_norm"), (PHI, "q_layernorm")], ids=str)
def test_a_norm_of_heads_that_the_plan_leaves_out_is_reported(chosen, norm):
    def body(mesh, case):
        model = empty(chosen, device="meta")
        plan = {key: style for key, style in get_hf_tp_shard_plan(model).items() if "norm" not in key}
        with pytest.warns(UserWarning, match=rf"'model.layers.0.self_attn.{norm}' is not in the plan while"):
            check_plan(model, plan, mesh.device_mesh)
        plan[f"model.layers.*.self_attn.{norm}"] = translate_to_torch_parallel_style("replicate")
        with pytest.warns(UserWarning, match=rf"'model.layers.0.self_attn.{norm}' is replicate while"):
            check_plan(model, plan, mesh.device_mesh)
        return True

    assert on_ranks(body).results == (True, True)


def test_a_layer_with_parameters_inside_is_rejected():
    def body(mesh, case):
        model = empty(Chosen("llama"), device="meta")
        model.lm_head.adapter = nn.Linear(3, 2, device="meta")
        with pytest.raises(ValueError, match=r"key 'lm_head': .* this Linear has 'adapter.weight' inside"):
            check_plan(model, get_hf_tp_shard_plan(model), mesh.device_mesh)
        return True

    assert on_ranks(body).results == (True, True)


def test_names_that_a_split_removed_are_no_mistake():
    def body(mesh, case):
        model = empty(Chosen("llama"), device="meta")
        plan = get_hf_tp_shard_plan(model)
        model.lm_head, model.model.embed_tokens = None, None
        model.model.layers = nn.ModuleDict({"1": model.model.layers[1]})
        with pytest.raises(ValueError, match=r"key 'lm_head' matches no module"):
            check_plan(model, plan, mesh.device_mesh)
        model.removed_modules = ("lm_head", "model.embed_tokens", "model.layers.0")
        check_plan(model, plan, mesh.device_mesh)
        explicit = {"model.layers.0.mlp.up_proj": translate_to_torch_parallel_style("colwise")}
        check_plan(model, explicit, mesh.device_mesh)
        with pytest.raises(ValueError, match=r"key 'model.layers.2.mlp.up_proj' matches no module"):
            check_plan(model, {"model.layers.2.mlp.up_proj": explicit.popitem()[1]}, mesh.device_mesh)
        return True

    assert on_ranks(body).results == (True, True)


def test_frozen_stays_frozen_and_shared_stays_shared():
    def body(mesh, case):
        model = model_of(TIED)
        model.model.norm.weight.requires_grad_(False)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        plan = get_hf_tp_shard_plan(model) | {"model.norm": SequenceParallel()}
        apply_plan(model, plan, mesh.device_mesh)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return frozen, model.lm_head.weight is model.model.embed_tokens.weight

    assert on_ranks(body).results == ((["model.layers.0.mlp.up_proj.weight", "model.norm.weight"], True),) * 2


class Unknown(ParallelStyle):
    """A style of a user's own, of which nothing is known before it is applied."""

    def _apply(self, module, device_mesh):
        cut = distribute_tensor(module.weight, device_mesh, [Shard(1)])
        module.register_parameter("weight", nn.Parameter(cut))
        return module


def test_a_style_of_a_user_that_breaks_a_tie_is_reported():
    def body(mesh, case):
        module = Tied(torch.ones(4, 2))
        with pytest.raises(ValueError, match=r"'table.weight' and 'head.weight' share a parameter and were sharded"):
            apply_plan(module, {"table": Unknown()}, mesh.device_mesh)
        return True

    assert on_ranks(body).results == (True, True)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_experts_match_the_full_model(family, tp):
    """Loss, every gradient and the state dict, against transformers in one process: JAX has no twin of routing."""
    chosen, (ids, targets) = Chosen(family, changes=(*FOUR_KV_HEADS, *EXPERTS[family])), batch(QWEN3, 2, 5)

    def values_and_gradients(model):
        outcome = trained(model, torch.from_numpy(ids), torch.from_numpy(targets), 2)[2]
        return {name: to_cpu(value).numpy() for name, value in model.state_dict().items()}, outcome

    def body(mesh, case):
        with Float64Throughout():
            model = with_values(empty(chosen))
            apply_plan(model, get_hf_tp_shard_plan(model), mesh.device_mesh)
            return values_and_gradients(model)

    with Float64Throughout():
        full, gradients = values_and_gradients(with_values(empty(chosen)))
    ranks = on_ranks(body, tp)
    assert all(np.array_equal(got[name], full[name]) for got, _ in ranks.results for name in {**full, **got})
    assert broken_on_ranks([outcome for _, outcome in ranks.results], gradients, {"tp": tp}) == []


def with_values(model):
    """Values for each parameter, from its name alone; eager experts, which take float64."""
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rng = np.random.Generator(np.random.Philox(key=[zlib.crc32(name.encode()), 0]))
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) / 2))
    return model


ALONE = [{"q_proj": "colwise_gather_output"}, {"k_proj": "colwise_gather_output", "o_proj": "rowwise_split_input"}]


@pytest.mark.parametrize("styles", ALONE, ids=str)
def test_part_of_attention_may_be_sharded_where_each_rank_has_all_heads(styles):
    chosen = Chosen("llama")
    ids, targets = batch(chosen, 3, 5)
    (want,) = reference(chosen, [(ids, targets)]).steps

    def body(mesh, case):
        with Float64Throughout():
            model = model_of(chosen)
            plan = {
                f"model.layers.*.self_attn.{leaf}": translate_to_torch_parallel_style(style)
                for leaf, style in styles.items()
            }
            check_plan(model, plan, mesh.device_mesh)
            apply_plan(model, plan, mesh.device_mesh)
            return trained(model, torch.from_numpy(ids), torch.from_numpy(targets), 1)

    ranks = on_ranks(body).results
    assert max(deviation(logits, want.logits) for _, logits, _ in ranks) <= PROMISED
    assert broken_on_ranks([outcome for _, _, outcome in ranks], want.gradients, {"tp": 2}) == []


@pytest.mark.parametrize("plan", [None, {}])
def test_one_rank_of_tp_needs_no_plan(plan):
    def body(mesh, case):
        net = Net().double()
        before = [p.detach().clone() for p in net.parameters()]
        check_plan(net, plan, mesh.device_mesh["tp"])
        net = fsdp2_strategy_parallelize(net, mesh.device_mesh, None, plan)
        assert all(to_cpu(p).equal(x) for p, x in zip(net.parameters(), before, strict=True))
        return [p.placements for p in net.parameters() if isinstance(p, DTensor)]

    assert run(body, CaseSpec("tp_plan", {"dp_shard": 1, "tp": 1})).results == ([(Shard(0),)] * len(NAMES),)
