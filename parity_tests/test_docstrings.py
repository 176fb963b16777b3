"""Public docstrings state arguments, errors, cost and specs; and the rule that checks them finds an omission."""

from __future__ import annotations

from inspect import isclass, isroutine

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from parity_tests import docstrings
from parity_tests.docstrings import HOMES, exported
from torch_impl.collectives import all_reduce
from torch_impl.contract import Sharded, contract


@pytest.mark.parametrize("home", HOMES)
def test_a_public_docstring_is_complete(home):
    missing = {name: docstrings.missing(of) for name, of in exported(home).items() if isroutine(of) or isclass(of)}
    assert missing
    assert {name: wanting for name, wanting in missing.items() if wanting} == {}


# Docstrings that still repeat the specs of the signature. The list may only become shorter.
REPEATED = frozenset(
    {
        "context_parallel.BatchLayout.gather",
        "context_parallel.BatchLayout.shard",
        "mamba.Mamba2Mixer",
        "mamba.MambaContextParallel.post_conv_ssm",
        "mamba.MambaContextParallel.pre_conv_ssm",
        "mamba._AllToAll",
        "mamba._all_to_all_cp2hp",
        "mamba._all_to_all_hp2cp",
        "models.valid_count",
        "vocab_parallel.get_next_token_logprobs_from_logits",
    }
)


@pytest.mark.parametrize("home", HOMES)
def test_a_docstring_does_not_repeat_its_contract(home):
    """The manual prints the specs of the signature; a copy in the docstring could differ from them."""
    before = home.removeprefix("torch_impl.")
    repeated = {f"{before}.{name}" for name, of in docstrings.contracted(home).items() if docstrings.repeats_specs(of)}
    assert repeated == {name for name in REPEATED if name.startswith(f"{before}.")}


@contract
def doubled(x: Sharded[Tensor, "... n/tp"]) -> Sharded[Tensor, "... n/tp"]:
    """Twice x.

        x  "b n/tp"   ->   "b n/tp"

    Errors: TypeError unless x is a Tensor.
    """
    return x * 2


def test_a_repeated_contract_is_seen(monkeypatch):
    assert docstrings.repeats_specs(doubled)
    monkeypatch.setattr(doubled, "__doc__", doubled.__doc__.replace("->", ""))
    assert not docstrings.repeats_specs(doubled)


# The rule itself: the docstrings of these omit required items.


def undocumented(x):
    return x


def raises(x):
    """x, if it is positive."""
    if x < 0:
        raise ValueError(f"x={x} is negative")
    return x


def names_nothing(x, alpha):
    """x as it is."""
    return x


def sends(x: Float[Tensor, "*a"], group: ProcessGroup):
    """The sum of x over the ranks of group."""
    return all_reduce(x, group)


class Sent(torch.autograd.Function):
    """x summed over group in backward.

        x  "a axis=R"  ->  "a axis=I"

    Errors: TypeError if group is None.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return all_reduce(g, ctx.group), None


class Held:
    """Holds x."""

    def __init__(self, x, y):
        self.x = x, y

    def shown(self):
        raise RuntimeError("nothing to show")


@pytest.mark.parametrize(
    ("of", "wanting"),
    [
        (undocumented, ["a docstring"]),
        (raises, ["Errors:"]),
        (names_nothing, ["alpha"]),
        (sends, ["Errors:", "Cost:", "a spec string"]),
        (Sent, ["Cost:"]),
        (Held, ["y", "shown: a docstring"]),
        (all_reduce, []),
    ],
)
def test_an_omission_is_seen(of, wanting):
    assert docstrings.missing(of) == wanting


@pytest.mark.parametrize("line", ["Errors:", "Cost:", "Backward", "axis=P"])
def test_a_line_removed_from_a_complete_docstring(line, monkeypatch):
    """Errors and Cost are required; prose is not, nor a spec string that the signature states."""
    monkeypatch.setattr(all_reduce, "__doc__", all_reduce.__doc__.replace(line, "").replace('"', "'"))
    expected = {"Errors:": ["Errors:"], "Cost:": ["Cost:"]}.get(line, [])
    assert docstrings.missing(all_reduce) == expected
