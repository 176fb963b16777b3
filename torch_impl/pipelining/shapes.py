"""Set the shapes of each stage's inputs and outputs in advance, so that no stage has to run to infer them; and check
each step's batch against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import Dtype, Instance, ListOf, PositiveInt, Rejected, contract
from torch_impl.pipelining._torch_compat import (
    SCHEDULES,
    forget_shapes,
    of_torch,
    output_dtype_of,
    set_static_shapes,
    stages_of,
)

Schedule = Annotated[Any, Instance(SCHEDULES, "pass what pipeline_model returns", shows_value=False)]
Stages = Annotated[
    list[PipelineStage],
    ListOf(
        Instance(PipelineStage, "pass a PipelineStage", shows_value=False),
        "PipelineStage",
        if_empty="pass the stages of this rank",
    ),
]


def _get_hidden_and_vocab_size(config: Any) -> tuple[int, int]:
    """(hidden_size, vocab_size), each from the config or else from its `text_config`.

    Errors: ValueError for a size that is in neither, or that is not a positive int.
    """
    return _size(config, "hidden_size"), _size(config, "vocab_size")


def _size(config: Any, field: str) -> int:
    name = type(config).__name__
    # transformers' multimodal configs have their language model's sizes in `text_config`.
    value = getattr(config, field, None)
    if value is None:
        value = getattr(getattr(config, "text_config", None), field, None)
    if value is None:
        raise ValueError(
            f"Cannot determine {field} from {name}: neither {name}.{field} nor {name}.text_config.{field} is set; "
            f"pass a model_config with {field}"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Cannot determine {field} from {name}: {field}={value!r} must be a positive int")
    return value


@contract
def _precompute_stage_shapes(
    stages: Stages,
    model_config: Any,
    microbatch_size: PositiveInt,
    seq_len: PositiveInt,
    *,
    tensor_dtype: Dtype | None = None,
) -> None:
    """Set the shapes of each stage's input and output. Every rank must call it, with the same sizes.

        first stage       ids "b s"      others        hidden states "b s d", with a gradient
        with a head       logits "b s v" others        hidden states "b s d"

    `seq_len` is the local length: divided by cp, and by tp if sequences are sharded between stages. The dtype is
    `tensor_dtype`, or else the dtype of the stage's output. A module can define its own shapes by
    `get_pipeline_stage_metas(is_first, microbatch_size, seq_len, dtype)`, which returns its input tensors and its
    output tensors, on meta.

    Cost:   none. Without it the first step passes shapes from stage to stage, in 2 (stages - 1) sequential messages.
    Errors: ValueError for sizes below 1, no stages, a config without sizes; RuntimeError in the first step if stages
            of other ranks have no shapes.
    """
    set_shapes(stages, _get_hidden_and_vocab_size(model_config), microbatch_size, seq_len, tensor_dtype)


def set_shapes(
    stages: Sequence[PipelineStage],
    sizes: tuple[int, int],
    microbatch_size: int,
    seq_len: int,
    tensor_dtype: torch.dtype | None,
) -> bool:
    """Set the shapes of stages for sizes (hidden_size, vocab_size); returns whether any shape has changed."""
    has_changed = False
    for stage in stages:
        dtype = tensor_dtype or output_dtype_of(stage.submod)
        key = (microbatch_size, seq_len, dtype)
        # Report changes only: `reset_pp_stage_shapes` then drops the buffers, which unchanged shapes can reuse.
        if getattr(stage, "static_key", None) != key:
            entering, leaving = _metas(stage, sizes, key)
            set_static_shapes(stage, entering, leaving, key)
            has_changed = True
    return has_changed


@contract
def reset_pp_stage_shapes(
    schedule: Schedule,
    stages: Stages,
    model_config: Any,
    microbatch_size: PositiveInt,
    seq_len: PositiveInt,
    *,
    tensor_dtype: Dtype | None = None,
) -> None:
    """Change the shapes of a schedule's stages, for batches of another length; gradients are not changed.

    Every rank must call it with the same sizes; this is not checked across ranks. A call with unchanged sizes does
    nothing.

    Errors: as `_precompute_stage_shapes`; ValueError for stages that are not the schedule's.
    """
    if {id(stage) for stage in stages} != {id(stage) for stage in stages_of(schedule)}:
        raise Rejected("stages are not the stages of the schedule; pass the stages it was built with")
    if set_shapes(stages, _get_hidden_and_vocab_size(model_config), microbatch_size, seq_len, tensor_dtype):
        forget_shapes(schedule, stages)


def _metas(stage: PipelineStage, sizes: tuple[int, int], key: tuple[int, int, torch.dtype]) -> Any:
    """The input tensors and the output tensors of a stage, on meta."""
    microbatch, length, dtype = key
    # The module's own method decides. The default is transformers' layout: ids enter, a head returns logits.
    metas_of_module = getattr(stage.submod, "get_pipeline_stage_metas", None)
    if metas_of_module is not None:
        return metas_of_module(stage.is_first, microbatch, length, dtype)
    hidden, vocab = sizes
    ids = torch.empty(microbatch, length, dtype=torch.int64, device="meta")
    has_head = getattr(stage.submod, "lm_head", None) is not None
    leaving = _floats(microbatch, length, vocab if has_head else hidden, dtype)
    return ([ids] if stage.is_first else [_floats(microbatch, length, hidden, dtype)]), [leaving]


def _floats(microbatch: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(microbatch, length, width, dtype=dtype, device="meta", requires_grad=True)


def check_batches_of_each_step(schedule: Any, stages: Sequence[PipelineStage], local_batch_size: int) -> None:
    """Wrap the schedule's `step` in place, so that a batch of a wrong size is a ValueError before anything is sent."""
    step = schedule.step
    lengths: set[int] = set()  # sequence lengths of earlier steps, whose shapes the stages have inferred

    def step_with_checks(*args: Any, target: Any = None, **kwargs: Any) -> Any:
        # The model's inputs may be passed by position or by name; these two names are options of `step`.
        inputs = args or set(kwargs) - {"losses", "return_outputs"}
        for problem in _step_problems(schedule, stages, bool(inputs), target):
            raise ValueError(f"pipelining.step: {problem}")
        for name, x in (*((f"args[{index}]", x) for index, x in enumerate(args)), ("target", target)):
            for problem in _batch_problems(name, x, stages, local_batch_size, lengths):
                raise ValueError(f"pipelining.step: {name} has {problem}")
        returned = step(*map(_in_row_major_order, args), target=target, **kwargs)
        lengths.update(x.shape[1] for x in args if isinstance(x, Tensor) and x.ndim > 1)
        return returned

    schedule.step = step_with_checks


def _in_row_major_order(x: Any) -> Any:
    """A tensor with the strides of a new one: torch 2.11 compares each microbatch's strides with these."""
    if not isinstance(x, Tensor) or x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _step_problems(schedule: Any, stages: Sequence[PipelineStage], has_inputs: bool, target: Any) -> Iterator[str]:
    """Missing inputs on the first stage's rank, missing targets on the last's; torch would fail amid the step."""
    if any(stage.is_first for stage in stages) and not has_inputs:
        yield "args is empty on the rank of the first stage; pass the model's input"
    if any(stage.is_last for stage in stages) and target is None and of_torch(schedule, "_loss_fn") is not None:
        yield "target=None on the rank of the last stage; pass the target of loss_fn"


def _batch_problems(
    name: str, x: Any, stages: Sequence[PipelineStage], local_batch_size: int, lengths: set[int]
) -> Iterator[str]:
    """Sizes of a step's argument that the schedule was not built for; arguments that are not tensors pass."""
    if not isinstance(x, Tensor) or not x.ndim:
        return
    if x.shape[0] != local_batch_size:
        yield f"{x.shape[0]} rows, the schedule was built for local_batch_size={local_batch_size}; pass as many"
    key = getattr(stages[0], "static_key", None)
    # If shapes are not set, torch infers them in the first step and uses them in all later ones.
    expected = {key[1]} if key else lengths
    if name != "target" and x.ndim > 1 and expected and x.shape[1] not in expected:
        earlier = f"the stages were set to seq_len={key[1]}" if key else f"the first step had s={min(lengths)}"
        yield f"s={x.shape[1]}, {earlier}; call reset_pp_stage_shapes on every rank first"
