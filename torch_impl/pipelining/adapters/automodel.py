"""NeMo Automodel's `AutoPipeline`: the settings of a pipeline, which `build` splits a model by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import Function, Mesh, Module, PositiveInt, contract
from torch_impl.pipelining.functional import ParallelizeFnProtocol, pipeline_model, reset_pp_stage_shapes


@dataclass(frozen=True)
class PipelineInfo:
    """The pipeline that `build` made: its schedule, and this rank's parts and stages. Before it, `enabled` is False."""

    enabled: bool = False
    schedule: Any = None
    has_first_stage: bool = False
    has_last_stage: bool = False
    model_parts: list[nn.Module] = field(default_factory=list)
    stages: list[PipelineStage] = field(default_factory=list)


class AutoPipeline:
    """Splits a model over a pipeline and runs its steps; arguments as Automodel's, most as in `pipeline_model`.

        pipeline = AutoPipeline(mesh, pp_schedule="1f1b", pp_microbatch_size=1, pp_batch_size=8, device=device)
        pipeline.build(model, loss_fn=loss)
        pipeline.step(ids, target=targets, losses=losses)

    `pp_batch_size` is the number of rows of this rank's step, in micro-batches of `pp_microbatch_size` rows.
    `defer_fsdp_grad_sync=False` reduces gradients after every micro-batch. `pp_seq_len` sets the stages' shapes, so
    that no forward is needed to infer them.

    Errors: as `pipeline_model`, when it is built.
    """

    @contract("AutoPipeline")
    def __init__(
        self,
        world_mesh: Mesh,
        moe_mesh: DeviceMesh | None = None,
        pp_axis_name: str = "pp",
        dp_axis_names: tuple[str, ...] = ("dp",),
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
        pp_schedule: str | None = "1f1b",
        pp_schedule_csv: str | None = None,
        pp_microbatch_size: PositiveInt = 1,
        pp_batch_size: PositiveInt = 1,
        layers_per_stage: PositiveInt | None = None,
        round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None,
        module_fqns_per_model_part: list[list[str]] | None = None,
        patch_inner_model: bool = True,
        patch_causal_lm_model: bool = True,
        patch_stage_backward_maybe_with_nosync: bool = False,
        defer_fsdp_grad_sync: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        scale_grads_in_schedule: bool = False,
        pp_seq_len: PositiveInt | None = None,
    ) -> None:
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.info, self.microbatch_size, self.dtype = PipelineInfo(), pp_microbatch_size, dtype
        self._config: Any = None
        self._settings: dict[str, Any] = dict(
            world_mesh=world_mesh,
            moe_mesh=moe_mesh,
            pp_axis_name=pp_axis_name,
            dp_axis_names=dp_axis_names,
            cp_axis_name=cp_axis_name,
            tp_axis_name=tp_axis_name,
            ep_axis_name=ep_axis_name,
            ep_shard_axis_names=ep_shard_axis_names,
            layers_per_stage=layers_per_stage,
            pipeline_parallel_schedule_csv=pp_schedule_csv,
            # A file of a schedule decides over its name, which has a default.
            pipeline_parallel_schedule=None if pp_schedule_csv else pp_schedule,
            microbatch_size=pp_microbatch_size,
            local_batch_size=pp_batch_size,
            device=self.device,
            module_fqns_per_model_part=module_fqns_per_model_part,
            patch_inner_model=patch_inner_model,
            patch_causal_lm_model=patch_causal_lm_model,
            scale_grads=scale_grads_in_schedule,
            round_to_pp_multiple=round_virtual_stages_to_pp_multiple,
            patch_stage_backward_maybe_with_nosync=patch_stage_backward_maybe_with_nosync,
            reduce_grad_per_microbatch=not defer_fsdp_grad_sync,
            seq_len=pp_seq_len,
            tensor_dtype=dtype,
        )

    @contract("AutoPipeline.build")
    def build(
        self, model: Module, *, loss_fn: Function, parallelize_fn: ParallelizeFnProtocol | None = None
    ) -> AutoPipeline:
        """Split `model`, which is consumed, and build the schedule; returns self.

        Cost:   as `pipeline_model`.
        Errors: as `pipeline_model`; TypeError for a loss_fn that is no function.
        """
        schedule, parts, has_first, has_last, stages = pipeline_model(
            model, loss_fn=loss_fn, parallelize_fn=parallelize_fn, **self._settings
        )
        self.info = PipelineInfo(True, schedule, has_first, has_last, parts, stages)
        self._config = getattr(model, "config", None)  # read where shapes are set
        return self

    @contract("AutoPipeline.update_seq_len")
    def update_seq_len(self, seq_len: PositiveInt) -> None:
        """Set the stages' shapes for batches of another length. An unchanged length does nothing.

        Errors: as `reset_pp_stage_shapes`; ValueError before `build`.
        """
        info = self._built()
        reset_pp_stage_shapes(
            info.schedule, info.stages, self._config, self.microbatch_size, seq_len, tensor_dtype=self.dtype
        )

    @contract("AutoPipeline.step")
    def step(
        self,
        model_input: Tensor | None = None,
        *,
        target: Any = None,
        losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step of the schedule: forwards and backwards of all micro-batches.

        `model_input` "b ..." is read on the rank with the first stage, `target` and `losses` on the rank with the last.

        Cost:   as `build_pipeline_schedule`.
        Errors: as the schedule's step; ValueError before `build`.
        """
        info = self._built()
        inputs = (model_input,) if info.has_first_stage else ()
        return info.schedule.step(*inputs, target=target, losses=losses, **kwargs)

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's parts of the model.  Errors: ValueError before `build`."""
        return self._built().model_parts

    def list_stage_modules(self) -> list[list[str]]:
        """The names of the modules of each part."""
        return [[name for name, _ in part.named_modules() if name] for part in self.info.model_parts]

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """The number of elements of the parameters of each part."""
        return [_count(part.parameters(), trainable_only) for part in self.info.model_parts]

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """The number of elements of the parameters of all parts of this rank."""
        return sum(self.get_stage_param_counts(trainable_only))

    def _built(self) -> PipelineInfo:
        if not self.info.enabled:
            raise ValueError("AutoPipeline: there is no pipeline yet; call build(model, loss_fn=...) first")
        return self.info


def _count(parameters: Any, trainable_only: bool) -> int:
    return sum(each.numel() for each in parameters if each.requires_grad or not trainable_only)
