"""Where a tensor is wrong: halos by their width, and regions of one rank that another mesh refutes."""

import jax.numpy as jnp
import torch
import torch.distributed as dist

from shardproof import scheme, values


def declared(function, reference, spec="b s/cp", **more):
    defaults = {"mesh": {"cp": (2, 3)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    return scheme(reference=reference, inputs={"x": spec}, outputs=spec, **{**defaults, **more})(function)


def notes(report):
    assert not report.ok and report.failure is None, str(report)
    return [note for of_tensor in report.notes.values() for note in of_tensor]


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
    assert first.startswith("wrong only at the last 2 places before a shard border of s (all of its elements)"), first


def test_the_two_chunks_of_the_last_rank_have_a_border_between_them():
    def differences_within_chunks(mesh, x):
        return torch.cat([chunk.diff(dim=1, prepend=chunk[:, :1] * 0) for chunk in x.chunk(2, 1)], 1)

    def reference(x):
        return x - jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]

    layout = "b s/cp:dual_chunk_swap"
    declaration = declared(differences_within_chunks, reference, layout, mesh={"cp": (2,)}, nograd=("x",))
    first = declaration.verify(s=16, b=1).notes["out"][0]
    assert first.startswith("wrong only at the first place after a shard border of s (all of its elements)"), first


class BorrowsWithoutReturning(torch.autograd.Function):
    """The next rank's first element behind the own ones; the backward keeps only the gradient of the own."""

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


def test_a_missing_gradient_of_a_border_is_no_region_of_a_rank():
    """On two ranks it is rank 1 alone that lacks it, on three rank 2 as well."""

    def differences(mesh, x):
        longer = BorrowsWithoutReturning.apply(x, mesh["cp"])
        return longer[:, 1:] - longer[:, :-1]

    def reference(x):
        longer = jnp.pad(x, ((0, 0), (0, 1)))
        return longer[:, 1:] - longer[:, :-1]

    declaration = declared(differences, reference)
    first, *others = notes(declaration.verify(cp=2, s=6, b=2))
    assert first.startswith("wrong only at the first place after a shard border of s (all of its elements)"), first
    assert not any("rank 1 owns" in note for note in others)


def test_a_region_is_counted_in_a_larger_case_and_names_a_mesh_that_refutes_it():
    def wrong_on_the_last_rank(mesh, x):
        is_last = mesh.rank("cp") == mesh.size("cp") - 1
        return torch.where(is_last & (x > 0), x.sin(), x)

    declaration = declared(wrong_on_the_last_rank, lambda x: x, nograd=("x",))
    (note, *_) = [note for note in notes(declaration.verify(cp=2)) if note.startswith("wrong only where")]
    assert note.startswith("wrong only where cp rank 1 owns (") and "all of its" not in note, note
    (note, *_) = notes(declaration.verify(cp=2, s=6, b=2))
    assert note.startswith("wrong only where cp rank 1 owns (") and note.endswith("); not so on cp=3"), note
