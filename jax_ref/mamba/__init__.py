"""The Mamba2 mixer and its parts, and the gated delta rule, on one device."""

from jax_ref.mamba.delta_rule import gated_delta_rule as gated_delta_rule
from jax_ref.mamba.reference import Mamba2 as Mamba2
from jax_ref.mamba.reference import causal_conv as causal_conv
from jax_ref.mamba.reference import scan as scan
