"""A mixer whose parameters are all different, a strategy for it, and possible outputs of in_proj."""

from __future__ import annotations

from typing import Any

import torch

from torch_impl.mamba import Mamba2Mixer, MambaContextParallel, MambaStatePassing

GIVEN: dict[str, Any] = {"num_heads": 4, "head_dim": 2, "n_groups": 2, "d_state": 3}
W, T, CU = 32, 24, [0, 8, 8, 24]


def hidden_parallel_strategy(mesh, mixer=None, **options):
    settings = {**GIVEN, **{name: options.pop(name) for name in GIVEN if name in options}}
    mixer = Mamba2Mixer(5, **GIVEN, dtype=torch.float64) if mixer is None else mixer
    return MambaContextParallel(mesh["cp"], **settings, mixer=mixer, **options)


def state_passing_strategy(mesh, mixer=None, **options):
    """The strategy that passes states, of a mixer whose parameters are all different."""
    settings = {**GIVEN, **{name: options.pop(name) for name in GIVEN if name in options}}
    return MambaStatePassing(mesh["cp"], **settings, mixer=filled() if mixer is None else mixer, **options)


def filled(**sizes):
    """A mixer whose parameters are all different."""
    mixer = Mamba2Mixer(5, **{**GIVEN, **sizes}, dtype=torch.float64)
    with torch.no_grad():
        for k, parameter in enumerate(mixer.parameters(), 2):
            parameter.copy_(torch.linspace(-1, k, parameter.numel()).sin().view(parameter.shape))
    return mixer


PROJECTED = torch.linspace(-2, 3, 2 * T * W, dtype=torch.float64).sin().view(2, T, W)
U = torch.linspace(-1, 2, 2 * T * 5, dtype=torch.float64).sin().view(2, T, 5)
