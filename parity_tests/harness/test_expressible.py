"""Everything that a declaration can express: a right function is equal, and one with the usual mistake is not."""

from functools import partial

import jax.numpy as jnp
import pytest
import torch

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import drawn, values


def verdicts(right, wrong, reference, **more):
    """Both are judged alike; returns their reports."""
    return [declared(function, reference, **more).verify(examples=12) for function in (right, wrong)]


def sentence(function, reference, **more):
    with pytest.raises(ValueError) as caught:
        declared(function, reference, **more).verify()
    return str(caught.value)


# Sizes of the mesh


def local_means(x, mesh):
    """Each rank of ep normalizes by the mean of its own part."""
    parts = x.reshape(mesh["ep"], -1)
    return (parts / (1.0 + (parts**2).mean(-1, keepdims=True))).reshape(-1)


@pytest.mark.slow
def test_a_reference_takes_the_sizes_of_the_mesh():
    def local(mesh, x):
        return x / (1.0 + (x**2).mean())

    def synchronised(mesh, x):
        return x / (1.0 + summed((x**2).mean(), mesh["ep"]) / mesh.size("ep"))

    right, wrong = verdicts(local, synchronised, local_means, mesh={"ep": (1, 2, 4)}, inputs={"x": "n/ep"},
                            outputs="n/ep")  # fmt: skip
    assert right.ok, str(right)
    assert wrong.verdict == "mismatch" and wrong.case.mesh["ep"] > 1
    assert right.meshes == ("ep=1", "ep=2", "ep=4")


@pytest.mark.slow
def test_a_dim_follows_from_an_axis():
    """Two experts on each rank, whatever the number of ranks."""
    seen = set()

    def two_experts(mesh, x):
        seen.add((mesh.size("ep"), *x.shape))
        return x * 2

    report = declared(two_experts, mesh={"ep": (1, 2, 4)}, inputs={"x": "e/ep d"}, outputs="e/ep d",
                      dims={"e": "2*ep"}).verify(examples=20)  # fmt: skip
    assert report.ok and report.meshes == ("ep=1", "ep=2", "ep=4"), str(report)
    assert {shape[:2] for shape in seen} == {(1, 2), (2, 2), (4, 2)}

    def two_of_the_mesh(mesh, x):
        return x * (2 if mesh.size("ep") < 4 else 3)

    wrong = declared(two_of_the_mesh, mesh={"ep": (1, 2, 4)}, inputs={"x": "e/ep d"}, outputs="e/ep d",
                     dims={"e": "2*ep"}).verify(examples=20)  # fmt: skip
    assert dict(wrong.case.mesh) == {"ep": 4} and wrong.case.e == 8


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"e": "2*tq"}, "dims['e'] = '2*tq': no input has dim tq, nor is it an axis (tp)"),
        ({"tp": (2,)}, "dims has 'tp', which is an axis of the mesh; its sizes are mesh['tp']"),
    ],
)
def test_wrong_sizes_of_the_mesh(dims, words):
    text = sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, inputs={"x": "e/tp"}, outputs="e/tp", dims=dims)
    assert text == f"scheme '<lambda>': {words}"


# Joint constraints


@pytest.mark.slow
def test_a_square_mesh():
    seen = set()

    def doubled(mesh, x):
        seen.add((mesh.size("rows"), mesh.size("columns")))
        return x * (2 if mesh.size("rows") < 2 else 3)

    square = {"mesh": {"rows": (1, 2, 3), "columns": (1, 2, 3)}, "inputs": {"x": "m/rows n/columns"},
              "outputs": "m/rows n/columns", "assume": lambda case: case.rows == case.columns}  # fmt: skip
    report = declared(doubled, **square).verify(examples=20)
    assert dict(report.case.mesh) == {"rows": 2, "columns": 2}
    report = declared(lambda mesh, x: x * 2, **square).verify(examples=20)
    assert report.ok and report.meshes == ("rows=1,columns=1", "rows=2,columns=2", "rows=3,columns=3")
    assert "assume rejects m=" in report.left_out["rows=1,columns=2"]


@pytest.mark.slow
def test_tokens_that_are_a_multiple_of_the_ranks():
    """`b * s` is sharded after it is flattened, neither b nor s is."""
    seen = []

    def own_tokens(mesh, x):
        ranks, rank = mesh.size("tp"), mesh.rank("tp")
        flat = x.flatten()
        seen.append((ranks, *x.shape))
        return summed((flat.chunk(ranks)[rank] * 2).sum(), mesh["tp"])

    def rounded_down(mesh, x):
        ranks, rank = mesh.size("tp"), mesh.rank("tp")
        count = x.shape[0] // ranks * x.shape[1]
        return summed((x.flatten()[rank * count : (rank + 1) * count] * 2).sum(), mesh["tp"])

    flattened = {"mesh": {"tp": (2, 4)}, "inputs": {"x": "b s tp=R"}, "outputs": "tp=I",
                 "assume": lambda case: case.b * case.s % case.tp == 0}  # fmt: skip
    right, wrong = verdicts(own_tokens, rounded_down, lambda x: x.sum() * 2.0, **flattened)
    assert right.ok, str(right)
    assert wrong.verdict == "mismatch", str(wrong)
    assert all(b * s % ranks == 0 for ranks, b, s in seen) and any(b % ranks for ranks, b, s in seen)


def test_options_that_fit_the_sizes():
    def chunked(mesh, x, chunk):
        assert x.shape[0] % chunk == 0
        return x * 2

    report = declared(chunked, rank_options={"chunk": (1, 2, 3)},
                      assume=lambda case: case.b // case.tp % case.chunk == 0).verify(examples=20)  # fmt: skip
    assert report.ok, str(report)
    given = declared(chunked, rank_options={"chunk": (1, 2, 3)},
                     assume=lambda case: case.b // case.tp % case.chunk == 0).verify(chunk=3, examples=6)  # fmt: skip
    assert given.ok and given.case.chunk == 3, str(given)


def test_a_search_beyond_the_menu():
    """No shape that is drawn has three sizes that differ by one each; small multiples of the units do."""
    report = declared(lambda mesh, x: x * 2, inputs={"x": "b/tp h d"}, outputs="b/tp h d", mesh={"tp": (2,)},
                      assume=lambda case: case.h == case.b + 1 and case.d == case.h + 1).verify(examples=3)  # fmt: skip
    assert report.ok and report.case.dims == {"b": 2, "h": 3, "d": 4}


def test_an_assumption_that_nothing_satisfies():
    text = sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, assume=lambda case: case.b == 7)
    assert text == (
        "scheme '<lambda>': assume rejects b=2 and all other sizes that were tried, on tp=2 as on each mesh; "
        "loosen it, or name sizes that satisfy it: dims={...}"
    )


@pytest.mark.parametrize(
    ("assume", "words"),
    [
        (lambda case: case.q > 1, "assume raised AttributeError at test_expressible.py:157 with tp=2 b=2: case '"),
        (True, "assume is bool; pass a function of the case: def assume(case): ..."),
        (lambda b, s: True, "assume takes (b, s); it is called with the case alone"),
    ],
)
def test_wrong_assumptions(assume, words):
    text = sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, assume=assume)
    assert text.startswith(f"scheme '<lambda>': {words}")


def of_dtype(name, case):
    return case.dtype == name


@pytest.mark.parametrize(
    ("assume", "name"), [(lambda case: max(case.itemsize, 4) > 1, "itemsize"), (partial(of_dtype, "bfloat16"), "dtype")]
)
def test_an_assumption_on_a_later_draw_is_rejected(assume, name):
    text = sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, assume=assume)
    assert f"with tp=2 b=2: {name} is drawn after sizes and options; declare schemes with other draws instead" in text


# A larger world


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "b": 3}])
def test_the_default_group_on_a_one_axis_mesh(sizes):
    """Red among the cases that are drawn by default, and where all sizes are given."""
    partial = {"inputs": {"x": "b tp=P"}, "outputs": "b tp=I", "mesh": {"tp": (1, 2)}}
    wrong = declared(lambda mesh, x: summed(x, None), lambda x: x * 1.0, **partial).verify(**sizes)
    assert not wrong.ok and wrong.case.mesh["spare"] == 2
    assert "the default group is used inside a sub-group" in wrong.hygiene[0]
    assert "inside a larger world: spare is not an axis of the scheme" in str(wrong)
    right = declared(lambda mesh, x: summed(x, mesh["tp"]), lambda x: x * 1.0, **partial).verify(**sizes)
    assert right.ok and not any("spare" in mesh for mesh in right.meshes), str(right)


@pytest.mark.usefixtures("unexplained")
def test_a_failure_that_needs_no_larger_world_is_reported_without_it():
    report = declared(lambda mesh, x: x * 3).verify()
    assert not report.ok and "spare" not in report.case.mesh


# Sizes in spec strings


def grouped(x, w):
    """x: [b, d], w: [d, g * q]: a projection to g groups of q heads."""
    return x @ w * 2.0


@pytest.mark.slow
def test_dims_that_are_one():
    seen = []

    def projected(mesh, x, w):
        seen.append((mesh.size("tp"), w.shape[1], mesh.total("g*q")))
        return x @ w * 2

    specs = {"inputs": {"x": "b d tp=R", "w": "d (g q)/tp"}, "outputs": "b (g q)/tp", "mesh": {"tp": (1, 2, 4)},
             "draw": {name: values("normal") for name in "xw"}, "roundings": 2}  # fmt: skip
    right = declared(projected, grouped, **specs).verify(examples=12)
    assert right.ok, str(right)
    assert all(total == local * ranks for ranks, local, total in seen)
    given = declared(projected, grouped, **specs).verify(tp=4, g=2, q=6, b=1, d=2)
    assert given.ok and given.case.dims["g*q"] == 12
    wrong = declared(lambda mesh, x, w: x @ w * mesh.size("tp"), grouped, **specs).verify(examples=12)
    assert wrong.verdict == "mismatch" and str(wrong.tensors[0].argument.spec) == "b (g q)/tp"


@pytest.mark.usefixtures("unexplained")
def test_sizes_that_are_written_out_and_leading_dims():
    specs = {"inputs": {"x": "... 3 8/tp"}, "outputs": "... 8/tp", "mesh": {"tp": (1, 2, 4)}}
    right = declared(lambda mesh, x: x.sum(2), lambda x: x.sum(2), **specs).verify(examples=12)
    assert right.ok, str(right)
    assert sorted(right.case.dims) == ["b", "s"] and right.tensors[0].want.shape[2] == 8
    wrong = declared(lambda mesh, x: x[:, :, :2].sum(2), lambda x: x.sum(2), **specs).verify(examples=12)
    assert wrong.verdict == "mismatch"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("d (g)/tp", "'(g)' groups no dims; write two or more, as in (g q)/tp"),
        ("g (g q)/tp", "dim 'g*q' occurs twice; give the second its own letter"),
        ("d (g q/tp", "'(g' has no closing bracket"),
        ("... b/tp", "dim 'b' occurs twice; give the second its own letter"),
        ("03 b/tp", "unexpected '0' at column 1"),
    ],
)
def test_wrong_sizes_in_spec_strings(spec, words):
    assert words in sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, inputs={"x": spec}, outputs=spec)


# Inputs that are overwritten


def softmax_left_behind(logits):
    """log p of column 0; the logits are left as probabilities."""
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    return jnp.log(p[:, 0]), p


class InPlace(torch.autograd.Function):
    """Megatron's way: the softmax is written over the logits, for the backward."""

    @staticmethod
    def forward(ctx, logits, scale):
        logits.sub_(logits.max(-1, keepdim=True).values).exp_()
        logits.div_(logits.sum(-1, keepdim=True) * scale)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits)
        return logits[:, 0].log(), logits

    @staticmethod
    def backward(ctx, cotangent, _):
        (p,) = ctx.saved_tensors
        gradient = -p * cotangent[:, None]
        gradient[:, 0] += cotangent
        return gradient, None


def test_an_input_that_is_overwritten_may_have_no_gradient():
    def decoded(mesh, x, cache):
        y = x + cache
        cache += x.detach()
        return y

    specs = {"inputs": {"x": "b/dp v", "cache": "b/dp v"}, "outputs": "b/dp v", "mesh": {"dp": (1, 2)}}
    caching = declared(
        decoded, lambda x, cache: (x + cache, cache + x), **specs, nograd=("cache",), modifies=("cache",)
    )
    report = caching.verify(examples=6)
    assert report.ok and [tensor.label for tensor in report.tensors] == ["out", "cache after", "d/d x"]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("modifies", [("logits",), ()])
def test_an_input_that_is_overwritten_on_purpose(modifies):
    def first_logprob(mesh, logits):
        return InPlace.apply(logits if modifies else logits.clone(), 1.0)[0]

    reference = softmax_left_behind if modifies else lambda logits: softmax_left_behind(logits)[0]
    specs = {"inputs": {"logits": "b/dp v"}, "outputs": "b/dp", "mesh": {"dp": (1, 2)}, "modifies": modifies,
             "draw": {"logits": values("normal")}, "dtypes": ("float64",)}  # fmt: skip
    report = declared(first_logprob, reference, **specs).verify(examples=6)
    assert report.ok, str(report)
    labels = ["out", "logits after", "d/d logits"] if modifies else ["out", "d/d logits"]
    assert [tensor.label for tensor in report.tensors] == labels


def test_a_wrong_value_in_an_overwritten_input():
    def halves(mesh, x):
        y = x * 2
        x.detach().mul_(0.5)
        return y

    specs = {"modifies": ("x",), "mesh": {"tp": (1, 2)}}
    assert declared(halves, lambda x: (x * 2.0, x * 0.5), **specs).verify(examples=4).ok
    wrong = declared(halves, lambda x: (x * 2.0, x * 0.25), **specs).verify(examples=4)
    assert wrong.verdict == "mismatch" and [tensor.label for tensor in wrong.tensors if not tensor.ok] == ["x after"]
    untouched = declared(lambda mesh, x: x * 2, lambda x: (x * 2.0, x * 0.5), **specs).verify(examples=4)
    assert [tensor.label for tensor in untouched.tensors if not tensor.ok] == ["x after"]
    assert untouched.notes["x after"][0] == "as it was before the call: nothing is written to it"


def test_an_input_that_is_overwritten_without_a_word_is_reported():
    def halves(mesh, x, y):
        out = x * 2
        x.detach().mul_(0.5)
        y.detach().mul_(0.5)
        return out

    report = declared(halves, lambda x, y: (x * 2.0 + 0.0 * y, x * 0.5), {"x": "b/tp", "y": "b/tp"}, modifies=("x",),
                      draw={"x": values("normal"), "y": values("normal")}).verify(tp=2, b=2)  # fmt: skip
    assert report.verdict == "hygiene" and "input 'y' was modified" in report.hygiene[0]


@pytest.mark.parametrize(
    ("modifies", "words"),
    [
        ("x", "modifies is 'x'; give a tuple of inputs, such as ('logits',)"),
        (("logits",), "modifies has 'logits', the inputs are (x)"),
    ],
)
def test_wrong_modifies(modifies, words):
    text = sentence(lambda mesh, x: x * 2, lambda x: x * 2.0, modifies=modifies)
    assert text == f"scheme '<lambda>': {words}"


# Random schemes


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("same_for_all", [False, True])
def test_a_dropout_by_a_mask_that_is_drawn(same_for_all):
    """A mask sharded like x; a rank that takes the first shard's mask is wrong."""

    def reference(x, kept):
        return jnp.where(kept, x / 0.75, 0.0)

    def dropout(mesh, x, kept):
        if same_for_all:
            torch.distributed.broadcast(kept, src=torch.distributed.get_global_rank(mesh["tp"], 0), group=mesh["tp"])
        return torch.where(kept, x / 0.75, 0.0)

    report = declared(
        dropout, reference, {"x": "b d/tp", "kept": "b d/tp"}, "b d/tp", mesh={"tp": (1, 2)},
        draw={"x": values("normal"),
              "kept": drawn(lambda generator, shape: generator.random(shape) < 0.75, integer=True)},
    ).verify(examples=12)  # fmt: skip
    assert report.ok != same_for_all, str(report)
