"""NeMo Automodel's packed batches: rows of a batch as one stream, whole and in chunks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from nemo_automodel.components.distributed.thd_utils import process_input_for_thd, split_batch_into_thd_chunks

from shardproof import integers, scheme

TOKENS = dict(
    mesh={"dp": (1, 2)},
    inputs={"tokens": "b/dp s"},
    outputs="(b s)/dp",
    draw={"tokens": integers(1, 99)},
    dtypes=("float32",),
)


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each row is one sequence, as long as the row."""
    rows, width = tokens.shape
    lengths = torch.full((rows, 1), width)
    positions = torch.arange(width).repeat(rows, 1)
    return dict(input_ids=tokens, labels=tokens, position_ids=positions, seq_lens=lengths, seq_lens_padded=lengths)


def _stream(tokens: Any) -> Any:
    return tokens.reshape(-1).astype(float)


@scheme(reference=_stream, dims={"b": (2, 4, 6)}, **TOKENS)
def stream_of_rows(mesh: Any, tokens: torch.Tensor) -> torch.Tensor:
    return process_input_for_thd(batch_of(tokens))["input_ids"].float()


@scheme(
    reference=lambda tokens: jnp.tile(jnp.arange(tokens.shape[1]), tokens.shape[0]).astype(float),
    dims={"b": (2, 4, 6)},
    **TOKENS,
)
def positions_of_rows(mesh: Any, tokens: torch.Tensor) -> torch.Tensor:
    return process_input_for_thd(batch_of(tokens))["position_ids"].float()


@scheme(reference=_stream, dims={"b": (4, 8)}, **TOKENS)
def chunks_of_an_even_batch(mesh: Any, tokens: torch.Tensor) -> torch.Tensor:
    return split_batch_into_thd_chunks(batch_of(tokens), 2)["input_ids"].reshape(-1).float()


@scheme(reference=_stream, dims={"b": (6,)}, **TOKENS)
def chunks_of_an_odd_batch(mesh: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Three rows on each of two ranks, or six on one, in as many chunks as leave one over."""
    chunks = 2 if len(tokens) == 3 else 4
    return split_batch_into_thd_chunks(batch_of(tokens), chunks)["input_ids"].reshape(-1).float()
