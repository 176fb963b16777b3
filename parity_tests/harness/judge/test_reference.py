"""The reference's gradients and spreads, compared with derivations by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardproof import integers, scheme, token_below, values
from shardproof.draw import inputs
from shardproof.engines.program import Program
from shardproof.judge import kept_traces, reference
from shardproof.judge.reference import UNIT_ROUNDOFF, ReferenceFailure

U = UNIT_ROUNDOFF["bfloat16"]
# Operations err by float32's unit: beside bfloat16's, by which inputs are rounded, the last 16 bits.
BESIDE = 8 * UNIT_ROUNDOFF["float32"] / U


def product(x, w):
    return x @ w


def scaled(x, scale):
    return x * scale


@scheme(
    reference=product,
    mesh={"tp": (1, 2)},
    inputs={"x": "b d tp=R", "w": "d f/tp"},
    outputs="b f/tp",
    draw={"x": values("normal"), "w": values("normal")},
)
def matmul(mesh, x, w):
    return x @ w


def noisy(x):
    return 2.0 * x + np.random.default_rng().standard_normal()


def test_a_reference_that_does_not_repeat_itself_is_named():
    declared = scheme(
        reference=noisy, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")}
    )(lambda mesh, x: 2 * x)
    sentence = r"noisy \(test_reference.py:\d+\) gives other numbers for 'out' when it is traced again: "
    for _ in range(2):  # it is not taken for one that repeats itself, after it was named
        with pytest.raises(ReferenceFailure, match=sentence):
            declared.verify(tp=2, examples=1)


@scheme(
    reference=scaled,
    mesh={"tp": (1, 2)},
    inputs={"x": "b/tp"},
    outputs="b/tp",
    draw={"x": values("normal")},
    options={"scale": (1.0, 2.5)},
)
def times(mesh, x, scale):
    return x * scale


@scheme(reference=lambda x: x * 1.0, mesh={"tp": (4,)}, inputs={"x": "b tp=P"}, outputs="b tp=R")
def partial_to_replicated(mesh, x):
    return x


def evaluated(declaration, case, **options):
    return reference.evaluate(declaration, Program.of(declaration, **options), case)


def drawn(declaration, case):
    return {arg.name: inputs.full_array(arg, declaration.draws[arg.name], case) for arg in declaration.inputs}


def signs(case, name, shape):
    """The same random signs as the reference's, which are part of the meaning of a case."""
    return 2.0 * inputs.generator(case, f"direction {name}").integers(0, 2, size=(8, *shape)) - 1.0


def within_rounding(got, want):
    """Equal except for the order of float64 sums."""
    return bool((np.abs(got - want) <= 64 * 2.0**-53 * np.abs(want).max()).all())


def is_spread(got, want):
    """Equal except for the operations' own errors, for bfloat16 inputs."""
    return bool((np.abs(got - want) <= BESIDE * want.max()).all())


def test_gradients_of_a_product():
    case = matmul.case(tp=2, b=3, d=4, f=6, dtype="float32")
    evaluation, arrays = evaluated(matmul, case), drawn(matmul, case)
    c = inputs.cotangent(matmul.outputs[0], case)
    assert within_rounding(evaluation.outputs["out"], arrays["x"] @ arrays["w"])
    assert within_rounding(evaluation.gradients["x"], c @ arrays["w"].T)
    assert within_rounding(evaluation.gradients["w"], arrays["x"].T @ c)


def test_gradient_of_a_log_softmax():
    """d/dz of sum_s c_s log p_s[t_s] is c_s (1[v = t_s] - p_s), derived by hand."""

    def logprob(logits, target):
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
        return jnp.take_along_axis(log_p, target[:, None], -1)[:, 0]

    def on_ranks(mesh, logits, target): ...

    declaration = scheme(
        reference=logprob, mesh={"tp": (2,)}, inputs={"logits": "s v/tp", "target": "s"}, outputs="s tp=I",
        draw={"logits": values("normal"), "target": token_below("v")},
    )(on_ranks)  # fmt: skip
    case = declaration.case(s=5, v=6)
    evaluation, arrays = evaluated(declaration, case), drawn(declaration, case)
    p = np.exp(arrays["logits"]) / np.exp(arrays["logits"]).sum(-1, keepdims=True)
    hit = np.eye(6)[arrays["target"]]
    c = inputs.cotangent(declaration.outputs[0], case)[:, None]
    assert within_rounding(evaluation.gradients["logits"], c * (hit - p))
    assert set(evaluation.gradients) == {"logits"}


def test_spread_of_a_linear_map():
    """F(x) = a x is linear: D is a u |x|, whatever the signs, and the gradient's is a u |c|."""
    case = times.case(tp=1, b=7, scale=2.5, dtype="bfloat16")
    evaluation, x = evaluated(times, case), drawn(times, case)["x"]
    c = inputs.cotangent(times.outputs[0], case)
    assert is_spread(evaluation.output_spread["out"], 2.5 * U * np.abs(x))
    assert is_spread(evaluation.gradient_spread["x"], 2.5 * U * np.abs(c))


def test_spread_of_a_product():
    """By the product rule, with the reference's signs: the root mean square over eight directions."""
    case = matmul.case(tp=1, b=2, d=3, f=2, dtype="bfloat16")
    u = U
    evaluation, arrays = evaluated(matmul, case), drawn(matmul, case)
    x, w, c = arrays["x"], arrays["w"], inputs.cotangent(matmul.outputs[0], case)
    dx, dw = (u * np.abs(arrays[name]) * signs(case, name, arrays[name].shape) for name in ("x", "w"))
    dc = u * np.abs(c) * signs(case, "c out", c.shape)
    d_out = np.stack([dx[i] @ w + x @ dw[i] for i in range(8)])
    d_x = np.stack([dc[i] @ w.T + c @ dw[i].T for i in range(8)])
    assert is_spread(evaluation.output_spread["out"], np.sqrt((d_out**2).mean(0)))
    assert is_spread(evaluation.gradient_spread["x"], np.sqrt((d_x**2).mean(0)))


def test_addends_move_the_reference_as_far_as_they_are_large():
    """Their cancellation is the harness's doing: u times the sum of |addends| stands where u |x| stood."""
    case = partial_to_replicated.case(tp=4, b=5, dtype="bfloat16")
    [x], [out] = partial_to_replicated.inputs, partial_to_replicated.outputs
    evaluation = evaluated(partial_to_replicated, case)
    terms = inputs.addends(x, drawn(partial_to_replicated, case)["x"], case, "input")
    fed_back = inputs.addends(out, inputs.cotangent(out, case), case, "cotangent")
    assert within_rounding(evaluation.outputs["out"], terms.sum(0))
    assert is_spread(evaluation.output_spread["out"], U * np.abs(terms).sum(0))
    assert within_rounding(evaluation.gradients["x"], fed_back.sum(0))
    assert is_spread(evaluation.gradient_spread["x"], U * np.abs(fed_back).sum(0))


def test_inputs_without_a_gradient_are_rounded_all_the_same():
    def weighted(mesh, x, w): ...

    declaration = scheme(
        reference=lambda x, w: x * w, mesh={"tp": (1,)}, inputs={"x": "b/tp", "w": "b/tp"}, outputs="b/tp",
        draw={"x": values("normal"), "w": values("normal")}, nograd=("x", "w"),
    )(weighted)  # fmt: skip
    case = declaration.case(b=4, dtype="bfloat16")
    evaluation, arrays = evaluated(declaration, case), drawn(declaration, case)
    x, w = arrays["x"], arrays["w"]
    perturbation = U * (np.abs(x) * signs(case, "x", (4,)) * w + np.abs(w) * signs(case, "w", (4,)) * x)
    assert evaluation.gradients == {}
    assert is_spread(evaluation.output_spread["out"], np.sqrt((perturbation**2).mean(0)))


def test_a_masked_entry_does_not_move():
    def exponential(mesh, x): ...

    declaration = scheme(
        reference=lambda x: jnp.exp(x), mesh={"tp": (1,)}, inputs={"x": "b s/tp"}, outputs="b s/tp",
        draw={"x": values("neg_inf_mask")},
    )(exponential)  # fmt: skip
    case = declaration.case(b=20, s=3, dtype="bfloat16")
    evaluation, x = evaluated(declaration, case), drawn(declaration, case)["x"]
    masked = np.isneginf(x)
    assert masked.any()
    assert (evaluation.output_spread["out"][masked] == 0).all()
    assert is_spread(evaluation.output_spread["out"][~masked], U * np.abs(x[~masked] * np.exp(x[~masked])))


def test_a_direction_without_a_derivative_is_left_out():
    derivatives = np.array([[3.0, np.nan], [4.0, np.nan], [np.nan, np.nan], [np.inf, 1e200]])
    spread = reference._rms(derivatives)
    assert within_rounding(spread[:1], np.sqrt([12.5])) and spread[1] == 1e200
    assert reference._rms(np.full((4, 1), np.nan)).tolist() == [0.0]
    assert reference._rms(np.full((8, 2), 1e200)).tolist() == [1e200, 1e200]
    assert reference._rms(np.zeros((8, 0))).tolist() == []


def test_options_reach_the_reference():
    cases = [times.case(tp=1, b=7, scale=scale, dtype="float32") for scale in (1.0, 2.5, -3.0)]
    outputs = [evaluated(times, case).outputs["out"] for case in cases]
    x = drawn(times, cases[0])["x"]
    assert [within_rounding(y, s * x) for y, s in zip(outputs, (1.0, 2.5, -3.0), strict=True)] == [True] * 3


def test_the_reference_does_not_depend_on_dtype_mesh_or_engine():
    base = times.case(tp=1, b=4, scale=2.5, dtype="float32")
    same = [base, base.replace(mesh={"tp": 2}), base.replace(engine="gloo"), base.replace(schedule=5)]
    assert len({evaluated(times, case).outputs["out"].tobytes() for case in same}) == 1


def test_one_compilation_for_each_shape_and_option():
    def fresh(mesh, x, scale): ...

    declaration = scheme(
        reference=scaled, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp", options={"scale": (1.0, 2.0)}
    )(fresh)
    before = reference.CLOCK.count
    for seed in range(3):
        for dtype in ("float32", "bfloat16", "float64"):
            evaluated(declaration, declaration.case(tp=1, b=4, scale=1.0, seed=seed, dtype=dtype))
    assert reference.CLOCK.count == before + 1
    evaluated(declaration, declaration.case(tp=1, b=4, scale=2.0))
    evaluated(declaration, declaration.case(tp=2, b=6, scale=1.0))
    assert reference.CLOCK.count == before + 3
    assert reference.CLOCK.seconds > 0


def test_compiled_programs_do_not_pile_up(monkeypatch):
    """Linux counts a process's memory maps, and every compilation takes some dozens."""
    monkeypatch.setattr(kept_traces, "MAX_PROGRAMS", 3)
    cases = [matmul.case(tp=1, b=b, d=2, f=2) for b in range(1, 9)]
    before = reference.CLOCK.count
    first, again = ([evaluated(matmul, case).outputs["out"] for case in cases] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert reference.CLOCK.count == before + 2 * len(cases)  # the second round found none of the first
    assert len(kept_traces.programs_of(product)) <= 3


def test_arrays_passed_by_hand_replace_drawn_ones():
    case = times.case(tp=2, b=4, scale=2.5)
    x, c = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 0.0, 0.0, 2.0])
    evaluation = evaluated(times, case, arrays={"x": x}, cotangents={"out": c})
    assert evaluation.outputs["out"].tolist() == [2.5, 5.0, 7.5, 10.0]
    assert evaluation.gradients["x"].tolist() == [2.5, 0.0, 0.0, 5.0]


def test_an_error_of_the_reference_is_one_sentence():
    def broken(x, n):
        raise ValueError(f"no mathematics for {x.shape}\nand a second line")

    def on_ranks(mesh, x, n): ...

    declaration = scheme(
        reference=broken, mesh={"tp": (1,)}, inputs={"x": "b/tp", "n": "b/tp"}, outputs="b/tp",
        draw={"n": integers(0, 3)},
    )(on_ranks)  # fmt: skip
    with pytest.raises(ReferenceFailure) as caught:
        evaluated(declaration, declaration.case(b=4))
    at = f"test_reference.py:{broken.__code__.co_firstlineno + 1}"
    assert str(caught.value) == (
        f"scheme 'on_ranks': reference broken raised ValueError at {at}: no mathematics for (4,); "
        "if the reference does not support b=4, declare the sizes that it supports: dims={...} or assume="
    )
    assert isinstance(caught.value.__cause__, ValueError)


def of_one_input(reference):
    return scheme(reference=reference, mesh={"tp": (1,)}, inputs={"x": "b tp=I"}, outputs="b tp=I")(lambda mesh, x: x)


@pytest.mark.parametrize(
    "rows", [lambda x: jnp.arange(9.0)[x], lambda x: jnp.take_along_axis(jnp.arange(9.0), x, 0)], ids=["index", "take"]
)
def test_ids_without_a_draw_are_named_where_they_are_used(rows):
    declaration = of_one_input(rows)
    with pytest.raises(ReferenceFailure, match=r"; an input without a draw has floats: give ids theirs, as draw="):
        evaluated(declaration, declaration.case(b=4))


def test_a_reference_that_mixes_floats_is_rejected_with_the_conversion_to_write():
    declaration = of_one_input(lambda x: x * x.astype(jnp.float32) + jnp.arange(4))
    with pytest.raises(ReferenceFailure) as caught:
        evaluated(declaration, declaration.case(b=4))
    # JAX lists the dtypes in the order of a set
    assert re.search(
        r"TypePromotionError at test_reference.py:\d+: Input dtypes \('.+', '.+'\) have no", str(caught.value)
    )
    remedy = "a reference does not mix floats of two widths: convert one, as in table.astype(x.dtype)"
    assert str(caught.value).endswith(f"dtype promotion path; {remedy}")


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: x + (jnp.arange(x.shape[0]) + 0.0),
        lambda x: x * jnp.arange(x.shape[0]),
        lambda x: x * (jnp.arange(x.shape[0]) > 1),
        lambda x: x * 10000.0 ** (-jnp.arange(0, 2 * x.shape[0], 2) / x.shape[0]),
    ],
)
def test_integers_and_booleans_become_floats_in_a_users_reference(reference):
    declaration = of_one_input(reference)
    case = declaration.case(b=4)
    x = Program.of(declaration).full_array(declaration.inputs[0], case)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(evaluated(declaration, case).outputs["out"], reference(jnp.asarray(x)))


def test_a_function_of_jax_that_computes_in_float32_is_named():
    def attention(x):
        q = x[None, :, None, None]
        return jax.nn.dot_product_attention(q, q, q)[0, :, 0, 0]

    declaration = of_one_input(attention)
    with pytest.raises(ReferenceFailure) as caught:
        evaluated(declaration, declaration.case(b=4))
    way_out = "dot_product_attention computes in float32 inside JAX: write its formula in jnp, which keeps float64"
    assert str(caught.value).endswith(f"; {way_out}")


@pytest.mark.parametrize("doubled", [lambda x: torch.cat([x, x]), lambda x: np.asarray(x) * 2], ids=["torch", "numpy"])
def test_a_torch_or_numpy_reference_is_rejected_with_a_remedy(doubled):
    declaration = scheme(reference=doubled, mesh={"tp": (1,)}, inputs={"x": "b/tp"}, outputs="b/tp")(lambda mesh, x: x)
    with pytest.raises(ReferenceFailure, match="JAX traces a reference: write jnp and jax, not torch or numpy"):
        evaluated(declaration, declaration.case(b=4))


def test_a_reference_that_branches_on_a_value_is_rejected_with_a_remedy():
    def branching(x):
        return x if x[0] > 0 else -x

    declaration = scheme(reference=branching, mesh={"tp": (1,)}, inputs={"x": "b/tp"}, outputs="b/tp")(
        lambda mesh, x: x
    )
    with pytest.raises(ReferenceFailure, match=r"write jnp\.where or jax\.lax\.cond if a value decides"):
        evaluated(declaration, declaration.case(b=4))


def test_a_function_of_trees_is_traced_once_for_a_signature():
    traces = []

    def centred(tree, shift):
        traces.append(tree["x"].shape)
        return {"centred": tree["x"] - tree["x"].mean() + shift, "order": jnp.argsort(tree["x"])}

    function = reference.evaluated(centred)
    for x in (np.array([3.0, 1.0, 2.0]), np.array([1.0, 5.0, 3.0]), np.array([4.0, 2.0])):
        returned = function({"x": x}, np.float64(2.0))
        assert returned["centred"].tolist() == (x - x.mean() + 2.0).tolist()
        assert returned["order"].tolist() == np.argsort(x).tolist()
    assert traces == [(3,), (2,)]
