"""The Mamba2 mixer and its parts, on one device."""

from jax_ref.mamba.reference import Mamba2 as Mamba2
from jax_ref.mamba.reference import causal_conv as causal_conv
from jax_ref.mamba.reference import scan as scan
