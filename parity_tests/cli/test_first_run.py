"""Rejections on a scheme's first run: outputs of the ranks or the reference that do not fit their declaration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int
from torch import Tensor, complex64

from shardproof import Cost, scheme, values
from shardproof.engines.failure import Raised
from shardproof.judge.reference import ReferenceFailure
from shardproof.verify_one_case import verify_case


def identity(x):
    return x * 1.0


def first_run(function, reference, outputs="b s/cp", **changes):
    declaration = scheme(
        **{"reference": reference, "mesh": {"cp": (4,)}, "inputs": {"x": "b s/cp"}, "outputs": outputs, **changes}
    )(function)
    return declaration.verify(cp=4, b=2, s=8)


def said_by_a_rank(function, reference=identity, **changes):
    report = first_run(function, reference, **changes)
    assert isinstance(report.failure, Raised)
    return report.failure.args[0].replace(f"rank {report.failure.rank} ", "rank 0 ")  # all fail; the schedule picks one


def test_local_shape():
    def too_wide(mesh, x):
        return x.repeat(1, 2) if mesh.rank("cp") == 2 else x

    sentence = "scheme 'too_wide': rank 2 returned (2, 4), 'b s/cp' with s=8, cp=4 says (2, 2)"
    assert first_run(too_wide, identity).failure.args[0] == sentence


def test_a_replicated_output_has_the_full_shape():
    def flat(mesh, x):
        return x.flatten()

    message = said_by_a_rank(flat, inputs={"x": "b s cp=I"}, outputs="b s cp=I")
    assert message == "scheme 'flat': rank 0 returned (16,), 'b s cp=I' with b=2, s=8 says (2, 8)"


def test_a_size_that_no_input_gives_is_to_be_declared():
    """The two best of each row: without `dims`, the size of k is drawn."""
    top_two = scheme(
        reference=lambda x: jax.lax.top_k(x, 2)[0], mesh={"dp": (1, 2)}, inputs={"x": "b/dp e"}, outputs="b/dp k"
    )(lambda mesh, x: x.topk(2).values)  # fmt: skip
    with pytest.raises(ReferenceFailure) as caught:
        verify_case(top_two, top_two.case(dp=1, b=2, e=4, k=3))
    remedy = "no input has k: declare dims={'k': (2,)} or a formula of other dims"
    assert str(caught.value).endswith(f"returned (2, 2) for 'out', 'b/dp k' says (2, 3); {remedy}")


@pytest.mark.slow
def test_number_and_kind_of_outputs():
    def twice(mesh, x):
        return x, x

    def number(mesh, x):
        return 1.0

    def whole_numbers(mesh, x):
        return x.long()

    def rotated(mesh, x):
        return x.to(complex64)

    def named(mesh, x):
        return {"y": x}

    def fraction(mesh, x) -> Int[Tensor, "b s"]:
        return x

    assert said_by_a_rank(twice) == "scheme 'twice': rank 0 returned 2 outputs, outputs has 1"
    assert said_by_a_rank(number) == "scheme 'number': rank 0 returned float for 'out'; return a tensor"
    assert said_by_a_rank(whole_numbers) == (
        "scheme 'whole_numbers': rank 0 returned torch.int64 for 'out'; "
        "annotate the return as Int or Bool of jaxtyping if it is one"
    )
    assert said_by_a_rank(rotated) == (
        "scheme 'rotated': rank 0 returned torch.complex64 for 'out'; return its torch.view_as_real"
    )
    message = said_by_a_rank(named, reference=lambda x: {"z": x}, outputs={"z": "b s/cp"})
    assert message == "scheme 'named': rank 0 returned ['y'], outputs has ['z']"
    message = said_by_a_rank(fraction, reference=lambda x: x.astype(int))
    assert message == (
        "scheme 'fraction': rank 0 returned torch.float32 for 'out'; annotate the return as Float if it is one"
    )


def same(mesh, x):
    return x * 1


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (lambda x: 1.0, "returned float for 'out'; return a JAX array"),
        (lambda x: np.ones((2, 8)), "returned ndarray for 'out'; return a JAX array"),
        (
            lambda x: x.astype(jnp.float32),
            "returned float32 for 'out' from float64 inputs; "
            "drop the cast, the reference states the mathematics in float64",
        ),
        (
            lambda x: x.astype(jnp.bfloat16),
            "returned bfloat16 for 'out' from float64 inputs; "
            "drop the cast, the reference states the mathematics in float64",
        ),
        (
            lambda x: x.astype(jnp.int64),
            "returned int64 for 'out', which is floating without Int or Bool of jaxtyping in the scheme's return "
            "annotation",
        ),
        (lambda x: (x, x), "returned 2 outputs, outputs has 1"),
        (lambda x: {"out": x}, "returned dict for 'out'; return a JAX array"),
        (lambda x: x.sum(-1), "returned (2,) for 'out', 'b s/cp' says (2, 8)"),
        (lambda x: x + {}, None),
    ],
)
def test_an_invalid_reference_is_rejected(reference, sentence):
    with pytest.raises(ReferenceFailure) as caught:
        first_run(same, reference)
    start = "scheme 'same': reference <lambda> "
    if sentence is None:
        assert str(caught.value).startswith(f"{start}raised TypeError at test_first_run.py:")
        assert "\n" not in str(caught.value)
    else:
        assert str(caught.value) == f"{start}(test_first_run.py:{reference.__code__.co_firstlineno}) {sentence}"


def test_a_reference_without_an_output_is_named_with_its_line():
    def one(x):
        return {"y": x}

    with pytest.raises(ReferenceFailure) as caught:
        first_run(lambda mesh, x: {"y": x, "z": x}, one, outputs={"y": "b s/cp", "z": "b s/cp"})
    place = f"test_first_run.py:{one.__code__.co_firstlineno}"
    assert str(caught.value).endswith(f"reference one ({place}) returned ['y'], outputs has ['y', 'z']")


def test_integers_alone_and_no_gradient_at_all():
    def largest(mesh, x) -> Int[Tensor, "b"]:
        return x.argmax(-1)

    declaration = scheme(
        reference=lambda x: x.argmax(-1), mesh={"tp": (1, 2)}, inputs={"x": "b/tp s"}, outputs="b/tp", nograd=("x",)
    )(largest)
    report = declaration.verify(examples=5)
    assert report.ok, str(report)
    assert [tensor.label for tensor in report.tensors] == ["out"]


def test_a_parameter_tree_and_outputs_by_name():
    def linear(mesh, params, x):
        return {"y": x @ params["inner"]["w"] + params["bias"], "half": x / 2}

    def reference(params, x):
        return {"half": x / 2, "y": x @ params["inner"]["w"] + params["bias"][None]}

    declaration = scheme(
        reference=reference,
        mesh={"tp": (1, 2)},
        inputs={"params": {"inner": {"w": "d f/tp"}, "bias": "f/tp"}, "x": "b d tp=R"},
        outputs={"y": "b f/tp", "half": "b d tp=P"},
        draw={"x": values("normal"), "params.inner.w": values("normal")},
        cost=lambda c: Cost(),
    )(linear)
    report = declaration.verify(tp=2, b=2, d=3, f=4)
    assert [tensor.label for tensor in report.tensors] == [
        "y",
        "half",
        "d/d params.inner.w",
        "d/d params.bias",
        "d/d x",
    ]
    # Each rank returned all of the half where their sum was promised: twice too much, forward and back.
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == ["half", "d/d x"]


def test_scalars_in_and_out():
    def scaled_loss(mesh, x, scale):
        return (x.double() ** 2).sum() * scale

    declaration = scheme(
        reference=lambda x, scale: (x**2).sum() * scale,
        mesh={"tp": (1, 2)},
        inputs={"x": "n tp=R", "scale": "tp=P"},
        outputs="tp=P",
        draw={"x": values("normal")},
    )(scaled_loss)
    report = declaration.verify(examples=6)
    assert report.ok, str(report)
    assert [(tensor.label, tensor.want.ndim) for tensor in report.tensors] == [
        ("out", 0),
        ("d/d x", 1),
        ("d/d scale", 0),
    ]
