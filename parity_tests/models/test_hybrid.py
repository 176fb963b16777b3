"""Parity of models.hybrid: logits, and the gradient of every parameter."""

import pytest
from hypothesis import given, settings

from jax_ref.models.config import Config
from parity_tests import check, every_case, integers, offsets, scheme, token_below
from parity_tests.models.by_name import flax_model
from parity_tests.models.parameters import RELATED, ROUNDINGS, SIZES, TIED, UNTIED, config_of, drawn, specs
from parity_tests.models.schemes import DTYPES, HEAD_DIM, rank_logits
from torch_impl.models import Stream, rank_stream


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
    )


def parallel(mesh, ids, groups, cu_padded, cu_real, parameters, **chosen):
    stream = rank_stream(Stream(ids, cu_padded, cu_real), mesh.size("cp"), mesh.rank("cp"))
    return rank_logits(mesh, stream, parameters, len(groups), **chosen)


@scheme(mesh={"cp": (1, 2, 3, 4), "tp": (1,)}, **declared(UNTIED, h=(12,), g=(1,), r=(12,), j=(1,)))
def hybrid_over_tokens(mesh, ids, groups, cu_padded, cu_real, parameters, exchange, mamba):
    return parallel(mesh, ids, groups, cu_padded, cu_real, parameters, exchange=exchange, mamba=mamba)


@scheme(mesh={"cp": (1, 2), "tp": (1, 2)}, **declared(TIED, h=(4,), g=(2,), r=(4,), j=(2,)))
def hybrid_over_heads(mesh, ids, groups, cu_padded, cu_real, parameters, exchange, mamba):
    return parallel(mesh, ids, groups, cu_padded, cu_real, parameters, exchange=exchange, mamba=mamba)


SCHEMES = (hybrid_over_tokens, hybrid_over_heads)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    @settings(max_examples=8)
    @given(every_case(declared))
    def example(case):
        check(case)

    example()
