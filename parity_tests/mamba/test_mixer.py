"""Parity of mamba.mixer."""

import re

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from parity_tests.mamba.by_name import flax_mixer
from parity_tests.mamba.parameters import DRAW, OF_THE_RECURRENCE, ORDINARY, SIZES, SPECS, settings_of
from shardproof import offsets, scheme, values
from shardproof.declare.declared import flat
from torch_impl.mamba import Mamba2Mixer
from torch_impl.mamba.mix import gate, steps
from torch_impl.mamba.mixer import GroupedNorm

ROUNDINGS = 6  # in_proj, the convolution, y, the gate, the norm, out_proj


EPS = 1e-5
VARIANTS = ({}, {"norm_groups": 1, "dt_limit": (0.3, 0.8)})


def reference(u, parameters, groups, cu, variant):
    return flax_mixer(parameters, **settings_of(parameters, groups), **variant)(u, cu)


class InParts(Mamba2Mixer):
    """The mixer by its parts, of one stream of tokens."""

    def forward(self, x, cu_seqlens):
        return self.out_proj(self.norm(self.mix(self.in_proj(x[0]), cu_seqlens)))[None]


@scheme(
    reference=reference,
    mesh={"cp": (1,)},
    contract=Mamba2Mixer,
    inputs={"u": "b s d cp=R", "parameters": SPECS, "groups": "g", "cu": "q"},
    outputs="b s d cp=R",
    dims={**SIZES, "b": (1,), "s": (9,), "q": (4,)},
    draw={**DRAW, "u": values("normal", "ties"), "cu": offsets("s", padded=True)},
    options={"variant": VARIANTS},
    rank_options={"chunk_size": (4, 1, 256), "in_parts": (False, True)},
    dtypes=("float32", "bfloat16", "float64"),
    wider_inputs=OF_THE_RECURRENCE,
    reduction=("s", "i"),
    roundings=ROUNDINGS,
    excluded_conditions=("inference_mode", "autocast"),  # torch's linear layers follow autocast
)
@pytest.mark.cases(20)
def mamba2(mesh, u, parameters, groups, cu, variant, chunk_size, in_parts):
    chosen = {**settings_of(parameters, groups), **variant, "chunk_size": chunk_size}
    module = (InParts if in_parts else Mamba2Mixer)(**chosen, device="meta", dtype=u.dtype)
    return functional_call(module, flat(parameters), (u, cu), strict=True)


def steps_and_gate(dt, bias, y, z, limits):
    return jnp.clip(jax.nn.softplus(dt + bias[None, None]), *limits), y * jax.nn.silu(z)


@scheme(
    reference=steps_and_gate,
    mesh={"cp": (1,)},
    inputs={"dt": "b s h cp=R", "bias": "h cp=R", "y": "b s i cp=R", "z": "b s i cp=R"},
    outputs=("b s h cp=R", "b s i cp=R"),
    options={"limits": ((0.0, float("inf")), (0.3, 0.8))},
    draw=dict.fromkeys(("dt", "bias", "y", "z"), values("normal", "normal", "ties", "ones")),
    dtypes=("bfloat16", "float32", "float64"),
    sums="float32",
    wide=("out[0]",),
    wider_inputs=("bias",),
    roundings=2,
    reduction=("s",),
)
@pytest.mark.cases(20)
def stepped_and_gated(mesh, dt, bias, y, z, limits):
    """The steps before the recurrence and the gate behind it; only their results are rounded."""
    return steps(dt, bias, limits), gate(y, z)


def norm_of_groups(y, weight, groups):
    parts = y.reshape(*y.shape[:-1], groups, -1)
    normed = parts / jnp.sqrt(jnp.mean(parts**2, -1, keepdims=True) + EPS)
    return normed.reshape(y.shape) * weight[None, None]


@scheme(
    reference=norm_of_groups,
    mesh={"cp": (1,)},
    inputs={"y": "b s i cp=R", "weight": "i cp=R"},
    outputs="b s i cp=R",
    dims={"i": (8, 4, 12)},
    draw={"y": values("normal", "ties", "zeros", "huge"), "weight": ORDINARY},
    options={"groups": (1, 2, 4)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("b", "s", "i"),
    sums="float32",
    wider_inputs=("weight",),
    roundings=3,  # the mean of squares, its root, the normed values
)
def normed(mesh, y, weight, groups):
    return functional_call(
        GroupedNorm(len(weight), groups, EPS, device="meta", dtype=weight.dtype), {"weight": weight}, y
    )


GIVEN = {"d_model": 5, "num_heads": 4, "head_dim": 3, "n_groups": 2, "d_state": 2}
U = torch.linspace(-1, 2, 11 * 5, dtype=torch.float64).sin().view(11, 5)


def mixer_of(**options):
    """A mixer whose parameters are all different and all seen."""
    module = Mamba2Mixer(**{**GIVEN, "chunk_size": 4, "dtype": torch.float64, **options})
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters(), 2):
            parameter.copy_(torch.linspace(-1, k, parameter.numel()).sin().view(parameter.shape))
    return module


def test_a_token_changes_only_later_tokens_of_its_sequence():
    module, cu = mixer_of(), torch.tensor([0, 3, 3, 4, 11])
    sequence = torch.searchsorted(cu[1:], torch.arange(11), right=True)
    y = module(U, cu)
    for t in range(11):
        edited = U.clone()
        edited[t] += 0.5
        moved = (module(edited, cu) != y).any(-1)
        assert moved.tolist() == [u >= t and sequence[u] == sequence[t] for u in range(11)]


def test_one_stream_is_one_row():
    module, cu = mixer_of(), torch.tensor([0, 4, 11])
    assert torch.equal(module(U[None], cu), module(U, cu)[None])
    assert torch.equal(module(U, torch.tensor([0, 11])), module(U[None])[0])


def test_padding_changes_no_real_token():
    module = mixer_of()
    other = U.clone()
    other[9:] = 7
    assert torch.equal(module(U[None])[:, :9], module(other[None])[:, :9])


def test_names_and_dtypes_match_mamba_ssm():
    module = Mamba2Mixer(**GIVEN, dtype=torch.bfloat16)
    tensors = {name: (list(x.shape), x.dtype) for name, x in module.state_dict().items()}
    narrow, wide = torch.bfloat16, torch.float32
    assert tensors == {
        "dt_bias": ([4], wide),
        "A_log": ([4], wide),
        "D": ([4], wide),
        "in_proj.weight": ([36, 5], narrow),
        "conv1d.weight": ([20, 1, 4], narrow),
        "conv1d.bias": ([20], narrow),
        "norm.weight": ([12], narrow),
        "out_proj.weight": ([5, 12], narrow),
    }
    assert "conv1d.bias" not in Mamba2Mixer(**GIVEN, conv_bias=False).state_dict()
    assert Mamba2Mixer(**GIVEN, bias=True).state_dict()["in_proj.bias"].shape == (36,)


def test_the_first_steps_and_decays_are_in_their_ranges():
    module = Mamba2Mixer(**{**GIVEN, "num_heads": 400}, dtype=torch.float64)
    dt, decay = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 1e-3 <= dt.min() < 2e-3 and 5e-2 < dt.max() <= 1e-1
    assert 1 <= decay.min() < 2 and 15 < decay.max() <= 16


def test_a_mixer_on_the_meta_device_gets_the_same_initial_values():
    """Each module fills its own parameters, so that a model may be built without memory."""
    with torch.device("meta"):
        mixer = Mamba2Mixer(**GIVEN)
    mixer.to_empty(device="cpu")
    for parameter in mixer.parameters():
        parameter.detach().fill_(torch.nan)
    for module in mixer.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in mixer.parameters())
    assert mixer.norm.weight.eq(1.0).all() and mixer.D.eq(1.0).all()


def test_a_name_that_either_side_lacks_is_rejected():
    parameters = {name: x.detach().numpy() for name, x in mixer_of().named_parameters()}
    with pytest.raises(KeyError, match=re.escape("['gate'] unknown")):
        flax_mixer({**parameters, "gate": parameters["D"]}, **GIVEN)
    with pytest.raises(KeyError, match=re.escape("['conv1d.bias'] are missing")):
        flax_mixer({name: x for name, x in parameters.items() if name != "conv1d.bias"}, **GIVEN)


REJECTED = [
    (lambda: Mamba2Mixer(**{**GIVEN, "num_heads": 6, "n_groups": 4}), "num_heads=6 must be divisible by n_groups=4"),
    (lambda: Mamba2Mixer(**{**GIVEN, "d_state": 0}), "d_state=0 must be at least 1"),
    (lambda: Mamba2Mixer(**GIVEN, d_conv=0), "d_conv=0 must be at least 1"),
    (lambda: Mamba2Mixer(**GIVEN, norm_groups=5), "norm_groups=5 must divide num_heads * head_dim = 12"),
    (lambda: mixer_of(chunk_size=0), "chunk_size=0 must be at least 1"),
    (lambda: mixer_of(dt_limit=(2.0, 1.0)), "dt_limit=(2.0, 1.0) is not a range of steps; pass 0 <= low <= high"),
    (lambda: mixer_of(norm_eps=-1e-5), "norm_eps=-1e-05 must be at least 0"),
    (lambda: mixer_of()(U), "x is [11, 5] without cu_seqlens; pass them, or [b, s, w]"),
    (
        lambda: mixer_of()(U[None].expand(2, 11, 5), torch.tensor([0, 11])),
        "x is [2, 11, 5] with cu_seqlens; one stream is [t, w] or [1, t, w]",
    ),
    (lambda: mixer_of()(U[0]), "x is [5]; it is [b, s, w], or [t, w] with cu_seqlens"),
]


@pytest.mark.parametrize(("call", "text"), REJECTED)
def test_rejection(call, text):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"mamba.Mamba2Mixer: {text}"


@pytest.mark.parametrize(("size", "kind"), [(3.0, "a float"), ("3", "a str"), (None, "None")])
def test_a_size_that_is_not_an_integer_is_rejected(size, kind):
    with pytest.raises(TypeError) as caught:
        Mamba2Mixer(**{**GIVEN, "num_heads": size})
    assert str(caught.value) == f"mamba.Mamba2Mixer: num_heads={size!r} is {kind}; pass an int"


def test_no_dims_are_rejected():
    with pytest.raises(ValueError, match=r"^mamba.Mamba2Mixer: x has no dims; the last one must be d$"):
        mixer_of()(torch.tensor(1.0))


def test_a_size_may_be_a_tensor_of_one_integer():
    assert Mamba2Mixer(**{**GIVEN, "num_heads": torch.tensor(4)}).sizes == Mamba2Mixer(**GIVEN).sizes


@pytest.mark.parametrize("shape", [(2, 11, 4), (11, 6), (0,)])
def test_another_width_is_rejected(shape):
    with pytest.raises(ValueError) as caught:
        mixer_of()(torch.zeros(shape, dtype=torch.float64))
    assert str(caught.value) == f"mamba.Mamba2Mixer: x is {list(shape)}; d_model=5 is its last dim"


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([1.0], "x is a list; pass a Tensor"),
        (torch.zeros(1, 11, 5, dtype=torch.int64), "x is int64; it must be floating"),
        (torch.zeros(1, 11, 5), "x is float32, in_proj.weight is float64; cast one, or use torch.autocast"),
    ],
    ids=["list", "int64", "float32"],
)
def test_inputs_that_are_not_hidden_states_are_rejected(x, text):
    with pytest.raises(TypeError) as caught:
        mixer_of()(x)
    assert str(caught.value) == f"mamba.Mamba2Mixer: {text}"


def test_hidden_states_that_are_cast_on_the_way_are_accepted():
    """By autocast, a hook, a forward put in its place, a mode, or a projection of another kind."""
    module, x = mixer_of(dtype=torch.float32), U[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.float().bfloat16()).isfinite().all()
    module.in_proj.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))
    assert torch.equal(module(x), module(x.float()))
    patched = mixer_of(dtype=torch.float32)
    patched.in_proj.forward = lambda x, forward=patched.in_proj.forward: forward(x.float())
    assert torch.equal(patched(x), patched(x.float()))
    with Cast():
        assert mixer_of(dtype=torch.float32)(x).isfinite().all()
    other = mixer_of(dtype=torch.float32)
    other.in_proj = torch.nn.Sequential(Narrowed(), other.in_proj)
    assert torch.equal(other(x), other(x.float()))


class Cast(TorchFunctionMode):
    """Takes float64 for float32 where a layer is linear."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            args = tuple(x.float() if isinstance(x, torch.Tensor) else x for x in args)
        return function(*args, **(kwargs or {}))


class Narrowed(torch.nn.Module):
    """To float32."""

    def forward(self, x):
        return x.float()


def test_offsets_that_end_elsewhere_are_rejected():
    with pytest.raises(ValueError, match="cu_seqlens ends at 10 but the stream holds 11 tokens; pass the padded"):
        mixer_of()(U, torch.tensor([0, 10]))


def test_the_gate_is_rounded_once():
    """In half precision as well: of wide y and z, one rounding of the product."""
    y, z = torch.linspace(-3, 5, 400).view(2, 200).bfloat16()
    wide = y.double() * torch.nn.functional.silu(z.double())
    assert torch.equal(gate(y, z), wide.bfloat16())
