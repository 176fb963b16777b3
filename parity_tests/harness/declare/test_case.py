"""A CaseSpec is sent as one line of JSON, which is the same, with the same id, wherever it is written."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from shardproof.declare.case import FORMAT, CaseSpec

EXAMPLE = dict(
    scheme="parity_tests.vocab_parallel.test_logprob:vocab_parallel_logprob",
    mesh={"tp": 4},
    dims={"b": 2, "s": 3, "v": 16},
    dtype="bfloat16",
    layouts={"v/tp": {"name": "ragged", "lengths": [5, 5, 5, 1]}},
    values={
        "logits": {"kind": "normal"},
        "target": {"kind": "ids", "dim": "v", "picks": [[3, "last"], [0, "first"]]},
    },
    seed=1234,
)
CANONICAL = (
    '{"dims":{"b":2,"s":3,"v":16},"dtype":"bfloat16","engine":"lockstep","format":1,'
    '"layouts":{"v/tp":{"lengths":[5,5,5,1],"name":"ragged"}},"lengths":{},"mesh":{"tp":4},"options":{},'
    '"schedule":0,"scheme":"parity_tests.vocab_parallel.test_logprob:vocab_parallel_logprob","seed":1234,'
    '"values":{"logits":{"kind":"normal"},"target":{"dim":"v","kind":"ids","picks":[[3,"last"],[0,"first"]]}}}'
)


def test_canonical_json():
    assert CaseSpec(**EXAMPLE).json == CANONICAL


def test_the_id_is_the_start_of_the_hash_of_that_line():
    """The expected id was computed with `sha256sum`, so that ids of replay files stay the same."""
    assert CaseSpec(**EXAMPLE).id == "21bac764"


def test_round_trip():
    case = CaseSpec.from_json(CANONICAL)
    assert case == CaseSpec(**EXAMPLE)
    assert case.json == CANONICAL
    assert hash(case) == hash(CaseSpec(**EXAMPLE))


def test_order_of_keys_matters_only_in_the_mesh():
    turned = {key: EXAMPLE[key] for key in reversed(EXAMPLE)}
    assert CaseSpec(**turned).json == CANONICAL
    assert CaseSpec(**{**EXAMPLE, "dims": {"v": 16, "s": 3, "b": 2}}).json == CANONICAL
    meshes = [CaseSpec("f", mesh) for mesh in ({"cp": 2, "tp": 2}, {"tp": 2, "cp": 2})]
    assert meshes[0] != meshes[1]
    assert [list(CaseSpec.from_json(case.json).mesh) for case in meshes] == [["cp", "tp"], ["tp", "cp"]]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1235},
        {"schedule": 1},
        {"engine": "gloo"},
        {"dtype": "float32"},
        {"mesh": {"tp": 2}},
        {"dims": {"b": 2, "s": 3, "v": 17}},
        {"options": {"temperature": 2.0}},
    ],
)
def test_every_part_is_in_the_id(change):
    case = CaseSpec(**EXAMPLE)
    assert case.replace(**change).id != case.id
    assert case.replace(**change) != case


def test_another_process_writes_the_same_line():
    """Hash seeds and dictionary orders differ between processes; the line does not."""
    program = f"from shardproof.declare.case import CaseSpec; print(CaseSpec(**{EXAMPLE!r}).json)"
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == CANONICAL


def rejected(text):
    with pytest.raises(ValueError) as caught:
        CaseSpec.from_json(text)
    return str(caught.value)


def test_unknown_keys_are_rejected():
    record = {**json.loads(CANONICAL), "colour": 1, "axis": 2}
    assert rejected(json.dumps(record)) == "case: unknown keys axis, colour"


def test_missing_keys_are_rejected():
    assert rejected('{"format":1,"dims":{}}') == "case: missing keys mesh, scheme"
    assert rejected("[1]") == "case: is a list; a case is a JSON object"


@pytest.mark.parametrize("size", ["x", 0, 1.5, None])
def test_a_mesh_size_must_be_a_number_of_ranks(size):
    record = {**json.loads(CANONICAL), "mesh": {"tp": size}}
    assert rejected(json.dumps(record)) == f"case: mesh axis 'tp' has size {size!r}; a size is a whole number from 1 on"


def test_lengths_with_unknown_names_are_rejected():
    record = {**json.loads(CANONICAL), "lengths": {"s": {"true": [3], "padded": [4]}}}
    assert rejected(json.dumps(record)) == "case: lengths of 's' have padded, true; give real and padded ones"


def test_another_format_is_rejected():
    record = {**json.loads(CANONICAL), "format": FORMAT + 1}
    assert rejected(json.dumps(record)) == "case: format 2 is not 1; this file was written by another version"


def test_another_dtype_is_rejected():
    record = {**json.loads(CANONICAL), "dtype": "float8"}
    assert rejected(json.dumps(record)) == "case: dtype 'float8' is not one of float64, float32, bfloat16, float16"


def test_names_are_attributes():
    case = CaseSpec(**{**EXAMPLE, "options": {"temperature": 2.0}})
    assert (case.b, case.tp, case.temperature, case.world) == (2, 4, 2.0, 4)
    assert (case.itemsize, case.accumulator_itemsize) == (2, 4)
    assert CaseSpec("f", {"dp": 2, "tp": 3}, dtype="float64").accumulator_itemsize == 8
    with pytest.raises(AttributeError) as caught:
        _ = case.h
    assert str(caught.value) == f"case {case.scheme!r} has no dim, mesh axis or option 'h'"


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        CaseSpec(**EXAMPLE).seed = 2


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({"dims": 3}, "case: dims is 3; it is a JSON object"),
        ({"dims": {"b": 1.5}}, "case: dim 'b' has size 1.5; a size is a whole number from 0 on"),
        ({"dims": {"b": -1}}, "case: dim 'b' has size -1; a size is a whole number from 0 on"),
        ({"lengths": "x"}, "case: lengths is 'x'; it is a JSON object"),
        ({"values": {"x": None}}, "case: values of 'x' are None; they are a JSON object"),
        ({"seed": "now"}, "case: seed is 'now'; it is a whole number from 0 on"),
    ],
)
def test_a_record_with_a_value_of_another_kind_is_rejected(edit, sentence):
    assert rejected(json.dumps({"scheme": "of_mine", "mesh": {"tp": 2}, **edit})) == sentence
