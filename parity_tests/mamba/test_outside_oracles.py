"""The scan, the convolution and the full layer, over ranks too, against mamba-ssm's and causal-conv1d's plain torch.

Most oracles take one sequence, so sequences are given one after another. Our values and gradients must be within the
budgets that the harness computed for the case.
"""

import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parity_tests.mamba.outside import NEEDS, is_installed, outside
from parity_tests.mamba.test_hidden_parallel import hidden_parallel_packed
from parity_tests.mamba.test_mix import convolved
from parity_tests.mamba.test_mixer import VARIANTS, mamba2
from parity_tests.mamba.test_scan import scanned
from parity_tests.mamba.test_state_passing import state_passing_packed, state_passing_stream
from shardproof.draw import inputs
from shardproof.verify_one_case import verify_case

pytestmark = pytest.mark.skipif(not is_installed(), reason=NEEDS)


def sequences(cu, *tensors):
    """Rows of dim 1 of each tensor, for each sequence that has any."""
    for start, stop in pairwise(cu.tolist()):
        if start < stop:
            yield tuple(x[:, start:stop] for x in tensors)


def block(x):
    """A chunk length that divides dim 1, as some functions require."""
    return next(size for size in (4, 3, 2, 1) if x.shape[1] % size == 0)


def minimal(x, dt, A, B, C, D, entering, cu):
    """Listing 1 of the paper, with an initial and a final state."""
    dt, A, each = dt.exp(), -A.exp(), x.shape[2] // B.shape[2]
    terms = x * dt[..., None], dt * A, *(part.repeat_interleave(each, 2) for part in (B, C))
    y, state = [], entering
    for k, part in enumerate(sequences(cu, *terms)):
        first = entering if k == 0 else torch.zeros_like(entering)
        out, state = outside().minimal.ssd_minimal_discrete(*part, block(part[0]), initial_states=first[:, None])
        y.append(out)
    return torch.cat(y, 1) + x * D, state


def combined(x, dt, A, B, C, D, entering, cu):
    """mamba-ssm's chunked scan in plain torch, in float32 inside, without initial and final states."""
    scan, dt, A = outside().scan.ssd_chunk_scan_combined_ref, dt.exp(), -A.exp()
    parts = sequences(cu, x, dt, B, C)
    return (torch.cat([scan(x, dt, A, B, C, block(x), D=D.expand(x.shape[2:])) for x, dt, B, C in parts], 1),)


def stepwise(x, dt, A, B, C, D, entering, cu):
    """One token after another; the state is overwritten, so there is no gradient."""
    state, y, dt = entering.clone(), [], dt.exp()[..., None].expand_as(x)
    A, D = -A.exp()[:, None, None].expand(state.shape[1:]), D.expand(x.shape[2:])
    for k, part in enumerate(sequences(cu, x, dt, B, C)):
        if k:
            state.zero_()
        for x_t, dt_t, B_t, C_t in zip(*(each.unbind(1) for each in part), strict=True):
            y.append(outside().step.selective_state_update_ref(state, x_t, dt_t, A, B_t, C_t, D))
    return torch.stack(y, 1), state


def convolution(x, weight, bias, cu):
    """causal-conv1d's convolution of the full stream; it takes the sequence of each token."""
    ids = torch.searchsorted(cu[1:].contiguous(), torch.arange(x.shape[1]), right=True).expand(x.shape[:2])
    y = outside().conv.causal_conv1d_ref(x.transpose(1, 2), weight, bias, activation="silu", seq_idx=ids)
    return (y.transpose(1, 2),)


def layer(case):
    """mamba-ssm's whole Mamba2 layer for each sequence, in float32 inside."""
    variant = case.options.get("variant", {})
    groups = variant.get("norm_groups", case.dims["g"])
    limits = variant.get("dt_limit", case.options.get("limits", (0.0, math.inf)))
    has_bias = case.options.get("conv_bias", True)

    def function(u, groups, cu, **parameters):
        w = {name.removeprefix("parameters."): x for name, x in parameters.items()}
        fixed = {"rmsnorm_eps": 1e-5, "norm_before_gate": False, "dt_limit": limits}
        reference = outside().scan.mamba_split_conv1d_scan_ref
        outputs = [
            reference(
                F.linear(part, w["in_proj.weight"]),
                w["conv1d.weight"][:, 0],
                w["conv1d.bias"] * has_bias,
                w["dt_bias"],
                -w["A_log"].exp(),
                w["D"].expand(-1, case.dims["p"]),
                4,
                rmsnorm_weight=w["norm.weight"],
                outproj_weight=w["out_proj.weight"],
                headdim=case.dims["p"],
                ngroups=case.dims["g"],
                **fixed,
            )
            for (part,) in sequences(cu, u)
        ]
        return (torch.cat(outputs, 1),)

    def in_plain_torch(**arrays):
        """Call `function` with the three CUDA functions replaced by the libraries' own plain torch."""
        theirs = outside()

        def norm(x, weight, bias, z, eps, norm_before_gate):
            size = x.shape[-1] // groups
            return theirs.norm.rms_norm_ref(x, weight, bias, z, eps, size, norm_before_gate)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(theirs.scan, "causal_conv1d_fn", theirs.conv.causal_conv1d_ref)
            patch.setattr(theirs.scan, "rmsnorm_fn", norm)
            plain = SimpleNamespace(selective_scan_fn=theirs.selective.selective_scan_ref)
            patch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", plain)
            return function(**arrays)

    return in_plain_torch


def agrees(scheme, case, function, has_gradients=True):
    """Our results pass against the reference, and are within the same budgets of the other library's results."""
    report = verify_case(scheme, case)
    report.raise_if_failed()
    tensors = {
        arg.name: torch.from_numpy(inputs.full_array(arg, scheme.draws[arg.name], case)) for arg in scheme.inputs
    }
    differentiable = [arg.name for arg in scheme.inputs if arg.differentiable] if has_gradients else []
    leaves = [tensors[name].requires_grad_() for name in differentiable]
    outputs = function(**tensors)
    results = [*outputs]
    if has_gradients:
        sums = [inputs.addends(arg, inputs.cotangent(arg, case), case, "cotangent").sum(0) for arg in scheme.outputs]
        cotangents = [torch.from_numpy(x).to(y) for x, y in zip(sums, outputs, strict=True)]
        results += torch.autograd.grad(outputs, leaves, cotangents)
    rows = [tensor for tensor in report.tensors if tensor.role == "output"][: len(outputs)]
    rows += [tensor for tensor in report.tensors if tensor.role == "gradient"] if has_gradients else []
    for row, theirs in zip(rows, results, strict=True):
        error = np.abs(row.got - theirs.detach().double().numpy())
        assert (error <= row.element_budgets).all(), (row.label, float(error.max()))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_scan_agrees_with_the_listing_of_the_paper(seed):
    agrees(scanned, scanned.case(seed=seed, dtype="float64", s=9), minimal)


@pytest.mark.parametrize("seed", range(3))
def test_the_scan_agrees_with_their_step_of_one_token(seed):
    agrees(scanned, scanned.case(seed=seed, dtype="float64", s=9), stepwise, has_gradients=False)


@pytest.mark.parametrize("seed", range(3))
def test_the_scan_agrees_with_their_chunked_scan(seed):
    case = scanned.case(seed=seed, dtype="float32", s=9)
    case = case.replace(values={**case.values, "entering": {"kind": "zeros"}})
    agrees(scanned, case, combined, has_gradients=False)


@pytest.mark.parametrize("seed", range(3))
def test_the_convolution_agrees_with_theirs(seed):
    agrees(convolved, convolved.case(seed=seed, dtype="float64", s=9, has_wide_taps=False), convolution)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layer_agrees_with_theirs(variant):
    case = mamba2.case(seed=2, dtype="float32", variant=variant, g=2)
    agrees(mamba2, case, layer(case))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("scheme", [hidden_parallel_packed, state_passing_packed, state_passing_stream])
def test_the_layer_over_ranks_agrees_with_theirs(scheme):
    case = scheme.case(seed=1, dtype="float32", cp=2, g=2)
    agrees(scheme, case, layer(case))


def test_another_function_does_not_agree():
    def half_the_decay(A, **arguments):
        return minimal(A=A - 0.7, **arguments)

    with pytest.raises(AssertionError):
        agrees(scanned, scanned.case(seed=0, dtype="float64", s=9), half_the_decay)
