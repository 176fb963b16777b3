"""Wrong lines that no number tells, and the edit of the line that makes every tensor right."""

import ast
import os

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.noted_scheme import notes_on_case
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, token_below, values
from shardproof.experiments.alternatives import alternatives
from shardproof.experiments.edited_lines import DRAWN, DRAWN_FAILING, MOST_DRAWN, ORDINARY, drawn_cases
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.line_edits import edits_of
from shardproof.experiments.names import Names
from shardproof.experiments.right_apart import JudgedCase, which_are_right
from shardproof.experiments.running_lines import running_functions
from shardproof.experiments.statement_alternatives import of_statement
from torch_impl.collectives import all_reduce, ring_shift


def first_note(*declared, label="out", **more):
    return notes_on_case(*declared, **more)[label][0]


def of_the_wrong_neighbour(mesh, x):
    size, rank = mesh.size("tp"), mesh.rank("tp")
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=mesh["tp"])
    before = parts[(rank + 1) % size][-1:]
    return torch.cat([before, x[:-1]]) * 2 - x


def a_row_too_many(mesh, x, w):
    rows = mesh.rank("tp") * len(x) + torch.arange(len(x))
    kept = torch.where((rows <= 3)[:, None], x, 0)
    return all_reduce(kept.sum(0), mesh["tp"]) * w


def of_first_rows(x, w):
    return jnp.where(jnp.arange(x.shape[0])[:, None] < 3, x, 0).sum(0) * w


def test_a_neighbour_on_the_wrong_side():
    note = first_note(
        of_the_wrong_neighbour, lambda x: 2.0 * jnp.roll(x, 1, 0) - x, {"x": "s/tp d"}, "s/tp d",
        {"tp": 4, "s": 8, "d": 3}, nograd=("x",),
    )  # fmt: skip
    line = line_of(of_the_wrong_neighbour, "before = ")
    assert note == f"{RIGHT_ONCE}{line} has `parts[(rank - 1) % size][-1:]`, not `parts[(rank + 1) % size][-1:]`"


@pytest.mark.slow
def test_a_row_too_many():
    case = {"tp": 2, "s": 8, "d": 3}
    note = first_note(a_row_too_many, of_first_rows, {"x": "s/tp d", "w": "d tp=I"}, "d tp=I", case)
    assert note.startswith(f"{RIGHT_ONCE}{line_of(a_row_too_many, 'rows <= 3')} has `torch.where((rows ")


def rows_without_their_mask(mesh, i, table):
    own = i - mesh.rank("tp") * len(table)
    here = (own >= 0) & (own < len(table))  # noqa: F841  the mistake: it is never read
    rows = table[own.clamp(0, len(table) - 1)]
    return all_reduce(rows, mesh["tp"]) * 2


def rows_of_a_half_open_range(mesh, i, table):
    n = len(table)
    own = i - mesh.rank("tp") * n
    here = own >= 0
    rows = table[own.clamp(0, n - 1)] * here[..., None]
    return all_reduce(rows, mesh["tp"]) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "word", "words"),
    [
        (rows_without_their_mask, "rows = ", "table[own.clamp(0, len(table) - 1)] * here[..., None]"),
        (rows_of_a_half_open_range, "here = ", "(own >= 0) & (own < n)"),
    ],
)
def test_rows_of_other_ranks(function, word, words):
    note = first_note(
        function, lambda i, table: 2.0 * table[i], {"i": "b", "table": "v/tp d"}, "b d tp=I",
        {"tp": 2, "b": 6, "v": 8, "d": 3}, draw={"i": token_below("v"), "table": values("normal")},
    )  # fmt: skip
    assert f"{line_of(function, word)} has `{words}`" in note


def decayed_sum(mesh, x, decay):
    total = torch.zeros_like(x[0])
    for row, keep in zip(x, decay, strict=True):  # noqa: B007  the mistake: it is never read
        total = total + row
    return total * 3


@pytest.mark.slow
def test_a_running_sum_that_is_not_scaled():
    def reference(x, decay):
        total = jnp.zeros_like(x[0])
        for row, keep in zip(x, decay, strict=True):
            total = total * keep[..., None] + row
        return 3.0 * total

    note = first_note(
        decayed_sum, reference, {"x": "s b/tp d", "decay": "s b/tp"}, "b/tp d", {"tp": 2, "s": 3, "b": 4, "d": 3},
        nograd=("x", "decay"),
    )  # fmt: skip
    line = line_of(decayed_sum, "total + row")
    assert note == f"{RIGHT_ONCE}{line} has `total * keep[..., None] + row`, not `total + row`"


class _LogSumExp(torch.autograd.Function):
    """The logsumexp along a sharded dim; the mistake is the softmax of each part alone in backward."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.exp().sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(x, total.log())
        return total.log()

    @staticmethod
    def backward(ctx, grad):
        x, lse = ctx.saved_tensors  # noqa: RUF059  it is never read
        return grad[..., None] * torch.softmax(x, -1), None


def log_of_all(mesh, x):
    return _LogSumExp.apply(x, mesh["tp"])


def test_a_softmax_of_each_part_beside_the_logsumexp_of_all():
    note = first_note(
        log_of_all,
        lambda x: jax.nn.logsumexp(x, -1),
        {"x": "b v/tp"},
        "b tp=I",
        {"tp": 2, "b": 3, "v": 8},
        label="d/d x",
    )
    line = line_of(_LogSumExp.backward, "torch.softmax")
    assert note == f"{RIGHT_ONCE}softmax at {line} is the softmax over all ranks of tp, not of each rank's own part"


class _Weighted(torch.autograd.Function):
    """w * x ** 2; the mistake is another tensor in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return w * x**2

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return 2 * grad * w.tanh() * w, grad * x**2


@pytest.mark.slow
def test_a_tensor_that_is_computed_where_a_stored_one_belongs():
    note = first_note(
        lambda mesh, x, w: _Weighted.apply(x, w), lambda x, w: w * x**2, {"x": "b v/tp", "w": "b v/tp"}, "b v/tp",
        {"tp": 2, "b": 3, "v": 8}, label="d/d x",
    )  # fmt: skip
    line = line_of(_Weighted.backward, "w.tanh")
    assert note.startswith(f"{RIGHT_ONCE}{line} has `(2 * grad * x * w, grad * x ** 2)`, not ")


def of_a_third_more(mesh, x):
    return all_reduce(x.sum(0), mesh["tp"]) * (4.0 / 3.0)


def test_a_factor_without_a_meaning_is_left_out_beside_its_line():
    """A report prints an edit that several tensors share below them, so that 1.333 would be its first note."""
    case = {"tp": 2, "b": 8, "d": 4}
    (note,) = notes_on_case(of_a_third_more, lambda x: 1.0 * x.sum(0), {"x": "b/tp d"}, "d tp=I", case)["out"]
    assert note.startswith(f"{RIGHT_ONCE}{line_of(of_a_third_more, '4.0')} has `")


def test_a_tensor_that_is_never_read_takes_the_index_of_its_neighbour():
    kinds = {"state": "tensor of floats, 1", "totals": "tensor of floats, 1"}
    whole = ast.parse("state + ends[r]", mode="eval").body
    tried = alternatives(whole.left, whole, Names(kinds, {}, {}, ("tp",), unread=frozenset({"totals"})))
    assert "state * totals[r]" in {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


def of_a_local_length(mesh, x):
    length = len(x)
    return x * torch.tensor(1.0 + length / 3).log()


@pytest.mark.slow
def test_a_length_of_one_rank_for_the_length_of_all():
    note = first_note(
        of_a_local_length, lambda x: x * jnp.log(1.0 + x.shape[0] / 3), {"x": "s/tp d"}, "s/tp d",
        {"tp": 2, "s": 8, "d": 3},
    )  # fmt: skip
    assert note.startswith(f"{RIGHT_ONCE}{line_of(of_a_local_length, 'length = ')} has `len(x) * mesh.size('tp')`, not")


def test_no_line_is_named_if_no_small_edit_is_right():
    note = first_note(
        lambda mesh, x: x.cos(), lambda x: jnp.tanh(x) + x**3 / 7.0, {"x": "s/tp d"}, "s/tp d", {"tp": 2, "s": 4}
    )
    assert not note.startswith(RIGHT_ONCE)


def keys_that_move_alone(mesh, k, v):
    total = torch.zeros_like(k)
    for _ in range(mesh.size("tp")):
        total = total + k * v
        k = ring_shift(k, mesh["tp"])
    return total


def test_a_step_that_a_second_name_lacks():
    def reference(k, v, mesh):
        total = (k * v).reshape(mesh["tp"], -1, k.shape[-1]).sum(0)
        return jnp.tile(total, (mesh["tp"], 1))

    note = first_note(
        keys_that_move_alone, reference, {"k": "s/tp d", "v": "s/tp d"}, "s/tp d", {"tp": 2, "s": 4, "d": 3},
        nograd=("k", "v"),
    )  # fmt: skip
    line = line_of(keys_that_move_alone, "ring_shift")
    assert note.startswith(f"{RIGHT_ONCE}{line} has `k, v = (ring_shift(k, mesh['tp']), ring_shift(v, mesh['tp']))`")


@pytest.mark.parametrize(("bound", "count"), [(-9.0, DRAWN), (0.9, MOST_DRAWN)])
def test_a_mistake_that_shows_in_few_cases_is_tried_on_more(bound, count):
    """Any edit is right in a case that has no large number."""
    declaration = scheme(
        reference=lambda x: jnp.where(x > bound, x + 1.0, x), inputs={"x": "b/tp"}, outputs="b/tp",
        mesh={"tp": (1, 2)}, nograd=("x",),
        draw={"x": values("normal")}, dtypes=("float32",), dims={"b": (2,)},
    )(lambda mesh, x: 1 * x)  # fmt: skip
    judged = drawn_cases(declaration, declaration.case(tp=2))
    failing = sum(not case.is_right(declaration) for case in judged)
    assert DRAWN <= len(judged) <= count and failing >= DRAWN_FAILING, (len(judged), failing)
    assert (len(judged) == DRAWN) == (count == DRAWN)


class _EndsItsProcess:
    def applied(self):
        os._exit(1)


def test_an_edit_that_ends_its_process_is_none_and_the_next_are_tried():
    declaration = scheme(
        reference=of_first_rows, inputs={"x": "s/tp d", "w": "d tp=I"}, outputs="d tp=I", mesh={"tp": (1, 2, 4)}
    )(a_row_too_many)
    case = declaration.case(tp=2, s=8, d=3)
    line = int(line_of(a_row_too_many, "rows <= 3").rpartition(":")[2])
    edits = [edit for edit in edits_of(running_functions(declaration, case), ["tp"]) if edit.line == line][::2]
    judged = [JudgedCase.of(declaration, case)]
    found = which_are_right(declaration, edits, judged, 60.0)
    assert found
    with_ends = [each for edit in edits for each in (_EndsItsProcess(), edit)]
    assert which_are_right(declaration, with_ends, judged, 60.0) == [2 * number + 1 for number in found]
    assert not judged[0].is_right(declaration)  # the function itself is as it was


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("a / n", "a"),
        ("a + n", "a - n"),
        ("a < n", "a <= n"),
        ("x.sum(0).detach()", "x.sum(0)"),
        ("torch.no_grad()", "torch.enable_grad()"),
        ("x[1:]", "x"),
        ("rank", "rank + 1"),
        ("rank", "n"),
        ("torch.maximum(a, b)", "torch.minimum(a, b)"),
        ("f(a, b)", "f(b, a)"),
        ("mesh['tp']", "mesh"),
        ("n if a else b", "b"),
        ("not a", "a"),
        ("F.gelu(x)", "F.gelu(x, approximate='tanh')"),
        ("0", "rank"),
        ("layout.size", "layout.rank"),
        ("torch.arange(n)", "torch.arange(n) + mesh.rank() * n"),
        ("torch.arange(len(x))", "torch.arange(len(x)) + view.rank('tp') * len(x)"),
        ("torch.arange(n)", "view.global_ids('s')"),
        ("torch.arange(n) + rank * n", "view.global_ids('s')"),
        ("x.repeat(1, n, 1)", "x.repeat_interleave(n, -2)"),
        ("x.repeat_interleave(n, 1)", "torch.cat([x] * n, 1)"),
        ("ids >= 0", "(ids >= 0) & (ids < n)"),
        ("ids < n", "(ids < n) & (ids >= 0)"),
        ("x[ids]", "x[ids] * forgotten[..., None]"),
        ("x.mean(0)", "x.mean(0) / view.size('tp')"),
        ("x.flip(0).reshape(n)", "x"),
        ("x.log()", "a"),
        ("torch.log(x)", "a"),
        ("x.shape[0]", "x.shape[0] * view.size('tp')"),
        ("x.size(0)", "x.size(0) * view.size('tp')"),
        ("len(x)", "len(x) * view.size('tp')"),
        ("n", "n * view.size('tp')"),
        ("torch.softmax(x * n, -1)", "(x * n - stored[..., None]).exp()"),
        ("x.softmax(-1)", "(x - stored).exp()"),
        ("ids", "ids + n"),
        ("a", "a.where(forgotten[..., None], x)"),
        ("a", "a / stored.clamp(min=1)"),
        ("a @ x", "a * stored.exp()[..., None] @ x"),
        ("a * n + x", "(a + x) * n"),
        ("a * n + x", "a * (n + x)"),
        ("n * (a - 1)", "a - 1 * n"),
        ("a + torch.where(f, x, 0)", "torch.where(f, x + a, 0)"),
        ("x.std()", "x.std(correction=0)"),
        ("torch.var(x, unbiased=False)", "torch.var(x, correction=1)"),
        ("x[:n]", "x[-n:]"),
        ("x[:1]", "x[-1:]"),
        ("x[-n:]", "x[:n]"),
        ("x[:, :1]", "x[:, -1:]"),
        ("moved(x, n)", "moved(x, -n)"),
        ("moved(x, 1)", "moved(x, -1)"),
        ("moved(x, ctx.n)", "moved(x, -ctx.n)"),
        ("a", "a * (~forgotten)[..., None]"),
        ("[x[0], x[-1]]", "[x[-1], x[0]]"),
        ("(n, a, x)", "(n, x, a)"),
        ("a.sin()", "-a.sin()"),
        ("view.rank('tp')", "view.rank('tp') + 1"),
        ("dist.get_rank(mesh)", "dist.get_rank(mesh) - 1"),
        ("x[0]", "stored"),
        ("1.0", "scale"),
        ("True", "is_causal"),
        ("flags", "flags.tril(-1)"),
        ("torch.triu(x)", "torch.triu(x, 1)"),
        ("x.tril()", "x.tril(-1)"),
        ("x.narrow(0, n, rank)", "x.narrow(0, 0, rank)"),
        ("x.narrow(0, 0, n)", "x.narrow(0, -n, n)"),
        ("x.clamp(min=limits[0])", "x.clamp(min=limits[0], max=limits[1])"),
        ("(x - 1).clamp(max=rank)", "(x - 1).clamp(max=rank, min=n)"),
        ("x.square()", "x.square().where(flags, 0.0)"),
        ("slice(0, len(x))", "rows"),
        ("3", "1"),
    ],
)
def test_what_may_be_right_in_place_of_an_expression(written, right):
    kinds = {"a": "tensor of floats, 2", "n": "int", "rank": "int", "x": "tensor of floats, 2", "mesh": "group"}
    kinds |= {
        "ctx.n": "int",
        "layout.size": "int",
        "layout.rank": "int",
        "view": "mesh",
        "ids": "tensor of integers, 1",
    }
    kinds |= {"forgotten": "tensor of flags, 1", "stored": "tensor of floats, 1"}
    kinds |= {"flags": "tensor of flags, 2", "scale": "float", "is_causal": "bool", "rows": "slice"}
    unread = frozenset({"forgotten", "stored"})
    node = ast.parse(written, mode="eval").body
    tried = alternatives(node, ast.Module([], []), Names(kinds, {}, {}, ("tp",), ("s",), unread))
    assert right in {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("sizes = [n]", "sizes = [n] if rows is None else rows"),
        ("sizes = 1 if n else 2", "sizes = (1 if n else 2) if rows is None else rows"),
        ("if n:\n    x.zero_()\n    n = 1", "pass"),
        ("attached(n, x)", "x = attached(n, x)"),
        ("x.clamp(min=n)", "x = x.clamp(min=n)"),
    ],
)
def test_what_may_be_right_in_place_of_a_statement(written, right):
    names = Names({"n": "int", "x": "tensor of floats, 2"}, {}, {}, ("tp",), unread=frozenset({"rows"}))
    tried = of_statement(ast.parse(written).body[0], names)
    assert right in {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


def test_a_negative_size_is_no_edit():
    names = Names({"x": "tensor of floats, 2", "n": "int"}, {}, {}, ("tp",))
    for written in ("x.view(n, 2)", "range(n)", "torch.zeros(n)"):
        tried = alternatives(ast.parse(written, mode="eval").body, ast.Module([], []), names)
        assert not any("(-n" in ast.unparse(ast.fix_missing_locations(new)) for _, new in tried)


def test_a_group_of_one_rank_is_no_edit():
    """A model that is not sharded is right, whatever line of its sharding is wrong."""
    names = Names({"view": "mesh"}, {}, {}, ("tp",))
    tried = alternatives(ast.parse("view.size('tp')", mode="eval").body, ast.Module([], []), names)
    assert "view.size('tp') / view.size('tp')" not in {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


def test_a_copy_that_is_left_out_is_no_edit():
    """It would share its storage, and the mistake might be written over."""
    names = Names({"x": "tensor of floats, 2"}, {}, {}, ("tp",))
    for written in ("x.clone()", "x.contiguous().clone()"):
        tried = alternatives(ast.parse(written, mode="eval").body, ast.Module([], []), names)
        assert not {"x", "x.contiguous()"} & {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


def in_the_first_order(mesh, x, keys):
    order = keys.argsort(stable=True)
    rows = x[order] * keys[order][:, None]
    return rows[order]


def test_an_order_that_is_applied_twice_in_place_of_undone():
    note = first_note(
        in_the_first_order,
        lambda x, keys: x * keys[:, None],
        {"x": "n d/tp", "keys": "n"},
        "n d/tp",
        {"tp": 2, "n": 5, "d": 4},
        nograd=("x", "keys"),
    )
    line = line_of(in_the_first_order, "rows[order]")
    assert note == f"{RIGHT_ONCE}{line} has `rows[order.argsort()]`, not `rows[order]`"


def test_a_mask_that_is_never_read_bounds_what_is_subtracted():
    kinds = {"outside": "tensor of flags, 1"}
    (statement,) = ast.parse("x[rows, ids] -= 1.0").body
    tried = alternatives(statement.value, statement, Names(kinds, {}, {}, ("tp",), unread=frozenset({"outside"})))
    assert "1.0 * ~outside" in {ast.unparse(ast.fix_missing_locations(new)) for _, new in tried}


def with_padded_columns(mesh, h, w):
    padded = torch.nn.functional.pad(w, (0, 0, 0, -len(w) % 4))
    scores = h @ padded.T
    shift = scores.amax(-1, keepdim=True)
    dist.all_reduce(shift, dist.ReduceOp.MAX, group=mesh["tp"])
    total = (scores - shift).exp().sum(-1, keepdim=True)
    dist.all_reduce(total, group=mesh["tp"])
    return (total.log() + shift)[:, 0]


def test_an_edit_is_tried_with_ordinary_values_if_the_right_function_overflows_with_others():
    note = first_note(
        with_padded_columns,
        lambda h, w: jax.nn.logsumexp(h @ w.T, -1),
        {"h": "n d", "w": "v/tp d"},
        "n tp=I",
        {"tp": 1, "n": 2, "d": 2, "v": 3},
        kinds={"h": {"kind": "normal"}, "w": {"kind": "normal"}},
        draw={},  # other cases have values of all kinds
        nograd=("h", "w"),
    )
    line = line_of(with_padded_columns, "padded = ")
    assert note.startswith(f"{RIGHT_ONCE}{line} has `w`, not ") and note.endswith(ORDINARY)
