"""Rows of packed sequences as one stream: worked examples, the reference, tokens that are never lost, rejections."""

from functools import partial

import pytest
import torch
from hypothesis import given

from jax_ref.context_parallel import reference
from parity_tests.context_parallel.drawn_rows import FILL, batch_of, drawn_rows
from torch_impl.context_parallel import make_cp_batch_for_te, process_input_for_thd, split_batch_into_thd_chunks


def batch(real, padded, size, ids=None, **entries):
    rows = len(real)
    ids = torch.arange(rows * size).view(rows, size) if ids is None else ids
    return {"input_ids": ids, "seq_lens": torch.tensor(real), "seq_lens_padded": torch.tensor(padded), **entries}


def lists(out):
    return {name: value.tolist() for name, value in out.items() if isinstance(value, torch.Tensor)}


def test_padding_inside_a_row():
    out = lists(process_input_for_thd(batch([[3, 2], [6, FILL]], [[4, 2], [6, FILL]], 6)))
    assert out["cu_seqlens"] == [0, 3, 5, 11]
    assert out["cu_seqlens_padded"] == [0, 4, 6, 12]
    assert out["position_ids"] == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]
    assert [i for i, masked in enumerate(out["padding_mask"]) if masked] == [3]
    assert out["max_seqlen"] == 6
    assert out["input_ids"] == list(range(12))


def test_a_tail_joins_the_last_slot_of_its_row():
    out = lists(process_input_for_thd(batch([[4, 2], [8, FILL]], [[4, 2], [8, FILL]], 8)))
    assert out["cu_seqlens_padded"] == [0, 4, 8, 16]
    assert out["cu_seqlens"] == [0, 4, 6, 14]
    assert [i for i, masked in enumerate(out["padding_mask"]) if masked] == [6, 7]


def component_of(process):
    """How the messages of a function begin."""
    return "te" if isinstance(process, partial) and process.func is make_cp_batch_for_te else "thd"


@pytest.mark.parametrize("process", [process_input_for_thd, partial(make_cp_batch_for_te, None)])
def test_a_mask_of_the_batch_is_replaced(process):
    out = process(batch([[3]], [[4]], 4, padding_mask=torch.tensor([[True, True, False, False]])))
    assert out["padding_mask"].tolist() == [False, False, False, True]


def test_every_key():
    b, s = 2, 4
    inputs = batch([[4], [3]], [[4], [4]], s)
    inputs |= {
        "labels": torch.arange(8).view(b, s),
        "loss_mask": torch.ones(b, s, dtype=torch.bool),
        "position_ids": torch.arange(3 * b * s).view(3, b, s),
        "attention_mask": torch.ones(b, s),
        "padding_mask": torch.ones(b, s, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 99]),
        "rewards": torch.tensor([0.5, 1.5]),
        "table": torch.ones(8, 3),
        "name": "any",
    }
    out = process_input_for_thd(inputs)
    assert {name: tuple(value.shape) for name, value in out.items() if isinstance(value, torch.Tensor)} == {
        "input_ids": (8,),
        "labels": (8,),
        "loss_mask": (8,),
        "position_ids": (3, 1, 8),
        "padding_mask": (8,),
        "rewards": (2,),
        "table": (8, 3),
        "cu_seqlens": (3,),
        "cu_seqlens_padded": (3,),
        "max_seqlen": (),
    }
    assert out["name"] == "any" and out["rewards"] is inputs["rewards"] and out["table"] is inputs["table"]
    assert torch.equal(out["position_ids"][:, 0], inputs["position_ids"].view(3, 8))
    assert out["padding_mask"].tolist() == [False] * 7 + [True]


def test_floats_keep_bits_width_and_gradient():
    x = torch.rand(2, 4, 1, requires_grad=True)
    out = process_input_for_thd(batch([[4], [4]], [[4], [4]], 4, x))
    assert torch.equal(out["input_ids"], x.view(8, 1)) and out["padding_mask"].shape == (8,)
    out["input_ids"].sum().backward()
    assert x.grad.flatten().tolist() == [1.0] * 8


def test_positions_of_one_kind_are_unchanged():
    out = process_input_for_thd(batch([[4]], [[4]], 4, position_ids=torch.tensor([[5, 6, 7, 8]])))
    assert out["position_ids"].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("dtypes", [(torch.int8, torch.int64), (torch.int64, torch.int8), (torch.uint8, torch.int16)])
def test_each_table_of_lengths_has_a_dtype_of_its_own(dtypes):
    real, padded = ([[10, 10]], [[60, 44]]) if dtypes[1] == torch.int8 else ([[10, 10]], [[300, 44]])
    inputs = batch(real, padded, sum(padded[0]))
    inputs |= {
        name: inputs[name].to(dtype) for name, dtype in zip(("seq_lens", "seq_lens_padded"), dtypes, strict=True)
    }
    out = process_input_for_thd(inputs, seq_lens_padding_value=-100)
    assert out["cu_seqlens"].tolist() == [0, 10, 20]
    assert out["cu_seqlens_padded"].tolist() == [0, padded[0][0], sum(padded[0])]


@pytest.mark.parametrize("earlier", [150, 263])
def test_a_prefix_is_a_number_beyond_the_dtype_of_the_lengths(earlier):
    """In int8 150 is -106 and 263 is 7, an earlier sequence; of 200 sequences there is none with that number."""
    inputs = batch([[1] * 200], [[1] * 200], 200)
    prefixes = torch.full((1, 200), -1)
    prefixes[0, 199] = earlier
    inputs |= {"seq_lens": inputs["seq_lens"].to(torch.int8), "prefix_of": prefixes}
    process = partial(process_input_for_thd, inputs, seq_lens_padding_value=-100, return_layout=True)
    if earlier < 199:
        assert process()[0]["prefix_of"].tolist() == prefixes[0].tolist()
    else:
        with pytest.raises(ValueError, match=f"sequence 199 continues {earlier}"):
            process()


@given(drawn_rows())
def test_the_stream_is_the_reference(rows):
    inputs = batch_of(rows, 1)
    ids = inputs["input_ids"]
    slots = reference.slots(ids.shape[1], inputs["seq_lens"].tolist(), inputs["seq_lens_padded"].tolist(), FILL)
    expected = reference.stream(slots)
    out = process_input_for_thd(inputs)
    assert {name: out[name].tolist() for name in expected} == expected
    assert int(out["max_seqlen"]) == max((slot for _, slot in slots), default=0)
    assert torch.equal(out["input_ids"], ids.flatten()) and torch.equal(out["labels"], inputs["labels"].flatten())


@given(drawn_rows())
def test_a_chunk_is_its_rows_alone(rows):
    inputs, m = batch_of(rows, 1), rows.chunks
    inputs |= {"rewards": torch.arange(len(inputs["labels"])), "name": "any"}
    inputs["position_ids"] = torch.arange(2 * inputs["labels"].numel()).view(2, *inputs["labels"].shape)
    stacked = split_batch_into_thd_chunks(inputs, m)
    each = len(inputs["labels"]) // m
    for i in range(m if m > 1 else 0):
        span = slice(i * each, (i + 1) * each)
        block = {name: x[span] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        block["position_ids"] = inputs["position_ids"][:, span]
        alone = process_input_for_thd(block)
        assert alone.keys() == stacked.keys()
        for name, value in alone.items():
            there = stacked[name] if name == "name" else stacked[name][i]
            if name.startswith("cu_"):
                assert set(there[len(value) :].tolist()) <= {FILL}
                there = there[: len(value)]
            assert there == value if name == "name" else torch.equal(there, value)


def test_entries_by_token_keep_further_dims_in_several_chunks():
    features = torch.arange(2.0 * 8 * 3 * 2).view(2, 8, 3, 2)
    out = chunks(2, 2, features=features)
    assert torch.equal(out["features"], features)  # a row is a chunk here
    out = chunks(4, 2, features=torch.cat([features, features + 1]))
    assert torch.equal(out["features"], torch.stack([features.flatten(0, 1), features.flatten(0, 1) + 1]))


def thd(real, padded, size=8, fill=FILL, **entries):
    return process_input_for_thd(batch(real, padded, size, **entries), fill)


def chunks(rows, m, **entries):
    return split_batch_into_thd_chunks(batch([[8]] * rows, [[8]] * rows, 8, **entries), m)


REJECTED = [
    (lambda: thd([[9]], [[9]]), "row 0: seq_lens_padded adds up to 9, the row has 8 tokens; shorten it"),
    (
        lambda: thd([[8], [FILL]], [[8], [FILL]]),
        "row 1 has no sequence; give it seq_lens 0 and seq_lens_padded 8",
    ),
    (
        lambda: thd([[1], [FILL]], [[1], [FILL]], size=1),
        "row 1 has no sequence; give it seq_lens 0 and seq_lens_padded 1",
    ),
    (
        lambda: thd([[4, 4], [5, 3]], [[4, 4], [4, 4]]),
        "row 1, sequence 0: seq_lens is 5 and seq_lens_padded 4; a real length exceeds its padded one; "
        "lengthen the slot",
    ),
    (  # row 0 has a sequence, whose slot takes its tail
        lambda: thd([[4], [FILL]], [[4], [FILL]]),
        "row 1 has no sequence; give it seq_lens 0 and seq_lens_padded 8",
    ),
    (  # the sequence of length 0 before it is right
        lambda: thd([[0, 5]], [[4, 4]]),
        "row 0, sequence 1: seq_lens is 5 and seq_lens_padded 4; a real length exceeds its padded one; "
        "lengthen the slot",
    ),
    (
        lambda: thd([[4, FILL]], [[4, 4]]),
        "row 0, sequence 1: seq_lens is -1000 and seq_lens_padded 4; both or neither are -1000; fill both",
    ),
    (
        lambda: thd([[4, -1]], [[4, 4]]),
        "row 0, sequence 1: seq_lens is -1 and seq_lens_padded 4; lengths are 0 or more, or -1000 for none",
    ),
    (lambda: thd([[8]], [[8]], fill=0), "seq_lens_padding_value=0 could be a length; use a negative one"),
    (
        lambda: thd([[8, 0]], [[8]]),
        "seq_lens is [1, 2], seq_lens_padded is [1, 1]; give a padded length for each length",
    ),
    (lambda: thd([8], [8]), "seq_lens is [1]; it has a row for each of 1 rows of tokens"),
    (
        lambda: thd([[8]], [[8]], labels=torch.zeros(1, 7)),
        "labels is [1, 7], input_ids has [1, 8] tokens; give one for each",
    ),
    (
        lambda: thd([[8]], [[8]], position_ids=torch.zeros(2, 8)),
        "position_ids is [2, 8], input_ids has [1, 8] tokens; give one for each",
    ),
    (lambda: thd([[8]], [[8]], ids=torch.zeros(8)), "input_ids is [8]; it is [b, s] or [b, s, d]"),
    (lambda: chunks(3, 2), "num_chunks=2 does not divide the batch of 3 rows; drop or add a row"),
    (lambda: chunks(2, 4), "num_chunks=4 does not divide the batch of 2 rows; drop or add a row"),
    (
        lambda: chunks(2, 2, table=torch.zeros(3)),
        "table is [3], which has no dim of 2 rows to split into num_chunks=2; take it out of the batch",
    ),
    (
        lambda: chunks(2, 2, scale=torch.tensor(1.0)),
        "scale is [], which has no dim of 2 rows to split into num_chunks=2; take it out of the batch",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REJECTED, ids=[text[:70] for _, text in REJECTED])
def test_rejection(call, sentence):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"context_parallel.thd: {sentence}"


def test_lengths_are_integers():
    with pytest.raises(TypeError) as caught:
        thd([[8.0]], [[8.0]])
    assert str(caught.value) == "context_parallel.thd: seq_lens is float32; lengths are integers"


@pytest.mark.parametrize("name", ["input_ids", "seq_lens", "seq_lens_padded"])
def test_required_entries(name):
    inputs = batch([[8]], [[8]], 8)
    del inputs[name]
    with pytest.raises(KeyError) as caught:
        process_input_for_thd(inputs)
    assert caught.value.args == (f"context_parallel.thd: batch has no '{name}'; it has {', '.join(inputs)}; add it",)


@pytest.mark.parametrize("process", [split_batch_into_thd_chunks, partial(make_cp_batch_for_te, None)])
def test_a_number_of_chunks_is_an_integer(process):
    with pytest.raises(TypeError) as caught:
        process(batch([[8]], [[8]], 8), num_chunks=1.0)
    assert str(caught.value) == f"context_parallel.{component_of(process)}: num_chunks=1.0 is a float; pass an int"


@pytest.mark.parametrize("process", [process_input_for_thd, partial(make_cp_batch_for_te, None)])
@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"seq_lens": [[8]]}, "seq_lens is a list; pass a Tensor"),
        ({"seq_lens_padded": None}, "seq_lens_padded is None; pass a Tensor"),
        ({"input_ids": [[1]]}, "input_ids is a list; pass a Tensor"),
        ({"labels": [[1]]}, "labels is a list; pass a Tensor"),
        ({"position_ids": (1,)}, "position_ids is a tuple; pass a Tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_entries_by_token_are_tensors(process, entries, sentence):
    with pytest.raises(TypeError) as caught:
        process(batch([[8]], [[8]], 8) | entries)
    assert str(caught.value) == f"context_parallel.{component_of(process)}: {sentence}"


def test_labels_may_be_none():
    assert process_input_for_thd(batch([[8]], [[8]], 8, labels=None))["labels"] is None


@pytest.mark.parametrize("process", [process_input_for_thd, partial(make_cp_batch_for_te, None)])
def test_a_batch_is_a_dict_with_something_in_it(process):
    with pytest.raises(TypeError) as caught:
        process(None)
    assert (
        str(caught.value) == f"context_parallel.{component_of(process)}: batch is None; pass a dict of tensors by name"
    )
    with pytest.raises(KeyError) as missing:
        process({})
    prefix = f"context_parallel.{component_of(process)}"
    assert missing.value.args == (f"{prefix}: batch has no 'input_ids'; it has nothing; add it",)


@pytest.mark.parametrize(("fill", "kind"), [(-1000.0, "a float"), ("-1", "a str"), (None, "None")])
def test_a_fill_is_an_integer(fill, kind):
    with pytest.raises(TypeError) as caught:
        thd([[8]], [[8]], fill=fill)
    assert str(caught.value) == f"context_parallel.thd: seq_lens_padding_value={fill!r} is {kind}; pass an int"
