"""A patch of a class like Megatron's GPTModel: calls that it takes, calls that it rejects, and its removal.

`test_gpt_model` tests its scores and gradients.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

V, D, B, S = 6, 4, 2, 8
patch = vp.patch_gpt_model_forward_for_linear_ce_fusion
PATCH = "vocab_parallel.patch_gpt_model_forward_for_linear_ce_fusion"
FORWARD = "vocab_parallel._gpt_forward_with_linear_ce_fusion"
IDS = (torch.arange(B * S) * 5 % V).view(B, S)


class Decoder(nn.Module):
    def forward(self, hidden_states, **seen):
        return hidden_states.tanh()


def fake_model_class():
    """A new class for each test, with the attributes that a patched forward may touch."""

    class FakeGPT(nn.Module):
        post_process, share_embeddings_and_output_weights = True, False

        def __init__(self, tp_group=None, cp_group=None):
            super().__init__()
            self.config, self.pg_collection = SimpleNamespace(), SimpleNamespace(tp=tp_group, cp=cp_group)
            self.embedding, self.decoder = nn.Parameter(torch.ones(V, D)), Decoder()
            self.output_layer = SimpleNamespace(bias=None, weight=nn.Parameter(torch.ones(V, D)))

        def _preprocess(self, input_ids, padding_mask, **_):
            return self.embedding[input_ids].transpose(0, 1), "emb", "cos", "sin", "offset", padding_mask

        def forward(self, input_ids, position_ids, attention_mask, *rest, **keywords):
            self.called = (input_ids, position_ids, attention_mask, *rest), keywords
            return "original"

    return FakeGPT


def fused_scores(model, input_ids=IDS, labels=IDS, **options):
    return model(input_ids, None, None, labels=labels, return_logprobs_for_linear_ce_fusion=True, **options)


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh=mesh)).results


def test_a_stage_before_the_last_returns_hidden_states():
    model_class = fake_model_class()
    model = model_class()
    model.post_process = False
    with patch(chunk_size=3, model_class=model_class):
        assert fused_scores(model, labels=None).shape == (S, B, D)


def test_inference_saves_nothing():
    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"])
        with patch(chunk_size=3, model_class=model_class):
            fused_scores(model, inference_context=object()).sum().backward()  # in training a context changes nothing
            model.eval()
            with pytest.raises(RuntimeError) as caught:
                fused_scores(model, inference_context=object()).sum().backward()
        return str(caught.value)

    assert on_mesh(body, cp=1, tp=1)[0].startswith("inference_only=True saved nothing")


def test_without_the_flag_the_original_gets_the_same_arguments():
    model_class = fake_model_class()
    model = model_class()
    with patch(chunk_size=3, model_class=model_class):
        assert model(1, 2, 3) == "original"
        assert model.called == ((1, 2, 3, None, None, None, None, None, None), {})
        model(1, 2, 3, 4, 5, 6, 7, {}, True, loss_mask=8, is_spec_decode=True, newer=9)
        assert model.called == ((1, 2, 3, 4, 5, 6, 7, {}, True), {"loss_mask": 8, "is_spec_decode": True, "newer": 9})


def test_a_patch_is_idempotent_and_leaves_no_trace():
    model_class, other = fake_model_class(), fake_model_class()
    before, other_before = dict(vars(model_class)), dict(vars(other))
    first = patch(chunk_size=3, model_class=model_class)
    assert model_class.forward is vp._gpt_forward_with_linear_ce_fusion
    once = {name: value for name, value in vars(model_class).items() if name not in before}
    second = patch(chunk_size=None, model_class=model_class)
    assert [name for name in vars(model_class) if name not in before] == list(once)
    assert [vars(fusion) for fusion in once.values()] == [
        {"class_forward": before["forward"], "original": before["forward"], "chunk_size": None}
    ]
    assert dict(vars(other)) == other_before
    for handle in (second, first, first):
        handle.unpatch()
        assert dict(vars(model_class)) == before


def test_a_class_that_inherits_its_forward_gets_it_back():
    base = fake_model_class()
    heir = type("Heir", (base,), {})
    before = dict(vars(heir))
    with patch(chunk_size=1, model_class=base), patch(chunk_size=2, model_class=heir):
        assert heir()(1, 2, 3) == "original"
        assert base()(1, 2, 3) == "original"
    assert dict(vars(heir)) == before


def test_a_later_patch_is_not_discarded():
    model_class = fake_model_class()
    handle, mine = patch(chunk_size=1, model_class=model_class), model_class.forward
    model_class.forward = lambda self: None
    with pytest.raises(RuntimeError) as caught:
        handle.unpatch()
    assert str(caught.value) == f"{PATCH}: FakeGPT.forward was replaced after the patch; undo that first"
    model_class.forward = mine
    handle.unpatch()


def with_bias(model):
    model.output_layer.bias = torch.zeros(V)
    return fused_scores(model)


def with_scale(model):
    model.config.use_mup = True
    return fused_scores(model)


FLAG = "return_logprobs_for_linear_ce_fusion=True"
REJECTED = [
    (
        lambda model: fused_scores(model, labels=None),
        ValueError,
        f"labels is None; {FLAG} needs the unshifted labels",
    ),
    (
        lambda model: fused_scores(model, newer=1),
        TypeError,
        f"newer is not known together with {FLAG}; drop it",
    ),
    (with_bias, ValueError, f"output_layer has a bias, which {FLAG} does not add; build it without"),
    (with_scale, ValueError, f"config.use_mup scales the logits, which {FLAG} does not; turn it off"),
]


@pytest.mark.parametrize(("call", "kind", "text"), REJECTED, ids=[text[:40] for _, _, text in REJECTED])
def test_rejection(call, kind, text):
    model_class = fake_model_class()
    with patch(chunk_size=1, model_class=model_class), pytest.raises(kind) as caught:
        call(model_class())
    assert str(caught.value) == f"{FORWARD}: {text}"


def test_an_empty_chunk_and_a_missing_megatron_are_rejected(monkeypatch):
    with pytest.raises(ValueError) as caught:
        patch(chunk_size=0)
    assert str(caught.value) == f"{PATCH}: chunk_size=0 must be at least 1, or None for automatic blocks"
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError) as missing:
        patch(chunk_size=1)
    assert str(missing.value) == (
        f"{PATCH}: linear CE fusion needs Megatron-core; pip install -e '.[megatron]' in the clone"
    )
