"""Parity of a dense batch inside its context and after it: positions of every kind, a mask, a loss mask."""

import warnings

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from shardproof import Cost, integers, scheme
from torch_impl import context_parallel as cp
from torch_impl.context_parallel.batch_ctx import restarts

KINDS = 2
LARGE = 5  # larger ids are padding by a padding mask
POSITIONS = ("rows", "one row", "kinds")
ByToken = Int[Tensor, "b l"]
Entries = tuple[
    ByToken, ByToken, ByToken, Int[Tensor, "k b l"], Bool[Tensor, "b l"],
    Int[Tensor, "b s"], Int[Tensor, "b s"], Int[Tensor, "two"],
]  # fmt: skip


def batch_by_hand(ids, steps, less, positions, mask):
    """Columns from s - `less` on are padding; by an attention mask r more of row r are, by a padding mask those of
    large ids."""
    rows, size = ids.shape
    column, row, real = jnp.arange(size), jnp.arange(rows), size - less
    added = column >= real
    behind = (mask in ("padding", "both")) & (column[None] >= real - row[:, None])
    padding = added[None] | behind | ((mask in ("both", "of ids")) & (ids > LARGE))
    given = steps.cumsum(-1)
    last = given[..., real - 1 : real]
    counted = jnp.where(added[None, None], last + (column - real + 1)[None, None], given)
    rows_of = {"rows": counted[:1], "one row": counted[:1, :1], "kinds": counted}[positions]
    # Positions of several kinds, as for images, never restart.
    restarting = (jnp.diff(rows_of[..., :real]) <= 0).any() & (positions != "kinds")
    weights = jnp.where(added[None], 0, 3 * ids)
    sharded = jnp.where(added[None], 11, ids), weights, weights, jnp.broadcast_to(rows_of, steps.shape), padding
    facts = jnp.stack([restarting, restarting & (mask in ("none", "of ids"))])
    return *sharded, jnp.where(added[None], 0, ids), weights, facts.astype(ids.dtype)


@scheme(
    reference=batch_by_hand,
    mesh={"cp": (2, 3)},
    inputs={"ids": "b s", "steps": "k b s"},
    outputs=(
        *3 * ("b s/cp:dual_chunk_swap",),
        "k b s/cp:dual_chunk_swap",
        "b s/cp:dual_chunk_swap",
        "b s",
        "b s",
        "two",
    ),
    dims={"b": (3,), "s": (12, 24), "k": (KINDS,), "two": (2,)},
    draw={"ids": integers(1, 9), "steps": integers(0, 5)},
    options={"less": (3, 1, 0), "positions": POSITIONS, "mask": ("padding", "none", "both", "ones", "of ids")},
    cost=lambda c: Cost(),
)
@pytest.mark.cases(3, engine="gloo")
@pytest.mark.cases(20)
def entries_of_a_dense_batch(mesh, ids, steps, less, positions, mask) -> Entries:
    """Ids, the batch's loss mask and the caller's, positions and padding; the caller's ids, which stay whole; the loss
    mask after; a restart, a warning."""
    rows, real = len(ids), ids.shape[1] - less
    kinds = steps.cumsum(-1)[..., :real]
    given = {"rows": kinds[0], "one row": kinds[0, :1], "kinds": kinds}[positions]
    batch = {"input_ids": ids[:, :real], "position_ids": given}
    if mask in ("both", "of ids"):
        batch["padding_mask"] = batch["input_ids"] > LARGE
    if mask not in ("none", "of ids"):
        fewer = (mask != "ones") * torch.arange(rows)[:, None]
        batch["attention_mask"] = (torch.arange(real) < real - fewer).int()
    loss_mask = 3 * ids[:, :real]
    with warnings.catch_warnings(record=True) as caught:  # without a mask such positions have a warning
        warnings.simplefilter("always")
        factory, padded = cp.make_cp_batch_and_ctx(mesh.device_mesh, batch, loss_mask, padding_token_id=11)
    warned = any("position_ids restart inside a row" in str(each.message) for each in caught)
    with factory():
        places = padded["position_ids"].expand(KINDS, rows, -1)
        padding = padded.get("padding_mask", torch.zeros_like(padded["input_ids"], dtype=torch.bool))
        inside = padded["input_ids"], padded["loss_mask"], loss_mask, places, padding
        own_ids = torch.nn.functional.pad(batch["input_ids"], (0, less))
        inside = tuple(each.clone() for each in (*inside, own_ids))
    after = torch.nn.functional.pad(loss_mask, (0, less))
    return *inside, after.clone(), torch.tensor([restarts(given), warned]).to(ids)
