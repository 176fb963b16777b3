"""Attention inside a context sees the full sequence by whatever way it is called: modules, recomputation, threads."""

import functools
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import flex_attention as imported_flex
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import create_context_parallel_ctx, sdpa_mode

SDPA, MHA = F.scaled_dot_product_attention, F.multi_head_attention_forward
BOUND = functools.partial(MHA, need_weights=False)  # before any context is entered
B, S, HEADS, SIZE = 2, 4, 2, 4


def on_ranks(n, body, engine="lockstep"):
    results = run(body, CaseSpec(scheme="sdpa_mode", mesh={"cp": n}), engine=engine).results
    q = torch.zeros(1, 1, 2, 4)
    assert torch.equal(SDPA(q, q, q), q) and not sdpa_mode._OPEN.threads and sdpa_mode._OPEN.library is None
    assert F.scaled_dot_product_attention is SDPA and F.multi_head_attention_forward is MHA
    assert torch.backends.mha.get_fastpath_enabled()
    return results


def context(mesh):
    return create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(8)], [0], set(), "allgather")


def local_tokens(mesh):
    generator = torch.Generator().manual_seed(dist.get_rank(mesh["cp"]))
    return torch.randn(B, S, HEADS * SIZE, generator=generator)


def by_heads(x):
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def self_attention(x, **options):
    q = by_heads(x)
    return SDPA(q, q, q, **options).transpose(1, 2).flatten(2)


def identity(attention):
    """Projections that leave every bit as it is."""
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.eye(HEADS * SIZE).repeat(3, 1))
        attention.out_proj.weight.copy_(torch.eye(HEADS * SIZE))
    return attention


def mha():
    return identity(nn.MultiheadAttention(HEADS * SIZE, HEADS, bias=False, batch_first=True))


def layer(dropout=0.0):
    encoder = nn.TransformerEncoderLayer(HEADS * SIZE, HEADS, 4, dropout, batch_first=True, norm_first=True)
    identity(encoder.self_attn)
    for zeros in (
        encoder.linear2.weight,
        encoder.linear2.bias,
        encoder.self_attn.in_proj_bias,
        encoder.self_attn.out_proj.bias,
    ):
        nn.init.zeros_(zeros)
    return encoder


def bound_mha(x):
    module, x = mha(), x.transpose(0, 1)
    weights = module.in_proj_weight, None, None, None, False, 0.0, module.out_proj.weight, None
    return BOUND(x, x, x, HEADS * SIZE, HEADS, *weights)[0].transpose(0, 1)


def without_gradient(module, x):
    with torch.no_grad():
        return module.eval()(x)


def layer_norm(x):
    return F.layer_norm(x, (HEADS * SIZE,))


CAUSAL = torch.ones(S, S).triu(1).bool()
WAYS = {
    "MultiheadAttention": (lambda x: mha()(x, x, x, need_weights=False)[0], self_attention),
    "causal MultiheadAttention": (
        lambda x: mha()(x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True)[0],
        lambda x: self_attention(x, is_causal=True),
    ),
    "multi_head_attention_forward bound before": (bound_mha, self_attention),
    "a layer in training": (lambda x: layer()(x), lambda x: x + self_attention(layer_norm(x))),
    "a layer in inference": (lambda x: without_gradient(layer(), x), lambda x: x + self_attention(layer_norm(x))),
    "a function imported before": (lambda x: imported(*3 * [by_heads(x)]).transpose(1, 2).flatten(2), self_attention),
}


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("way", WAYS)
def test_modules_see_the_full_sequence(way, engine):
    def body(mesh, case):
        (called, expected), x = WAYS[way], local_tokens(mesh)
        with context(mesh):
            return torch.equal(called(x), expected(x))

    assert on_ranks(2, body, engine) == (True, True)


ATTENTIONS = {
    "by name": lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "imported before": lambda q: imported(q, q, q, is_causal=True),
    "a module": lambda q: by_heads(mha()(*3 * [q.transpose(1, 2).flatten(2)], need_weights=False)[0]),
}
BACKWARDS = {"Tensor.backward": torch.Tensor.backward, "autograd.backward": torch.autograd.backward}


def gradient(attention, backward, q):
    q = q.clone().requires_grad_()
    backward(attention(q * 1).square().sum())
    return q.grad


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_backward_sees_the_full_sequence(use_reentrant, engine):
    def body(mesh, case):
        q = by_heads(local_tokens(mesh))
        with context(mesh):
            return [
                torch.equal(
                    gradient(attention, backward, q),
                    gradient(lambda x, f=attention: checkpoint(f, x, use_reentrant=use_reentrant), backward, q),
                )
                for attention in ATTENTIONS.values()
                for backward in BACKWARDS.values()
            ]

    assert on_ranks(2, body, engine) == ([True] * 6,) * 2


def in_a_thread(f):
    got = []
    thread = threading.Thread(target=lambda: got.append(f()))
    thread.start()
    thread.join()
    return got[0]


def test_a_thread_without_a_context_uses_the_only_open_one():
    def body(mesh, case):
        x = local_tokens(mesh)
        with context(mesh):
            inferred = in_a_thread(lambda: without_gradient(layer(), x))
            return torch.equal(inferred, x + self_attention(layer_norm(x)))

    assert on_ranks(2, body, "gloo") == (True, True)


def test_a_thread_without_a_context_is_rejected_among_several():
    def message_of(q):
        with pytest.raises(RuntimeError) as caught:
            F.scaled_dot_product_attention(q, q, q)
        return str(caught.value)

    def body(mesh, case):
        q = by_heads(local_tokens(mesh))
        with context(mesh):
            dist.barrier(mesh["cp"])
            message = in_a_thread(lambda: message_of(q))
            dist.barrier(mesh["cp"])
        return message

    sentence = "this thread has no context and 2 are open in other threads; enter one here"
    assert on_ranks(2, body) == (f"context_parallel.sdpa: {sentence}",) * 2


def test_a_rank_outside_has_torchs_attention_while_another_is_inside():
    def body(mesh, case):
        x = local_tokens(mesh)
        q, group = by_heads(x), mesh["cp"]
        plain = SDPA(q, q, q)
        if dist.get_rank(group) == 0:
            with context(mesh):
                dist.barrier(group)
                dist.barrier(group)
        else:
            dist.barrier(group)
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)
            assert mha()(x, x, x)[1].shape == (B, S, S)
            dist.barrier(group)

    on_ranks(2, body)


def test_the_inner_one_of_two_contexts_applies():
    def body(mesh, case):
        q = by_heads(local_tokens(mesh))
        with context(mesh) as outer, context(mesh) as inner:
            inner.layout = outer.layout
            both = F.scaled_dot_product_attention(q, q, q)
        with context(mesh):
            return torch.equal(F.scaled_dot_product_attention(q, q, q), both)

    assert on_ranks(2, body) == (True, True)


def test_a_foreign_replacement_of_torchs_function_stays(monkeypatch):
    def body(mesh, case):
        with context(mesh):
            monkeypatch.setattr(F, "scaled_dot_product_attention", imported_too)
        is_swapped = F.scaled_dot_product_attention is imported_too
        monkeypatch.undo()
        F.scaled_dot_product_attention = SDPA
        return is_swapped

    imported_too = functools.partial(SDPA)
    assert on_ranks(1, body) == (True,)


def test_autocast_casts_as_it_does_outside():
    def body(mesh, case):
        q = by_heads(local_tokens(mesh))
        half, double = q.bfloat16(), q.double()
        with context(mesh):
            expected = SDPA(half, half, half)
            with torch.autocast("cpu", torch.bfloat16):
                mixed = [F.scaled_dot_product_attention(q, half, q), imported(half, q, half)]
                wide = F.scaled_dot_product_attention(double, double, double)
            return [torch.equal(x, expected) for x in mixed], torch.equal(wide, SDPA(double, double, double))

    assert on_ranks(2, body) == (([True, True], True),) * 2


OF_A_MASK = (
    "whose columns are not sharded over cp; pass is_causal=True and no mask; adapt_model_to_context drops a "
    "Hugging Face model's masks; attention over other tokens (a vision tower, an encoder, cross attention) goes into "
    "local_attention()"
)
NO_FLEX = (
    "flex_attention would see only this rank's tokens, at local positions; "
    "call F.scaled_dot_product_attention, or context_parallel_attention with cu_seqlens or window"
)
REJECTED = [
    (
        lambda x: mha()(x, x, x),
        "need_weights=True would return weights for this rank's keys only; pass need_weights=False",
    ),
    (
        lambda x: MHA(*3 * [x[0]], SIZE, 1, *4 * [None], False, 0.0, torch.eye(SIZE), None),
        "need_weights=True would return weights for this rank's keys only; pass need_weights=False",
    ),
    (
        lambda x: mha()(x, x, x, need_weights=False, attn_mask=CAUSAL),
        f"attn_mask is [1, 1, 4, 4], {OF_A_MASK}",
    ),
    (
        lambda x: layer()(x, src_key_padding_mask=torch.zeros(B, S)),
        f"attn_mask is [2, 2, 1, 4], {OF_A_MASK}",
    ),
    (lambda x: layer(0.1)(x), "dropout_p=0.1 would differ over cp; pass 0.0"),
]


@pytest.mark.parametrize(("call", "sentence"), REJECTED, ids=[text[:60] for _, text in REJECTED])
def test_modules_reject_the_same_inputs_as_attention(call, sentence):
    def body(mesh, case):
        x = local_tokens(mesh)
        with pytest.raises(ValueError) as caught, context(mesh):
            call(x)
        return str(caught.value)

    assert on_ranks(2, body) == (f"context_parallel.sdpa: {sentence}",) * 2


@pytest.mark.parametrize("call", [imported_flex, lambda *x: flex_attention.flex_attention(*x)])
def test_flex_attention_is_rejected_by_the_operation_that_it_calls(call):
    def body(mesh, case):
        with context(mesh), pytest.raises(RuntimeError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex_attention warns that it is not compiled
            call(*3 * [by_heads(local_tokens(mesh))])
        return str(caught.value)

    assert NO_FLEX in on_ranks(1, body)[0]
