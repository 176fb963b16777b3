"""Parity of which tables of lengths, shapes and prefixes a packed batch takes, and of which rule the others break."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import Cost, check_cases, drawn, integers, scheme
from torch_impl import context_parallel as cp

FUNCTION = "context_parallel.thd: "
RULES = (
    "both or neither are",
    "lengths are 0 or more",
    "a real length exceeds its padded one",
    "adds up to",
    "has no sequence",
)
SLOT_RULE = 6
Codes = Int[Tensor, "n k"]


def drawn_tables(rng, shape, case):
    """Real and padded lengths that fit, half of them with an entry or two that may not."""
    n, _, b, q = shape
    fill, size, ranks = case.options["fill"], case.dims["s"], case.mesh["cp"]
    unit = 2 * ranks if ranks > 1 else 1
    tables = np.full(shape, fill)
    for i in range(n):
        cuts = np.sort(rng.integers(0, size // unit + 1, (b, q)), 1)
        padded = np.diff(cuts, axis=1, prepend=0) * unit
        real = rng.integers(0, padded + 1)
        is_slot = (rng.random((b, q)) < 0.7) | (np.arange(q) == rng.integers(0, q, (b, 1)))
        tables[i] = np.where(is_slot, np.stack([real, padded]), fill)
        if rng.random() < 0.15:  # a row without a sequence
            tables[i][:, rng.integers(0, b)] = fill
        for _ in range(rng.choice([0, 0, 1, 2])):
            entry = rng.integers(0, 2), rng.integers(0, b), rng.integers(0, q)
            tables[i][entry] = rng.choice([fill, fill, -1, 0, unit, unit + 1, size, size + 1])
    return tables


def slots_of(tables, size, fill):
    """Which entries are sequences, and their slots, the last of which in a row takes the row's tail."""
    real, padded = tables[:, 0], tables[:, 1]
    is_slot = real != fill
    slot = jnp.where(is_slot, padded, 0)
    tail = size - slot.sum(-1)
    is_last = is_slot & (jnp.cumsum(is_slot, -1) == is_slot.sum(-1, keepdims=True))
    return is_slot, slot, tail, jnp.where(is_last, slot + tail[..., None], slot)


def first_of(violated):
    """[rule, row, entry] of the first rule that an entry violates, counted from 1, and there of the first entry."""
    n, rules, b, q = violated.shape
    flat = violated.reshape(n, rules * b * q)
    at = flat.argmax(-1)
    found = jnp.stack([at // (b * q) + 1, at // q % b, at % q], -1)
    return jnp.where(flat.any(-1)[:, None], found, 0)


def lengths_by_rule(ids, tables, fill, mesh):
    (b, s), n = ids.shape, len(tables)
    real, padded = tables[:, 0], tables[:, 1]
    is_slot, slot, tail, full = slots_of(tables, s, fill)
    is_first = (jnp.arange(real.shape[-1]) == 0)[None, None]
    violated = [
        is_slot != (padded != fill),
        is_slot & ((real < 0) | (padded < 0)),
        is_slot & (real > padded),
        (tail < 0)[..., None] & is_first,
        (~is_slot.any(-1) & (tail > 0))[..., None] & is_first,
    ]
    found = first_of(jnp.stack(violated, 1))
    # Several ranks halve each slot, the tail included. Sequences are counted through all rows.
    multiple = 2 * mesh["cp"] if mesh["cp"] > 1 else 1
    cannot = (is_slot & (full % multiple != 0)).reshape(n, -1)
    number = jnp.cumsum(is_slot.reshape(n, -1), -1) - 1
    sequence = jnp.take_along_axis(number, cannot.argmax(-1)[:, None], -1)
    by_slot = jnp.concatenate([jnp.full_like(sequence, SLOT_RULE), 0 * sequence, sequence], -1)
    fits = found[:, 0] == 0
    codes = jnp.where((fits & cannot.any(-1))[:, None], by_slot, found)
    # A token's place is counted from the last slot that starts at or before it.
    start = jnp.cumsum(slot, -1) - slot
    place = jnp.arange(s)[None, None, :, None]
    begun = is_slot[:, :, None] & (start[:, :, None] <= place)
    position = (place - jnp.where(begun, start[:, :, None], -1).max(-1, keepdims=True))[..., 0]
    is_real = (begun & (place < (start + real)[:, :, None])).any(-1)
    hidden = jnp.where(fits[:, None, None], jnp.stack([position, (~is_real).astype(int)], 1).reshape(n, 2 * b, s), -1)
    return codes.astype(ids.dtype), hidden.astype(ids.dtype)


def rule_broken(call):
    """[rule, row, sequence] of a rejection, the rule counted from 1; zeros where it is taken."""
    try:
        call()
    except ValueError as error:
        sentence = str(error)
        numbers = [int(number) for number in re.findall(r"(?:row|sequence) (\d+)", sentence)]
        if sentence.startswith("cu_seqlens: sequence ") and "needs a multiple" in sentence:
            return [SLOT_RULE, 0, numbers[0]]
        if not sentence.startswith(FUNCTION):
            raise
        (rule,) = (i for i, words in enumerate(RULES, 1) if words in sentence)
        return [rule, *numbers, 0][:3]
    return [0, 0, 0]


@scheme(
    reference=lengths_by_rule,
    mesh={"cp": (1, 2)},
    inputs={"ids": "b s", "tables": "n/cp two b q"},
    outputs=("n/cp k", "n/cp rows s"),
    dims={"b": (2, 4), "s": (8, 1, 12), "n": (12,), "two": (2,), "q": (3, 2), "k": (3,), "rows": "2*b"},
    draw={"ids": integers(0, 9), "tables": drawn(drawn_tables, integer=True)},
    options={"fill": (-1000, -3)},
    rank_options={"num_chunks": (1, 2)},
    cost=lambda c: Cost(),
)
def tables_of_lengths(mesh, ids, tables, fill, num_chunks) -> tuple[Codes, Int[Tensor, "n rows s"]]:
    """Which rule each table breaks and where; positions and padding of the stream, -1 where it is rejected."""
    codes, streams = [], []
    for real, padded in tables:
        batch = {"input_ids": ids, "seq_lens": real, "seq_lens_padded": padded}
        settings = {"num_chunks": num_chunks, "seq_lens_padding_value": fill}
        code = rule_broken(lambda: cp.make_cp_batch_for_te(mesh.device_mesh["cp"], batch, **settings))  # noqa: B023
        codes.append(code)
        if code[0] not in (0, SLOT_RULE):
            streams.append(ids.new_full((2 * len(ids), ids.shape[1]), -1))
            continue
        out = cp.split_batch_into_thd_chunks(batch, **settings)
        streams.append(torch.stack([out["position_ids"], out["padding_mask"]]).view(-1, ids.shape[1]))
    return torch.tensor(codes).to(ids), torch.stack(streams).to(ids)


COLUMNS = ("ids_dims", "rows", "chunks", "fill", "real_dims", "real_rows", "real_entries")
COLUMNS += ("padded_dims", "padded_rows", "padded_entries", "label_rows", "label_size", "score_dims", "scores")
SIZE = 3


def drawn_sizes(rng, shape):
    """Sizes that fit, half of them with one that may not."""
    rows = rng.choice([2, 4, 3], shape[0])
    entries = rng.integers(1, 4, shape[0])
    fits = {name: rows for name in ("rows", "real_rows", "padded_rows", "label_rows", "scores")}
    fits |= {"ids_dims": rng.integers(2, 4, shape[0]), "chunks": np.where(rows % 2, 1, rng.integers(1, 3, shape[0]))}
    fits |= {"fill": -rng.integers(1, 9, shape[0]), "real_dims": 0 * rows + 2, "padded_dims": 0 * rows + 2}
    fits |= {
        "real_entries": entries,
        "padded_entries": entries,
        "label_size": 0 * rows + SIZE,
        "score_dims": 0 * rows + 1,
    }
    sizes = np.stack([fits[name] for name in COLUMNS], 1)
    for row in sizes:
        if rng.random() < 0.6:
            at = rng.integers(0, len(COLUMNS))
            row[at] = rng.choice([0, 1]) if COLUMNS[at] in ("fill", "score_dims") else rng.integers(1, 5)
    return sizes


def shapes_by_rule(sizes):
    of = {name: sizes[:, i] for i, name in enumerate(COLUMNS)}
    violated = [
        (of["ids_dims"] != 2) & (of["ids_dims"] != 3),
        of["rows"] % of["chunks"] != 0,
        of["fill"] >= 0,
        (of["real_dims"] != 2) | (of["real_rows"] != of["rows"]),
        (of["padded_dims"] != 2) | (of["padded_rows"] != of["rows"]),
        of["real_entries"] != of["padded_entries"],
        (of["label_rows"] != of["rows"]) | (of["label_size"] != SIZE),
        (of["chunks"] > 1) & ((of["score_dims"] == 0) | (of["scores"] != of["rows"])),
    ]
    found = jnp.stack(violated, 1)
    return jnp.where(found.any(1), found.argmax(1) + 1, 0).astype(sizes.dtype)


SHAPE_RULES = (
    r"input_ids is \[.*\]; it is \[b, s\]",
    "num_chunks=.* does not divide the batch",
    "seq_lens_padding_value=.* could be a length",
    r"seq_lens is \[.*\]; it has a row for each",
    r"seq_lens_padded is \[.*\]; it has a row for each",
    r"seq_lens is \[.*\], seq_lens_padded is \[.*\]; give a padded length",
    r"labels is \[.*\], input_ids has \[.*\] tokens",
    r"scores is \[.*\], which has no dim of .* rows",
)


@scheme(
    reference=shapes_by_rule,
    mesh={"cp": (1, 2)},
    inputs={"sizes": "n/cp k"},
    outputs="n/cp",
    dims={"n": (40,), "k": (len(COLUMNS),)},
    draw={"sizes": drawn(drawn_sizes, integer=True)},
    cost=lambda c: Cost(),
)
def shapes_of_a_packed_batch(mesh, sizes) -> Int[Tensor, " n"]:
    """The rule that a batch of such shapes breaks, counted from 1; 0 where it is taken."""
    codes = []
    for of in (dict(zip(COLUMNS, row, strict=True)) for row in sizes.tolist()):
        tables = {}
        for table, rows, entries in (
            ("seq_lens", "real_rows", "real_entries"),
            ("seq_lens_padded", "padded_rows", "padded_entries"),
        ):
            dims = of["real_dims" if table == "seq_lens" else "padded_dims"]
            lengths = torch.zeros((of[rows], of[entries], 1, 1)[:dims], dtype=torch.int64)
            tables[table] = lengths
        batch = {
            "input_ids": torch.zeros((of["rows"], SIZE, 2, 2)[: of["ids_dims"]]),
            "labels": torch.zeros(of["label_rows"], of["label_size"]),
            "scores": torch.zeros((of["scores"],)[: of["score_dims"]]),
            **tables,
        }
        try:
            cp.split_batch_into_thd_chunks(batch, of["chunks"], of["fill"])
            codes.append(0)
        except ValueError as error:
            (rule,) = (i for i, words in enumerate(SHAPE_RULES, 1) if re.match(FUNCTION + words, str(error)))
            codes.append(rule)
    return torch.tensor(codes).to(sizes)


def drawn_prefixes(rng, shape):
    """[whether an entry is a sequence, what it continues]: earlier entries of its row, or one that may be none."""
    n, _, b, q = shape
    is_slot = (rng.random((n, b, q)) < 0.8) | (np.arange(q) == 0)
    prefix_of = np.full((n, b, q), -1)
    for i in range(n):
        for row, entry in np.argwhere(is_slot[i]):
            earlier = np.flatnonzero(is_slot[i, row, :entry])
            if len(earlier) and rng.random() < 0.5:
                prefix_of[i, row, entry] = rng.choice(earlier)
        if rng.random() < 0.5:
            prefix_of[i, rng.integers(0, b), rng.integers(0, q)] = rng.integers(-2, q + 1)
    return np.stack([is_slot, prefix_of], 1)


def prefixes_by_rule(ids, tables):
    (b, _), (n, _, _, q) = ids.shape, tables.shape
    is_slot, prefix_of = tables[:, 0] > 0, tables[:, 1]
    entry = jnp.arange(q)[None, None, None]
    chosen = is_slot[:, :, None] & (prefix_of[..., None] == entry)  # [.., j, i]: j continues i, a sequence
    is_earlier = (chosen & (entry < entry.reshape(1, 1, q, 1))).any(-1)
    found = first_of((is_slot & ~is_earlier & (prefix_of != -1))[:, None])
    number = (jnp.cumsum(is_slot.reshape(n, -1), -1) - 1).reshape(n, b, q)
    continued = jnp.where(is_earlier, jnp.where(chosen, number[:, :, None], 0).sum(-1), -1)
    # By the numbers of sequences in the stream: the k-th is the entry that has k before it.
    sequence = jnp.arange(b * q)[None, :, None]
    at = is_slot.reshape(n, 1, -1) & (number.reshape(n, 1, -1) == sequence)
    stream = jnp.where(at.any(-1), jnp.where(at, continued.reshape(n, 1, -1), 0).sum(-1), -5)
    return found.astype(ids.dtype), jnp.where(found[:, :1] == 0, stream, -9).astype(ids.dtype)


@scheme(
    reference=prefixes_by_rule,
    mesh={"cp": (1, 2)},
    inputs={"ids": "b s", "tables": "n/cp two b q"},
    outputs=("n/cp k", "n/cp e"),
    dims={"b": (2, 3), "s": (16,), "n": (12,), "two": (2,), "q": (4, 3), "k": (3,), "e": "b*q"},
    draw={"ids": integers(0, 9), "tables": drawn(drawn_prefixes, integer=True)},
    rank_options={"sharded": (False, True)},
    cost=lambda c: Cost(),
)
def prefixes_of_sequences(mesh, ids, tables, sharded) -> tuple[Codes, Int[Tensor, "n e"]]:
    """Where a prefix is no earlier sequence of its row; else those of the stream, without fill, which is -5 here."""
    codes, streams = [], []
    for is_slot, prefix_of in tables:
        lengths = torch.where(is_slot > 0, 4, -1000)
        lengths[:, 0] = ids.shape[1] - 4 * (is_slot[:, 1:] > 0).sum(1)
        batch = {"input_ids": ids, "seq_lens": lengths, "seq_lens_padded": lengths, "prefix_of": prefix_of}
        stream = torch.full((prefix_of.numel(),), -9)
        try:
            out, layout = cp.process_input_for_thd(batch, return_layout=True)
        except ValueError as error:
            row, sequence = re.match(FUNCTION + r"prefix_of: row (\d+): sequence (\d+) continues", str(error)).groups()
            codes.append([1, int(row), int(sequence)])
            streams.append(stream)
            continue
        codes.append([0, 0, 0])
        if sharded:  # fill behind the prefixes and offsets is stripped
            filled = {
                name: torch.nn.functional.pad(out[name], (0, 2), value=-1000) for name in ("cu_seqlens", "prefix_of")
            }
            filled["cu_seqlens_padded"] = filled["cu_seqlens"]
            given = cp._shard_thd_chunk_for_te(
                {**out, **filled}, mesh.device_mesh["cp"], "thd", -1000, 0, return_layout=True
            )
            out, layout = given
        assert tuple(out["prefix_of"].tolist()) == layout.tokens.prefix_of
        stream[:] = -5
        stream[: len(out["prefix_of"])] = out["prefix_of"]
        streams.append(stream)
    return torch.tensor(codes).to(ids), torch.stack(streams).to(ids)


# Of a packed batch: what must be there and a tensor, what is a tensor if it is by token, and what may be anything.
ENTRIES = ("input_ids", "seq_lens", "seq_lens_padded", "labels", "position_ids", "scores", "name")
KINDS = ("tensor", "list", "None")
MUST_BE, MAY_BE_NONE = 3, 5


def kinds_by_rule(kinds):
    """An entry that is no tensor is named; only labels and positions may be None, and only what is not by token all."""
    entry = jnp.arange(len(ENTRIES))[None]
    is_wrong = ((kinds == 1) & (entry < MAY_BE_NONE)) | ((kinds == 2) & (entry < MUST_BE))
    return jnp.where(is_wrong.any(1), is_wrong.argmax(1) + 1, 0).astype(kinds.dtype)


def one_of_another_kind(rng, shape):
    kinds = np.zeros(shape, int)
    kinds[np.arange(len(kinds)), rng.integers(0, len(ENTRIES), len(kinds))] = rng.integers(0, len(KINDS), len(kinds))
    return kinds


@scheme(
    reference=kinds_by_rule,
    mesh={"cp": (1, 2)},
    inputs={"kinds": "n/cp k"},
    outputs="n/cp",
    dims={"n": (24,), "k": (len(ENTRIES),)},
    draw={"kinds": drawn(one_of_another_kind, integer=True)},
    rank_options={"num_chunks": (1, 2)},
    cost=lambda c: Cost(),
)
def kinds_of_packed_entries(mesh, kinds, num_chunks) -> Int[Tensor, " n"]:
    """The entry that should be a tensor and is not, counted from 1; 0 where the batch is taken."""
    tensors = {"input_ids": torch.zeros(2, 4), "seq_lens": torch.full((2, 1), 4), "labels": torch.zeros(2, 4)}
    tensors |= {"seq_lens_padded": tensors["seq_lens"], "position_ids": torch.zeros(2, 4)}
    tensors |= {"scores": torch.zeros(2), "name": torch.zeros(2, 1)}
    codes = []
    for row in kinds.tolist():
        batch = {name: (tensors[name], [[1]], None)[kind] for name, kind in zip(ENTRIES, row, strict=True)}
        try:
            cp.split_batch_into_thd_chunks(batch, num_chunks)
            codes.append(0)
        except TypeError as error:
            named = re.match(FUNCTION + r"(\w+) is (a list|None); pass a Tensor$", str(error))
            if named is None:
                raise
            codes.append(ENTRIES.index(named[1]) + 1)
    return torch.tensor(codes).to(kinds)


SCHEMES = (tables_of_lengths, shapes_of_a_packed_batch, prefixes_of_sequences, kinds_of_packed_entries)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    check_cases(declared, 20)
