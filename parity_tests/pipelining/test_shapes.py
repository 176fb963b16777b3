"""Parity of pipelining.shapes: shapes passed in advance equal the shapes that a run infers; lengths that change."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from parity_tests.pipelining.unsplit_models import LENGTH, PROMISED, ROWS, chosen, loss_of, tokens
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.schedule import build_pipeline_schedule
from torch_impl.pipelining.shapes import (
    _get_hidden_and_vocab_size,
    _precompute_stage_shapes,
    reset_pp_stage_shapes,
)
from torch_impl.pipelining.split import split_model_into_stages

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")

CPU = torch.device("cpu")
OF = chosen("qwen3", False, 4)
# Whether a pipeline's ranks vote on who infers shapes; torch 2.11 has no vote: each stage without shapes infers them.
VOTES = hasattr(PipelineStage, "_warmup_forward_vote")


def case_of(p=2, **options):
    return CaseSpec("shapes", {"pp": p}, options=options)


class FooConfig:
    def __init__(self, **fields):
        vars(self).update(fields)


TEXT = SimpleNamespace(hidden_size=7, vocab_size=9)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"hidden_size": 3, "vocab_size": 5}, (3, 5)),
        ({"text_config": TEXT}, (7, 9)),
        ({"hidden_size": 3, "text_config": TEXT}, (3, 9)),
        ({"vocab_size": 5, "text_config": TEXT}, (7, 5)),
        ({"hidden_size": None, "vocab_size": 5, "text_config": TEXT}, (7, 5)),
    ],
)
def test_each_size_comes_from_the_config_or_its_text_config(fields, sizes):
    assert _get_hidden_and_vocab_size(FooConfig(**fields)) == sizes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"hidden_size": 3},
            "Cannot determine vocab_size from FooConfig: neither FooConfig.vocab_size nor "
            "FooConfig.text_config.vocab_size is set",
        ),
        ({"vocab_size": 3, "text_config": FooConfig()}, "Cannot determine hidden_size from FooConfig: neither"),
        ({"hidden_size": 0, "vocab_size": 3}, "hidden_size=0 must be a positive int"),
        ({"hidden_size": 3, "vocab_size": 3.0}, "vocab_size=3.0 must be a positive int"),
        ({"hidden_size": True, "vocab_size": 3}, "hidden_size=True must be a positive int"),
    ],
)
def test_a_missing_size_is_named(fields, words):
    with pytest.raises(ValueError, match=r"^Cannot determine") as rejection:
        _get_hidden_and_vocab_size(FooConfig(**fields))
    assert words in str(rejection.value)


def built(mesh, name, dtype, n=4):
    stages, _ = split_model_into_stages(families.model_of(OF, dtype), mesh.device_mesh, "pp", name, CPU)
    return stages, build_pipeline_schedule(None, name, ROWS, n * ROWS, stages, loss_of)


def step(schedule, stages, ids, targets):
    stage_ids, losses = {stage.stage_index for stage in stages}, []
    last = {"target": targets, "losses": losses} if stages[0].num_stages - 1 in stage_ids else {}
    schedule.step(*([ids] if 0 in stage_ids else []), **last)
    return [loss.item() for loss in losses]


def gradients(stages):
    return {
        name: parameter.grad.numpy().tobytes()
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }


def metas_of(stage):
    """Shape, dtype and whether there is a gradient, of each input and output that torch expects of a stage."""
    if hasattr(stage, "_stage_meta"):
        metas = (*stage._stage_meta.inputs, *stage._stage_meta.outputs)
        return [(tuple(meta.shape), meta.dtype, meta.requires_grad) for meta in metas]
    # torch 2.11, which has a gradient for every message if the schedule has a backward
    return [(tuple(meta.shape), meta.dtype) for meta in (*stage.inputs_meta, *stage.get_outputs_meta())]


def inferred_and_passed(mesh, case):
    """The same step with inferred shapes and with passed shapes: whether the results are equal, and the shapes."""
    outcomes = []
    for has_shapes in (False, True):
        stages, schedule = built(mesh, case.name, torch.float64)
        if has_shapes:
            _precompute_stage_shapes(stages, OF.config, ROWS, LENGTH)
        losses = step(schedule, stages, *tokens(OF, 4))
        outcomes.append((losses, gradients(stages), str([metas_of(stage) for stage in stages])))
    return outcomes[0] == outcomes[1], outcomes[1][2]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_passed_shapes_equal_inferred_ones(name):
    ranks = run(inferred_and_passed, case_of(name=name))
    assert [same for same, _ in ranks.results] == [True, True]


def shapes_sent(mesh, case):
    stages, schedule = built(mesh, case.name, torch.float32)
    _precompute_stage_shapes(stages, OF.config, ROWS, LENGTH)
    step(schedule, stages, *tokens(OF, 4))
    return [stage._inference_mode.name for stage in stages] if VOTES else []


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("name", list(RULES))
def test_no_message_has_a_shape(name):
    ranks = run(shapes_sent, case_of(name=name))
    assert {mode for modes in ranks.results for mode in modes} == ({"STATIC"} if VOTES else set())
    # torch's vote, and hidden states; torch 2.11 sends no vote, and shapes as int64 and uint8
    assert {row.dtypes for row in ranks.ledger.rows} == ({("int32",), ("float32",)} if VOTES else {("float32",)})


def lengths(mesh, case):
    """The gradients of batches of several lengths, added up; shapes are passed each time."""
    stages, schedule = built(mesh, case.name, torch.float32, n=2)
    for length in case.lengths_of:
        reset_pp_stage_shapes(schedule, stages, OF.config, ROWS, length)
        ids, targets = (torch.from_numpy(x) for x in families.batch(OF, 2 * ROWS, length))
        step(schedule, stages, ids, targets)
    return gradients(stages)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", ["1F1B", "DualPipeV", "InterleavedZeroBubble"])
def test_lengths_that_change_are_accumulated(name):
    chain = (5, 8, 8, 3)
    if name == "DualPipeV":
        ranks = run(lengths, CaseSpec("shapes", {"pp": 1}, options={"name": name, "lengths_of": chain}))
    else:
        ranks = run(lengths, case_of(name=name, lengths_of=chain))
    model = families.model_of(OF, torch.float32)
    for length in chain:
        ids, targets = (torch.from_numpy(x) for x in families.batch(OF, 2 * ROWS, length))
        for rows, labels in zip(ids.split(ROWS), targets.split(ROWS), strict=True):
            loss_of(model(rows, use_cache=False).logits, labels).backward()
    gradients = {}
    for of_rank in ranks.results:
        gradients |= of_rank
    assert gradients == {name: parameter.grad.numpy().tobytes() for name, parameter in model.named_parameters()}


def test_a_batch_of_another_size_is_rejected_by_the_first_stage():
    def body(mesh, case):
        stages, schedule = built(mesh, "LoopedBFS", torch.float32)
        _precompute_stage_shapes(stages, OF.config, ROWS, LENGTH)
        ids, targets = tokens(OF, 4)
        with pytest.raises(ValueError, match=r"args\[0\] has s=4, the stages were set to seq_len=5; call reset_pp_"):
            schedule.step(ids[:, :4], target=targets[:, :4])
        with pytest.raises(ValueError, match=r"args\[0\] has 7 rows, the schedule was built for local_batch_size=8"):
            schedule.step(ids[:7], target=targets[:7])

    assert run(body, case_of(1)).ledger.rows == []


def test_another_length_than_the_first_steps_is_rejected_by_the_first_stage():
    def body(mesh, case):
        stages, schedule = built(mesh, "LoopedBFS", torch.float32)
        ids, targets = tokens(OF, 4)
        for _ in range(2):
            step(schedule, stages, ids, targets)
        with pytest.raises(ValueError, match=r"args\[0\] has s=4, the first step had s=5; call reset_pp_stage_shapes"):
            step(schedule, stages, ids[:, :4], targets[:, :4])
        reset_pp_stage_shapes(schedule, stages, OF.config, ROWS, 4)
        return len(step(schedule, stages, ids[:, :4], targets[:, :4]))

    assert run(body, case_of(1)).results == (4,)


def test_a_step_without_input_or_target_is_rejected_on_the_rank_that_needs_it():
    def body(mesh, case):
        _, schedule = built(mesh, "GPipe", torch.float32)
        ids, targets = tokens(OF, 4)
        last = mesh.rank("pp")
        words = "target=None on the rank of the last stage" if last else "args is empty on the rank of the first stage"
        with pytest.raises(ValueError, match=words):
            schedule.step(*([ids] if last else []), target=None if last else targets, losses=[])

    assert run(body, case_of(2)).ledger.rows == []


def test_invalid_shapes_are_rejected():
    def body(mesh, case):
        stages, schedule = built(mesh, "LoopedBFS", torch.float32)
        for sizes, words in (
            ((0, 5), "microbatch_size=0 must be at least 1"),
            ((2, 0), "seq_len=0 must be at least 1"),
        ):
            with pytest.raises(ValueError, match=words):
                _precompute_stage_shapes(stages, OF.config, *sizes)
        with pytest.raises(ValueError, match="stages is empty"):
            _precompute_stage_shapes([], OF.config, 2, 5)
        with pytest.raises(ValueError, match="stages are not the stages of the schedule"):
            reset_pp_stage_shapes(schedule, stages[:1], OF.config, 2, 5)
        assert not hasattr(stages[0], "static_key")

    run(body, case_of(1))


@pytest.mark.skipif(not VOTES, reason="torch 2.11 takes no vote: a rank without shapes waits for them")
def test_ranks_with_shapes_reject_a_step_if_others_have_none():
    """The other rank takes part in torch's vote and goes no further."""

    def body(mesh, case):
        stages, schedule = built(mesh, "GPipe", torch.float32)
        if mesh.rank("pp"):
            return schedule._warmup_p2p(stages, True, False)
        _precompute_stage_shapes(stages, OF.config, ROWS, LENGTH)
        with pytest.raises(RuntimeError, match="has static shapes and would infer them, since others have none"):
            step(schedule, stages, *tokens(OF, 4))

    run(body, case_of(2))


def sharded_lengths(mesh, case):
    """The gradients of steps of several lengths under FSDP2, added up."""
    stages, schedule = built(mesh, "Interleaved1F1B", torch.float64, n=2)
    for stage in stages:
        fully_shard(stage.submod, mesh=mesh.device_mesh["dp"], reshard_after_forward=False)
    for length in case.lengths_of:
        reset_pp_stage_shapes(schedule, stages, OF.config, ROWS, length)
        ids, targets = (torch.from_numpy(x) for x in families.batch(OF, 2 * ROWS, length))
        step(schedule, stages, ids, targets)
    return {
        name: parameter.grad.full_tensor().numpy().tobytes()
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }


@pytest.mark.slow
def test_lengths_that_change_are_accumulated_under_fsdp():
    chain = (5, 8, 3)
    ranks = run(sharded_lengths, CaseSpec("shapes", {"pp": 2, "dp": 2}, options={"lengths_of": chain}))
    model = families.model_of(OF, torch.float64)
    for length in chain:
        ids, targets = (torch.from_numpy(x) for x in families.batch(OF, 2 * ROWS, length))
        loss_of(model(ids, use_cache=False).logits, targets).backward()
    gradients = {}
    for of_rank in ranks.results:
        gradients |= of_rank
    for name, parameter in model.named_parameters():
        ours = torch.frombuffer(bytearray(gradients[name]), dtype=torch.float64).view_as(parameter)
        assert (ours - parameter.grad).norm() <= PROMISED * parameter.grad.norm(), name
