"""Parity of attention that a context leaves alone, by a scope or by hooks, beside attention over the full sequence."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from jax_ref.context_parallel import layer_with_cross_attention
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.context_parallel import adapt_model_to_context, create_context_parallel_ctx, local_attention
from torch_impl.context_parallel.model_hooks import _is_causal, _window


class SelfAttention(nn.Module):
    """Causal attention in the manner of transformers: a mask, if there is one, is all of its rule."""

    is_causal = True

    def __init__(self, window, told="by module"):
        super().__init__()
        if told == "by module":
            self.sliding_window = window
        else:  # a config of all layers has a window, which only some of them use
            types = ["full_attention", "sliding_attention"]
            self.config, self.layer_idx = (
                SimpleNamespace(sliding_window=window or 3, layer_types=types),
                int(bool(window)),
            )

    def forward(self, hidden_states, attention_mask=None):
        is_causal = attention_mask is None
        return F.scaled_dot_product_attention(*3 * [hidden_states], attn_mask=attention_mask, is_causal=is_causal)


class Attention(nn.Module):
    def forward(self, hidden_states, states):
        return F.scaled_dot_product_attention(hidden_states, states, states)


class CrossAttention(nn.Module):
    is_causal = False

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, hidden_states, states):
        return self.inner(hidden_states, states)


class Layer(nn.Module):
    def __init__(self, window, told="by module"):
        super().__init__()
        self.own, self.cross = SelfAttention(window, told), CrossAttention()

    def forward(self, hidden_states, attention_mask, states, recomputed=False, named=False, position_embeddings=()):
        for each in position_embeddings:
            hidden_states = hidden_states + each
        by_position, by_name = ((), {"attention_mask": attention_mask}) if named else ((attention_mask,), {})
        hidden_states = hidden_states + self.own(hidden_states, *by_position, **by_name)
        if recomputed:
            return hidden_states + checkpoint(self.cross.inner, hidden_states, states, use_reentrant=False)
        return hidden_states + self.cross(hidden_states, states)


def mask_of(size, window, blind=0):
    """The mask that transformers builds for the full sequence; its last queries may be padding, which sees nothing."""
    place = torch.arange(size)
    distance = place[:, None] - place
    is_real = place[:, None] < size - blind
    return (is_real & (distance >= 0) & (distance < (window or size)))[None, None]


def context(mesh, size, rotate="allgather", device=None):
    buffers = [torch.zeros(size, device=device)]
    return create_context_parallel_ctx(mesh.device_mesh["cp"], buffers, [0], set(), rotate)


@scheme(
    reference=layer_with_cross_attention,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b h s p cp=R", "states": "b h e p cp=R"},
    outputs="b h s/cp:dual_chunk_swap p",
    dims={"b": (1, 2), "h": (2,), "s": (16,), "e": (16, 3), "p": (4,)},
    draw={name: values("normal", "ties") for name in ("x", "states")},
    options={"window": (None, 5)},
    rank_options={
        "recomputed": (False, True),
        "masked": ("by position", "by name", None),
        "embedded": (True, False),
        "told": ("by module", "by config"),
        "blind": (0, 3),
    },
    reduction=("s", "p"),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "autocast"),  # torch's linear layers follow autocast
)
def adapted_layer(mesh, x, states, window, recomputed, masked, embedded, told, blind):
    """A layer that takes the full sequence, with a cross attention to states that each rank has in full.

    With `embedded` x is the sum of hidden states and two embeddings of positions.
    """
    parts = (x / 2, (x / 4, x / 4)) if embedded else (x, ())
    size, model = x.shape[2], nn.ModuleList([Layer(window, told)])
    adapt_model_to_context(model, local=["*.cross"], sharded=["?", "?.own"])
    with context(mesh, size, device=x.device):
        mask = mask_of(size, window, blind) if masked else None
        return model[0](parts[0], mask, states, recomputed, masked == "by name", position_embeddings=parts[1])


@scheme(
    reference=layer_with_cross_attention,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b h s/cp:dual_chunk_swap p", "states": "b h e p cp=R"},
    outputs="b h s/cp:dual_chunk_swap p",
    dims={"b": (1, 2), "h": (2,), "s": (16,), "e": (16, 3), "p": (4,)},
    draw={name: values("normal", "ties") for name in ("x", "states")},
    rank_options={"where": ("scope", "after")},
    reduction=("s", "p"),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "autocast"),  # torch's linear layers follow autocast
)
def layer_with_a_scope(mesh, x, states, where):
    """Attention is torch's own in a scope, and once the context is left."""
    layer = Layer(None)
    with context(mesh, x.shape[2] * mesh.size("cp"), "alltoall", x.device):
        x = x + layer.own(x)
        if where == "scope":
            with local_attention():
                return x + layer.cross(x, states)
    return x + layer.cross(x, states)


test_parity = parity([adapted_layer, layer_with_a_scope], lockstep=15, gloo=3)


def on_ranks(n, body):
    return run(body, CaseSpec(scheme="model_hooks", mesh={"cp": n})).results


def test_a_scope_takes_the_same_arguments_as_torch():
    """Masks, weights and other lengths; in it a context is as if it were not there."""

    def body(mesh, case):
        x, y = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 3, 4)
        mask = torch.rand(4, 3) < 2
        module = nn.MultiheadAttention(4, 1, batch_first=True)
        outside = F.scaled_dot_product_attention(x, y, y, attn_mask=mask), module(x[0], x[0], x[0])[1]
        with context(mesh, 8):
            with local_attention(), local_attention():
                inside = F.scaled_dot_product_attention(x, y, y, attn_mask=mask), module(x[0], x[0], x[0])[1]
            with pytest.raises(ValueError, match="attn_mask"):
                F.scaled_dot_product_attention(x, y, y, attn_mask=mask)
        return [torch.equal(a, b) for a, b in zip(inside, outside, strict=True)]

    assert on_ranks(2, body) == ([True, True],) * 2


def test_a_scope_ends_with_an_exception():
    def body(mesh, case):
        x = torch.rand(1, 1, 4, 4)
        with context(mesh, 8):
            expected = F.scaled_dot_product_attention(x, x, x)
            with pytest.raises(RuntimeError), local_attention():
                F.scaled_dot_product_attention(x, x[..., :3], x)
            return torch.equal(F.scaled_dot_product_attention(x, x, x), expected)

    assert on_ranks(2, body) == (True, True)


def test_hooks_end_with_an_exception_and_when_removed():
    def body(mesh, case):
        layer, x, states = Layer(None), torch.rand(1, 1, 4, 4), torch.rand(1, 1, 3, 4)
        hooks = adapt_model_to_context(layer, local=["cross"])
        with context(mesh, 8):
            with pytest.raises(RuntimeError):
                layer.cross(x, states[..., :2])
            with pytest.raises(TypeError):
                layer.own(x.long())
            expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            assert torch.equal(layer.own(x, torch.ones(4, 4)), expected)
            hooks.remove()
            with pytest.raises(ValueError, match="key 3, this rank's shard of the sequence has 4"):
                layer.cross(x, states)

    on_ranks(2, body)


def test_each_mask_is_read():
    """Layers share a mask, which is read once; a second one is another mask."""

    def body(mesh, case):
        layer, x = Layer(None), torch.rand(1, 1, 4, 4)
        adapt_model_to_context(layer, local=["cross"])
        first, _, other = masks(8)
        with context(mesh, 8):
            layer.own(x, first)
            with pytest.raises(ValueError, match="is not the causal rule"):
                layer.own(x, other)
        return True

    assert on_ranks(2, body) == (True, True)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hidden_states", (2, 8, 3)),
        ("inputs_embeds", (2, 8, 3)),
        ("position_embeddings", (3, 2, 8, 4)),
        ("input_ids", (2, 8)),
        ("position_ids", (3, 2, 8)),
        ("cache_position", (8,)),
    ],
)
def test_which_dim_of_an_input_is_sharded(name, shape):
    class Decoder(nn.Module):
        def forward(self, **inputs):
            return inputs[name]

    def body(mesh, case):
        decoder, x = Decoder(), torch.arange(math.prod(shape)).view(shape)
        adapt_model_to_context(decoder, sharded=[""])
        with context(mesh, 8):
            shard = decoder(**{name: x})
        dim = shape.index(8)
        return torch.equal(shard, x.index_select(dim, torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][mesh.rank("cp")])))

    assert on_ranks(2, body) == (True, True)


def test_outside_of_a_context_hooks_do_nothing():
    layer, x, states = Layer(3), torch.rand(1, 1, 8, 4), torch.rand(1, 1, 3, 4)
    mask = torch.rand(8, 8) < 0.5
    mask |= torch.eye(8, dtype=torch.bool)
    plain = layer(x, mask, states)
    adapt_model_to_context(layer, local=["cross"], sharded=["*"])
    assert torch.equal(layer(x, mask, states), plain)


def masks(size):
    causal = mask_of(size, None)[0, 0]
    real = torch.tensor([[True] * size, [True] * 5 + [False] * (size - 5)])
    return causal, causal & real[:, None, None], causal & real.flip(1)[:, None, None]


def test_masks_that_equal_causal_attention_are_recognized():
    causal, right, left = masks(8)
    addends = torch.zeros(8, 8).masked_fill(~causal, torch.finfo().min)
    assert _is_causal(causal, None) and _is_causal(addends, None) and _is_causal(right, None)
    assert _is_causal(mask_of(8, 3), 3) and not _is_causal(mask_of(8, 3), None) and not _is_causal(causal, 3)
    assert not _is_causal(left, None)
    assert not _is_causal(torch.ones(8, 8, dtype=torch.bool), None)
    assert not _is_causal(causal[:4], None)
    documents = causal.clone()
    documents[4:, :4] = False
    assert not _is_causal(documents, None)


class Config:
    def __init__(self, **entries):
        self.__dict__.update(entries)


def attention_of(**entries):
    attention = SelfAttention(None)
    attention.config, attention.layer_idx = Config(**entries), 0
    return nn.ModuleDict({"attention": attention})


FUNCTION = "context_parallel.adapt_model_to_context: "
REJECTED = [
    (
        lambda: adapt_model_to_context(nn.ModuleList([Layer(None)]), local=["0.crosses"]),
        "local: '0.crosses' matches no module; nearest is '0.cross'",
    ),
    (
        lambda: adapt_model_to_context(attention_of(_attn_implementation="eager")),
        "attention is computed by 'eager', which sees this rank's tokens alone; load the model with "
        "attn_implementation='sdpa'",
    ),
    (
        lambda: adapt_model_to_context(attention_of(layer_types=["chunked_attention"])),
        "attention attends within chunks, which a context does not support; leave it out of cp",
    ),
]


@pytest.mark.parametrize(("call", "message"), REJECTED, ids=[text[:40] for _, text in REJECTED])
def test_rejections(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == FUNCTION + message


INSIDE = [
    (
        lambda layer, x: layer(x, masks(8)[2], x),
        "own: attention_mask [2, 1, 8, 8] is not the causal rule and padding on the right, and cp would drop it; "
        "give the module no such mask",
    ),
    (
        lambda layer, x: layer(x, {"full_attention": None}, x),
        "own: attention_mask is a dict; load the model with attn_implementation='sdpa'",
    ),
    (
        lambda layer, x: layer(x[:, :, :6], None, x),
        "Layer: hidden_states has 6 positions, the sequence has 8 and this rank's shard 4; "
        "pass the padded batch of the context",
    ),
]


def called_in_a_context(mesh, call):
    layer = Layer(None)
    adapt_model_to_context(layer, local=["cross"], sharded=[""])
    with context(mesh, 8):
        call(layer, torch.rand(1, 1, 8, 4))


test_rejections_inside_a_context = rejected(
    {"cp": 2},
    [(text[:40], lambda mesh, call=call: called_in_a_context(mesh, call), FUNCTION + text) for call, text in INSIDE],
)


@pytest.mark.parametrize(
    ("entries", "window"),
    [
        ({"sliding_window": 7}, 7),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 7, "layer_types": ["sliding_attention"]}, 7),
        ({}, None),
    ],
)
def test_the_window_of_a_config(entries, window):
    attention = attention_of(**entries)["attention"]
    del attention.sliding_window
    assert _window(attention) == window
