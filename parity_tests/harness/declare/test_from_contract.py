"""A scheme takes its specs from a public function's contract, or from its own annotations."""

import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

from shardproof import integers, scheme, values
from shardproof.declare.instance import meaning_of
from torch_impl.collectives import all_reduce
from torch_impl.contract import Positive, Sharded, ShardedIds, contract, contract_of


@contract
def weighted(
    logits: Sharded[Tensor, "... v/tp"], weight: Sharded[Tensor, "v/tp"], scale: Positive = 1.0
) -> Sharded[Tensor, "... tp=I"] | tuple[Sharded[Tensor, "... tp=I"], Sharded[Tensor, "... tp=I"]]:
    return (logits * weight).sum(-1) * scale


def reference(logits, weight, scale=1.0):
    return jnp.einsum("bsv,v->bs", logits, weight) * scale


def test_specs_come_from_the_public_function():
    @scheme(reference=reference, mesh={"tp": (1, 2)}, contract=weighted, options={"scale": (1.0, 2.0)})
    def weighted_over_tp(mesh, logits, weight, scale):
        return all_reduce(weighted(logits, weight, scale), mesh["tp"])

    inputs = {arg.name: str(arg.spec) for arg in weighted_over_tp.inputs}
    assert inputs == {"logits": "b s v/tp", "weight": "v/tp"}
    assert [str(arg.spec) for arg in weighted_over_tp.outputs] == ["b s tp=I"]
    assert weighted_over_tp.verify(tp=2, b=1, s=2, v=4).ok


def test_specs_come_from_the_annotations():
    @scheme(
        reference=lambda x, ids: x[ids],
        mesh={"tp": (1, 2)},
        draw={"x": values("normal"), "ids": integers(0, 2)},
        dims={"n": (3,)},
    )
    def looked_up(mesh, x: Sharded[Tensor, "n tp=R"], ids: ShardedIds[Tensor, "k/tp"]) -> Sharded[Tensor, "k/tp"]:
        return x[ids]

    assert [(str(arg.spec), arg.is_integer) for arg in looked_up.inputs] == [("n tp=R", False), ("k/tp", True)]
    assert looked_up.verify(tp=2, k=4).ok


def test_declared_specs_take_precedence():
    @scheme(
        reference=reference, mesh={"tp": (1, 2)}, contract=weighted,
        inputs={"logits": "b s v/tp:ragged", "weight": "v/tp:ragged"},
    )  # fmt: skip
    def weighted_over_ragged_tp(mesh, logits, weight):
        return all_reduce(weighted(logits, weight), mesh["tp"])

    assert [str(arg.spec) for arg in weighted_over_ragged_tp.inputs] == ["b s v/tp:ragged", "v/tp:ragged"]
    assert weighted_over_ragged_tp.verify(tp=2, b=1, s=2, v=5).ok


@pytest.mark.parametrize(
    ("function", "contract", "sentence"),
    [
        (lambda mesh, x: x, None, "has no inputs, and the signature of <lambda> states no contract; pass inputs"),
        (lambda mesh, x: x, torch.add, "has no inputs, and the signature of add states no contract; pass inputs"),
        (
            lambda mesh, x: x,
            weighted,
            "takes (x), but the contract of weighted has only (logits, weight); rename the arguments, or pass inputs",
        ),
    ],
)
def test_without_specs_the_declaration_is_rejected(function, contract, sentence):
    with pytest.raises(ValueError) as caught:
        scheme(reference=lambda x: x, mesh={"tp": (1,)}, contract=contract)(function)
    assert str(caught.value) == f"scheme '<lambda>': {sentence}"


def test_a_contract_without_results_needs_outputs():
    def doubled(mesh, x: Sharded[Tensor, "n/tp"]):
        return x * 2

    with pytest.raises(ValueError, match="has no outputs, and the signature of doubled states none; pass outputs"):
        scheme(reference=lambda x: x, mesh={"tp": (1,)})(doubled)


def test_written_specs_are_an_instance_and_outputs_follow_from_them():
    """Layouts, the words for dims and the further axis of a batch are the scheme's own."""

    @scheme(
        reference=lambda rows, weight: jnp.einsum("nc,c->n", rows, weight),
        mesh={"dp": (1, 2), "tp": (1, 2)},
        contract=weighted,
        inputs={"rows": "n/dp c/tp:ragged", "weight": "c/tp:ragged dp=R"},
    )
    def weighted_rows(mesh, rows, weight):
        return all_reduce(weighted(rows, weight), mesh["tp"])

    assert [str(arg.spec) for arg in weighted_rows.outputs] == ["n/dp tp=I"]
    assert weighted_rows.verify(tp=2, dp=2, n=2, c=4).ok


GENERAL = 'logits "... v/tp" weight "v/tp" -> "... tp=I" or "... tp=I", "... tp=I"'


@pytest.mark.parametrize(
    ("inputs", "outputs", "own"),
    [
        (
            {"logits": "b s v/tp", "weight": "v tp=R"},
            "b s tp=I",
            'logits "b s v/tp", weight "v tp=R" -> "b s tp=I"',
        ),
        ({"logits": "b s v/tp", "weight": "w/tp"}, "b s tp=I", 'logits "b s v/tp", weight "w/tp" -> "b s tp=I"'),
        ({"logits": "b s v/tp", "weight": "v/tp"}, "b s tp=R", 'logits "b s v/tp", weight "v/tp" -> "b s tp=R"'),
        ({"logits": "b s v/tp", "weight": "v/tp"}, "b tp=I", 'logits "b s v/tp", weight "v/tp" -> "b tp=I"'),
        ({"logits": "b s v/tp"}, None, 'logits "b s v/tp"'),
    ],
)
def test_specs_that_are_no_instance_are_rejected(inputs, outputs, own):
    def written(mesh, logits, weight):
        return weighted(logits, weight)

    with pytest.raises(ValueError) as caught:
        scheme(reference=reference, mesh={"tp": (1, 2)}, contract=weighted, inputs=inputs, outputs=outputs)(written)
    sentence = f"has {own}, which does not match the contract of weighted: {GENERAL}"
    assert sentence in str(caught.value)


def test_a_layout_that_a_contract_names_must_be_that():
    @contract
    def swapped(x: Sharded[Tensor, "b s/cp:dual_chunk_swap ..."]) -> Sharded[Tensor, "b s/cp ..."]:
        return x

    stated = contract_of(swapped)
    assert meaning_of(stated, {"y": "b t/cp:dual_chunk_swap d"}, ["b t/cp d"], ("cp",)) is not None
    assert meaning_of(stated, {"y": "b t/cp d"}, ["b t/cp d"], ("cp",)) is None


def test_a_contract_without_specs_is_no_contract_of_a_scheme():
    with pytest.raises(ValueError, match="has contract=add, whose signature states no specs; drop it"):
        scheme(reference=lambda x: x, mesh={"tp": (1,)}, contract=torch.add, inputs={"x": "n"}, outputs="n")(
            lambda mesh, x: x
        )
