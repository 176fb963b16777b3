"""References for gradient clipping and the optimiser steps AdamW, SGD and Muon, on one device."""

from jax_ref.optimizers.reference import adamw as adamw
from jax_ref.optimizers.reference import clipped as clipped
from jax_ref.optimizers.reference import muon as muon
from jax_ref.optimizers.reference import newton_schulz as newton_schulz
from jax_ref.optimizers.reference import norm as norm
from jax_ref.optimizers.reference import sgd as sgd
