"""What schemes of a mixer over cp share: the reference, and declarations of sharded rows and of a packed stream."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from parity_tests.mamba.by_name import flax_mixer
from parity_tests.mamba.parameters import DRAW, SPECS, settings_of
from shardproof import offsets, values

FOLLOW = {"e": (1, 2), "i": "h*p", "c": "h*p+2*g*n", "w": "2*h*p+2*g*n+h"}
EACH = {**DRAW, "u": values("normal", "ties")}


# Limits of the step dt: none, or two that clamp many of the drawn steps.
OPTIONS = {"limits": ((0.0, math.inf), (0.3, 0.8)), "conv_bias": (True, False)}


def dense(u, parameters, groups, limits, conv_bias):
    return whole_mixer(parameters, groups, limits, conv_bias)(u)


def packed(u, parameters, groups, cu, limits, conv_bias):
    return whole_mixer(parameters, groups, limits, conv_bias)(u, cu)


def whole_mixer(parameters, groups, limits, conv_bias):
    """The whole mixer on one device. Without `conv_bias` the bias of its convolution is zero."""
    conv = parameters["conv1d"]
    read = parameters if conv_bias else {**parameters, "conv1d": {**conv, "bias": jnp.zeros_like(conv["bias"])}}
    return flax_mixer(read, **settings_of(parameters, groups), dt_limit=limits)


def sharded_rows(layout: str) -> dict[str, Any]:
    """A declaration of rows sharded by `layout`."""
    inputs = {"u": f"b t/cp{layout} d", "parameters": SPECS, "groups": "g"}
    return {"reference": dense, "inputs": inputs, "outputs": f"b t/cp{layout} d", "draw": EACH, "options": OPTIONS}


def sharded_stream(layout: str) -> dict[str, Any]:
    """A declaration of a stream sharded by `layout`."""
    inputs = {"u": f"1 t/cp{layout} d", "parameters": SPECS, "groups": "g", "cu": "q"}
    draw = {**EACH, "cu": offsets("t", padded=True)}
    outputs = f"1 t/cp{layout} d"
    return {"reference": packed, "inputs": inputs, "outputs": outputs, "draw": draw, "options": OPTIONS}
