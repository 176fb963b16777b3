"""Costs of schemes for the same result: attention over cp, the Mamba mixer over cp, the loss over tp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardproof.cost.candidates import Comparison, Setting, candidates
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.places import TESTS


def attention(setting: Setting) -> Comparison:
    """Ring, all-gather and Ulysses over cp, and USP for each way to write cp as ring * heads.

    Dims: b, s, h query heads, g KV heads, p the head size. The option causal subtracts the masked pairs.
    """
    from shardproof.cost.attention_forms import over_one_axis, over_two_axes

    causal = setting.names.get("causal", False)
    if not isinstance(causal, bool):
        raise ValueError(f"--option causal={causal}: give True or False")
    names = {name: value for name, value in setting.names.items() if name != "causal"}
    setting = replace(setting, names=names)
    dims = _dims(setting, "attention", {"b": 1, "s": None, "h": None, "g": None, "p": 128}) | {"one": 1}
    sized = replace(setting, names=dims)
    one_axis = _scheme("context_parallel/test_attention.py", "attention_in_dual_chunk_swap")
    one_axis = replace(one_axis, cost=over_one_axis(causal))
    comparison = join(Comparison(setting), one_axis, sized)
    usp = _scheme("context_parallel/test_attention.py", "attention_over_two_axes")
    usp = replace(usp, cost=over_two_axes(causal))
    for heads in _divisors(setting.mesh["cp"]):
        mesh = _split_axis(setting.mesh, "cp", {"ring": setting.mesh["cp"] // heads, "heads": heads})
        join(comparison, usp, replace(sized, mesh=mesh), f"usp heads={heads}")
    return _without_prefix("exchange=", comparison)


def mamba(setting: Setting) -> Comparison:
    """A Mamba mixer over cp: exchange heads for tokens, or pass states.

    The exchange has two forms: one all_to_all for all inputs, or one for each. Dims: b rows of t tokens, h heads in g
    groups, p the head size, n the state size, k taps of the convolution.
    """
    defaults = {"b": 1, "t": None, "h": None, "g": 8, "p": 64, "n": 128, "k": 4, "d": 1}
    dims = _dims(setting, "mamba", defaults)
    heads, groups = dims["h"], dims["g"]
    if heads % groups:
        raise ValueError(f"--dim h={heads}: mamba needs a multiple of g={groups}")
    hidden = _scheme("mamba/test_hidden_parallel.py", "hidden_parallel")
    comparison = join(Comparison(setting), hidden, replace(setting, names=dims), "hidden")
    states = {**{name: size for name, size in dims.items() if name != "h"}, "r": heads // groups}
    passing = _scheme("mamba/test_state_passing.py", "state_passing")
    return join(comparison, passing, replace(setting, names=states), "states")


def logprob(setting: Setting) -> Comparison:
    """Log-probabilities of hidden states over tp, the states replicated or sharded along the sequence.

    A chunk size saves memory; it does not change bytes or calls. Dims: b, s, d the hidden size, v.
    """
    dims = _dims(setting, "logprob", {"b": 1, "s": None, "d": None, "v": None})
    sized = replace(setting, names=dims)
    file = "vocab_parallel/test_linear_logprob.py"
    comparison = join(Comparison(setting), _scheme(file, "linear_logprobs"), sized, "hidden replicated")
    return join(comparison, _scheme(file, "linear_logprobs_of_sharded_states"), sized, "hidden sharded")


COMPARISONS: dict[str, Callable[[Setting], Comparison]] = {"attention": attention, "mamba": mamba, "logprob": logprob}
AXES = {"attention": "cp", "mamba": "cp", "logprob": "tp"}


def compared(name: str, setting: Setting) -> Comparison:
    """The comparison with this name. Errors: ValueError for a missing axis or dim."""
    axis = AXES[name]
    if axis not in setting.mesh:
        raise ValueError(f"--mesh lacks {axis}: {name} is compared over it; give {axis}=N")
    return COMPARISONS[name](setting)


def _scheme(file: str, name: str) -> Declared:
    return discover.scheme_of_file(str(TESTS / file), name)


def _dims(setting: Setting, name: str, defaults: Mapping[str, int | None]) -> dict[str, Any]:
    unknown = [dim for dim in setting.names if dim not in defaults]
    if unknown:
        raise ValueError(f"--dim {unknown[0]}: {name} has the dims {', '.join(defaults)}")
    dims = {**defaults, **setting.names}
    missing = [dim for dim, size in dims.items() if size is None]
    if missing:
        raise ValueError(f"--dim lacks {missing[0]}: give {', '.join(f'{dim}=N' for dim in missing)}")
    return dims


def _divisors(ranks: int) -> list[int]:
    """The divisors of `ranks`, without 1 and `ranks`."""
    return [number for number in range(2, ranks // 2 + 1) if ranks % number == 0]


def _split_axis(mesh: Mapping[str, int], axis: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The mesh with one axis replaced by several, and the ranks in the same order."""
    ordered: dict[str, int] = {}
    for name, size in mesh.items():
        ordered |= axes if name == axis else {name: size}
    return ordered


def join(comparison: Comparison, scheme: Declared, setting: Setting, label: str = "") -> Comparison:
    """Add the candidates of a scheme to a comparison; if there are none, store the reason in `left_out`."""
    try:
        more = candidates(scheme, setting, label)
    except ValueError as reason:
        comparison.left_out[label or scheme.name] = str(reason).removeprefix(f"scheme '{scheme.name}': ")
        return comparison
    comparison.candidates += more.candidates
    comparison.left_out |= more.left_out
    return comparison


def _without_prefix(prefix: str, comparison: Comparison) -> Comparison:
    """Labels without the option's name: `ring` for `exchange=ring`."""
    shorter = [replace(each, label=each.label.removeprefix(prefix)) for each in comparison.candidates]
    left_out = {name.removeprefix(prefix): reason for name, reason in comparison.left_out.items()}
    return Comparison(comparison.setting, shorter, left_out)
