"""Properties of attention beyond equality with the reference, for every exchange and on both engines."""

import numpy as np
import pytest
import torch

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.context_parallel.ulysses import _group_rows
from torch_impl.layouts import TokenLayout

EXCHANGES = ("ring", "all_gather", "ulysses")
S, H, HK, P = 32, 4, 2, 4
PADDED, REAL = [0, 16, 16, 32], [0, 13, 13, 14]  # a sequence of one token: three of four ranks hold its padding only
generator = torch.Generator().manual_seed(0)
Q, K, V, COTANGENT = (torch.randn(1, heads, S, P, generator=generator, dtype=torch.float64) for heads in (H, HK, HK, H))


def on_ranks(body, cp=4, engine="lockstep"):
    return run(body, CaseSpec(scheme="context_parallel", mesh={"cp": cp}, engine=engine), engine)


def on_two_axes(body):
    """Four ranks as usp has them."""
    return run(body, CaseSpec(scheme="context_parallel", mesh={"ring": 2, "heads": 2}))


def layout_of(mesh, kind, cp=None):
    size, rank = cp or (mesh.size("cp"), mesh.rank("cp"))
    sizes = dict(cp_size=size, cp_rank=rank)
    if kind == "packed":
        return TokenLayout.packed(torch.tensor(PADDED), torch.tensor(REAL), **sizes)
    return TokenLayout.dense(kind, S, **sizes)


def attended(mesh, kind, exchange, tensors=(Q, K, V), cotangent=COTANGENT, **rules):
    """Full output and gradients, put together from all ranks' shards."""
    layout = layout_of(mesh, kind)
    shards = [layout.shard(x, 2).requires_grad_() for x in tensors]
    out = context_parallel_attention(*shards, group=mesh["cp"], layout=layout, exchange=exchange, **rules)
    gradients = torch.autograd.grad(out, shards, layout.shard(cotangent, 2))
    full = [layout.unshard(x.detach(), 2, mesh["cp"], gradient="I").numpy() for x in (out, *gradients)]
    return dict(zip(("out", "q", "k", "v"), full, strict=True))


def attended_over_two_axes(mesh, kind, tensors):
    """Where each row stands in the whole, and the output of usp there."""
    layout = layout_of(mesh, kind, (4, 2 * mesh.rank("ring") + mesh.rank("heads")))
    shards = [layout.shard(x, 2) for x in tensors]
    out = context_parallel_attention(*shards, mesh=mesh.device_mesh, layout=layout, exchange="usp")
    return layout.local_index.numpy(), out.numpy()


@pytest.mark.parametrize("kind", ["packed", "dual_chunk_swap", "contiguous"])
def test_a_token_changes_nothing_before_it_over_two_axes(kind):
    tokens, ends = (3, 12, 16), (13, 13, 17) if kind == "packed" else (S, S, S)

    def body(mesh, case):
        rows, full = attended_over_two_axes(mesh, kind, (Q, K, V))
        changes = []
        for token in tokens:
            moved = [x.index_add(2, torch.tensor([token]), torch.ones_like(x[:, :, :1])) for x in (Q, K, V)]
            changes.append(rows[(attended_over_two_axes(mesh, kind, moved)[1] != full).any((0, 1, 3))])
        return changes

    ranks = on_two_axes(body).results
    for i, (token, end) in enumerate(zip(tokens, ends, strict=True)):
        changed = np.sort(np.concatenate([rows[i] for rows in ranks]))
        np.testing.assert_array_equal(changed, np.arange(token, end))


def test_layers_share_the_rows_of_a_group():
    layout = layout_of(None, "packed", (4, 1))
    assert _group_rows(layout, 2) is _group_rows(layout, 2)
    assert _group_rows(layout, 2) is not _group_rows(layout, 4)


@pytest.mark.parametrize("kind", ["packed", "dual_chunk_swap"])
@pytest.mark.parametrize("exchange", [*EXCHANGES, "usp"])
def test_caches_built_in_inference_serve_training(exchange, kind):
    """A layout of its own, so that all that is derived from it and kept is derived in inference."""

    def body(mesh, case):
        rank = 2 * mesh.rank("ring") + mesh.rank("heads") if exchange == "usp" else mesh.rank("cp")
        layout = layout_of(mesh, kind, (4, rank))
        group = {"mesh": mesh.device_mesh} if exchange == "usp" else {"group": mesh["cp"]}
        shards = [layout.shard(x, 2).requires_grad_() for x in (Q, K, V)]

        def attend():
            return context_parallel_attention(*shards, **group, layout=layout, exchange=exchange, window=7)

        with torch.inference_mode():
            first = attend()
        out = attend()
        gradients = torch.autograd.grad(out, shards, layout.shard(COTANGENT, 2))
        return torch.equal(first, out), [x.shape[2] for x in gradients]

    ranks = on_two_axes(body) if exchange == "usp" else on_ranks(body)
    assert ranks.results == ((True, [S // 4] * 3),) * 4


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", ["packed", "dual_chunk_swap", "contiguous", "striped"])
def test_a_token_changes_nothing_before_it_nor_in_another_sequence(kind, exchange):
    tokens = (3, 12, 16) if kind == "packed" else (5, 31)

    def body(mesh, case):
        unchanged = attended(mesh, kind, exchange)["out"]
        changes = []
        for token in tokens:
            moved = [x.clone() for x in (Q, K, V)]
            for x in moved:
                x[:, :, token] += 1.0
            changes.append((attended(mesh, kind, exchange, moved)["out"] != unchanged).any((0, 1, 3)))
        return changes

    for changed in on_ranks(body).results:
        for token, rows in zip(tokens, changed, strict=True):
            end = next((stop for stop in PADDED if stop > token), S) if kind == "packed" else S
            real = min(end, 13 if token < 16 else 17) if kind == "packed" else S
            np.testing.assert_array_equal(rows.nonzero()[0], np.arange(token, real))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "dual_chunk_swap", "contiguous", "striped"])
def test_padding_gives_nothing_and_gets_nothing_whatever_it_holds(kind):
    """NaN in every padding row gives the same outputs and gradients as zeros there."""

    def body(mesh, case):
        padding = layout_of(mesh, kind).padding_mask[:, None]
        spoilt = [x.masked_fill(padding, torch.nan) for x in (Q, K, V, COTANGENT)]
        clean = [x.masked_fill(padding, 0.0) for x in (Q, K, V, COTANGENT)]
        compared = []
        for exchange in EXCHANGES:
            for causal in (True, False):
                a, b = (attended(mesh, kind, exchange, x[:3], x[3], causal=causal) for x in (spoilt, clean))
                compared.append((a, b, padding[:, 0].numpy()))
        return compared

    for triples in on_ranks(body).results:
        for spoilt, clean, padding in triples:
            for name in clean:
                np.testing.assert_array_equal(spoilt[name], clean[name])
                assert not clean[name][:, :, padding].any()
                assert np.isfinite(clean[name]).all() and clean[name].any()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_messages_follow_from_the_layout_alone(engine):
    """Not from the values; and whoever gathers keys or exchanges heads sends as much as every other."""

    def ledger_of(tensors, exchanges):
        def body(mesh, case):
            for exchange in exchanges:
                attended(mesh, "packed", exchange, tensors)

        ledger = on_ranks(body, engine=engine).ledger
        return [[(row.op, row.dtypes, row.shapes, row.phase) for row in ledger.of(rank)] for rank in range(4)]

    rows = ledger_of((Q, K, V), EXCHANGES)
    assert rows[0] and rows == ledger_of([torch.zeros_like(x) for x in (Q, K, V)], EXCHANGES)
    alike = ledger_of((Q, K, V), ("all_gather", "ulysses"))
    assert alike[0] and all(of_rank == alike[0] for of_rank in alike)


def test_more_sequences_send_no_more():
    def ledger(lengths):
        def body(mesh, case):
            cu = torch.tensor([0, *lengths]).cumsum(0)
            shards = [x[:, :, : S // 2].clone().requires_grad_() for x in (Q, K, V)]
            out = context_parallel_attention(*shards, group=mesh["cp"], layout="dual_chunk_swap", cu_seqlens=cu)
            out.sum().backward()

        return [(row.op, row.shapes, row.phase) for row in on_ranks(body, cp=2).ledger.rows]

    assert ledger([32]) == ledger([4] * 8) == ledger([16, 0, 12, 4])


def test_one_layout_serves_every_layer_and_each_spelling():
    """A group or a mesh, a name or a layout, offsets apart or carried: the same bits."""

    def body(mesh, case):
        layout = layout_of(mesh, "packed")
        shards = [layout.shard(x, 2) for x in (Q, K, V)]
        dense = TokenLayout.packed(torch.tensor(PADDED), cp_size=4, cp_rank=mesh.rank("cp"))
        ways = (
            dict(group=mesh["cp"], layout=dense),
            dict(mesh=mesh.device_mesh, layout=dense),
            dict(group=mesh["cp"], layout="packed", cu_seqlens=torch.tensor(PADDED)),
            dict(group=mesh["cp"], layout=dense, cu_seqlens=torch.tensor([*PADDED, -1000])),
            dict(group=mesh["cp"], layout=dense, cu_seqlens=PADDED),
            dict(group=mesh["cp"], layout="packed", cu_seqlens=PADDED),
            dict(group=mesh["cp"], layout="dual_chunk_swap", cu_seqlens=torch.tensor(PADDED), scale=P**-0.5),
        )
        outs = [context_parallel_attention(*shards, **way) for way in ways]
        return [torch.equal(out, outs[0]) for out in outs]

    assert all(map(all, on_ranks(body).results))


def test_a_rank_that_needs_no_gradient_of_keys_still_takes_part():
    def body(mesh, case):
        layout = layout_of(mesh, "dual_chunk_swap")
        q, k, v = (layout.shard(x, 2) for x in (Q, K, V))
        q.requires_grad_()
        out = context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout)
        (alone,) = torch.autograd.grad(out, q, layout.shard(COTANGENT, 2))
        full = layout.unshard(alone, 2, mesh["cp"], gradient="I").numpy()
        return np.array_equal(full, attended(mesh, "dual_chunk_swap", "ring")["q"])

    assert all(on_ranks(body).results)


STRIDED = {
    "every other number": lambda x: torch.stack([x, -x], -1).flatten(3)[..., ::2],
    "rows across": lambda x: x.mT.contiguous().mT,
    "one number for all": lambda x: x[..., :1].expand(-1, -1, -1, x.shape[-1]),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("way", STRIDED)
def test_queries_of_any_strides(way, exchange):
    """Strides that lead elsewhere than the numbers: the same bits as of queries side by side."""

    def body(mesh, case):
        q, *keys = (x[:, :, :8] for x in (Q, K, V))
        runs = []
        for kind in ("dual_chunk_swap", "packed"):
            layout = TokenLayout.dense("dual_chunk_swap", 16, cp_size=2, cp_rank=mesh.rank("cp"))
            if kind == "packed":
                layout = TokenLayout.packed([0, 4, 16], cp_size=2, cp_rank=mesh.rank("cp"))
            strided = STRIDED[way](q)
            for queries in (strided, strided.clone(memory_format=torch.contiguous_format)):
                leaves = [x.detach().requires_grad_() for x in (queries, *keys)]
                out = context_parallel_attention(*leaves, group=mesh["cp"], layout=layout, exchange=exchange)
                runs.append([x.numpy() for x in (out.detach(), *torch.autograd.grad(out, leaves, COTANGENT[:, :, :8]))])
        return runs

    for results in on_ranks(body, cp=2).results:
        for leaf, clean in (results[:2], results[2:]):
            for x, y in zip(leaf, clean, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("way", ["every other number", "rows across"])
def test_queries_of_any_strides_that_choose_one_key(way, exchange):
    """Of queries that each want one key alone the output is that key's value, exactly."""
    chosen = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    values = torch.randn(1, 2, 16, 16, generator=generator)

    def body(mesh, case):
        layout = TokenLayout.dense("contiguous", 16, cp_size=2, cp_rank=mesh.rank("cp"))
        q, k = (x.expand(1, 2, 16, 16) for x in (1e4 * torch.eye(16)[chosen], torch.eye(16)))
        shards = STRIDED[way](layout.shard(q, 2)), layout.shard(k, 2), layout.shard(values, 2)
        out = context_parallel_attention(
            *shards, group=mesh["cp"], layout=layout, exchange=exchange, causal=False, scale=1.0
        )
        return torch.equal(out, layout.shard(values[:, :, chosen], 2))

    assert all(on_ranks(body, cp=2).results)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_output_may_be_written_to(exchange):
    """It is no view; where it was saved, a gradient that would be wrong is rejected, as of torch's own attention."""

    def body(mesh, case):
        def attend(q):
            keys = (x[:, :, :8] for x in (K, V))
            return context_parallel_attention(q, *keys, group=mesh["cp"], layout="contiguous", exchange=exchange)

        q = Q[:, :, :8].clone().requires_grad_()
        out, twice = attend(q), attend(q).mul_(2)
        assert not out._is_view() and torch.equal(twice, 2 * out)
        (expected,) = torch.autograd.grad(2 * out, q, COTANGENT[:, :, :8])
        try:
            (gradient,) = torch.autograd.grad(twice, q, COTANGENT[:, :, :8])
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return torch.equal(gradient, expected)

    assert all(on_ranks(body, cp=2).results)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_second_derivative_is_rejected(exchange):
    """The gradient is computed outside of autograd: its own derivative would lack the terms of queries and keys."""

    def body(mesh, case):
        leaves = [x[:, :, :8].clone().requires_grad_() for x in (Q, K, V)]
        out = context_parallel_attention(*leaves, group=mesh["cp"], layout="contiguous", exchange=exchange)
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="_BlockwiseAttention: its gradient cannot be differentiated again"):
            sum(x.square().sum() for x in gradients).backward()

    on_ranks(body, cp=2)
