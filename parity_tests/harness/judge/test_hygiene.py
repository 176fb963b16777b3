"""Hygiene: whatever is touched, left different or drawn turns a small scheme red although its values are right."""

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import integers, values
from shardproof.declare import conditions
from shardproof.declare.case import CaseSpec
from shardproof.verify_one_case import verify_case


def findings(function, **more):
    """The one oracle's sentences; the values are right."""
    report = declared(function, **more).verify(tp=2, b=4)
    assert report.failure is None and all(tensor.ok for tensor in report.tensors), str(report)
    return report


def test_a_clean_scheme_has_no_findings():
    def doubled(mesh, x):
        return x * 2

    report = findings(doubled)
    assert (report.protocol, report.cost, report.hygiene) == ((), (), ())


def test_an_input_that_is_modified():
    def doubled(mesh, x):
        y = x * 2
        if mesh.rank("tp") == 1:
            x.data[1] += 1.0
        return y

    assert findings(doubled).hygiene == ("rank 1: input 'x' was modified, first at (1,)",)


@pytest.mark.parametrize(("name", "count"), [("neg_", 2), ("exp_", 2), ("zero_", 0)])
def test_zeros_that_are_modified(name, count):
    """This includes new bits of equal value, as -0 for 0; writing the same bits is not a change."""

    def doubled(mesh, x):
        y = x * 2
        getattr(x.data, name)()
        return y

    assert len(findings(doubled, draw={"x": values("zeros")}).hygiene) == count


class InItsOutput(torch.autograd.Function):
    """2 x, with a gradient that is written into the output's memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = 2 * x
        return ctx.y

    @staticmethod
    def backward(ctx, cotangent):
        return torch.mul(cotangent, 2, out=ctx.y.detach())


def test_an_output_that_the_backward_overwrites():
    """The forward is right, so values are right."""
    report = findings(lambda mesh, x: InItsOutput.apply(x))
    assert report.verdict == "hygiene"
    assert report.hygiene == tuple(
        f"rank {r}: output 'out' was modified by the backward, first at (0,)" for r in (0, 1)
    )


BUFFERS = {}


def in_a_buffer(mesh, x):
    buffer = BUFFERS.setdefault((mesh.rank("tp"), x.shape), torch.empty_like(x))
    buffer.copy_(x.detach() * 2)
    return buffer


def test_an_output_that_the_next_call_overwrites():
    declaration = declared(in_a_buffer, nograd=("x",))
    case = declaration.case(tp=2, b=4)
    next_call = conditions.record_of(case.replace(seed=case.seed + 1))
    report = verify_case(declaration, case.replace(conditions={"call_between": next_call}))
    assert report.hygiene == tuple(
        f"rank {rank}: output 'out' was modified by the next call, first at (0,)" for rank in (0, 1)
    )
    assert report.verdict == "hygiene" and verify_case(declaration, case).ok


def test_an_integer_input_that_is_modified():
    def picked(mesh, x, index):
        y = x * (index + 1).to(x.dtype)
        index.clamp_(max=0)
        return y

    report = declared(
        picked, lambda x, index: x * (index + 1).astype(x.dtype), {"x": "b/tp", "index": "b/tp"},
        draw={"x": values("normal"), "index": integers(1, 3)},
    ).verify(tp=2, b=4)  # fmt: skip
    assert report.hygiene == tuple(f"rank {rank}: input 'index' was modified, first at (0,)" for rank in (0, 1))


def test_a_cotangent_that_is_modified():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent.mul_(2)

    def doubled(mesh, x):
        return Double.apply(x)

    assert findings(doubled).hygiene == tuple(
        f"rank {rank}: cotangent 'out' was modified, first at (0,)" for rank in (0, 1)
    )


@pytest.mark.slow
def test_replicas_that_differ_in_the_last_bit():
    def doubled(mesh, x):
        y = x * 2
        above = torch.nextafter(y, torch.full_like(y, 9.0))
        return y + (above - y).detach() if mesh.rank("tp") == 1 else y

    declaration = declared(
        doubled, inputs={"x": "b tp=R"}, outputs="b tp=I", draw={"x": values("ones")}, mesh={"tp": (2,)}
    )
    report = declaration.verify(tp=2, b=3)
    assert all(tensor.ok for tensor in report.tensors if tensor.role == "output")
    assert report.hygiene == ("out differs between replicas: at (0), tp=1 is unlike tp=0",)
    loose = declared(
        doubled, inputs={"x": "b tp=R"}, outputs="b tp=I", draw={"x": values("ones")}, replicas="budget"
    )  # fmt: skip
    assert loose.verify(tp=2, b=3).hygiene == ()


def test_replicas_of_a_gradient():
    class Slightly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            return 2 * cotangent * (1 + ctx.rank * 2.0**-23), None

    def doubled(mesh, x):
        return Slightly.apply(x, mesh.rank("tp"))

    report = findings(doubled, inputs={"x": "b tp=I"}, outputs="b tp=I")
    assert report.hygiene == ("d/d x differs between replicas: at (0), tp=1 is unlike tp=0",)


def test_infinite_replicas_are_equal():
    def logarithm(mesh, x):
        return torch.cat([x[:1], torch.log(x[1:] * 0)])

    def reference(x):
        return jnp.concatenate([x[:1], x[1:] * 0.0 - jnp.inf])

    report = findings(logarithm, reference=reference, inputs={"x": "b tp=I"}, outputs="b tp=I", nograd=("x",))
    assert report.hygiene == ()


def test_random_numbers():
    def doubled(mesh, x):
        torch.rand(1)
        return x * 2

    moved = "the random state moved; declare random=True if the scheme draws"
    assert findings(doubled).hygiene == (f"rank 0: {moved}", f"rank 1: {moved}")
    assert findings(doubled, random=True).hygiene == ()


def test_ranks_with_different_dtypes():
    def doubled(mesh, x):
        return (x * 2).double() if mesh.rank("tp") == 1 else x * 2

    assert findings(doubled).hygiene == ("rank 1: 'out' is float64, on rank 0 it is float32",)


@pytest.mark.slow
def test_the_default_group_inside_a_sub_group():
    def total(mesh, x):
        return summed(x, None)

    declaration = declared(total, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I")
    assert declaration.verify(tp=2, b=3, inside_subgroup=False).ok  # where the mesh is the world, nothing is wrong
    report = declaration.verify(tp=2, b=3, inside_subgroup=True)
    assert report.case.mesh == {"spare": 2, "tp": 2}
    assert report.verdict == "mismatch"  # twice too much
    [finding] = report.hygiene
    assert finding.startswith("the default group is used inside a sub-group: rank 0, all_reduce float32[3] SUM (group ")

    def well_behaved(mesh, x):
        return summed(x, mesh["tp"])

    right = declared(well_behaved, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I")
    assert right.verify(examples=5, inside_subgroup=True).ok


def exchanged(mesh, x, peer):
    """x of the other rank of tp, by messages without a group."""
    mine, theirs = x.detach().contiguous().clone(), torch.empty(x.shape)
    if mesh.rank("tp") == 0:
        dist.send(mine, peer)
        dist.recv(theirs, peer)
    else:
        dist.recv(theirs, peer)
        dist.send(mine, peer)
    return theirs


def in_a_batch(mesh, x, peer):
    """The same by the idiom of pipelines."""
    mine, theirs = x.detach().contiguous().clone(), torch.empty(x.shape)
    calls = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return theirs


@pytest.mark.parametrize("exchange", [exchanged, in_a_batch])
def test_messages_by_global_rank_are_right_in_every_mesh(exchange):
    def scheme_of(factor):
        def other(mesh, x):
            peer = dist.get_global_rank(mesh["tp"], 1 - mesh.rank("tp"))
            return exchange(mesh, x, peer) * factor

        mesh = {"dp": (2,), "tp": (2,)}
        spec = "b dp=I tp=I"
        return declared(other, lambda x: x * 1.0, {"x": spec}, spec, mesh=mesh, nograd=("x",))

    assert scheme_of(1).verify(b=3, inside_subgroup=True).ok
    case = CaseSpec("other", mesh={"dp": 2, "tp": 2}, dims={"b": 3}, values={"x": {"kind": "normal"}})
    wrong = verify_case(scheme_of(3), case)
    assert not wrong.ok
    assert "send at" not in str(wrong)


def test_a_message_that_leaves_the_mesh():
    """The last rank of the world is the other one of tp only where the mesh is the world; its values are the same."""

    def other(mesh, x):
        return exchanged(mesh, x, dist.get_world_size() - 1 - dist.get_rank())

    declaration = declared(other, lambda x: x * 1.0, {"x": "b tp=I"}, "b tp=I", nograd=("x",))
    alone = CaseSpec("other", mesh={"tp": 2}, dims={"b": 3}, values={"x": {"kind": "normal"}})
    assert verify_case(declaration, alone).ok
    [finding] = verify_case(declaration, alone.replace(mesh={"spare": 2, "tp": 2})).hygiene
    assert finding.startswith("a message leaves the mesh: rank 0, send float32[3] peer=3 tag=0 (group world, #0)")


@pytest.mark.usefixtures("unexplained")
def test_global_ranks_inside_a_sub_group():
    """A group rank taken for a global rank as the root: right in one half of the world, rejected in the other."""

    def shared(mesh, x):
        y = x.detach() * 1
        dist.broadcast(y, src=0, group=mesh["tp"])
        return x + (y - x).detach()

    declaration = declared(shared, lambda x: x * 1.0, {"x": "b tp=I"}, "b tp=I")
    assert declaration.verify(tp=2, b=3, inside_subgroup=False).ok
    assert declaration.verify(tp=2, b=3, inside_subgroup=True).failure is not None


def test_a_scheme_sees_only_its_axes():
    seen = []

    def doubled(mesh, x):
        seen.append((mesh.axes, mesh.size("tp"), mesh.rank("tp"), dist.get_world_size(mesh["tp"])))
        return x * 2

    assert declared(doubled).verify(tp=2, b=4, inside_subgroup=True, examples=1).ok
    assert sorted(seen) == [(("tp",), 2, 0, 2)] * 2 + [(("tp",), 2, 1, 2)] * 2


@pytest.mark.slow
def test_the_default_group_on_a_mesh_of_two_axes_is_named():
    def both(mesh, x):
        return summed(x, None)

    declared_on = {"mesh": {"dp": (2,), "tp": (2,)}, "inputs": {"x": "b/dp tp=P"}, "outputs": "b/dp tp=I"}
    report = declared(both, lambda x: x * 1.0, **declared_on).verify(b=6)
    all_notes = [note for notes in report.notes.values() for note in notes]
    assert any(
        "is over all 4 ranks, which is more than one axis: pass group=mesh[axis]" in note for note in all_notes
    ), all_notes
