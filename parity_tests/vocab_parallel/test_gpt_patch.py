"""The patched forward of a model that is built as Megatron's GPTModel is."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from jax_ref.layouts import dual_chunk_swap
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.collectives import all_gather

V, D, B, S = 6, 4, 2, 8
patch = vp.patch_gpt_model_forward_for_linear_ce_fusion
PATCH = "vocab_parallel.patch_gpt_model_forward_for_linear_ce_fusion"
FORWARD = "vocab_parallel._gpt_forward_with_linear_ce_fusion"
IDS = (torch.arange(B * S) * 5 % V).view(B, S)


def parameter(*shape, frequency):
    n = int(np.prod(shape))
    return nn.Parameter(torch.linspace(0, frequency, n, dtype=torch.float64).sin().view(*shape) * 2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = parameter(D, D, frequency=40), None

    def forward(self, hidden_states, **seen):
        self.seen = seen
        return (hidden_states @ self.weight).tanh()


def fake_model_class():
    """A class of its own for each test, with the attributes that a patched forward may touch."""

    class FakeGPT(nn.Module):
        post_process, share_embeddings_and_output_weights = True, False

        def __init__(self, tp_group=None, cp_group=None, tied=False, rank=0, world=1, results=6):
            super().__init__()
            self.config, self.pg_collection = SimpleNamespace(), SimpleNamespace(tp=tp_group, cp=cp_group)
            self.share_embeddings_and_output_weights, self.results = tied, results
            self.embedding, self.decoder = parameter(V, D, frequency=30), Decoder()
            full = parameter(V, D, frequency=50).data
            self.output_layer = SimpleNamespace(bias=None, weight=None)
            if not tied:
                self.head = nn.Parameter(full.chunk(world)[rank].clone())
                self.output_layer.weight = self.head

        def shared_embedding_or_output_weight(self):
            return self.embedding

        def _preprocess(
            self, input_ids, position_ids, decoder_input, inference_context, packed_seq_params, padding_mask
        ):
            states = self.embedding[input_ids].transpose(0, 1) if decoder_input is None else decoder_input
            return (states, "emb", "cos", "sin", "offset", padding_mask, "both")[: self.results]

        def forward(self, input_ids, position_ids, attention_mask, *rest, **keywords):
            self.called = (input_ids, position_ids, attention_mask, *rest), keywords
            return "original"

    return FakeGPT


def logits_of(model, input_ids):
    """The logits of the fake model's own head, on one rank."""
    weight = model.embedding if model.share_embeddings_and_output_weights else model.head
    return (model.embedding[input_ids] @ model.decoder.weight).tanh() @ weight.T


def own_logprobs(model, input_ids, labels):
    log_p = logits_of(model, input_ids).log_softmax(-1)[:, :-1]
    return log_p.gather(-1, labels[:, 1:, None]).squeeze(-1)


def fused(model, input_ids=IDS, labels=IDS, **options):
    return model(input_ids, None, None, labels=labels, return_logprobs_for_linear_ce_fusion=True, **options)


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh=mesh)).results


def rounded(*tensors):
    return [x.detach().float().numpy() for x in tensors]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("results", [6, 7])
def test_it_scores_as_the_logits_of_the_model(tied, results):
    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"], tied, results=results)
        with patch(chunk_size=3, model_class=model_class):
            y = fused(model)
            gradients = torch.autograd.grad(y.sum(), list(model.parameters()))
        scores = own_logprobs(model, IDS, IDS)
        return rounded(y, *gradients), rounded(scores, *torch.autograd.grad(scores.sum(), list(model.parameters())))

    ((patched, expected),) = on_mesh(body, cp=1, tp=1)
    for a, b in zip(patched, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_over_tp_and_cp():
    """The sum of the parameters' gradients over cp, whose ranks each own a half of the loss."""

    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"], rank=mesh.rank("tp"), world=2)
        with patch(chunk_size=None, model_class=model_class):
            y = fused(model, IDS[:, dual_chunk_swap(S, 2)[mesh.rank("cp")]])
            gradients = torch.autograd.grad(y.sum() / 2, list(model.parameters()))
        gradients = [all_gather(g[None], mesh["cp"], out="I").sum(0) for g in gradients]
        alone = fake_model_class()()
        scores = own_logprobs(alone, IDS, IDS)
        expected = list(torch.autograd.grad(scores.sum(), list(alone.parameters())))
        expected[1] = expected[1].chunk(2)[mesh.rank("tp")]  # the head
        return rounded(y, *gradients), rounded(scores, *expected)

    for patched, expected in on_mesh(body, cp=2, tp=2):
        for a, b in zip(patched, expected, strict=True):
            np.testing.assert_array_equal(np.float16(a), np.float16(b))


@pytest.mark.parametrize("name", ["cu_seqlens_q_padded", "cu_seqlens_q"])
def test_packed_is_sequence_by_sequence(name):
    offsets, ids = torch.tensor([0, 3, 8]), IDS[:1]

    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"])
        packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, 8]))
        setattr(packed, name, offsets)
        with patch(chunk_size=3, model_class=model_class):
            y = fused(model, ids, ids, packed_seq_params=packed)
        zero = torch.zeros(1, 1, dtype=torch.float64)
        rows = [own_logprobs(model, ids[:, part], ids[:, part]) for part in (slice(0, 3), slice(3, 8))]
        return rounded(y, torch.cat([rows[0], zero, rows[1]], dim=1))

    ((y, expected),) = on_mesh(body, cp=1, tp=1)
    np.testing.assert_array_equal(y, expected)


def test_the_decoder_gets_the_computed_and_the_passed_arguments():
    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"], results=7)
        model.post_process = False
        model.config.fine_grained_activation_offloading = True
        model.preprocess_for_fine_grained_offloading = lambda: calls.append("offloading")
        calls = []
        with patch(chunk_size=3, model_class=model_class):
            hidden = fused(
                model,
                labels=None,
                inference_params="old context",
                padding_mask="padding",
                packed_seq_params="packed",
                extra_block_kwargs={"more": 1},
            )
        return tuple(hidden.shape), model.decoder.seen, calls

    seen = dict(
        attention_mask=None,
        rotary_pos_emb="emb",
        rotary_pos_cos="cos",
        rotary_pos_sin="sin",
        rotary_pos_cos_sin="both",
        sequence_len_offset="offset",
        padding_mask="padding",
        inference_context="old context",
        packed_seq_params="packed",
        more=1,
    )
    assert on_mesh(body, cp=1, tp=1) == (((S, B, D), seen, ["offloading"]),)


def test_inference_saves_nothing():
    def body(mesh, case):
        model_class = fake_model_class()
        model = model_class(mesh["tp"], mesh["cp"])
        with patch(chunk_size=3, model_class=model_class):
            fused(model, inference_context=object()).sum().backward()  # in training a context changes nothing
            model.eval()
            with pytest.raises(RuntimeError) as caught:
                fused(model, inference_context=object()).sum().backward()
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
    return fused(model)


def with_scale(model):
    model.config.use_mup = True
    return fused(model)


FLAG = "return_logprobs_for_linear_ce_fusion=True"
REJECTED = [
    (
        lambda model: fused(model, labels=None),
        ValueError,
        f"labels is None; {FLAG} needs the unshifted labels",
    ),
    (
        lambda model: fused(model, newer=1),
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


def test_a_chunk_of_nothing_and_a_missing_megatron(monkeypatch):
    with pytest.raises(ValueError) as caught:
        patch(chunk_size=0)
    assert str(caught.value) == f"{PATCH}: chunk_size=0 must be at least 1, or None for automatic blocks"
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError) as missing:
        patch(chunk_size=1)
    assert str(missing.value) == (
        f"{PATCH}: linear CE fusion needs Megatron-core; pip install -e '.[megatron]' in the clone"
    )
