"""The attention masks and positions that cp accepts: padding on the right, and one position for each token."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parity_tests.rejections import rejected
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import make_cp_batch_and_ctx
from torch_impl.context_parallel.batch_ctx import padding_of, restarts


def on_ranks(n, body):
    ranks = run(body, CaseSpec(scheme="attention_mask", mesh={"cp": n}))
    assert ranks.ledger.rows == []
    return ranks.results


rows = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3)


@example([[True] * 6] * 2, torch.int64)
@given(rows, st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_a_mask_is_let_pass_if_its_zeros_are_behind(mask, dtype):
    is_right = all(sorted(row, reverse=True) == row for row in mask)
    with nullcontext() if is_right else pytest.raises(ValueError, match=r"left padding|holes"):
        padding_mask = padding_of(torch.tensor(mask).to(dtype), (len(mask), 6))
        padding = torch.zeros(len(mask), 6, dtype=torch.bool) if padding_mask is None else padding_mask
        assert padding.tolist() == [[not token for token in row] for row in mask]
        assert (padding_mask is None) == all(all(row) for row in mask)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_a_mask_of_no_tokens_has_no_padding(shape):
    assert padding_of(torch.ones(shape), shape) is None


def test_positions_of_one_row_serve_each_row():
    def body(mesh, case):
        batch = {"input_ids": torch.zeros(3, 6), "position_ids": torch.arange(6)[None]}
        _, padded = make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)
        padded["position_ids"][0] = -1
        return padded["position_ids"][:, -1].tolist()

    assert on_ranks(2, body) == ([-1, 7, 7],) * 2


def test_a_batch_that_needs_no_padding_stays_the_callers():
    def body(mesh, case):
        batch = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8)}
        factory, padded = make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)
        with factory():
            padded["input_ids"].fill_(7)
            return batch["input_ids"].tolist(), padded["input_ids"].tolist()

    assert on_ranks(2, body) == (([[*range(8)]], [[7] * 4]),) * 2


def test_dropped_tokens_become_a_padding_mask():
    def body(mesh, case):
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
        batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "attention_mask": mask}
        _, padded = make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)
        assert "attention_mask" not in padded
        return padded["padding_mask"].int().tolist()

    assert on_ranks(2, body) == ([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]],) * 2


def test_a_padding_mask_stays_when_the_attention_mask_is_dropped():
    def body(mesh, case):
        batch = {
            "input_ids": torch.zeros(1, 4, dtype=torch.int64),
            "attention_mask": torch.tensor([[1, 1, 1, 0]]),
            "padding_mask": torch.tensor([[True, False, False, False]]),
        }
        return make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)[1]["padding_mask"].tolist()

    assert on_ranks(2, body) == ([[True, False, False, True]],) * 2


def test_positions_that_start_anew():
    assert restarts(torch.tensor([[0, 1, 0, 1]])) and restarts(torch.tensor([[0, 0, 0, 0]]))
    assert not restarts(torch.tensor([[3, 4, 5, 9]]))
    assert not restarts(torch.zeros(3, 1, 4))  # several kinds of positions may stand still


def make(mesh, mask=None, **entries):
    batch = {"input_ids": torch.zeros(3, 4, dtype=torch.int64), **entries}
    batch |= {} if mask is None else {"attention_mask": torch.tensor(mask)}
    return make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)


ONES = [1, 1, 1, 1]
REJECTED = [
    (
        lambda m: make(m, [ONES, ONES, [0, 0, 0, 1]]),
        "attention_mask: row 2 starts with 3 zeros; left padding is lost under cp; pad on the right",
    ),
    (
        lambda m: make(m, [ONES, [1, 0, 1, 0], ONES]),
        "attention_mask: row 1 has zeros between ones; holes are lost under cp; pad on the right",
    ),
    (
        lambda m: make(m, [[1, 1, 2, 2], ONES, ONES]),
        "attention_mask: row 0 has 2, an id of packed sequences; pass use_te=True with seq_lens, where cu_seqlens "
        "keep them apart",
    ),
    (
        lambda m: make(m, [ONES, [0.0, 0.0, -1e9, -1e9], ONES]),
        "attention_mask: row 1 has a negative entry; pass ones, and zeros for padding",
    ),
    (
        lambda m: make(m, [ONES, ONES, [1.0, 1.0, 0.5, 0.0]]),
        "attention_mask: row 2 has an entry other than 0 and 1; pass ones, and zeros for padding",
    ),
    (
        lambda m: make(m, [ONES, [1.0, 1.0, 1.0, float("inf")], ONES]),
        "attention_mask: row 1 has an entry other than 0 and 1; pass ones, and zeros for padding",
    ),
    *[
        (
            lambda m, shape=shape: make(m, torch.ones(shape).tolist()),
            f"attention_mask is {shape}, the batch has [3, 4] tokens; give one for each",
        )
        for shape in ([1, 4], [3, 3], [5, 4])
    ],
    (
        lambda m: make(m, [[[[1]]]]),
        "attention_mask is [1, 1, 1, 1], under cp it is [b, s]; packed sequences go with use_te=True, where "
        "cu_seqlens keep them apart",
    ),
    *[
        (
            lambda m, shape=shape: make(m, position_ids=torch.zeros(shape)),
            f"position_ids is {shape}, the batch has [3, 4] tokens; give one for each",
        )
        for shape in ([4], [3, 5], [2, 4], [2, 2, 4], [1, 1, 3, 4])
    ],
]
test_rejection = rejected({"cp": 2}, [(text[:60], call, f"context_parallel.batch: {text}") for call, text in REJECTED])


@pytest.mark.parametrize(
    "entries", [{"position_ids": torch.tensor([[0, 1, 0, 1]] * 3)}, {"seq_lens_padded": [[2, 2]] * 3}]
)
def test_documents_in_a_row_without_a_mask_are_warned_of(entries):
    def body(mesh, case):
        given_here = {name: torch.as_tensor(x) for name, x in entries.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_cp_batch_and_ctx(mesh.device_mesh["cp"], {"input_ids": torch.zeros(3, 4), **given_here})
        return [(entry.category, str(entry.message)) for entry in caught]

    sentence = (
        "context_parallel.batch: position_ids restart inside a row without a mask, so its documents attend to each "
        "other; pass use_te=True with seq_lens"
    )
    assert run(body, CaseSpec(scheme="batch_ctx", mesh={"cp": 2})).results[0] == [(RuntimeWarning, sentence)]


def test_positions_that_start_anew_beside_a_mask_are_let_pass_in_silence():
    """A mask says that each row is one sequence. A warning would be an error here, as everywhere in these tests."""

    def body(mesh, case):
        _, padded = make(mesh, [ONES] * 3, position_ids=torch.tensor([[0, 1, 0, 1]]))
        return padded["position_ids"].tolist()

    assert on_ranks(2, body) == ([[0, 1, 0, 1]] * 3,) * 2
