"""Parity of vocab_parallel.logprob."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import logprob, logprob_and_negative_entropy
from parity_tests.slow import slow_but
from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import IGNORED_TARGETS, SOME_IGNORED
from parity_tests.vocab_parallel.shard import owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp

DECLARED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    draw={"target": SOME_IGNORED, "logits": values(nan_rows=IGNORED_TARGETS)},
    options={"temperature": (1.0, 0.7, 2.0)},
    dtypes=("float32", "float64", "bfloat16"),
    sums="float32",
    reduction=("v",),
    nan_cotangents={"out": IGNORED_TARGETS},
)
OF_BOTH = {**DECLARED, "nan_cotangents": {"out[0]": IGNORED_TARGETS}, "draw": {"target": SOME_IGNORED}}


def one_exchange(numbers):
    """One all_gather of so many numbers per token forward, nothing backward."""
    return lambda c: Cost(forward=all_gathers(over_tp(c, numbers * c.b * c.s)))


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=logprob,
    rank_options={"chunk_size": (None, 1, 2, 5)},
    cost=one_exchange(3),
    **DECLARED,
)
@pytest.mark.cases(8, engine="gloo")
@pytest.mark.cases
def vocab_parallel_logprob(mesh, logits, target, temperature, chunk_size):
    start, end = owned_range(mesh)
    return vp.vocab_parallel_logprob(
        logits,
        target,
        mesh["tp"],
        vocab_start_index=start,
        vocab_end_index=end,
        temperature=temperature,
        chunk_size=chunk_size,
        inference_only=wants_no_gradient(),
    )


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=logprob_and_negative_entropy,
    outputs=("b s tp=I", "b s tp=I"),
    rank_options={"chunk_size": (None, 1, 2, 5)},
    cost=one_exchange(4),
    roundings=3,  # log total, mean shifted logit, gradient
    **{**OF_BOTH, "dtypes": ("float32", "bfloat16")},  # the reference's own slope is no better than float64
)
@pytest.mark.cases
def logprob_with_entropy(mesh, logits, target, temperature, chunk_size):
    start, end = owned_range(mesh)
    return vp.vocab_parallel_logprob(
        logits,
        target,
        mesh["tp"],
        vocab_start_index=start,
        vocab_end_index=end,
        temperature=temperature,
        with_entropy=True,
        chunk_size=chunk_size,
        inference_only=wants_no_gradient(),
    )


@scheme(contract=vp.DistributedLogprob, reference=logprob, cost=one_exchange(3), **DECLARED)
@pytest.mark.cases
def distributed_logprob(mesh, logits, target, temperature):
    return vp.DistributedLogprob.apply(logits, target, *owned_range(mesh), mesh["tp"], wants_no_gradient(), temperature)


@scheme(
    contract=vp.ChunkedDistributedLogprob,
    reference=logprob,
    rank_options={"chunk_size": (1, 2, 5)},
    cost=one_exchange(3),
    **DECLARED,
)
@pytest.mark.cases
def chunked_distributed_logprob(mesh, logits, target, temperature, chunk_size):
    own_size = chunk_size + mesh.rank("tp")  # each rank may have another size
    return vp.ChunkedDistributedLogprob.apply(
        logits, target, *owned_range(mesh), own_size, mesh["tp"], wants_no_gradient(), temperature
    )


@scheme(
    contract=vp.DistributedLogprob,
    reference=logprob,
    nograd=("logits",),
    **{
        **DECLARED,
        "draw": {**DECLARED["draw"], "logits": values("ties", "iota", "ones")},  # integers: exact in bfloat16
        "dtypes": ("float32",),
    },
)
@pytest.mark.cases
def logprob_of_bfloat16_logits(mesh, logits, target, temperature):
    """Held to the budget of float32: only the logits are bfloat16, not the arithmetic."""
    return vp.DistributedLogprob.apply(
        logits.bfloat16(), target, *owned_range(mesh), mesh["tp"], wants_no_gradient(), temperature
    )


def copy_in_layout(logits, layout):
    """A copy of the logits whose memory the gradient may overwrite. With four dims the logits are in row 0."""
    copy = logits.clone(memory_format=torch.contiguous_format)
    buffer = torch.cat([copy.flatten(), copy.new_zeros(1)])
    return {
        "contiguous": lambda: copy,
        "transposed": lambda: logits.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1),
        "stepped": lambda: torch.stack([logits, logits], -1)[..., 0],
        "one": lambda: copy.as_strided((1, *copy.shape), (0, *copy.stride())),  # stride 0, which size 1 never uses
        "repeated": lambda: copy.expand(2, *copy.shape),
        "windows": lambda: buffer.as_strided((2, *copy.shape), (1, *copy.stride())),  # row 1 begins one element later
    }[layout]()


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=logprob_and_negative_entropy,
    outputs=("b s tp=I", "b s tp=I"),
    dims={"b": (1, 2), "s": (3, 1, 0, 5)},
    rank_options={"layout": ("contiguous", "transposed", "stepped", "one", "repeated", "windows")},
    excluded_conditions=("second_backward",),  # autograd says that the logits were overwritten
    roundings=3,  # log total, mean shifted logit, gradient
    **{**OF_BOTH, "dtypes": ("float32", "bfloat16")},
)
@pytest.mark.cases
def logprob_over_its_logits(mesh, logits, target, temperature, layout):
    """The gradient overwrites the logits. If elements of the logits share memory, it overwrites a copy."""
    start, end = owned_range(mesh)
    options = dict(vocab_start_index=start, vocab_end_index=end, temperature=temperature, with_entropy=True)
    z = copy_in_layout(logits, layout)
    ids = target.expand(z.shape[:-1])
    try:
        scores = vp.vocab_parallel_logprob(z, ids, mesh["tp"], inplace_gradient=True, **options)
    except ValueError:
        if layout not in ("repeated", "windows"):
            raise
        scores = vp.vocab_parallel_logprob(z.contiguous(), ids, mesh["tp"], inplace_gradient=True, **options)
    return tuple(x[0] if z.ndim > logits.ndim else x for x in scores)


def report_on(logits, target, tp, scheme=logprob_with_entropy, **options):
    """The report on given logits and targets."""
    b, s, v = logits.shape
    case = scheme.case(tp=tp, b=b, s=s, v=v, dtype="float32", **options)
    return verify_case(scheme, case, arrays={"logits": logits, "target": target})


def normal(*shape):
    return np.random.Generator(np.random.Philox(key=[5, 0])).standard_normal(shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_boundary_ids_and_out_of_vocabulary_ids(tp):
    v = 8
    width = v // tp
    borders = [id for start in range(0, v, width) for id in (start, start + width - 1)]
    invalid_ids = [-100, -1, v, v + 7, 2**40]
    target = np.array([[*borders, *invalid_ids]])
    case = CaseSpec(scheme="logprob", mesh={"tp": tp})
    logits = torch.from_numpy(normal(1, target.shape[1], v)).float()

    def body(mesh, case):
        rank = mesh.rank("tp")
        shard = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
        ids = torch.from_numpy(target)
        y = vp.DistributedLogprob.apply(shard, ids, rank * width, (rank + 1) * width, mesh["tp"])
        y.backward(torch.ones_like(y))
        return y.detach().numpy(), shard.grad.numpy()

    for y, gradient in run(body, case).results:
        assert (y[0, len(borders) :] == 0.0).all() and (gradient[0, len(borders) :] == 0.0).all()
        assert (y[0, : len(borders)] < 0.0).all() and (gradient[0, : len(borders)] != 0.0).all()
    report_on(logits.double().numpy(), target, tp).raise_if_failed()


MASKS = {
    "first and last column of each shard": [0, 3, 4, 7],
    "a whole shard": [0, 1, 2, 3],
    "all but one column": [0, 1, 2, 3, 4, 6, 7],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_columns(mask, tp):
    logits, target = normal(1, 8, 8), np.arange(8)[None]  # every column is a target, the masked ones too
    logits[..., MASKS[mask]] = -np.inf
    report = report_on(logits, target, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert not np.isnan(tensor.got).any()


def test_a_row_constant_changes_nothing():
    def body(mesh, case):
        start = 4 * mesh.rank("tp")
        z = torch.arange(24.0).view(1, 6, 4).remainder(7) + start
        results = []
        for constant in (0.0, 8192.0):  # integers: the sum is exact, and so are the next results
            shifted = (z + constant).requires_grad_()
            y = vp.vocab_parallel_logprob(
                shifted,
                torch.tensor([[0, 3, 4, 7, 1, -100]]),
                mesh["tp"],
                vocab_start_index=start,
                vocab_end_index=start + 4,
                with_entropy=True,
            )
            gradient = torch.autograd.grad(y, shifted, [torch.ones(1, 6), torch.full((1, 6), 3.0)])
            results.append([x.detach().numpy() for x in (*y, *gradient)])
        return results

    for plain, shifted in run(body, CaseSpec(scheme="logprob", mesh={"tp": 2})).results:
        for a, b in zip(plain, shifted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_gradients_of_a_row_cancel():
    report = report_on(normal(2, 5, 8), np.arange(10).reshape(2, 5) % 8, tp=4)
    report.raise_if_failed()
    gradient = next(tensor for tensor in report.tensors if tensor.role == "gradient")
    assert (np.abs(gradient.got.sum(-1)) <= gradient.element_budgets.sum(-1)).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_logits_have_the_largest_entropy_and_no_slope(tp):
    def body(mesh, case):
        width = 8 // tp
        z = torch.full((2, 3, width), 5.0, requires_grad=True)
        y, h = vp.vocab_parallel_logprob(
            z,
            torch.full((2, 3), -100),
            mesh["tp"],
            vocab_start_index=mesh.rank("tp") * width,
            vocab_end_index=mesh.rank("tp") * width + width,
            with_entropy=True,
        )
        (slope,) = torch.autograd.grad(h, z, torch.ones(2, 3))
        return y.detach().numpy(), h.detach().numpy(), slope.numpy()

    for y, h, slope in run(body, CaseSpec(scheme="logprob", mesh={"tp": tp})).results:
        np.testing.assert_array_equal(y, np.zeros((2, 3)))
        np.testing.assert_array_equal(h, np.full((2, 3), -np.log1p(np.float32(7))))
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_no_chunk_size_changes_the_ledger(engine):
    sizes = dict(tp=2, b=2, s=5, v=6, seed=3)
    assert calls_of_all(vocab_parallel_logprob, (None, *range(1, 9)), **sizes, engine=engine) == {("all_gather", "fwd")}


def test_gradcheck():
    def body(mesh, case):
        z = torch.from_numpy(normal(2, 3, 5)).requires_grad_()
        target = torch.tensor([[0, 4, -100], [2, 2, 1]])

        def both(x):
            owned = dict(vocab_start_index=0, vocab_end_index=5)
            return vp.vocab_parallel_logprob(x, target, mesh["tp"], temperature=0.7, with_entropy=True, **owned)

        return torch.autograd.gradcheck(both, z)

    assert run(body, CaseSpec(scheme="logprob", mesh={"tp": 1})).results == (True,)


@pytest.mark.parametrize("name", ["vocab_start_index", "vocab_end_index"])
def test_a_range_is_of_integers(name):
    def body(mesh, case):
        owned = dict(vocab_start_index=0, vocab_end_index=5) | {name: {"vocab_start_index": 0.0}.get(name, 5.0)}
        with pytest.raises(TypeError, match=f"{name}={owned[name]} is a float; pass an int"):
            vp.vocab_parallel_logprob(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), mesh["tp"], **owned)
        return True

    assert run(body, CaseSpec(scheme="logprob", mesh={"tp": 1})).results == (True,)


COMPILED = [
    {"tp": 2, "b": 2, "s": 3, "v": 12},
    {"tp": 3, "b": 1, "s": 5, "v": 20},
    {"tp": 2, "b": 1, "s": 3, "v": 10000},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("sizes", slow_but(COMPILED[:1], COMPILED), ids=str)
def test_parity_of_the_compiled_backend(sizes):
    """Declared here, so that no other run compiles it."""

    @scheme(reference=logprob_and_negative_entropy, outputs=("b s tp=I", "b s tp=I"), cost=one_exchange(4), **OF_BOTH)
    def compiled_logprob(mesh, logits, target, temperature):
        start, end = owned_range(mesh)
        owned = dict(vocab_start_index=start, vocab_end_index=end)
        options = dict(temperature=temperature, with_entropy=True, backend="compile")
        return vp.vocab_parallel_logprob(logits, target, mesh["tp"], **owned, **options)

    case = compiled_logprob.case(dtype="float32", temperature=0.7, **sizes)
    verify_case(compiled_logprob, case, quiet_s=240.0).raise_if_failed()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("width", [8, 8192])
def test_a_target_whose_logit_overflows_has_no_gradient_of_zero(tp, width):
    """+inf, as float16 makes it, is not an id outside the vocabulary: score and gradient are NaN on every rank."""

    def body(mesh, case):
        start, end = width * mesh.rank("tp"), width * (mesh.rank("tp") + 1)
        logits = torch.zeros(2, 9, width)
        logits[:, 4, 3] = math.inf if start == 0 else 0.0
        logits.requires_grad_()
        target = torch.full((2, 9), 3)
        target[1] = -100
        options = dict(vocab_start_index=start, vocab_end_index=end)
        score = vp.vocab_parallel_logprob(logits, target, mesh["tp"], **options)
        score.sum().backward()
        return (
            score.isnan().nonzero().tolist(),
            logits.grad.isnan().all(-1).nonzero().tolist(),
            bool(logits.grad[1].any()),
        )

    for scores, gradients, of_ignored in run(body, CaseSpec(scheme="overflow", mesh={"tp": tp})).results:
        assert [0, 4] in scores and gradients == [[0, 4]] and not of_ignored


@pytest.mark.parametrize("temperature", [np.float32(0.7), Fraction(7, 10), np.int64(2)], ids=repr)
def test_a_temperature_of_another_type_is_its_float(temperature):
    def body(mesh, case):
        logits, target = torch.linspace(-3.0, 3.0, 16).double().view(2, 8), torch.tensor([1, 9])
        start, long = 8 * mesh.rank("tp"), torch.linspace(-3.0, 3.0, 4096).double().expand(1, 2, 4096)
        of_types = []
        for each in (temperature, float(temperature)):
            short = vp.DistributedLogprob.apply(logits, target, start, start + 8, mesh["tp"], True, each)
            params = SimpleNamespace(top_k=None, top_p=None, temperature=each)
            ids = torch.arange(2).view(1, 2)
            routed = vp.get_next_token_logprobs_from_logits(ids, long, sampling_params=params)
            of_types.append((short, routed))
        return all(map(torch.equal, *of_types))

    assert run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 2})).results == (True, True)
