"""The text that a run reads."""

import numpy as np
import pytest

from shardproof.training.corpus import BLOCK, DOCUMENTS, global_batch, topics
from shardproof.training.run import Run

RUN = Run(mesh={}, steps=3)


def test_a_batch_is_its_seed_and_step_alone():
    first = global_batch(RUN, 1)
    for same in (RUN, Run.on({"dp": 2, "cp": 2}, mamba="state", attention="ulysses", dtype="float32")):
        again = global_batch(same, 1)
        assert all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for a, b in zip(first, again, strict=True)
            for name in ("ids", "padded", "real")
        )
    for other in (global_batch(RUN, 2), global_batch(RUN.replace(seed=1), 1)):
        assert not any(np.array_equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))


def test_no_stream_is_read_twice():
    streams = [(x.ids.tobytes(), x.real.tobytes()) for step in range(20) for x in global_batch(RUN, step)]
    assert len(set(streams)) == len(streams) == 20 * RUN.streams


def test_documents_are_unequal_and_divisible_by_any_mesh():
    streams = [stream for step in range(20) for stream in global_batch(RUN, step)]
    lengths = np.array([np.diff(stream.padded) for stream in streams])
    real = np.array([np.diff(stream.real) for stream in streams])
    assert (lengths.sum(1) == RUN.length).all() and (lengths % BLOCK == 0).all() and lengths.shape[1] == DOCUMENTS
    assert (real <= lengths).all() and ((real > 0) == (lengths > 0)).all()
    assert (lengths == 0).any() and (real < lengths).any() and (real == 1).any()
    counts = np.maximum(real - 1, 0).reshape(20, RUN.streams, DOCUMENTS).sum(2)
    assert (counts != counts[:, :1]).any(1).all()  # so that a mean of means is another number


def test_padding_is_zero_and_the_rest_is_the_text():
    text = b"\n".join(topic.tobytes() for topic in topics())
    for stream in global_batch(RUN, 0):
        for start, stop, count in zip(stream.padded[:-1], stream.padded[1:], np.diff(stream.real), strict=True):
            assert bytes(stream.ids[start : start + count].astype(np.uint8)) in text
            assert not stream.ids[start + count : stop].any()


@pytest.mark.parametrize("length", [0, 90])
def test_an_indivisible_length_is_rejected(length):
    with pytest.raises(ValueError, match=f"--length {length} must be a multiple of 24"):
        global_batch(RUN.replace(length=length), 0)
