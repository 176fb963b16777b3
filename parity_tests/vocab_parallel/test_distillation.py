"""Parity of vocab_parallel.distillation: both softmaxes, with and without entropy, by five routes."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import DTensor, Replicate, Shard

from jax_ref.vocab_parallel import distillation
from parity_tests.vocab_parallel.costs import all_gathers
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED, ignored, is_dropped
from shardproof import CaseSpec, Cost, check, every_case, scheme, values
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp


def whole_distillation(student, teacher, ids, zero_outside_topk, calculate_entropy):
    """The reference; without `with_entropy` the entropy is zeros, since a scheme always has the same outputs."""
    s, t, h = distillation(student, teacher, ids, zero_outside_topk, calculate_entropy)
    return s, t, jnp.zeros(s.shape[:2]) if h is None else h


def three(student, teacher, ids, zero_outside_topk, calculate_entropy, *groups):
    s, t, h = vp.get_distillation_topk_logprobs_from_logits(
        student, teacher, ids, zero_outside_topk, calculate_entropy, *groups
    )
    assert (h is None) != calculate_entropy
    return s, t, s.new_zeros(s.shape[:2]) if h is None else h


def cost(has_group, has_cp, asks_widths):
    """Over tp one exchange and the widths; over cp one gather, and its adjoint as the only collective of backward."""

    def of(c):
        n, k, a = c.b * c.f // getattr(c, "cp", 1), c.k, c.accumulator_itemsize
        reads_all = c.zero_outside_topk or c.calculate_entropy
        several = getattr(c, "tp", 1) > 1
        statistics = (1, (k + 2 + c.calculate_entropy) * n * a)
        forward = all_gathers(
            *[(1, 8)] * (asks_widths and several),
            *[statistics] * (has_group and reads_all and several),
            over_cp=[(1, (k + c.calculate_entropy) * n * a)] * has_cp,
        )
        if has_group and not reads_all:
            forward["all_reduce/tp"] = (1, k * n * a)
        size = (k + c.calculate_entropy) * n * getattr(c, "cp", 1) * a
        return Cost(forward=forward, backward={"reduce_scatter/cp": (1, size)} if has_cp else {})

    return of


def is_no_id(case, inputs):
    """Whether each id is outside the vocabulary, for all positions but the last."""
    return ignored("ids")(case, inputs)[:, : case.u]


DECLARED = dict(
    reference=whole_distillation,
    nan_cotangents={"out[0]": is_no_id},
    draw={"ids": SOME_IGNORED, "student": values(nan_rows=is_dropped)},
    dims={"k": (1, 2, 3, 8), "f": "s+e", "e": (0, 1, 2, 3), "u": "s-1"},
    options={"zero_outside_topk": (True, False), "calculate_entropy": (True, False)},
    dtypes=("float32", "float64", "bfloat16"),
    sums="float32",
    roundings=3,  # log total, mean shifted logit, gradient
)


def specs(student, types):
    return dict(
        inputs={"student": student, "teacher": f"b s k {types}", "ids": "b s k"},
        outputs=(f"b u k {types}", f"b u k {types}", f"b u {types}"),
    )


OVER_CP = "b f/cp:dual_chunk_swap"


@scheme(
    mesh={"tp": (1,)},
    **specs("b f v tp=I", "tp=I"),
    cost=cost(False, False, False),
    **DECLARED,
)
def distillation_alone(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
    return three(student, teacher, ids, zero_outside_topk, calculate_entropy)


@scheme(
    contract=vp.get_distillation_topk_logprobs_from_logits,
    mesh={"tp": (1, 2, 3, 4)},
    **specs("b f v/tp:ragged", "tp=I"),
    cost=cost(True, False, True),
    **DECLARED,
)
def distillation_over_tp(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
    groups = mesh.rank("tp"), mesh["tp"]
    return three(student, teacher, ids, zero_outside_topk, calculate_entropy, *groups)


@scheme(
    contract=vp.get_distillation_topk_logprobs_from_logits,
    mesh={"cp": (1, 2, 4)},
    **specs(f"{OVER_CP} v", "cp=R"),
    cost=cost(False, True, False),
    **DECLARED,
)
def distillation_over_cp(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
    return three(student, teacher, ids, zero_outside_topk, calculate_entropy, None, None, mesh["cp"])


@scheme(
    contract=vp.get_distillation_topk_logprobs_from_logits,
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    **specs(f"{OVER_CP} v/tp:ragged", "tp=I cp=R"),
    cost=cost(True, True, True),
    **DECLARED,
)
@pytest.mark.cases(5, engine="gloo")
def distillation_over_tp_and_cp(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
    groups = mesh.rank("tp"), mesh["tp"], mesh["cp"]
    return three(student, teacher, ids, zero_outside_topk, calculate_entropy, *groups)


def as_dtensor(mesh, local, v):
    """The local logits as a DTensor of the full mesh, sequence and vocabulary sharded."""
    cuts = {"cp": Shard(1), "tp": Shard(2)}
    placements = [cuts.get(axis, Replicate()) for axis in mesh.axes]
    shape = (local.shape[0], local.shape[1] * (mesh.size("cp") if "cp" in mesh.axes else 1), v)
    stride = (shape[1] * v, v, 1)
    return DTensor.from_local(local, mesh.device_mesh, placements, run_check=False, shape=shape, stride=stride)


@scheme(
    contract=vp.get_distillation_topk_logprobs_from_logits,
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    **specs(f"{OVER_CP} v/tp", "tp=I cp=R"),
    cost=cost(True, True, False),
    **DECLARED,
)
def distillation_of_dtensor(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
    logits = as_dtensor(mesh, student, student.shape[-1] * mesh.size("tp"))
    return three(logits, teacher, ids, zero_outside_topk, calculate_entropy)


ROUTES = (
    distillation_alone,
    distillation_over_tp,
    distillation_over_cp,
    distillation_over_tp_and_cp,
    distillation_of_dtensor,
)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_parity(route):
    @given(every_case(route))
    @settings(max_examples=settings().max_examples // 2)
    def every(case):
        check(case)

    every()


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("calculate_entropy", [True, False])
@pytest.mark.parametrize("zero_outside_topk", [True, False])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_combination(route, zero_outside_topk, calculate_entropy):
    sizes = {axis: max(size for size in menu if size <= 2) for axis, menu in route.mesh.items()}
    options = dict(zero_outside_topk=zero_outside_topk, calculate_entropy=calculate_entropy)
    e = (ROUTES.index(route) + zero_outside_topk) % 4  # tokens of padding
    for dtype in ("float32", "bfloat16"):
        verify_case(
            route, route.case(seed=e, dtype=dtype, b=2, s=8 - e, e=e, v=12, k=3, **sizes, **options)
        ).raise_if_failed()


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("v", [5, 7])
def test_dtensor_shards_that_are_uneven(v, tp):
    """This needs its own scheme: a DTensor can state only DTensor's uneven sharding, which no draw of lengths gives."""

    @scheme(mesh={"tp": (2, 4)}, **specs("b f v/tp:ragged", "tp=I"), cost=cost(True, False, False), **DECLARED)
    def distillation_of_uneven_dtensor(mesh, student, teacher, ids, zero_outside_topk, calculate_entropy):
        return three(as_dtensor(mesh, student, v), teacher, ids, zero_outside_topk, calculate_entropy)

    block = -(-v // tp)
    lengths = [max(0, min(block, v - rank * block)) for rank in range(tp)]
    for seed in range(4):
        case = distillation_of_uneven_dtensor.case(seed=seed, tp=tp, b=1, s=4, e=0, v=v, k=3)
        case = case.replace(layouts={"v/tp": {"name": "ragged", "lengths": lengths}})
        verify_case(distillation_of_uneven_dtensor, case).raise_if_failed()


def normal(*shape, key=17):
    return np.random.Generator(np.random.Philox(key=[key, 0])).standard_normal(shape)


def alone(*tensors, zero_outside_topk=True, calculate_entropy=True):
    return vp.get_distillation_topk_logprobs_from_logits(*tensors, zero_outside_topk, calculate_entropy)


@pytest.mark.parametrize("route", [distillation_over_tp, distillation_over_tp_and_cp], ids=lambda route: route.name)
@pytest.mark.parametrize("zero_outside_topk", [True, False])
def test_masked_columns_and_out_of_vocabulary_ids(route, zero_outside_topk):
    student, teacher = normal(1, 8, 8), normal(1, 8, 3, key=18)
    student[..., [0, 3, 4, 7]] = -np.inf  # the borders of two shards
    teacher[..., 2] = -np.inf
    ids = np.stack([[i, (i + 2) % 8, (-100, 8, 2**40)[i % 3]] for i in range(8)])[None]
    cuts = {"tp": 2, "cp": 2} if "cp" in route.mesh else {"tp": 2}
    sizes = dict(b=1, s=8, e=0, v=8, k=3, dtype="float32", calculate_entropy=True)
    case = route.case(**cuts, **sizes, zero_outside_topk=zero_outside_topk)
    report = verify_case(route, case, arrays={"student": student, "teacher": teacher, "ids": ids})
    report.raise_if_failed()
    for tensor in report.tensors:
        assert not np.isnan(tensor.got).any()
    scores = next(tensor for tensor in report.tensors if tensor.name == "out[0]")
    np.testing.assert_array_equal(scores.got[..., 2], np.zeros((1, 7)))


def test_both_choices_agree_if_k_is_the_vocabulary():
    """k = V: the sum over the k ids equals the sum over the vocabulary, term by term in the same order."""
    student, teacher = torch.from_numpy(normal(2, 4, 6)).float(), torch.from_numpy(normal(2, 4, 6, key=18)).float()
    ids = torch.arange(6).expand(2, 4, 6)
    inside, outside = (alone(student, teacher, ids, zero_outside_topk=choice) for choice in (False, True))
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)


def test_over_k_the_probabilities_add_up_to_one():
    """Logits of 0 and -inf: the probabilities are powers of two, which are exact."""
    student = torch.zeros(1, 3, 8)
    student[..., 5] = -torch.inf
    ids = torch.tensor([[[0, 1, 2, 3, 5], [4, 6, 7, 0, -100], [0, 0, 0, 0, 0]]])
    scores, teacher, _ = alone(student, torch.zeros(1, 3, 5), ids, zero_outside_topk=False)
    p = torch.where(ids[:, :-1] == -100, 0.0, scores.exp())
    assert torch.equal(p.sum(-1), torch.ones(1, 2)) and torch.equal(scores[0, 1, 4], torch.tensor(0.0))
    np.testing.assert_array_equal(teacher, np.full((1, 2, 5), -np.log1p(np.float32(4))))


def test_the_last_position_has_no_part():
    student, teacher = (torch.from_numpy(normal(1, 5, k, key=k)).requires_grad_() for k in (8, 3))
    ids = torch.from_numpy(np.arange(15).reshape(1, 5, 3) % 8)
    before = alone(student, teacher, ids)
    gradients = torch.autograd.grad([x.sum() for x in before], [student, teacher])
    assert all((g[:, -1] == 0).all() and (g[:, :-1] != 0).any() for g in gradients)
    with torch.no_grad():
        student[:, -1], teacher[:, -1], ids[:, -1] = 7.0, -7.0, 0
    for a, b in zip(before, alone(student, teacher, ids), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("calculate_entropy", [True, False])
@pytest.mark.parametrize("zero_outside_topk", [True, False])
@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_a_dropped_row_of_nan_reaches_no_gradient(cp, tp, zero_outside_topk, calculate_entropy):
    full, teacher = torch.from_numpy(normal(1, 8, 6 * tp)), torch.from_numpy(normal(1, 8, 2, key=18))
    full[:, -2:] = torch.nan  # the last position of the ids, and a padding position
    ids = torch.arange(14).view(1, 7, 2) * 5 % (6 * tp)

    def body(mesh, case):
        local = vp._get_tokens_on_this_cp_rank(full, mesh.rank("cp"), cp)
        student = local[..., 6 * mesh.rank("tp") : 6 * mesh.rank("tp") + 6].clone().requires_grad_()
        groups = mesh.rank("tp"), mesh["tp"], mesh["cp"]
        outputs = vp.get_distillation_topk_logprobs_from_logits(
            student, teacher[:, :7], ids, zero_outside_topk, calculate_entropy, *groups
        )
        used = [x for x in (outputs[0], outputs[2]) if x is not None]
        (gradient,) = torch.autograd.grad(used, student, [torch.ones_like(x) for x in used])
        is_dropped = local[..., 0].isnan()
        return bool((gradient[is_dropped] == 0).all()), bool((gradient[~is_dropped] != 0).any())

    results = run(body, CaseSpec(scheme="vocab_parallel", mesh={"cp": cp, "tp": tp})).results
    assert results == ((True, True),) * (cp * tp)


@pytest.mark.parametrize("zero_outside_topk", [True, False])
def test_gradcheck(zero_outside_topk):
    student, teacher = (torch.from_numpy(normal(1, 4, k, key=k)).requires_grad_() for k in (6, 3))
    ids = torch.tensor([[[0, 5, -100], [1, 1, 2], [3, 4, 5], [0, 0, 0]]])
    assert torch.autograd.gradcheck(
        lambda z, t: alone(z, t, ids, zero_outside_topk=zero_outside_topk), (student, teacher)
    )


def test_dtypes():
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        student, teacher = torch.zeros(1, 2, 4, dtype=dtype, requires_grad=True), torch.zeros(1, 2, 2, dtype=dtype)
        outputs = alone(student, teacher.requires_grad_(), torch.zeros(1, 2, 2, dtype=torch.int32))
        assert {x.dtype for x in outputs} == {result}
        sum(x.sum() for x in outputs).backward()
        assert student.grad.dtype == teacher.grad.dtype == dtype


@pytest.mark.parametrize("v", [64, 4096])
@pytest.mark.parametrize("zero_outside_topk", [True, False])
@pytest.mark.parametrize("calculate_entropy", [True, False])
def test_keeps_the_logits_by_reference_and_nothing_else_of_their_size(v, zero_outside_topk, calculate_entropy):
    def body(mesh, case):
        z, saved = torch.zeros(2, 4, v, requires_grad=True), []
        teacher, ids = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            vp.get_distillation_topk_logprobs_from_logits(
                z, teacher, ids, zero_outside_topk, calculate_entropy, 0, mesh["tp"]
            )
        extra = {x.data_ptr(): x.nbytes for x in saved if x.data_ptr() != z.data_ptr()}
        return len([x for x in saved if x.data_ptr() == z.data_ptr()]), sum(extra.values())

    ((references, saved_bytes),) = run(body, CaseSpec(scheme="distillation", mesh={"tp": 1})).results
    joint = 2 * 4 * (8 + 4 * 3 + 4 * calculate_entropy)
    over_k = 2 * 4 * (4 * 3 + 8 + 4 * 3)  # its own k logits, their normaliser and their slots
    selected = 2 * 4 * 3  # the ids that are asked for
    assert references == (zero_outside_topk or calculate_entropy)
    assert saved_bytes <= joint + (0 if zero_outside_topk else over_k + selected)
