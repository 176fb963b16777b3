"""Parity of pipelining.pipeline: one call for everything, with and without FSDP2; and rejections."""

import re

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from parity_tests.pipelining.perceptron import written
from parity_tests.pipelining.unsplit_models import LENGTH, PROMISED, ROWS, accumulated, chosen, loss_of, tokens
from parity_tests.pipelining.written_orders import dumped, with_communication
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining import schedule_order
from torch_impl.pipelining.functional import pipeline_model

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")

OF = chosen("llama", True, 4)
N = 4


def given_to(mesh, **options):
    arguments = {
        "pp_axis_name": "pp",
        "dp_axis_names": ("dp",) if "dp" in mesh.axes else (),
        "layers_per_stage": None,
        "pipeline_parallel_schedule_csv": None,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "microbatch_size": ROWS,
        "local_batch_size": N * ROWS,
        "device": torch.device("cpu"),
        "loss_fn": loss_of,
    }
    return arguments | options


def run_one(mesh, case):
    options = dict(case.options)
    sharded, returns = options.pop("sharded", False), options.pop("returns", False)
    inner_alone = options.pop("inner_alone", False)
    called, units = [], []

    def parallelize(model, world_mesh, moe_mesh, **axes):
        called.append(sorted(axes))
        if sharded:
            root = any(".layers." not in name for name, _ in model.named_parameters())
            units.append(root + len(model.model.layers))  # that have parameters
            for layer in model.model.layers.values():
                fully_shard(layer, mesh=world_mesh["dp"], reshard_after_forward=False)
        if sharded and not inner_alone:
            fully_shard(model, mesh=world_mesh["dp"], reshard_after_forward=False)
        return model if returns else None

    model = families.model_of(OF, torch.float64)
    schedule, parts, has_first, has_last, stages = pipeline_model(
        model, mesh.device_mesh, None, **given_to(mesh, **options), parallelize_fn=parallelize
    )
    ids, targets = tokens(OF, N)
    schedule.step(*([ids] if has_first else []), **({"target": targets} if has_last else {}))
    assert [stage.submod for stage in stages] == parts
    assert len(called) == len(parts)
    grads = {name: p.grad for part in parts for name, p in part.named_parameters()}
    full = {name: (g.full_tensor() if sharded else g).numpy() for name, g in grads.items()}
    return has_first, has_last, {name: g.tobytes() for name, g in full.items()}, sum(units)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("p", "options"),
    [
        (1, {"pipeline_parallel_schedule": "1F1B", "layers_per_stage": 4}),
        (1, {}),
        (2, {}),
        (2, {"seq_len": LENGTH}),
        (2, {"seq_len": LENGTH, "tensor_dtype": None, "returns": True}),
        (2, {"pipeline_parallel_schedule": "DualPipeV", "seq_len": LENGTH}),
        (2, {"pipeline_parallel_schedule": "GPipe", "layers_per_stage": 3, "round_to_pp_multiple": "up"}),
    ],
)
def test_gradients_match_the_full_model(p, options):
    ranks = run(run_one, CaseSpec("pipeline", {"pp": p}, options=options))
    gradients = {}
    for _, _, of_rank, _ in ranks.results:
        gradients |= of_rank
    _, expected = accumulated(OF, N, "float64", range(N))
    if p == 1 and options.get("layers_per_stage") == 4:  # one stage: the tie is one parameter, added otherwise
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            expected.pop(name), gradients.pop(name, None)
    assert gradients == expected
    flags = [(first, last) for first, last, *_ in ranks.results]
    v = options.get("pipeline_parallel_schedule") == "DualPipeV"
    assert flags == (
        [(True, True)] if p == 1 else [(True, True), (False, False)] if v else [(True, False), (False, True)]
    )


def check_reduced(options, times):
    """The gradients over dp are the full model's, and each unit reduces its own so many times."""
    ranks = run(run_one, CaseSpec("pipeline", {"pp": 2, "dp": 2}, options=options))
    gradients = {}
    for rank, (_, _, of_rank, units) in enumerate(ranks.results):
        gradients |= of_rank
        assert sum(row.op == "reduce_scatter" for row in ranks.ledger.of(rank)) == times * units
    _, expected = accumulated(OF, N, "float64", range(N))
    assert set(gradients) == set(expected)
    for parameter, bits in expected.items():
        ours, theirs = (torch.frombuffer(bytearray(x), dtype=torch.float64) for x in (gradients[parameter], bits))
        assert (ours - theirs).norm() <= PROMISED * theirs.norm(), parameter


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "a file"])
def test_with_fsdp_inside_stages(name, once, tmp_path):
    """Both dp ranks have the same batch, so that the mean over them is the gradient."""
    options = {"sharded": True, "pipeline_parallel_schedule": name, "seq_len": LENGTH}
    if name == "a file":  # it says when stages are gathered, and not when their gradients are reduced
        order = with_communication(schedule_order("1F1B", 2, N, 1), [0, 1], N)
        rows = [[action for action in row if not action or action.kind != "REDUCE_GRAD"] for row in order]
        options |= {
            "pipeline_parallel_schedule": None,
            "pipeline_parallel_schedule_csv": written(tmp_path, dumped(rows)),
        }
    options["patch_stage_backward_maybe_with_nosync"] = once
    check_reduced(options, times=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_gradients_reduced_after_each_microbatch_are_the_same(name):
    options = {
        "sharded": True,
        "pipeline_parallel_schedule": name,
        "seq_len": LENGTH,
        "reduce_grad_per_microbatch": True,
    }
    check_reduced(options, times=N)


def test_a_part_that_would_be_reduced_each_time_is_rejected():
    def body(mesh, case):
        with pytest.raises(ValueError, match="patch_stage_backward_maybe_with_nosync=True, but a part of Llama"):
            run_one(mesh, case)

    options = {"sharded": True, "inner_alone": True, "patch_stage_backward_maybe_with_nosync": True}
    run(body, CaseSpec("pipeline", {"pp": 2, "dp": 2}, options=options))


def rejection(mesh, case):
    options = dict(case.options)
    model, world_mesh = families.model_of(OF, torch.float32), options.pop("world_mesh", mesh.device_mesh)
    with pytest.raises((ValueError, TypeError)) as error:
        pipeline_model(model, world_mesh, None, **given_to(mesh, **options))
    assert model(tokens(OF, 1)[0]) is not None  # nothing was taken from it
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.fast_values(8)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_schedule": None}, "ValueError: .*pipeline_parallel_schedule=None; pass one of them"),
        ({"dp_axis_names": ("dp",)}, r"ValueError: .*dp_axis_names=\('dp',\) are not axes of world_mesh \('pp',\)"),
        ({"world_mesh": {"pp": 2}}, "TypeError: .*world_mesh is a dict; pass a torch DeviceMesh"),
        ({"pp_axis_name": "pipe"}, r"ValueError: .*pp_axis_name='pipe' is not an axis of world_mesh \('pp',\)"),
        ({"microbatch_size": 3}, "ValueError: .*microbatch_size=3 does not divide local_batch_size=8"),
        ({"local_batch_size": 10}, "ValueError: .*n_microbatches=5 cannot be scheduled by Interleaved1F1B"),
        ({"layers_per_stage": 3}, "ValueError: .*layers_per_stage=3 gives 2 stages for num_layers=4"),
        ({"seq_len": 0}, "ValueError: .*seq_len=0 must be at least 1"),
        (
            {"patch_stage_backward_maybe_with_nosync": 1},
            "TypeError: .*patch_stage_backward_maybe_with_nosync=1 is an int; pass True or False",
        ),
        ({"device": None}, "TypeError: .*device is None; pass a torch.device"),
        (
            {"tensor_dtype": "float32", "seq_len": 5},
            "TypeError: .*tensor_dtype='float32' is a str; pass a torch.dtype",
        ),
        ({"parallelize_fn": 3}, "TypeError: .*parallelize_fn is an int; pass a function"),
        (
            {"reduce_grad_per_microbatch": True, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "ValueError: .*reduce_grad_per_microbatch=True, and the schedule splits backward",
        ),
        (
            {"reduce_grad_per_microbatch": True, "patch_stage_backward_maybe_with_nosync": True},
            "ValueError: .*reduce_grad_per_microbatch=True and patch_stage_backward_maybe_with_nosync=True",
        ),
    ],
)
def test_impossible_arguments_are_rejected_before_the_model_is_touched(options, words):
    ranks = run(rejection, CaseSpec("pipeline", {"pp": 2}, options=options))
    assert ranks.ledger.rows == []
    assert all(re.match(words, sentence) for sentence in ranks.results), ranks.results
