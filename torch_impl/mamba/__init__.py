"""Mamba2: the mixer, and context parallelism for it."""

from torch_impl.mamba.mixer import Mamba2Mixer as Mamba2Mixer
