"""Parity of vocab_parallel.packed."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from jax_ref.layouts import dual_chunk_swap
from jax_ref.vocab_parallel import packed_next_token_logprob
from parity_tests.parity import parity
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED, has_no_next_in_stream, next_in_row_is_ignored
from parity_tests.vocab_parallel.shard import group_of_several, owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, integers, offsets, scheme, values
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

DECLARED = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=R",
    dims={
        "b": "n-1",
        "n": (4, 6, 3),
        "t": (24, 40, 16),
        "u": (5, 9, 2),
        "v": (8, 5, 13),
    },  # several sequences over cp=2
    draw={
        "target": SOME_IGNORED,
        "padded": offsets("t", padded=True),
        "real": offsets("t"),
        "columns": integers(0, 0),
    },
    # Without the last sequence: its tokens are the padding of the stream, past the last offset.
    options={"temperature": (1.0, 0.7), "without_last": (False, True)},
    rank_options={"chunk_size": (None, 1, 5)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("v",),
    cost=lambda c: Cost(
        forward=all_gathers(
            over_tp(c, 3 * c.t // c.cp), over_cp=[(1, c.t // c.cp * c.accumulator_itemsize)] * (c.cp > 1)
        ),
        backward={"reduce_scatter/cp": (1, c.t * c.accumulator_itemsize)} if c.cp > 1 else {},
    ),
)
INPUTS = {"logits": "1 t/cp:packed v/tp:ragged", "target": "1 t", "padded": "n", "real": "n", "columns": "u"}


def unread(lengths_of):
    """The rows that are not read: of logits and of cotangents, where a sequence has no next token."""
    logits = values(nan_rows=has_no_next_in_stream(lengths_of))
    return {
        **DECLARED,
        "draw": {**DECLARED["draw"], "logits": logits},
        "nan_cotangents": {"out": next_in_row_is_ignored(lengths_of)},
    }


def scored(mesh, logits, target, padded, columns, temperature, without_last, chunk_size, **options):
    if without_last:
        padded = padded[:-1]
        options |= {name: offsets[:-1] for name, offsets in options.items() if name == "cu_seqlens"}
    scores = vp.from_parallel_logits_to_logprobs_packed_sequences(
        logits,
        target,
        padded,
        len(columns) + 1,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=group_of_several(mesh, "cp"),
        chunk_size=chunk_size,
        sampling_params=None if temperature == 1.0 else SimpleNamespace(top_k=None, top_p=1.0, temperature=temperature),
        inference_only=wants_no_gradient(),
        **options,
    )
    return F.pad(scores, (0, 0, 0, 1)) if without_last else scores


def by_padded(logits, target, padded, real, columns, temperature, without_last=False):
    lengths = without_tokens_of_last(jnp.diff(padded), without_last)
    return packed_next_token_logprob(logits, target, padded[:-1], lengths, len(columns) + 1, temperature=temperature)


def by_real(logits, target, padded, real, columns, temperature, without_last):
    lengths = without_tokens_of_last(jnp.diff(real), without_last)
    return packed_next_token_logprob(logits, target, padded[:-1], lengths, len(columns) + 1, temperature=temperature)


def without_tokens_of_last(lengths, without_last):
    return lengths.at[-1].set(0) if without_last else lengths


@scheme(
    reference=by_padded,
    contract=vp.from_parallel_logits_to_logprobs_packed_sequences,
    inputs=INPUTS,
    **unread("padded"),
)
def packed_next_tokens(mesh, logits, target, padded, real, columns, temperature, without_last, chunk_size):
    return scored(mesh, logits, target, padded, columns, temperature, without_last, chunk_size)


@scheme(
    reference=by_real,
    contract=vp.from_parallel_logits_to_logprobs_packed_sequences,
    inputs=INPUTS,
    **unread("real"),
)
def packed_next_tokens_of_real_lengths(
    mesh, logits, target, padded, real, columns, temperature, without_last, chunk_size
):
    return scored(mesh, logits, target, padded, columns, temperature, without_last, chunk_size, cu_seqlens=real)


def rolled_and_sharded(target, padded, cp, rank):
    """As a data loader would: each sequence rolled in itself, this rank's share of it, one sequence after another."""
    pieces = [target[:, :0]]
    for start, stop in zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True):
        sequence = target[:, start:stop].roll(-1, dims=1)
        pieces.append(sequence[:, dual_chunk_swap(stop - start, cp)[rank]])
    return torch.cat(pieces, dim=1)


@scheme(
    reference=by_padded,
    contract=vp.from_parallel_logits_to_logprobs_packed_sequences,
    inputs=INPUTS,
    **unread("padded"),
)
def packed_next_tokens_rolled_before(
    mesh, logits, target, padded, real, columns, temperature, without_last, chunk_size
):
    rolled = rolled_and_sharded(target, padded, mesh.size("cp"), mesh.rank("cp"))
    return scored(
        mesh, logits, rolled, padded, columns, temperature, without_last, chunk_size, target_is_pre_rolled=True
    )


SCHEMES = (packed_next_tokens, packed_next_tokens_of_real_lengths, packed_next_tokens_rolled_before)
test_parity = parity(SCHEMES, lockstep=20, gloo=4)


V, LENGTHS = 6, [8, 0, 4, 12]
T = sum(LENGTHS)
STREAM = torch.linspace(-2, 3, (T + 4) * V, dtype=torch.float64).sin().view(1, T + 4, V) * 4
IDS = (torch.arange(T + 4) * 5 % V)[None]


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def on_ranks(body, cp=2):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"cp": cp, "tp": 1})).results


def cut(mesh, lengths, stream=STREAM, tail=4):
    """This rank's share of each sequence, and of the padding behind the last."""
    cp, rank, offset, pieces = mesh.size("cp"), mesh.rank("cp"), 0, [stream[:, :0]]
    for length in (*lengths, tail):
        pieces.append(stream[:, offset : offset + length][:, dual_chunk_swap(length, cp)[rank]])
        offset += length
    return torch.cat(pieces, dim=1)


def rows(mesh, logits, target=IDS, lengths=LENGTHS, unpacked_seqlen=12, **options):
    return vp.from_parallel_logits_to_logprobs_packed_sequences(
        logits, target, starts(lengths), unpacked_seqlen, 0, V, mesh["tp"], cp_group=mesh["cp"], **options
    )


def values_and_gradient(mesh, stream=STREAM, target=IDS, **options):
    leaf = cut(mesh, LENGTHS, stream).requires_grad_()
    y = rows(mesh, leaf, target, **options)
    y.sum().backward()
    return y.detach().numpy(), leaf.grad.numpy()


@pytest.mark.parametrize("unpacked_seqlen", [1, 6, 12, 20])
def test_a_row_is_its_sequence_alone(unpacked_seqlen):
    """Cut off where the rows are short, 0 where they are long; the padding behind the last belongs to no row."""

    def body(mesh, case):
        return values_and_gradient(mesh, unpacked_seqlen=unpacked_seqlen)

    expected = np.zeros((len(LENGTHS), unpacked_seqlen - 1))
    for row, start, length in zip(expected, starts(LENGTHS).tolist(), LENGTHS, strict=False):
        span = slice(start, start + length)
        alone = vp.get_next_token_logprobs_from_logits(IDS[:, span], STREAM[:, span])[0].numpy()
        row[: len(alone)] = alone[: len(row)]
    for y, gradient in on_ranks(body):
        np.testing.assert_array_equal(y, expected)
        assert not gradient[:, T // 2 :].any()


def test_two_sequences_never_see_each_other():
    def body(mesh, case):
        edited, other = STREAM.clone(), IDS.clone()
        edited[:, 8:12] *= 1.5  # sequence 2 of LENGTHS
        edited[:, 7] = torch.nan  # the last position of sequence 0
        other[:, 8:12] = 3
        return values_and_gradient(mesh), values_and_gradient(mesh, edited, other)

    for (y, _), (edited, gradient) in on_ranks(body):
        np.testing.assert_array_equal(y[[0, 1, 3]], edited[[0, 1, 3]])
        assert (y[2, :3] != edited[2, :3]).all() and np.isfinite(gradient).all()


def test_a_target_rolled_before_is_the_same_to_the_bit():
    def body(mesh, case):
        padded = starts([*LENGTHS, 4])
        rolled = rolled_and_sharded(IDS, padded, mesh.size("cp"), mesh.rank("cp"))
        return values_and_gradient(mesh), values_and_gradient(mesh, target=rolled, target_is_pre_rolled=True)

    for raw, rolled in on_ranks(body):
        for a, b in zip(raw, rolled, strict=True):
            np.testing.assert_array_equal(a, b)


def test_one_rank_takes_any_length():
    def body(mesh, case):
        lengths = [3, 1, 5]
        y = rows(mesh, STREAM[:, :9], IDS[:, :9], lengths, 5)
        without = vp.from_parallel_logits_to_logprobs_packed_sequences(
            STREAM[:, :9], IDS[:, :9], starts(lengths).int(), 5, 0, V, mesh["tp"]
        )
        return torch.equal(y, without), (y != 0).sum(1).tolist()

    assert on_ranks(body, cp=1) == ((True, [2, 0, 4]),)


def test_a_filter_reaches_packed_rows():
    def body(mesh, case):
        params = vp.TrainingSamplingParams(top_k=1)
        y = rows(mesh, cut(mesh, LENGTHS), sampling_params=params)
        return sorted(set(y.flatten().tolist()))

    assert on_ranks(body) == ([-np.inf, 0.0],) * 2


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_no_number_of_sequences_changes_the_ledger(engine):
    def ledger(lengths):
        def body(mesh, case):
            leaf = torch.zeros(1, sum(lengths) // 2, V, requires_grad=True)
            y = rows(mesh, leaf, torch.zeros(1, sum(lengths), dtype=torch.int64), lengths, 5)
            y.sum().backward()

        ranks = run(body, CaseSpec(scheme="vocab_parallel", mesh={"cp": 2, "tp": 1}, engine=engine), engine)
        return [(row.rank, row.op, row.dtypes, row.shapes, row.phase) for row in ranks.ledger.rows]

    assert ledger([200]) == ledger([120, 80]) == ledger([4] * 50)


class Operations(TorchDispatchMode):
    """Counts the operations that are sent to the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_cost_per_token_is_flat_in_the_number_of_sequences():
    """As many operations for 10, 1,000 and 100,000 sequences of one stream, and no more than twice the time."""

    def body(mesh, case):
        tokens, seconds_of = 400_000, {}
        logits = torch.zeros(1, tokens // 2, 2)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        for _ in range(3):
            for count in (10, 1_000, 100_000):
                length = tokens // count
                leaf, offsets = logits.clone().requires_grad_(), torch.arange(0, tokens + 1, length)
                began = time.thread_time()
                with Operations() as operations:
                    y = vp.from_parallel_logits_to_logprobs_packed_sequences(
                        leaf, ids, offsets, length, 0, 2, mesh["tp"], cp_group=mesh["cp"]
                    )
                    y.backward(torch.ones_like(y))
                seconds_of.setdefault(count, []).append((time.thread_time() - began, operations.count))
        return {count: (min(seconds for seconds, _ in runs), runs[0][1]) for count, runs in seconds_of.items()}

    for by_count in on_ranks(body):
        seconds, operations = zip(*by_count.values(), strict=True)
        assert len(set(operations)) == 1
        assert max(seconds) < 2 * min(seconds), by_count
