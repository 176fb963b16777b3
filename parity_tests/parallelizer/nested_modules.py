"""Modules inside modules, whose classes become units by their paths: every process imports them from here."""

from __future__ import annotations

import torch
from torch import nn

from parity_tests.parallelizer.styled import Norm, linear_layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = linear_layer(torch.ones(2, 2))


class Inner(nn.Module):
    """A linear layer, a norm, and a norm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear_layer(torch.ones(2, 2)), Norm(torch.ones(2))
        self.weightless = nn.LayerNorm(2, elementwise_affine=False)


class Enclosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), linear_layer(torch.ones(2, 2))


class Nested(nn.Module):
    """Instances of a class inside other instances of it, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Enclosing(), Inner(), linear_layer(torch.ones(2, 2))
