"""Where a tensor is wrong: halos by their width, and regions of one rank that another mesh refutes."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardproof import scheme, values
from shardproof.explain.evidence import Evidence
from shardproof.explain.places import wrong_region


def declared(function, reference, spec="b s/cp", **more):
    defaults = {"mesh": {"cp": (2, 3)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs={"x": spec}, outputs=spec, **{**defaults, **more})(function)


def notes(report):
    assert not report.ok and report.failure is None, str(report)
    return [note for tensor_notes in report.notes.values() for note in tensor_notes]


@pytest.mark.slow
def test_a_halo_without_backward_is_named_by_its_width():
    """The rows that the next rank reads have no gradient from there, whatever the mesh."""

    def convolved(mesh, x):
        rank, halo = mesh.rank("cp"), x[:, -2:].detach().contiguous()
        halos = [torch.empty_like(halo) for _ in range(mesh.size("cp"))]
        dist.all_gather(halos, halo, group=mesh["cp"])
        before = halos[rank - 1] if rank else torch.zeros_like(halo)
        padded = torch.cat([before, x], 1)
        return padded[:, 2:] + 2 * padded[:, 1:-1] + 3 * padded[:, :-2]

    def reference(x):
        padded = jnp.pad(x, ((0, 0), (2, 0)))
        return padded[:, 2:] + 2 * padded[:, 1:-1] + 3 * padded[:, :-2]

    declaration = declared(convolved, reference, mesh={"cp": (1, 2, 4)}, assume=lambda case: case.dims["s"] >= 8)
    first = declaration.verify().notes["d/d x"][0]
    assert first.startswith("wrong only at the last 2 places before a shard border of s (all elements there)"), first


def test_the_two_chunks_of_the_last_rank_have_a_border_between_them():
    def differences_within_chunks(mesh, x):
        return torch.cat([chunk.diff(dim=1, prepend=chunk[:, :1] * 0) for chunk in x.chunk(2, 1)], 1)

    def reference(x):
        return x - jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]

    layout = "b s/cp:dual_chunk_swap"
    declaration = declared(differences_within_chunks, reference, layout, mesh={"cp": (2,)}, nograd=("x",))
    first = declaration.verify(s=16, b=1).notes["out"][0]
    assert first.startswith("wrong only at the first place after a shard border of s (all elements there)"), first


class BorrowsWithoutReturning(torch.autograd.Function):
    """Append the next rank's first element; the backward keeps only the gradient of the rank's own elements."""

    @staticmethod
    def forward(ctx, x, group):
        first = [torch.empty_like(x[:, :1]) for _ in range(dist.get_world_size(group))]
        dist.all_gather(first, x[:, :1].contiguous(), group=group)
        rank = dist.get_rank(group)
        last = torch.zeros_like(first[0]) if rank == len(first) - 1 else first[rank + 1]
        return torch.cat([x, last], 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, :-1], None


@pytest.mark.slow
def test_a_missing_border_gradient_is_not_a_ranks_region():
    """On two ranks it is rank 1 alone that lacks it, on three rank 2 as well."""

    def differences(mesh, x):
        longer = BorrowsWithoutReturning.apply(x, mesh["cp"])
        return longer[:, 1:] - longer[:, :-1]

    def reference(x):
        longer = jnp.pad(x, ((0, 0), (0, 1)))
        return longer[:, 1:] - longer[:, :-1]

    declaration = declared(differences, reference)
    first, *others = notes(declaration.verify(cp=2, s=6, b=2))
    assert first.startswith("wrong only at the first place after a shard border of s (all elements there)"), first
    assert not any("rank 1 owns" in note for note in others)


@pytest.mark.slow
def test_a_region_is_counted_in_a_larger_case_and_names_a_mesh_that_refutes_it():
    def wrong_on_the_last_rank(mesh, x):
        is_last = mesh.rank("cp") == mesh.size("cp") - 1
        return torch.where(is_last & (x > 0), x.sin(), x)

    declaration = declared(wrong_on_the_last_rank, lambda x: x, nograd=("x",))
    (note, *_) = [note for note in notes(declaration.verify(cp=2)) if note.startswith("wrong only where")]
    assert note.startswith("wrong only where cp rank 1 owns (") and "all of its" not in note, note
    (note, *_) = notes(declaration.verify(cp=2, s=6, b=2))
    assert note.startswith("wrong only where cp rank 1 owns (") and note.endswith("); not so on cp=3"), note


@pytest.mark.slow
def test_a_halo_that_small_cases_hide_is_named_by_a_case_that_shows_it():
    """With four places on two ranks, rank 1 has only the first two places after the border."""

    class NextTwo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            firsts = [torch.empty_like(x[..., :2]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(firsts, x[..., :2].contiguous(), group=group)
            return torch.cat([x, [*firsts, torch.zeros_like(firsts[0])][dist.get_rank(group) + 1]], -1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient[..., :-2], None

    def convolved(mesh, x, weight):
        return torch.nn.functional.conv1d(NextTwo.apply(x, mesh["cp"]), weight)

    def reference(x, weight):
        longer, size = jnp.pad(x, ((0, 0), (0, 0), (0, 2))), x.shape[-1]
        return sum(jnp.einsum("ncs,oc->nos", longer[..., i : i + size], weight[..., i]) for i in range(3))

    declaration = scheme(
        reference=reference, mesh={"cp": (1, 2, 4)}, inputs={"x": "n c s/cp", "weight": "o c 3 cp=R"},
        outputs="n o s/cp", draw={"x": values("normal"), "weight": values("normal")}, dtypes=("float32",),
        reduction=("c",), assume=lambda case: case.s >= 2 * case.cp, nograd=("weight",),
    )(convolved)  # fmt: skip
    named = "wrong only at the first 2 places after a shard border of s (all elements there)"
    for sizes in ({}, {"cp": 2, "s": 32}, {"cp": 4, "s": 32}):
        first, *others = declaration.verify(**sizes).notes["d/d x"]
        assert first.startswith(named) and "not so on" not in first, first
        assert not any("owns" in note for note in others), others


def test_a_note_on_a_border_does_not_fit_a_case_that_has_no_such_border():
    got, mask = np.zeros(8), np.arange(8) == 3
    got[3] = 1.0
    evidence = Evidence("x", "output", got, np.zeros(8), np.full(8, 1e-6), borders={"a border": mask})
    (note,) = wrong_region(evidence)
    elsewhere, without = replace(evidence, borders={"a border": ~mask}), replace(evidence, borders={})
    assert [note.applies(each) for each in (evidence, elsewhere, without)] == [True, True, False]
    assert [note.fits(each) for each in (evidence, elsewhere, without)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "h": 8}], ids=str)
def test_a_border_is_not_named_if_another_size_is_wrong_elsewhere(sizes):
    """Each rank takes keys as if its heads were all heads. With two heads on a rank, only border heads are wrong."""

    def scores(mesh, x, query, key):
        own = torch.arange(len(query)) * 2 // len(query)
        return torch.einsum("td,hde,hed->th", x, query, key[own])

    def reference(x, query, key):
        own = jnp.arange(len(query)) * 2 // len(query)
        return jnp.einsum("td,hde,hed->th", x, query, key[own])

    declaration = scheme(
        reference=reference, mesh={"tp": (1, 2, 4)}, outputs="t h/tp", dims={"h": (4, 8)}, reduction=("d", "e"),
        inputs={"x": "t d tp=R", "query": "h/tp d e", "key": "2 e d tp=R"}, dtypes=("float32",),
        draw={name: values("normal") for name in ("x", "query", "key")}, nograd=("x", "key"),
    )(scores)  # fmt: skip
    all_notes = notes(declaration.verify(**sizes))
    assert not any("shard borders" in note for note in all_notes), all_notes


class WithPaddedIds(torch.autograd.Function):
    """Rows by ids; its backward pads the ids with zeros, and so writes into the first row."""

    @staticmethod
    def forward(ctx, x, ids):
        ctx.ids, ctx.shape = ids, x.shape
        return x[ids]

    @staticmethod
    def backward(ctx, cotangent):
        ids = torch.cat([ctx.ids, ctx.ids.new_zeros(1)])
        rows = torch.cat([cotangent, torch.ones_like(cotangent[:1])])
        return torch.zeros(ctx.shape).index_add(0, ids, rows), None


@pytest.mark.usefixtures("without_line_edits")
def test_the_first_place_of_a_dim_is_named():
    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (1, 2)}, inputs={"x": "n d/tp"}, outputs="n d/tp",
        draw={"x": values("normal")}, dtypes=("float32",),
    )(lambda mesh, x: WithPaddedIds.apply(x, torch.arange(len(x)).flip(0)).flip(0))  # fmt: skip
    first = declaration.verify().notes["d/d x"][0]
    assert first.startswith("wrong only at the first place of n (all elements there"), first
