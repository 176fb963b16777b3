"""Accepted tables of lengths, shapes and prefixes of a packed batch, and the rules that rejected tables break."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import context_parallel as cp

FUNCTION = "context_parallel.thd: "
FOR_TE = "context_parallel.te: "  # messages name the function that the user called, not the inner one that raised
RULES = (
    "both or neither are",
    "lengths are 0 or more",
    "a real length exceeds its padded one",
    "adds up to",
    "has no sequence",
)
SLOT_RULE = "needs a multiple"
ACCEPTED = "accepted"
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def drawn_tables(rng, shape, size, ranks, fill):
    """Valid real and padded lengths; half of the tables have one or two entries that may be invalid."""
    n, _, b, q = shape
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


def find_slots(real, padded, size, fill):
    """(which entries are sequences, their slots, each row's unused tail, the slots with the tail added to the last)."""
    is_slot = real != fill
    slot = np.where(is_slot, padded, 0)
    tail = size - slot.sum(-1)
    is_last = is_slot & (np.cumsum(is_slot, -1) == is_slot.sum(-1, keepdims=True))
    return is_slot, slot, tail, np.where(is_last, slot + tail[:, None], slot)


def broken_by(rules, violated):
    """(rule, row, entry): the first broken rule and the first entry [b, q] that breaks it. None if all hold."""
    for rule, entries in zip(rules, violated, strict=True):
        if entries.any():
            return rule, *(int(at) for at in np.argwhere(entries)[0])
    return None


def broken_by_lengths(real, padded, size, fill):
    is_slot, _, tail, _ = find_slots(real, padded, size, fill)
    is_first = np.arange(real.shape[-1]) == 0
    violated = [
        is_slot != (padded != fill),
        is_slot & ((real < 0) | (padded < 0)),
        is_slot & (real > padded),
        (tail < 0)[:, None] & is_first,
        (~is_slot.any(-1) & (tail > 0))[:, None] & is_first,
    ]
    return broken_by(RULES, violated)


def slot_that_cannot_be_halved(real, padded, size, fill, ranks):
    """The number, counted over all rows, of the first sequence whose slot with its tail the ranks cannot halve."""
    is_slot, *_, full = find_slots(real, padded, size, fill)
    cannot = full[is_slot] % (2 * ranks if ranks > 1 else 1) != 0
    return int(cannot.argmax()) if cannot.any() else None


def expected_stream(real, padded, size, fill):
    """Positions and padding of each row: a token's place is counted from the last slot that starts at or before it."""
    is_slot, slot, _, _ = find_slots(real, padded, size, fill)
    start, place = np.cumsum(slot, -1) - slot, np.arange(size)[None, :, None]
    begun = is_slot[:, None] & (start[:, None] <= place)
    position = (place - np.where(begun, start[:, None], -1).max(-1, keepdims=True))[..., 0]
    is_real = (begun & (place < (start + real)[:, None])).any(-1)
    return {"position_ids": position.tolist(), "padding_mask": (~is_real).tolist()}


def numbers_in(sentence):
    return [int(number) for number in re.findall(r"(?:row|sequence) (\d+)", sentence)]


def rejection_message(call, kind=ValueError):
    """The message of a call's rejection, or ACCEPTED."""
    try:
        call()
    except kind as error:
        return str(error)
    return ACCEPTED


SIZES = st.tuples(st.sampled_from((2, 4)), st.sampled_from((8, 1, 12)), st.sampled_from((3, 2)))


@settings(max_examples=few(20))
@given(SEEDS, st.sampled_from((1, 2)), SIZES, st.sampled_from((-1000, -3)), st.sampled_from((1, 2)))
def test_tables_of_lengths(rng, ranks, sizes, fill, num_chunks):
    """A rejection names the broken rule and its place; an accepted table gives positions and padding."""
    (b, s, q), settings = sizes, {"num_chunks": num_chunks, "seq_lens_padding_value": fill}
    tables = drawn_tables(rng, (12, 2, b, q), s, ranks, fill)
    ids = torch.from_numpy(rng.integers(0, 10, (b, s)))

    def outcome(mesh, real, padded):
        batch = {"input_ids": ids, "seq_lens": real, "seq_lens_padded": padded}
        sentence = rejection_message(lambda: cp.make_cp_batch_for_te(mesh.device_mesh["cp"], batch, **settings))
        if sentence.startswith(FOR_TE):
            return sentence, None
        out = cp.split_batch_into_thd_chunks(batch, **settings)
        return sentence, {name: out[name].view(b, s).tolist() for name in ("position_ids", "padding_mask")}

    def body(mesh, case):
        return [outcome(mesh, *table) for table in torch.from_numpy(tables)]

    outcomes = run(body, CaseSpec(scheme="lengths", mesh={"cp": ranks}))
    assert outcomes.ledger.rows == []
    for found in outcomes.results:
        for (real, padded), (sentence, stream) in zip(tables, found, strict=True):
            broken = broken_by_lengths(real, padded, s, fill)
            slot = slot_that_cannot_be_halved(real, padded, s, fill, ranks)
            if broken is not None:
                rule, row, entry = broken
                assert sentence.startswith(FOR_TE) and rule in sentence, (real, padded)
                assert [*numbers_in(sentence), 0][:2] == [row, entry], (real, padded)
                continue
            if slot is not None:
                assert sentence.startswith(f"cu_seqlens: sequence {slot} ") and SLOT_RULE in sentence, (real, padded)
            else:
                assert sentence == ACCEPTED, (real, padded)
            assert stream == expected_stream(real, padded, s, fill), (real, padded)


COLUMNS = ("ids_dims", "rows", "chunks", "fill", "real_dims", "real_rows", "real_entries")
COLUMNS += ("padded_dims", "padded_rows", "padded_entries", "label_rows", "label_size", "score_dims", "scores")
SIZE = 3


def drawn_sizes(rng, n):
    """Valid sizes; half of the tables have one that may be invalid."""
    rows = rng.choice([2, 4, 3], n)
    entries = rng.integers(1, 4, n)
    fits = {name: rows for name in ("rows", "real_rows", "padded_rows", "label_rows", "scores")}
    fits |= {"ids_dims": rng.integers(2, 4, n), "chunks": np.where(rows % 2, 1, rng.integers(1, 3, n))}
    fits |= {"fill": -rng.integers(1, 9, n), "real_dims": 0 * rows + 2, "padded_dims": 0 * rows + 2}
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


def expected_shape_rule(of):
    violated = (
        of["ids_dims"] not in (2, 3),
        of["rows"] % of["chunks"] != 0,
        of["fill"] >= 0,
        of["real_dims"] != 2 or of["real_rows"] != of["rows"],
        of["padded_dims"] != 2 or of["padded_rows"] != of["rows"],
        of["real_entries"] != of["padded_entries"],
        of["label_rows"] != of["rows"] or of["label_size"] != SIZE,
        of["chunks"] > 1 and (of["score_dims"] == 0 or of["scores"] != of["rows"]),
    )
    return next((FUNCTION + rule for rule, is_broken in zip(SHAPE_RULES, violated, strict=True) if is_broken), ACCEPTED)


def make_batch(of):
    lengths = {
        table: torch.zeros((of[f"{of_table}_rows"], of[f"{of_table}_entries"], 1, 1)[: of[f"{of_table}_dims"]]).long()
        for table, of_table in (("seq_lens", "real"), ("seq_lens_padded", "padded"))
    }
    return {
        "input_ids": torch.zeros((of["rows"], SIZE, 2, 2)[: of["ids_dims"]]),
        "labels": torch.zeros(of["label_rows"], of["label_size"]),
        "scores": torch.zeros((of["scores"],)[: of["score_dims"]]),
        **lengths,
    }


@settings(max_examples=few(20))
@given(SEEDS)
def test_shapes_of_a_packed_batch(rng):
    for row in drawn_sizes(rng, 40).tolist():
        of = dict(zip(COLUMNS, row, strict=True))
        batch = make_batch(of)

        def split(batch=batch, of=of):
            return cp.split_batch_into_thd_chunks(batch, of["chunks"], of["fill"])

        sentence = rejection_message(split)
        assert re.match(expected_shape_rule(of), sentence), (of, sentence)


def drawn_prefixes(rng, n, b, q):
    """[whether an entry is a sequence, the number of the entry it continues]: mostly an earlier entry of its row."""
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


def expected_prefixes(is_slot, prefix_of):
    """((row, entry), None) for the first prefix that is not an earlier sequence of its row, else (None, prefixes).

    The prefixes are those of the stream of all rows.
    """
    number = (np.cumsum(is_slot.ravel()) - 1).reshape(is_slot.shape)
    stream = []
    for row, entry in np.argwhere(is_slot):
        prefix = int(prefix_of[row, entry])
        if prefix == -1:
            stream.append(-1)
        elif 0 <= prefix < entry and is_slot[row, prefix]:
            stream.append(int(number[row, prefix]))
        else:
            return (int(row), int(entry)), None
    return None, stream


@settings(max_examples=few(20))
@given(SEEDS, st.sampled_from((1, 2)), st.tuples(st.sampled_from((2, 3)), st.sampled_from((4, 3))), st.booleans())
def test_prefixes_of_sequences(rng, ranks, sizes, sharded):
    """A prefix that is not an earlier sequence of its row is rejected; accepted prefixes number the whole stream."""
    (b, q), s = sizes, 16
    tables = drawn_prefixes(rng, 12, b, q)
    ids = torch.from_numpy(rng.integers(0, 10, (b, s)))

    def outcome(mesh, is_slot, prefix_of):
        lengths = torch.where(is_slot > 0, 4, -1000)
        lengths[:, 0] = s - 4 * (is_slot[:, 1:] > 0).sum(1)
        batch = {"input_ids": ids, "seq_lens": lengths, "seq_lens_padded": lengths, "prefix_of": prefix_of}
        try:
            out, layout = cp.process_input_for_thd(batch, return_layout=True)
        except ValueError as error:
            return str(error)
        if sharded:  # fill behind the prefixes and offsets is stripped
            filled = {
                name: torch.nn.functional.pad(out[name], (0, 2), value=-1000) for name in ("cu_seqlens", "prefix_of")
            }
            filled["cu_seqlens_padded"] = filled["cu_seqlens"]
            out, layout = cp._shard_thd_chunk_for_te(
                {**out, **filled}, mesh.device_mesh["cp"], "thd", -1000, 0, return_layout=True
            )
        assert tuple(out["prefix_of"].tolist()) == layout.tokens.prefix_of
        return out["prefix_of"].tolist()

    def body(mesh, case):
        return [outcome(mesh, *table) for table in torch.from_numpy(tables)]

    outcomes = run(body, CaseSpec(scheme="prefixes", mesh={"cp": ranks}))
    assert outcomes.ledger.rows == []
    for found in outcomes.results:
        for (is_slot, prefix_of), prefixes in zip(tables, found, strict=True):
            place, stream = expected_prefixes(is_slot > 0, prefix_of)
            if place is None:
                assert prefixes == stream, (is_slot, prefix_of)
            else:
                row, entry = place
                assert prefixes.startswith(f"{FUNCTION}prefix_of: row {row}: sequence {entry} continues"), prefix_of


# A packed batch: the first MUST_BE entries must be tensors, those up to MAY_BE_NONE may also be None, others anything.
ENTRIES = ("input_ids", "seq_lens", "seq_lens_padded", "labels", "position_ids", "scores", "name")
KINDS = ("tensor", "list", "None")
MUST_BE, MAY_BE_NONE = 3, 5


def expected_kind_message(kinds):
    """The message that names the first entry that should be a tensor and is not, or ACCEPTED."""
    for entry, (name, kind) in enumerate(zip(ENTRIES, kinds, strict=True)):
        if (kind == "list" and entry < MAY_BE_NONE) or (kind == "None" and entry < MUST_BE):
            return f"{FUNCTION}{name} is {'a list' if kind == 'list' else 'None'}; pass a Tensor"
    return ACCEPTED


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_kinds_of_packed_entries(entry, kind, num_chunks):
    """The message names an entry that has to be a tensor and is a list or None."""
    batch = {"input_ids": torch.zeros(2, 4), "seq_lens": torch.full((2, 1), 4), "labels": torch.zeros(2, 4)}
    batch |= {"seq_lens_padded": batch["seq_lens"], "position_ids": torch.zeros(2, 4)}
    batch |= {"scores": torch.zeros(2), "name": torch.zeros(2, 1)}
    batch[entry] = {"tensor": batch[entry], "list": [[1]], "None": None}[kind]
    sentence = rejection_message(lambda: cp.split_batch_into_thd_chunks(batch, num_chunks), TypeError)
    assert sentence == expected_kind_message([kind if name == entry else "tensor" for name in ENTRIES])
