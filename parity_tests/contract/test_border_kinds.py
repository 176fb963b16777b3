"""Rejected values that torch would notice only inside a function, or after a first message to another rank."""

import re

import pytest
import torch
from torch import Tensor

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives.large_tensors import index_select
from torch_impl.contract import NonNegativeInt, Positive, Sharded, contract
from torch_impl.models.batch import layout_of
from torch_impl.vocab_parallel import vocab_parallel_log_softmax


@contract
def scaled(x: Sharded[Tensor, "... d"], weight: Sharded[Tensor, "d"], factor: Positive = 1.0, n: NonNegativeInt = 0):
    return x * weight * factor


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(3)


def test_a_tensor_of_inference_mode_is_rejected_beside_one_with_a_gradient():
    x, weight = inference_tensor(), torch.ones(3, requires_grad=True)
    sentence = "x was made in inference mode but weight requires a gradient; pass x.clone()"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        scaled(x, weight)
    with torch.no_grad():
        scaled(x, weight)
    scaled(x, torch.ones(3))


@pytest.mark.parametrize("name", ["factor", "n"])
def test_a_number_beyond_torchs_integers_is_rejected(name):
    x = torch.ones(3)
    with pytest.raises(ValueError, match=rf"{name}={2**63} is beyond torch's integers; pass at most"):
        scaled(x, x, **{name: 2**63})
    scaled(x, x, **{name: 2**63 - 1})


def test_a_tensor_without_values_is_rejected_before_it_is_sent():
    def answer(mesh, case):
        logits = torch.ones(2, 4, device="meta")
        with pytest.raises(ValueError, match="is on meta, without values to communicate") as error:
            vocab_parallel_log_softmax(logits, mesh["tp"])
        return str(error.value)

    ranks = run(answer, CaseSpec("meta", {"tp": 2}), "lockstep")
    assert len(set(ranks.results)) == 1 and not ranks.ledger.rows


@pytest.mark.parametrize("value", [None, 7, "cp"])
def test_an_argument_of_a_wrong_type_names_the_class_to_pass(value):
    with pytest.raises(TypeError, match=r"placement is .*; pass a Placement"):
        layout_of(torch.zeros(1, 2, 3, dtype=torch.int64), value)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_rows_of_any_dtype_are_selected(dtype):
    x = torch.tensor([[1, 2**15], [3, 2**16 - 1]], dtype=torch.int64).to(dtype)
    assert index_select(x, torch.tensor([1, 0])).tolist() == [[3, 2**16 - 1], [1, 2**15]]
