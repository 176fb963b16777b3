"""Mixtures of experts, with each intermediate that `routed_experts` stores in the dtype of the tokens.

A gradient of a token is stored for each of its choices, then for each rank of tp and ep that it was sent to.
"""

import jax
import jax.numpy as jnp

from jax_ref.expert_parallel import gate_matrix
from jax_ref.stored import stored

ALPHA = 1.702  # of ClampedSwiGLU


def _stored_mixture(x, gates, experts, gate_up, down, mesh, is_gathered, unit, gate_up_bias=None, down_bias=None):
    """`jax_ref.expert_parallel.mixture`; the axes of intermediates are r of ep, s of tp, e of a rank's experts.

    gate_up is [e, d, 2, f] and gate_up_bias [e, 2, f]; `unit` takes the gates and the ups.
    """
    (size, d, _, f), tokens, ep, tp = gate_up.shape, len(x), mesh["ep"], mesh.get("tp", 1)
    gate_up = gate_up.reshape(ep, size // ep, d, 2, tp, f // tp)
    down = down.reshape(ep, size // ep, tp, f // tp, d)
    gates = gate_matrix(gates, experts, size).T.reshape(ep, 1, size // ep, tokens, 1)
    # 1. Each rank's tokens. all_to_all sends them over ep and gathers them over tp; all_gather starts with tp.
    one = (1, tp) if is_gathered else (ep, 1)
    x = stored(jnp.broadcast_to(x, (*one, tokens, d)))
    x = stored(jnp.broadcast_to(x, (ep, tp, tokens, d)))
    rows = stored(jnp.broadcast_to(x[:, :, None], (ep, tp, size // ep, tokens, d)))
    # 2. The experts, with biases in float32, of which the first rank of tp adds that of the output.
    columns = stored(jnp.einsum("rsetd,redcsf->rsetcf", rows, gate_up))
    if gate_up_bias is not None:
        biases = gate_up_bias.reshape(ep, size // ep, 1, 2, tp, f // tp)
        columns = columns + jnp.moveaxis(biases, 4, 1)
    hidden = stored(unit(columns[..., 0, :], columns[..., 1, :]) * gates)
    outputs = stored(jnp.einsum("rsetf,resfd->rsetd", hidden, down))
    if down_bias is not None:
        is_first = (jnp.arange(tp) == 0).reshape(1, tp, 1, 1, 1)
        outputs = outputs + jnp.where(is_first, down_bias.reshape(ep, 1, size // ep, 1, d) * gates, 0.0)
    # 3. The sums of a rank's experts, of tp and of ep. all_gather adds them up in float32.
    sums = outputs.sum(2)
    return sums.sum((0, 1)) if is_gathered else stored(stored(sums).sum(1)).sum(0)


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def by_all_to_all(x, gates, experts, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, mesh, False, _swiglu)


def by_all_gather(x, gates, experts, gate_up, down, mesh):
    return _stored_mixture(x, gates, experts, gate_up, down, mesh, True, _swiglu)


def kept_by_all_to_all(x, gates, experts, kept, gate_up, down, mesh):
    return by_all_to_all(x, jnp.where(kept, gates, 0.0), experts, gate_up, down, mesh)


def kept_by_all_gather(x, gates, experts, kept, gate_up, down, mesh):
    return by_all_gather(x, jnp.where(kept, gates, 0.0), experts, gate_up, down, mesh)


def _of_pairs(x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, mesh, is_gathered):
    """With biases and the clamped unit of gpt-oss: gate and up of each hidden column are neighbours."""
    pairs = [jnp.swapaxes(each.reshape(*each.shape[:-1], -1, 2), -1, -2) for each in (gate_up, gate_up_bias)]

    def unit(gate, up):
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)

    return _stored_mixture(x, gates, experts, pairs[0], down, mesh, is_gathered, unit, pairs[1], down_bias)


def pairs_by_all_to_all(x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, mesh):
    return _of_pairs(x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, mesh, False)


def pairs_by_all_gather(x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, mesh):
    return _of_pairs(x, gates, experts, gate_up, down, gate_up_bias, down_bias, limit, mesh, True)
