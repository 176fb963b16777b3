"""References of what happens between a gradient and the next weights, on one device."""

from jax_ref.optimizers.reference import adamw as adamw
from jax_ref.optimizers.reference import clipped as clipped
from jax_ref.optimizers.reference import muon as muon
from jax_ref.optimizers.reference import newton_schulz as newton_schulz
from jax_ref.optimizers.reference import norm as norm
from jax_ref.optimizers.reference import sgd as sgd
