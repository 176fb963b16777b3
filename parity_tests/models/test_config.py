"""Rejections by a config of models and by a placement."""

from dataclasses import asdict

import pytest

from jax_ref.models import Config
from parity_tests.rejections import check_rejection, rejected
from torch_impl.models import HybridConfig, Placement

REJECTED_SIZES = [
    ({"hidden_size": 0}, "hidden_size=0 is not a size; it is 1 or more"),
    ({"layers": ("attention", "rnn")}, "layers has 'rnn'; a layer is one of attention, mamba, moe"),
    ({"head_dim": 3}, "head_dim=3 must be even, since rotation pairs columns"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
    ({"balance_coefficient": -0.1}, "balance_coefficient=-0.1 must be at least 0"),
    ({"z_coefficient": float("nan")}, "z_coefficient=nan must be at least 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 must be divisible by num_key_value_heads=3"),
    ({"mamba_groups": 3}, "mamba_heads=4 must be divisible by mamba_groups=3"),
]


@pytest.mark.parametrize(("sizes", "text"), REJECTED_SIZES)
def test_rejection(sizes, text):
    with pytest.raises(ValueError) as caught:
        HybridConfig(**sizes)
    assert str(caught.value) == f"models.HybridConfig: {text}"


PLACED = [
    ({"exchange": "rings"}, "exchange='rings' is not known; it is one of ring, all_gather, ulysses, usp"),
    ({"mamba": "both"}, "mamba='both' is not known; it is one of hidden, state"),
    ({"order": "striped"}, "order='striped' is not known; it is one of dual_chunk_swap, contiguous"),
]
test_a_placement_rejects = rejected(
    {"cp": 2},
    [
        (text, lambda mesh, chosen=chosen: Placement(mesh["cp"], mesh["cp"], **chosen), f"models.Placement: {text}")
        for chosen, text in PLACED
    ],
)


def test_a_placement_without_a_group_is_rejected():
    sentence = "models.Placement: cp is None; pass a ProcessGroup (a group of size 1 for no context parallelism)"
    check_rejection({"cp": 2}, "no group", lambda mesh: Placement(None, mesh["cp"]), sentence, TypeError)


def test_both_sides_have_the_same_sizes():
    assert asdict(Config(**asdict(HybridConfig()))) == asdict(HybridConfig())
