"""Parity of models.hybrid: logits, and the gradient of every parameter."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

from jax_ref.models import Config
from parity_tests.models.parameters import (
    DTYPES,
    HEAD_DIM,
    RELATED,
    ROUNDINGS,
    SIZES,
    TIED,
    UNTIED,
    config_of,
    drawn,
    rank_logits,
    specs,
)
from parity_tests.parity import parity
from shardproof import CaseSpec, integers, offsets, scheme, token_below
from shardproof.engines.engines import run
from shardproof.training.by_name import flax_model
from torch_impl.layouts import TokenLayout
from torch_impl.models import (
    HybridConfig,
    HybridLM,
    Placement,
    Stream,
    rank_stream,
    tensor_parallel_plan,
    token_losses,
)

OF_DTENSOR = ("inference_mode", "autocast", "second_derivative")  # its backward cuts the graph of a second derivative


def whole_logits(ids, groups, cu_padded, cu_real, parameters, keep=None):
    config = Config(**config_of({"p": HEAD_DIM, "j": len(groups), "tp": 1}, parameters))
    return flax_model(config, parameters)(ids[None], cu_padded, cu_real)


def declared(parameters, **sizes):
    return dict(
        reference=whole_logits,
        inputs={"ids": "t", "groups": "j", "cu_padded": "q", "cu_real": "q", "parameters": specs(parameters, "cp=R")},
        outputs="1 t/cp:packed v/tp",
        dims={**SIZES, **RELATED, "t": (24,), "q": (4,), **sizes},
        draw={
            "ids": token_below("v"),
            "groups": integers(0, 0),
            "cu_padded": offsets("t", padded=True),
            "cu_real": offsets("t"),
            **drawn(parameters),
        },
        rank_options={"exchange": ("ring", "ulysses", "all_gather"), "mamba": ("hidden", "state")},
        dtypes=DTYPES,
        reduction=("t", "f"),
        roundings=ROUNDINGS,
        excluded_conditions=OF_DTENSOR,
    )


def parallel(mesh, ids, groups, cu_padded, cu_real, parameters, **chosen):
    stream = rank_stream(Stream(ids, cu_padded, cu_real), mesh.size("cp"), mesh.rank("cp"))
    return rank_logits(mesh, stream.ids, stream.layout, parameters, len(groups), **chosen)


@scheme(mesh={"cp": (1, 2, 3, 4), "tp": (1,)}, **declared(UNTIED, h=(12,), g=(1,), r=(12,), j=(1,)))
def hybrid_over_tokens(mesh, ids, groups, cu_padded, cu_real, parameters, exchange, mamba):
    return parallel(mesh, ids, groups, cu_padded, cu_real, parameters, exchange=exchange, mamba=mamba)


@scheme(mesh={"cp": (1, 2), "tp": (1, 2)}, **declared(TIED, h=(4,), g=(2,), r=(4,), j=(2,)))
def hybrid_over_heads(mesh, ids, groups, cu_padded, cu_real, parameters, exchange, mamba):
    return parallel(mesh, ids, groups, cu_padded, cu_real, parameters, exchange=exchange, mamba=mamba)


def each_row_alone(ids, groups, parameters):
    config = Config(**config_of({"p": HEAD_DIM, "j": len(groups), "tp": 1}, parameters))
    model, ends = flax_model(config, parameters), jnp.array([0, ids.shape[1]])
    return jax.vmap(lambda row: model(row[None], ends, ends)[0])(ids)


def of_rows(tokens):
    """Rows of one sequence each, their tokens sharded as declared."""
    return dict(
        reference=each_row_alone,
        mesh={"cp": (1, 2), "tp": (1,)},
        inputs={"ids": "b s", "groups": "j", "parameters": specs(UNTIED, "cp=R")},
        outputs=f"b {tokens} v/tp",
        dims={**SIZES, **RELATED, "b": (2,), "s": (8,), "h": (4,), "g": (2,), "r": (4,), "j": (2,)},
        draw={"ids": token_below("v"), "groups": integers(0, 0), **drawn(UNTIED)},
        rank_options={"exchange": ("ring", "ulysses", "all_gather"), "mamba": ("hidden", "state")},
        dtypes=("float32", "float64"),
        reduction=("s", "f"),
        roundings=ROUNDINGS,
        excluded_conditions=OF_DTENSOR,
    )


def rows(mesh, order, ids, groups, parameters, **chosen):
    of_rank = dict(cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), device=ids.device)
    layout = TokenLayout.dense(order, ids.shape[1], **of_rank)
    return rank_logits(mesh, layout.shard(ids, 1), layout, parameters, len(groups), order=order, **chosen)


@scheme(**of_rows("s/cp:dual_chunk_swap"))
def hybrid_of_rows(mesh, ids, groups, parameters, exchange, mamba):
    return rows(mesh, "dual_chunk_swap", ids, groups, parameters, exchange=exchange, mamba=mamba)


@scheme(**of_rows("s/cp"))
def hybrid_of_contiguous_rows(mesh, ids, groups, parameters, exchange, mamba):
    return rows(mesh, "contiguous", ids, groups, parameters, exchange=exchange, mamba=mamba)


SCHEMES = (hybrid_over_tokens, hybrid_over_heads, hybrid_of_rows, hybrid_of_contiguous_rows)
test_parity = parity(SCHEMES, lockstep=8)


@pytest.mark.parametrize("tp", [1, 2])
def test_with_targets_it_gives_the_loss_of_each_token(tp):
    config, cu = HybridConfig(vocab_size=11, hidden_size=8), torch.tensor([0, 5, 16])

    def body(mesh, case):
        model = HybridLM(config, Placement(mesh["cp"], mesh["tp"]), dtype=torch.float64)
        parallelize_module(model, mesh.device_mesh["tp"], tensor_parallel_plan(config.layers))
        stream = rank_stream(Stream(torch.arange(16) % 11, cu, cu), 1, 0)
        losses = model(stream.ids, stream.layout, stream.targets)
        expected = token_losses(model(stream.ids, stream.layout), stream.targets, mesh["tp"], 11)
        assert losses.equal(expected) and (losses > 0).sum() == 14  # the last token of each document predicts nothing

    run(body, CaseSpec("hybrid", {"cp": 1, "tp": tp}))


ORDERS = ("contiguous", "dual_chunk_swap")
MAMBA_ALONE = HybridConfig(layers=("mamba",), hidden_size=8)


def rejected(order, layout, rows):
    """The rejection of a model of Mamba alone on each of two cp ranks."""

    def body(mesh, case):
        model = HybridLM(MAMBA_ALONE, Placement(mesh["cp"], mesh["tp"], order=order))
        with pytest.raises(ValueError) as caught:
            model(torch.zeros(rows, 8, dtype=torch.int64), layout(mesh.rank("cp")))
        return str(caught.value)

    first, second = run(body, CaseSpec("hybrid", {"cp": 2, "tp": 1})).results
    assert first == second
    return first


@pytest.mark.parametrize(("order", "other"), [("contiguous", "dual_chunk_swap"), ("dual_chunk_swap", "contiguous")])
def test_a_layout_of_another_order_is_rejected(order, other):
    def layout(rank):
        cu = torch.tensor([0, 8, 16])
        return rank_stream(Stream(torch.zeros(16, dtype=torch.int64), cu, cu), 2, rank, other).layout

    assert rejected(order, layout, 1) == (
        f"models.MambaLayer: layout is sharded by '{other}', the model's Placement has order='{order}'; use one"
    )


def test_one_rank_takes_a_layout_of_any_order():
    def body(mesh, case):
        model = HybridLM(MAMBA_ALONE, Placement(mesh["cp"], mesh["tp"], order="contiguous"))
        ids = torch.arange(8)[None]
        one, other = (model(ids, TokenLayout.dense(kind, 8, cp_size=1, cp_rank=0)) for kind in ORDERS)
        return torch.equal(one, other)

    assert run(body, CaseSpec("hybrid", {"cp": 1, "tp": 1})).results == (True,)


def test_rows_of_several_documents_are_rejected():
    def layout(rank):
        return TokenLayout.packed(torch.tensor([0, 8, 16]), cp_size=2, cp_rank=rank)

    assert rejected("dual_chunk_swap", layout, 3) == (
        "models.MambaLayer: x has 3 rows and layout 2 documents; pass one packed row, or rows of one sequence each"
    )
