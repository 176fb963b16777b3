"""The parameters of a Mamba2 mixer as a scheme draws them, and the sizes that their shapes tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof import integers, values

SPECS = {
    "in_proj": {"weight": "w d cp=R"},
    "conv1d": {"weight": "c 1 k cp=R", "bias": "c cp=R"},
    "dt_bias": "h cp=R",
    "A_log": "h cp=R",
    "D": "h e cp=R",
    "norm": {"weight": "i cp=R"},
    "out_proj": {"weight": "d i cp=R"},
}
# A mixer creates them in float32, if its dtype has 16 bits.
OF_THE_RECURRENCE = ("parameters.dt_bias", "parameters.A_log", "parameters.D")
# r heads read one group. Of the groups no shape tells; an input as long as they are many does.
SIZES = {
    "r": (2, 1),
    "g": (2, 1),
    "h": "g*r",
    "p": (2,),
    "n": (3,),
    "d": (2,),
    "k": (4,),
    "e": (1, 2),  # D has a number per head, or one per channel
    "i": "h*p",
    "c": "h*p+2*g*n",
    "w": "2*h*p+2*g*n+h",
}
ORDINARY = values("normal", "ties")
PATHS = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight")
DRAW = {**{f"parameters.{path}": ORDINARY for path in PATHS}, "groups": integers(0, 0)}


def sizes_of(parameters: Mapping[str, Any], groups: Any) -> dict[str, int]:
    """The sizes that a mixer and its strategy are given."""
    heads, inner, g = parameters["dt_bias"].shape[0], parameters["norm"]["weight"].shape[0], groups.shape[0]
    shared = parameters["conv1d"]["bias"].shape[0] - inner
    return {"num_heads": heads, "head_dim": inner // heads, "n_groups": g, "d_state": shared // (2 * g)}


def settings_of(parameters: Mapping[str, Any], groups: Any) -> dict[str, int]:
    """The arguments of a mixer's constructor."""
    d_model, width = parameters["out_proj"]["weight"].shape[0], parameters["conv1d"]["weight"].shape[-1]
    return {"d_model": d_model, "d_conv": width, **sizes_of(parameters, groups)}
