"""Divide a model over a pipeline: the stages of each rank, the layers of each stage, the names of its modules.

These are numbers and names only, the same on every rank; nothing here loads torch.
"""

from __future__ import annotations

import heapq
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from torch_impl.contract import Names, NonNegative, PositiveInt, Rejected, contract

Style = Literal["loop", "v"]
Rounding = Literal["up", "down"]


@contract
def stage_ids_this_rank(
    pp_rank: int, pp_size: PositiveInt, num_stages: PositiveInt, style: Style = "loop"
) -> tuple[int, ...]:
    """The stages of one rank, ascending: `loop` deals them out in the same order in each pass, `v` reverses the order
    after each pass.

    >>> stage_ids_this_rank(1, 2, 6, "loop"), stage_ids_this_rank(1, 2, 6, "v")
    ((1, 3, 5), (1, 2, 5))

    Errors: TypeError for a wrong type; ValueError for num_stages that pp_size does not divide, an unknown rank or
            style.
    """
    if not 0 <= pp_rank < pp_size:
        raise Rejected(f"pp_rank={pp_rank} is not a rank of pp_size={pp_size}; pass 0 to {pp_size - 1}")
    if uneven := _sharing_problem(pp_size, num_stages):
        raise Rejected(uneven)
    return stage_ids(pp_rank, pp_size, num_stages, style)


def stage_ids(pp_rank: int, pp_size: int, num_stages: int, style: Style) -> tuple[int, ...]:
    """The stages of one rank, ascending, for valid arguments (`stage_ids_this_rank` checks them)."""
    # Each pass deals out pp_size stages, one to each rank; with `v` every second pass runs backwards.
    reversed_rank = pp_size - 1 - pp_rank if style == "v" else pp_rank
    passes = range(num_stages // pp_size)
    return tuple(k * pp_size + (reversed_rank if k % 2 else pp_rank) for k in passes)


@contract
def stage_to_rank(pp_size: PositiveInt, num_stages: PositiveInt, style: Style = "loop") -> list[int]:
    """The rank of each stage: the inverse of `stage_ids_this_rank`.

    Errors: TypeError for a wrong type; ValueError for num_stages that pp_size does not divide, or an unknown style.
    """
    if uneven := _sharing_problem(pp_size, num_stages):
        raise Rejected(uneven)
    return ranks_of_stages(pp_size, num_stages, style)


def _sharing_problem(pp_size: int, num_stages: int) -> str | None:
    """Why the ranks cannot have equal numbers of stages, or None if they can."""
    if num_stages % pp_size == 0:
        return None
    multiple = -(-num_stages // pp_size) * pp_size
    return f"num_stages={num_stages} is not a multiple of pp_size={pp_size}; use {multiple}"


def ranks_of_stages(pp_size: int, num_stages: int, style: Style) -> list[int]:
    """The rank of each stage, for valid arguments (`stage_to_rank` checks them)."""
    ranks = [0] * num_stages
    for rank in range(pp_size):
        for stage in stage_ids(rank, pp_size, num_stages, style):
            ranks[stage] = rank
    return ranks


def layer_counts(
    num_stages: int, num_layers: int, embed_cost: int | float | Fraction = 0, head_cost: int | float | Fraction = 0
) -> list[int]:
    """The number of contiguous layers of each stage, at least 1: the most expensive stage is as cheap as possible, then
    costs are as even as possible.

    Costs are in layers: the first stage also has the embedding's, the last stage the head's. Ties give earlier stages
    more layers; without costs the first `num_layers % num_stages` stages have one more.

    >>> layer_counts(4, 33), layer_counts(4, 32, embed_cost=1, head_cost=3)
    ([9, 8, 8, 8], [8, 9, 9, 6])
    """
    costs = [Fraction(1)] * num_stages  # fractions, so that no rounding decides
    costs[0] += Fraction(embed_cost)
    costs[-1] += Fraction(head_cost)
    counts = [1] * num_stages
    # Give each layer to the cheapest stage so far, which minimizes both the largest cost and the sum of squares.
    queue = [(cost, stage) for stage, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(num_layers - num_stages):
        cost, stage = queue[0]
        counts[stage] += 1
        heapq.heapreplace(queue, (cost + 1, stage))
    return counts


@contract
def calculate_virtual_stages(
    num_layers: PositiveInt,
    layers_per_stage: PositiveInt | None,
    pp_size: PositiveInt,
    is_single_stage_schedule: bool,
    round_to_pp_multiple: Rounding | None = None,
) -> tuple[int, int]:
    """The number of stages in all and on each rank: `(num_virtual_stages, stages_per_rank)`.

    With `layers_per_stage=None` each rank has one stage, or two if the schedule has several. Otherwise there are
    ceil(num_layers / layers_per_stage) stages, which must be a multiple of pp_size; `round_to_pp_multiple="up"` or
    `"down"` rounds to a multiple.

    >>> calculate_virtual_stages(33, 4, 4, False, "up")
    (12, 3)

    Errors: ValueError, with the largest `layers_per_stage` that works, for a number of stages that is not a multiple of
            pp_size, that the schedule cannot have, or that is above the number of layers; TypeError for a wrong type.
    """
    stages = _stages(num_layers, layers_per_stage, pp_size, is_single_stage_schedule, round_to_pp_multiple)
    problem = _problem(stages, num_layers, pp_size, is_single_stage_schedule)
    if problem:
        advice = _advice(num_layers, layers_per_stage, pp_size, is_single_stage_schedule, round_to_pp_multiple)
        raise Rejected(
            f"layers_per_stage={layers_per_stage} gives {stages} stages for "
            f"num_layers={num_layers} over pp_size={pp_size}, {problem}; {advice}"
        )
    return stages, stages // pp_size


def _stages(num_layers: int, per_stage: int | None, pp_size: int, is_single: bool, rounding: str | None) -> int:
    if per_stage is None:
        return pp_size if is_single else 2 * pp_size
    stages = -(-num_layers // per_stage)
    if rounding == "up":
        return -(-stages // pp_size) * pp_size
    return stages // pp_size * pp_size if rounding == "down" else stages


def _problem(stages: int, num_layers: int, pp_size: int, is_single: bool) -> str | None:
    """Why this number of stages is impossible, or None if it is possible."""
    if stages % pp_size:
        return f"not a multiple of pp_size={pp_size}"
    if is_single and stages != pp_size:
        return f"{stages // pp_size} on each rank where this schedule has one"
    if not is_single and stages < 2 * pp_size:
        return f"{stages // pp_size} on each rank where this schedule has two or more"
    return f"more than there are layers ({num_layers})" if stages > num_layers else None


def _advice(num_layers: int, layers_per_stage: int | None, pp_size: int, is_single: bool, rounding: str | None) -> str:
    """The largest layers_per_stage that every rule accepts, and the roundings that accept the argument."""
    # Search from the largest down: the fewest stages have the fewest messages.
    for per_stage in range(num_layers, 0, -1):
        stages = _stages(num_layers, per_stage, pp_size, is_single, rounding)
        if not _problem(stages, num_layers, pp_size, is_single):
            roundings = _roundings(num_layers, layers_per_stage, pp_size, is_single, rounding)
            return f"use layers_per_stage={per_stage}{roundings}"
    return f"none exists for pp_size={pp_size}; use fewer ranks or another schedule"


def _roundings(num_layers: int, per_stage: int | None, pp_size: int, is_single: bool, rounding: str | None) -> str:
    if per_stage is None or rounding is not None:
        return ""
    rounded = {each: _stages(num_layers, per_stage, pp_size, is_single, each) for each in ("up", "down")}
    legal = [each for each, stages in rounded.items() if not _problem(stages, num_layers, pp_size, is_single)]
    return "".join(f", or round_to_pp_multiple={each!r}" for each in legal)


# The names that transformers gives to image and audio encoders, and to the projectors of their outputs.
MULTIMODAL = (
    "vision_tower",
    "visual",
    "vision_model",
    "image_encoder",
    "vision_encoder",
    "embed_vision",
    "audio_tower",
    "audio_encoder",
    "audio_model",
    "mm_projector",
    "multi_modal_projector",
    "multimodal_projector",
    "vision_projector",
    "vit_large_projector",
    "audio_projector",
)


@contract
def generate_hf_model_fqn_per_model_part(
    num_stages: PositiveInt,
    num_layers: PositiveInt,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    include_multimodal_encoders: bool = True,
    extra_module_fqns: Names | None = None,
    fqn_prefix: str = "model.",
    lm_head_fqn: str = "lm_head",
    *,
    embed_cost: NonNegative = 0.0,
    head_cost: NonNegative = 0.0,
) -> list[list[str]]:
    """The names of each stage's modules, for models with transformers' layout. Names that a model lacks are harmless.

    The first stage begins with the embedding, the encoders of other modalities and the extra names; the last stage ends
    with the norm and the head; every stage closes with the rotary embedding, which has no parameters. Layers are
    divided by `partition.layer_counts`: costs are in layers, and without them the first stages may get one layer more.

    >>> only = dict(include_multimodal_encoders=False, include_rotary_emb=False)
    >>> generate_hf_model_fqn_per_model_part(2, 3, **only)[1]
    ['model.layers.2', 'model.norm', 'lm_head']

    Errors: ValueError for fewer layers than stages, sizes below 1 or negative costs; TypeError for a wrong type.
    """
    if num_layers < num_stages:
        raise Rejected(
            f"num_stages={num_stages} exceeds "
            f"num_layers={num_layers}; every stage needs a layer, so use at most {num_layers} stages"
        )
    counts = layer_counts(num_stages, num_layers, embed_cost, head_cost)
    # 1. List the layers of each stage, in order.
    ends = list(accumulate(counts))
    stages = [
        [f"{fqn_prefix}layers.{layer}" for layer in range(end - count, end)]
        for count, end in zip(counts, ends, strict=True)
    ]
    # 2. Put the modules before the layers on the first stage, the modules after them on the last.
    encoders = [f"{fqn_prefix}{module}" for module in MULTIMODAL] if include_multimodal_encoders else []
    embedding = [f"{fqn_prefix}embed_tokens"] if include_embeddings else []
    stages[0] = [*embedding, *encoders, *(extra_module_fqns or ()), *stages[0]]
    stages[-1] += [f"{fqn_prefix}norm", *([lm_head_fqn] if include_lm_head else [])]
    # 3. Give every stage a copy of the rotary embedding, which has no parameters.
    return [[*stage, *([f"{fqn_prefix}rotary_emb"] if include_rotary_emb else [])] for stage in stages]
