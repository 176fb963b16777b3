"""The mixture of experts, with each intermediate that `routed_experts` stores in the dtype of the tokens.

A gradient of a token is stored for each of its choices, then for each rank of tp and ep that it was sent to.
"""

import jax
import jax.numpy as jnp

from jax_ref.expert_parallel import gate_matrix
from jax_ref.stored import stored


def _stored_mixture(x, gates, experts, gate_up, down, kept, mesh, is_gathered):
    """`jax_ref.expert_parallel.mixture`; the axes of intermediates are r of ep, s of tp, e of a rank's experts."""
    gates = gates if kept is None else jnp.where(kept, gates, 0.0)
    (size, d, _, f), tokens, ep, tp = gate_up.shape, len(x), mesh["ep"], mesh.get("tp", 1)
    gate_up = gate_up.reshape(ep, size // ep, d, 2, tp, f // tp)
    down = down.reshape(ep, size // ep, tp, f // tp, d)
    gates = gate_matrix(gates, experts, size).T.reshape(ep, 1, size // ep, tokens, 1)
    # 1. Each rank's tokens. all_to_all sends them over ep and gathers them over tp; all_gather starts with tp.
    one = (1, tp) if is_gathered else (ep, 1)
    x = stored(jnp.broadcast_to(x, (*one, tokens, d)))
    x = stored(jnp.broadcast_to(x, (ep, tp, tokens, d)))
    rows = stored(jnp.broadcast_to(x[:, :, None], (ep, tp, size // ep, tokens, d)))
    # 2. The experts.
    columns = stored(jnp.einsum("rsetd,redcsf->rsetcf", rows, gate_up))
    hidden = stored(jax.nn.silu(columns[..., 0, :]) * columns[..., 1, :] * gates)
    outputs = stored(jnp.einsum("rsetf,resfd->rsetd", hidden, down))
    # 3. The sums of a rank's experts, of tp and of ep. all_gather adds them up in float32.
    sums = outputs.sum(2)
    return sums.sum((0, 1)) if is_gathered else stored(stored(sums).sum(1)).sum(0)


def by_all_to_all(x, gates, experts, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, None, mesh, is_gathered=False)


def by_all_gather(x, gates, experts, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, None, mesh, is_gathered=True)


def kept_by_all_to_all(x, gates, experts, kept, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, kept, mesh, is_gathered=False)


def kept_by_all_gather(x, gates, experts, kept, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, kept, mesh, is_gathered=True)
