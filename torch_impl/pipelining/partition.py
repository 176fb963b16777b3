"""Which stages a rank has, how many there are, and how many layers each gets. Numbers alone, the same on each rank."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction
from itertools import accumulate

from torch_impl.pipelining.arguments import Number, check_int, check_positive, check_switch, check_text

STYLES = ("loop", "v")
ROUNDINGS = ("up", "down")


def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...]:
    """Stages of one rank, ascending: `loop` deals them out again and again, `v` turns round after each pass.

    >>> stage_ids_this_rank(1, 2, 6, "loop"), stage_ids_this_rank(1, 2, 6, "v")
    ((1, 3, 5), (1, 2, 5))

    Errors: TypeError for what is no int; ValueError for stages that ranks cannot share equally, a rank or style
            that there is not.
    """
    name = "stage_ids_this_rank"
    check_positive(name, "pp_size", pp_size)
    check_positive(name, "num_stages", num_stages)
    check_int(name, "pp_rank", pp_rank)
    if not 0 <= pp_rank < pp_size:
        raise ValueError(
            f"pipelining.{name}: pp_rank={pp_rank} is no rank of pp_size={pp_size}; pass 0 to {pp_size - 1}"
        )
    if num_stages % pp_size:
        raise ValueError(
            f"pipelining.{name}: num_stages={num_stages} is not a multiple of pp_size={pp_size}; "
            f"use {-(-num_stages // pp_size) * pp_size}"
        )
    if style not in STYLES:
        raise ValueError(f"pipelining.{name}: style={style!r} is not known; use 'loop' or 'v'")
    turned = pp_size - 1 - pp_rank if style == "v" else pp_rank
    return tuple(passed * pp_size + (turned if passed % 2 else pp_rank) for passed in range(num_stages // pp_size))


def stage_to_rank(pp_size: int, num_stages: int, style: str = "loop") -> list[int]:
    """The rank of each stage: `stage_ids_this_rank` the other way round. Errors: as there."""
    check_positive("stage_to_rank", "pp_size", pp_size)
    check_positive("stage_to_rank", "num_stages", num_stages)
    ranks = [0] * num_stages
    for rank in range(pp_size):
        for stage in stage_ids_this_rank(rank, pp_size, num_stages, style):
            ranks[stage] = rank
    return ranks


def layer_counts(num_stages: int, num_layers: int, embed_cost: Number = 0.0, head_cost: Number = 0.0) -> list[int]:
    """Layers of each stage, contiguous, at least one: the dearest stage is as cheap as can be, then costs are even.

    Costs are in layers: the embedding's is the first stage's, the head's the last one's. Of cuts with the same costs
    earlier stages have more, so that without costs the first `num_layers % num_stages` stages get one layer more.
    Layers go one by one to the stage that is cheapest so far, which makes the costs as even as any cut can: the
    largest and the sum of squares are both least. Counted in fractions, so that no rounding decides.

    >>> layer_counts(4, 33), layer_counts(4, 32, embed_cost=1, head_cost=3)
    ([9, 8, 8, 8], [8, 9, 9, 6])
    """
    name = "generate_hf_model_fqn_per_model_part"
    check_positive(name, "num_stages", num_stages)
    check_positive(name, "num_layers", num_layers)
    if num_layers < num_stages:
        raise ValueError(
            f"pipelining.{name}: num_stages={num_stages} exceeds num_layers={num_layers}; every stage needs a layer, "
            f"so use at most {num_layers} stages"
        )
    costs = [Fraction(1)] * num_stages
    costs[0] += _checked_cost(name, "embed_cost", embed_cost)
    costs[-1] += _checked_cost(name, "head_cost", head_cost)
    counts = [1] * num_stages
    queue = [(cost, stage) for stage, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(num_layers - num_stages):
        cost, stage = queue[0]
        counts[stage] += 1
        heapq.heapreplace(queue, (cost + 1, stage))
    return counts


def calculate_virtual_stages(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    is_single_stage_schedule: bool,
    round_to_pp_multiple: str | None = None,
) -> tuple[int, int]:
    """Stages in all and on each rank: `(num_virtual_stages, stages_per_rank)`.

    `layers_per_stage=None` gives one stage to each rank, or two where the schedule has several. Else there are
    ceil(num_layers / layers_per_stage) stages, which must be a multiple of pp_size; `round_to_pp_multiple="up"` or
    `"down"` makes them one.

    >>> calculate_virtual_stages(33, 4, 4, False, "up")
    (12, 3)

    Errors: ValueError for stages that ranks cannot share equally, that the schedule cannot have, or that are more
            than the layers, naming the largest `layers_per_stage` that works; TypeError for what is no int or bool.
    """
    name = "calculate_virtual_stages"
    check_positive(name, "num_layers", num_layers)
    check_positive(name, "pp_size", pp_size)
    check_switch(name, "is_single_stage_schedule", is_single_stage_schedule)
    if layers_per_stage is not None:
        check_positive(name, "layers_per_stage", layers_per_stage)
    if round_to_pp_multiple is not None and round_to_pp_multiple not in ROUNDINGS:
        raise ValueError(
            f"pipelining.{name}: round_to_pp_multiple={round_to_pp_multiple!r} is not known; use 'up', 'down' or None"
        )
    stages = _stages(num_layers, layers_per_stage, pp_size, is_single_stage_schedule, round_to_pp_multiple)
    fault = _fault(stages, num_layers, pp_size, is_single_stage_schedule)
    if fault:
        advice = _advice(num_layers, layers_per_stage, pp_size, is_single_stage_schedule, round_to_pp_multiple)
        raise ValueError(
            f"pipelining.{name}: layers_per_stage={layers_per_stage} gives {stages} stages for "
            f"num_layers={num_layers} over pp_size={pp_size}, {fault}; {advice}"
        )
    return stages, stages // pp_size


def _stages(num_layers: int, per_stage: int | None, pp_size: int, is_single: bool, rounding: str | None) -> int:
    if per_stage is None:
        return pp_size if is_single else 2 * pp_size
    stages = -(-num_layers // per_stage)
    if rounding == "up":
        return -(-stages // pp_size) * pp_size
    return stages // pp_size * pp_size if rounding == "down" else stages


def _fault(stages: int, num_layers: int, pp_size: int, is_single: bool) -> str | None:
    """Why there cannot be so many stages, or None."""
    if stages % pp_size:
        return f"not a multiple of pp_size={pp_size}"
    if is_single and stages != pp_size:
        return f"{stages // pp_size} on each rank where this schedule has one"
    if not is_single and stages < 2 * pp_size:
        return f"{stages // pp_size} on each rank where this schedule has two or more"
    return f"more than there are layers ({num_layers})" if stages > num_layers else None


def _advice(num_layers: int, given: int | None, pp_size: int, is_single: bool, rounding: str | None) -> str:
    """The largest layers_per_stage that passes every rule, and the rounding that would save the one given."""
    for per_stage in range(num_layers, 0, -1):
        stages = _stages(num_layers, per_stage, pp_size, is_single, rounding)
        if not _fault(stages, num_layers, pp_size, is_single):
            return f"use layers_per_stage={per_stage}{_roundings(num_layers, given, pp_size, is_single, rounding)}"
    return f"none exists for pp_size={pp_size}; use fewer ranks or another schedule"


def _roundings(num_layers: int, given: int | None, pp_size: int, is_single: bool, rounding: str | None) -> str:
    if given is None or rounding is not None:
        return ""
    tried = {each: _stages(num_layers, given, pp_size, is_single, each) for each in ROUNDINGS}
    legal = [each for each, stages in tried.items() if not _fault(stages, num_layers, pp_size, is_single)]
    return "".join(f", or round_to_pp_multiple={each!r}" for each in legal)


def _checked_cost(function: str, name: str, cost: object) -> Fraction:
    if isinstance(cost, bool) or not isinstance(cost, (int, float, Fraction)):
        raise TypeError(f"pipelining.{function}: {name}={cost!r} is a {type(cost).__name__}; pass a number of layers")
    if not math.isfinite(cost) or cost < 0:
        raise ValueError(f"pipelining.{function}: {name}={cost!r} must be finite and at least 0; pass a cost in layers")
    return Fraction(cost)


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


def generate_hf_model_fqn_per_model_part(
    num_stages: int,
    num_layers: int,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    include_multimodal_encoders: bool = True,
    extra_module_fqns: list[str] | None = None,
    fqn_prefix: str = "model.",
    lm_head_fqn: str = "lm_head",
    *,
    embed_cost: Number = 0.0,
    head_cost: Number = 0.0,
) -> list[list[str]]:
    """Names of the modules of each stage; names that a model has not are harmless.

    The first stage begins with the embedding, encoders of other modalities and the extra names, the last one ends
    with norm and head, and every one closes with the rotary embedding, which has no parameters. Layers are cut as
    `partition.layer_counts` says: costs are in layers, and without them the first stages get one layer more.

    >>> only = dict(include_multimodal_encoders=False, include_rotary_emb=False)
    >>> generate_hf_model_fqn_per_model_part(2, 3, **only)[1]
    ['model.layers.2', 'model.norm', 'lm_head']

    Errors: ValueError for fewer layers than stages, sizes below 1 or negative costs; TypeError for other kinds.
    """
    name = "generate_hf_model_fqn_per_model_part"
    switches = {
        "include_embeddings": include_embeddings,
        "include_lm_head": include_lm_head,
        "include_rotary_emb": include_rotary_emb,
        "include_multimodal_encoders": include_multimodal_encoders,
    }
    for switch, value in switches.items():
        check_switch(name, switch, value)
    check_text(name, "fqn_prefix", fqn_prefix)
    check_text(name, "lm_head_fqn", lm_head_fqn)
    extra = _checked_names(name, extra_module_fqns)
    counts = layer_counts(num_stages, num_layers, embed_cost, head_cost)
    ends = list(accumulate(counts))
    stages = [
        [f"{fqn_prefix}layers.{layer}" for layer in range(end - count, end)]
        for count, end in zip(counts, ends, strict=True)
    ]
    others = [f"{fqn_prefix}{module}" for module in MULTIMODAL] if include_multimodal_encoders else []
    embedding = [f"{fqn_prefix}embed_tokens"] if include_embeddings else []
    stages[0] = [*embedding, *others, *extra, *stages[0]]
    stages[-1] += [f"{fqn_prefix}norm", *([lm_head_fqn] if include_lm_head else [])]
    return [[*stage, *([f"{fqn_prefix}rotary_emb"] if include_rotary_emb else [])] for stage in stages]


def _checked_names(function: str, names: object) -> list[str]:
    if names is None:
        return []
    if not isinstance(names, (list, tuple)):
        raise TypeError(
            f"pipelining.{function}: extra_module_fqns={names!r} is a {type(names).__name__}; pass a list of names"
        )
    for index, module in enumerate(names):
        check_text(function, f"extra_module_fqns[{index}]", module)
    return list(names)
