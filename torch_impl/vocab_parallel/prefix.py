"""Where a row's kept tokens end, as all ranks know it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torch_impl.vocab_parallel.candidates import Candidates
from torch_impl.vocab_parallel.statistics import below


class Prefix(NamedTuple):
    """The first tokens of a row, in descending order of the logits and of equal ones the lowest id first."""

    largest: Float[Tensor, " n"]
    rest: Float[Tensor, " n"]  # sum of exp((z - largest) / temperature) over the kept tokens but the first
    threshold: Float[Tensor, " n"]  # the last one's logit
    ties: Float[Tensor, " n"]  # how many tokens of that logit are kept, over all ranks


class Ties(NamedTuple):
    """Logits that equal the threshold, where not all of them are kept."""

    counts: Float[Tensor, "r n"]  # how many each rank has
    places: Float[Tensor, "r n"]  # how many of the rank precede the target; +inf where it does not own it
    candidates: Candidates  # where this rank's are looked for


def room_for(rest: Float[Tensor, "*n"], top_p: float) -> Float[Tensor, "*n"]:
    """What may lie before a kept token besides the first: less than p (1 + R) - 1, without cancellation as p -> 1."""
    return top_p * rest - (1.0 - top_p)


def weight_of(z: Float[Tensor, "*n"], largest: Float[Tensor, "*#n"], temperature: float) -> Float[Tensor, "*n"]:
    """exp((z - m) / temperature)."""
    return below(z, largest, temperature).exp()


def ties_within(
    room: Float[Tensor, "*n"], weight: Float[Tensor, "*n"], count: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """How many of `count` equal weights, one after another, have less than `room` before them."""
    fitting = torch.where(weight == 0, 0.0, torch.ceil(room / weight))
    return torch.minimum(fitting.clamp_min(0.0), count)
