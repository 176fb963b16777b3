"""The rejections of pipelining.schedule, in one table, on every rank and before anything is sent."""

import logging
import re

import pytest

from parity_tests.pipelining.perceptron import made_stages, placement, written
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining.schedule import build_pipeline_schedule


def case_of(p, **options):
    return CaseSpec("pipeline", {"pp": p}, options=options)


def rejection(mesh, case):
    """The sentence with which a schedule is rejected on this rank."""
    options = dict(case.options)
    placed = options.pop("placed")
    stages = [] if options.get("empty") else list(made_stages(mesh, placed, None).values())
    arguments = {"csv": None, "name": None, "microbatch": 2, "batch": 8, "loss": len, "scale": False} | options
    try:
        build_pipeline_schedule(
            arguments["csv"],
            arguments["name"],
            arguments["microbatch"],
            arguments["batch"],
            stages,
            arguments["loss"],
            arguments["scale"],
        )
    except (ValueError, TypeError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


LOOP, V, SINGLE = [0, 1, 0, 1], [0, 1, 1, 0], [0, 1]
REJECTED = [
    (LOOP, {"name": None}, "ValueError: .*: pipeline_parallel_schedule_csv=None and pipeline_parallel_schedule=None"),
    (LOOP, {"name": "LopedBFS"}, "ValueError: .*='LopedBFS' is not a schedule; nearest: 'LoopedBFS'"),
    (LOOP, {"name": "PipelineScheduleMulti"}, "ValueError: .*='PipelineScheduleMulti' is not a schedule"),
    (SINGLE, {"name": "PipelineScheduleSingle"}, "ValueError: .*='PipelineScheduleSingle' is not a schedule"),
    (SINGLE, {"name": ""}, "ValueError: .*pipeline_parallel_schedule='' is not a schedule"),
    (SINGLE, {"name": 3}, "TypeError: .*pipeline_parallel_schedule=3 is an int"),
    (LOOP, {"name": "1f1b"}, "ValueError: .*='1F1B' with 2 stages on each rank: 1F1B has exactly 1"),
    (LOOP, {"name": "GPipe"}, "ValueError: .*='GPipe' with 2 stages on each rank: GPipe has exactly 1"),
    (SINGLE, {"name": "ZBVZeroBubble"}, "ValueError: .*with 1 stages on each rank: ZBVZeroBubble has exactly 2"),
    ([0, 1, 0, 1, 0, 1], {"name": "DualPipeV"}, "ValueError: .*with 3 stages on each rank: DualPipeV has exactly 2"),
    ([0, 1, 0], {"name": "LoopedBFS"}, "ValueError: .*='LoopedBFS' with 3 stages over 2 ranks; use a multiple of 2"),
    (LOOP, {"name": "ZBVZeroBubble"}, r"ValueError: .*stages on rank 0 of 2 are \[0, 2\], but .* places \[0, 3\]"),
    (LOOP, {"name": "DualPipeV"}, r"ValueError: .*stages on rank 0 of 2 are \[0, 2\], but .* places \[0, 3\]"),
    (V, {"name": "Interleaved1F1B"}, r"ValueError: .*stages on rank 0 of 2 are \[0, 3\], but .* places \[0, 2\]"),
    (
        SINGLE,
        {"name": "1F1B", "batch": 2},
        "ValueError: .*local_batch_size=2, microbatch_size=2: .*=1 cannot be scheduled",
    ),
    (
        V,
        {"name": "DualPipeV", "batch": 6},
        "ValueError: .*local_batch_size=6, .*n_microbatches=3 cannot be scheduled .*use 4",
    ),
    (LOOP, {"name": "Interleaved1F1B", "batch": 10}, "ValueError: .*local_batch_size=10, .*n_microbatches=5 cannot"),
    (LOOP, {"name": "InterleavedZeroBubble", "batch": 10}, "ValueError: .*local_batch_size=10, .*=5 cannot"),
    (
        SINGLE,
        {"name": "GPipe", "microbatch": 3},
        "ValueError: .*microbatch_size=3 does not divide local_batch_size=8; use 1, 2, 4 or 8",
    ),
    (
        SINGLE,
        {"name": "GPipe", "batch": 1},
        "ValueError: .*microbatch_size=2 does not divide local_batch_size=1; use 1",
    ),
    (SINGLE, {"name": "GPipe", "batch": 0}, "ValueError: .*local_batch_size=0 must be at least 1"),
    (SINGLE, {"name": "GPipe", "microbatch": -2}, "ValueError: .*microbatch_size=-2 must be at least 1"),
    (SINGLE, {"name": "GPipe", "microbatch": 2.0}, "TypeError: .*microbatch_size=2.0 is a float; pass an int"),
    (SINGLE, {"name": "GPipe", "scale": 1}, "TypeError: .*scale_grads=1 is an int; pass True or False"),
    (SINGLE, {"name": "GPipe", "loss": "mse"}, "TypeError: .*loss_fn='mse' is a str; pass a function"),
    (SINGLE, {"name": "GPipe", "empty": True}, "ValueError: .*stages is empty"),
    (SINGLE, {"csv": 7}, "TypeError: .*pipeline_parallel_schedule_csv=7 is an int; pass a str"),
    (SINGLE, {"csv": "none.csv"}, "FileNotFoundError: .*pipeline_parallel_schedule_csv='none.csv' does not exist"),
]


FILES = [
    (SINGLE, "0F0,0B0,0F1,0B1\n1F0,1B0,1B1,1F1", "row 2, column 3: '1B1' comes before '1F1'"),
    (SINGLE, "0F0,0B0\n1F0,1B0", "row 1, column 3: the rank ends without '0F1'"),
    (SINGLE, "0F0,0B0,0F1,0B1", "row 2, column 1: is missing"),
    (LOOP, "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", "has 2 stages, the model 4; split the model into as many"),
    (SINGLE, "1F0,1B0,1F1,1B1\n0F0,0B0,0F1,0B1", "stages on rank 0 of 2 are [0], but pipeline_parallel_schedule_csv"),
]
NAMED_FILES = [
    (SINGLE, "0F0,0B0\n1F0,1B0", "LoopedBFS", "accepted"),
    (SINGLE, "0F0,0SEND_F0,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0", "LoopedBFS", "accepted"),
    (
        SINGLE,
        "0F0,0B0\n1F0,1B0",
        "1F1B",
        "'1F1B' does not fit pipeline_parallel_schedule_csv: cannot be scheduled by 1F1B",
    ),
    (
        LOOP,
        "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0",
        "GPipe",
        "'GPipe' does not fit .*: GPipe has exactly 1 on each rank",
    ),
    (LOOP, "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0", "ZBVZeroBubble", "ZBVZeroBubble places stages as 'v', the file as"),
]


ACCEPTED = [
    *((LOOP, {"name": name}) for name in ("LoopedBFS", "Interleaved1F1B", "interleavedzerobubble")),
    *((V, {"name": name}) for name in ("ZBVZeroBubble", "dualpipev")),
    *((SINGLE, {"name": name, "batch": 6}) for name in ("GPipe", "1f1b", "LoopedBFS")),
]


@pytest.mark.parametrize(("placed", "options"), ACCEPTED)
def test_a_schedule_that_fits_is_accepted_on_every_rank(placed, options):
    assert run(rejection, case_of(2, placed=placed, **options)).results == ("accepted",) * 2


@pytest.mark.parametrize(("placed", "options", "words"), REJECTED)
def test_impossible_arguments_are_rejected_on_every_rank_before_anything_is_sent(placed, options, words):
    ranks = run(rejection, case_of(2, placed=placed, **options))
    first, second = ranks.results
    assert ranks.ledger.rows == []
    assert re.match(words, first)
    assert second.partition(":")[0] == first.partition(":")[0]
    assert first.startswith("FileNotFoundError") or "pipelining.build_pipeline_schedule: " in second


OTHERS = [
    (lambda stages, longer: stages[0], "TypeError: .*: stages is a PipelineStage; pass a list of PipelineStage"),
    (lambda stages, longer: [*stages, 3], r"TypeError: .*: stages\[1\] is an int; pass a PipelineStage"),
    (lambda stages, longer: [None, *stages], r"TypeError: .*: stages\[0\] is None; pass a PipelineStage"),
    (lambda stages, longer: [*stages, *longer], r"ValueError: .*of pipelines with \[2, 4\] stages over \[2\] ranks"),
]


@pytest.mark.parametrize(("given_as", "words"), OTHERS, ids=range(len(OTHERS)))
def test_stages_that_are_not_one_pipelines_are_rejected(given_as, words):
    def body(mesh, case):
        stages, longer = (list(made_stages(mesh, placed, None).values()) for placed in (SINGLE, LOOP))
        with pytest.raises((TypeError, ValueError)) as error:
            build_pipeline_schedule(None, "GPipe", 2, 8, given_as(stages, longer), len)
        return f"{error.type.__name__}: {error.value}"

    ranks = run(body, case_of(2))
    assert ranks.ledger.rows == []
    assert all(re.match(words, sentence) for sentence in ranks.results), ranks.results


@pytest.mark.parametrize(("placed", "text", "words"), FILES)
def test_a_file_that_cannot_be_is_rejected_on_every_rank(placed, text, words, tmp_path):
    path = written(tmp_path, text)
    ranks = run(rejection, case_of(2, placed=placed, csv=path, batch=4))
    assert ranks.ledger.rows == []
    assert words in ranks.results[0]
    assert all(
        "ValueError: " in sentence and "pipeline_parallel_schedule_csv" in sentence for sentence in ranks.results
    )


@pytest.mark.parametrize(("placed", "text", "name", "words"), NAMED_FILES)
def test_a_name_beside_a_file_must_fit_it(placed, text, name, words, tmp_path):
    ranks = run(rejection, case_of(2, placed=placed, csv=written(tmp_path, text), name=name, batch=2))
    for sentence in ranks.results:
        assert re.search(words, sentence)


def test_logs_and_warnings(caplog):
    def built(mesh, case):
        stages = list(made_stages(mesh, placement("GPipe", 2, 1), None).values())
        with pytest.warns(UserWarning, match="scale_grads=True divides the accumulated gradients"):
            build_pipeline_schedule(None, "gpipe", 1, 1, stages, None, True)

    logging.getLogger("torch_impl.pipelining.schedule").setLevel(logging.INFO)
    run(built, case_of(2))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("torch_impl")]
    assert (
        messages
        == [
            "schedule GPipe: 2 ranks, 2 stages, 1 micro-batches, forward only (no loss_fn)",
            "1 micro-batches are fewer than the 2 stages: ranks will wait; use at least as many",
        ]
        * 2
    )
