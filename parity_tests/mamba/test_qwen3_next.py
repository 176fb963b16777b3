"""The gated delta layer of transformers' Qwen3-Next over cp and tp, with our convolution and rule in place of its own.

Every gradient equals the layer's on one device, in float64. The layer passes unknown keywords on to both functions:
so the group and the layout reach them.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.func import functional_call
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from parity_tests.mamba.over_ranks import rank_positions
from parity_tests.mamba.test_delta_rule import delta_rule, delta_rule_contiguous, delta_rule_per_channel
from parity_tests.mamba.test_outside_oracles import agrees
from parity_tests.parallelizer.families import Float64Throughout
from parity_tests.parallelizer.training import broken
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce, convert
from torch_impl.mamba import causal_conv_over_cp, gated_delta_rule

HIDDEN, TOKENS = 6, 24
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 3, 5, 4
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM


def layer(tp=1):
    """The layer with a tp-th of the heads."""
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_HEADS // tp,
        linear_num_value_heads=VALUE_HEADS // tp,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    return qwen3_next.Qwen3NextGatedDeltaNet(config, 0).double()


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights():
    return {name: numbers(p.shape, seed).requires_grad_() for seed, (name, p) in enumerate(layer().named_parameters())}


def shard(name, weight, mesh):
    """The heads of this rank of tp; the convolution has the channels of all queries, all keys and all values."""
    tp, rank = mesh.size("tp"), mesh.rank("tp")
    if name == "norm.weight":
        return weight
    if name == "conv1d.weight":
        return torch.cat([part.chunk(tp)[rank] for part in weight.split([KEYS, KEYS, VALUES])])
    return weight.chunk(tp, 1 if name == "out_proj.weight" else 0)[rank]


def convolution_over_cp(hidden_states, weight, bias, activation, *, cp_group, layout, cu_seq_lens_q=None):
    assert activation == "silu"
    x, sharded = hidden_states.transpose(1, 2), {"layout": layout, "cu_seqlens": cu_seq_lens_q}
    return causal_conv_over_cp(x, weight, cp_group, bias=bias, **sharded).transpose(1, 2)


def rule_over_cp(query, key, value, g, beta, *, cp_group, use_qk_l2norm_in_kernel, **options):
    return gated_delta_rule(query, key, value, g, beta, cp_group, use_qk_l2norm=use_qk_l2norm_in_kernel, **options)


def on_one_device(cu):
    """Gradients of the weights and of the input by the layer itself, one document after another, and its output."""
    parameters, x = weights(), numbers((1, TOKENS, HIDDEN), 100).requires_grad_()
    with Float64Throughout():
        parts = [functional_call(layer(), parameters, (x[:, start:stop],)) for start, stop in pairwise(cu)]
        out = torch.cat(parts, 1)
        gradients = torch.autograd.grad(out, [x, *parameters.values()], numbers(out.shape, 101))
    return {"out": out.detach(), **dict(zip(["x", *parameters], gradients, strict=True))}


def over_ranks(mesh_sizes, order, cu):
    """The same over a mesh; gradients are summed over the ranks, and tokens put in order."""
    offsets = torch.tensor(cu) if len(cu) > 2 else None

    def body(mesh, case):
        held = torch.tensor(rank_positions(mesh.size("cp"), order, cu if len(cu) > 2 else None)[mesh.rank("cp")])
        parameters, x = weights(), numbers((1, TOKENS, HIDDEN), 100)[:, held].requires_grad_()
        with Float64Throughout():
            local = {name: shard(name, weight, mesh) for name, weight in parameters.items()}
            entering = convert(x, mesh["tp"], src="I", dst="R")
            options = {"cp_group": mesh["cp"], "layout": order, "cu_seq_lens_q": offsets}
            out = all_reduce(functional_call(layer(mesh.size("tp")), local, (entering,), options), mesh["tp"])
            cotangent = numbers((1, TOKENS, HIDDEN), 101)[:, held]
            gradients = torch.autograd.grad(out, [x, *parameters.values()], cotangent)
        return held, out.detach(), dict(zip(["x", *parameters], gradients, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3_next, "causal_conv1d_fn", convolution_over_cp)
        patch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", partial(rule_over_cp, chunk_size=4))
        results = run(body, CaseSpec(scheme="qwen3_next", mesh=mesh_sizes)).results
    every = [gradients for _, _, gradients in results]
    got = {name: sum(gradients[name] for gradients in every) for name in every[0] if name != "x"}
    # The ranks of one cp rank have the same tokens, and each of them the full gradient of these.
    got["out"], got["x"] = torch.zeros(2, 1, TOKENS, HIDDEN, dtype=torch.float64)
    for held, out, gradients in results:
        got["out"][:, held], got["x"][:, held] = out, gradients["x"]
    return got


MESHES = [{"cp": 2, "tp": 2}, {"cp": 1, "tp": 1}, {"cp": 3, "tp": 1}, {"cp": 4, "tp": 2}, {"cp": 1, "tp": 2}]
WHOLE, DOCUMENTS, TO_RANKS = [0, TOKENS], [0, 8, 16, 24], [0, 5, 6, 12, 24]  # the last begin where ranks do, and not


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
@pytest.mark.parametrize(
    ("order", "cu"),
    [("dual_chunk_swap", WHOLE), ("contiguous", WHOLE), ("contiguous", TO_RANKS), ("dual_chunk_swap", DOCUMENTS)],
)
def test_the_layer_over_ranks_is_the_layer(order, cu, mesh):
    if order == "dual_chunk_swap" and cu is DOCUMENTS and mesh["cp"] == 3:
        cu = [0, 6, 12, 24]
    assert broken(over_ranks(mesh, order, cu), on_one_device(cu)) == []


def theirs(function):
    def rule(query, key, value, g, beta, initial_state):
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": initial_state / 3}
        with Float64Throughout():
            return function(query, key, value, g=-g.exp(), beta=beta, **options)

    return rule


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_rule_is_theirs_token_by_token(seed):
    case = delta_rule_contiguous.case(seed=seed, dtype="float64", cp=2, scale=None)
    agrees(delta_rule_contiguous, case, theirs(qwen3_next.torch_recurrent_gated_delta_rule))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_rule_is_theirs_in_chunks(seed):
    """Against float32's budget: their decays are exponentials of differences of long sums, which lose digits."""
    case = delta_rule_contiguous.case(seed=seed, dtype="float32", cp=2, scale=None)
    agrees(delta_rule_contiguous, case, theirs(qwen3_next.torch_chunk_gated_delta_rule))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_decays_per_channel_are_those_of_kimi(seed):
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    case = delta_rule_per_channel.case(seed=seed, dtype="float64", cp=2)
    agrees(delta_rule_per_channel, case, theirs(kimi.recurrent_kimi_delta_attention))


def test_a_rule_with_other_keys_does_not_agree():
    """Theirs normalizes the keys here, and ours does not."""
    with pytest.raises(AssertionError):
        case = delta_rule.case(seed=0, dtype="float64", cp=2, scale=None)
        agrees(delta_rule, case, theirs(qwen3_next.torch_recurrent_gated_delta_rule))
