"""GPT-2 in stages, for which transformers has no plan: learned positions are added on the first stage alone."""

import pytest
import torch
from torch import nn

from parity_tests.pipelining.unsplit_models import PROMISED, ROWS, chosen, loss_of, stepped, tokens
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining.model_parts import SUMMANDS
from torch_impl.pipelining.split import split_model_into_stages

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")
N = 4
LAYERS = 4


def unsplit(of):
    """Gradients by name of the full model, all micro-batches in one process."""
    model = families.model_of(of, torch.float64)
    ids, targets = tokens(of, N)
    for x, y in zip(ids.split(ROWS), targets.split(ROWS), strict=True):
        loss_of(model(x, use_cache=False).logits, y).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def case_of(p, **options):
    return CaseSpec("gpt2", {"pp": p}, dtype="float64", options=options)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("p", "name"), [(2, "1F1B"), (2, "Interleaved1F1B"), (4, "GPipe"), (2, "ZBVZeroBubble")])
def test_gradients_match_the_full_model(p, name, tied):
    options = {"family": "gpt2", "tied": tied, "layers": LAYERS, "name": name, "n": N, "steps": 1, "cut": {}}
    gradients = {}
    for _, of_rank in run(lambda mesh, case: stepped(mesh, _Options(case)), case_of(p, **options)).results:
        gradients |= of_rank
    expected = unsplit(chosen("gpt2", tied, LAYERS))
    assert set(gradients) == set(expected)
    for parameter, gradient in expected.items():
        ours = torch.frombuffer(bytearray(gradients[parameter]), dtype=torch.float64).view(gradient.shape)
        assert (ours - gradient).norm() <= PROMISED * gradient.norm(), parameter


class _Options:
    """The options of a case as attributes, beside its own."""

    def __init__(self, case):
        vars(self).update(case.options, dtype=case.dtype)


def test_a_position_that_every_stage_adds_is_reported(monkeypatch):
    """A stage that lacks the positions and is not known to leave them out cannot run, rather than to add nothing."""
    monkeypatch.setitem(SUMMANDS, "GPT2Model", ())
    of = chosen("gpt2", False, LAYERS)

    def body(mesh, case):
        _, parts = split_model_into_stages(
            families.model_of(of, torch.float64), mesh.device_mesh, "pp", "LoopedBFS", torch.device("cpu")
        )
        hidden = parts[0](tokens(of, 1)[0])
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            parts[1](hidden)

    run(body, case_of(1))


def test_a_layer_that_changes_a_stages_output_is_rejected():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe, self.drop = nn.Embedding(5, 4), nn.Embedding(9, 4), nn.Dropout(0.0)
            self.h, self.ln_f = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.LayerNorm(4)

        def forward(self, input_ids=None, inputs_embeds=None, use_cache=False):
            x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
            x = 2 * self.drop(x + self.wpe(torch.arange(x.shape[1])))
            for layer in self.h:
                x = layer(x)
            return self.ln_f(x)

    Scaled.__name__ = "GPT2Model"

    def body(mesh, case):
        _, parts = split_model_into_stages(Scaled(), mesh.device_mesh, "pp", "LoopedBFS", torch.device("cpu"))
        with pytest.raises(ValueError, match="changes hidden states outside its embedding"):
            parts[1](parts[0](torch.arange(5).remainder(5)[None]))

    run(body, case_of(1))
