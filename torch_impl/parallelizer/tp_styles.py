"""From the name of a style, as model configurations have it, to a style: the whole vocabulary of transformers 5."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.moe_styles import Experts
from torch_impl.parallelizer.packed_styles import PackedColwise, PackedRowwise
from torch_impl.parallelizer.rowwise import Rowwise
from torch_impl.parallelizer.whole_styles import Divided, Summed, Whole, WholeSeenInParts

NAME = "parallelizer.translate_to_torch_parallel_style"


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": Rowwise,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    "rowwise_split_input": _split,
    "rowwise_rep": _split,
    "embedding_rowwise": _split,
    "embedding_colwise": _gathered,
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": WholeSeenInParts,
    "replicate": Whole,
    "all_reduce": Summed,
    "packed_colwise": PackedColwise,
    "packed_rowwise": PackedRowwise,
    "moe_tp_experts": Experts,
    "moe_identity_expert": Divided,
}

EXPERT_PARALLEL = (
    "is an expert-parallel style and needs an ep mesh; remove it from the tensor-parallel plan or run experts with "
    "moe_tp_experts"
)
OF_PARAMETERS = "cuts a bare parameter, which has no forward; write {} for the module that owns it"
REFUSED = {
    "grouped_gemm": EXPERT_PARALLEL,
    "ep_dispatch_experts": EXPERT_PARALLEL,
    "ep_router": EXPERT_PARALLEL,
    "mla_kv_a_proj": (
        "needs qk_rope_head_dim of the config, to know which columns go past kv_b_proj, and a name cannot say it; "
        "leave the latent attention out of the plan"
    ),
    "local_params": (
        "stands on the owner of a parameter that is cut by itself; leave the module and its parameter out of the plan"
    ),
    "local": "is a style of transformers 4; write replicate, or moe_tp_experts for experts",
    "local_colwise": OF_PARAMETERS.format("colwise, or moe_tp_experts for experts,"),
    "local_rowwise": OF_PARAMETERS.format("rowwise, or moe_tp_experts for experts,"),
    "local_packed_rowwise": OF_PARAMETERS.format("packed_rowwise, or moe_tp_experts for experts,"),
    "gather": "is a style of transformers 4; write all_reduce, or moe_tp_experts for experts",
}


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """The style of a name, a fresh object at each call.

    Names are those of transformers' tensor-parallel plans, exact and case-sensitive. What a style does with its
    module's input, output and parameters is said by its class; `colwise`, `rowwise` and `sequence_parallel` are
    torch's. Names that mean expert parallelism, or the parameter of another module, are refused with the reason.

    Errors: TypeError for what is not a string; ValueError for a refused name, with what to write instead, and for
    an unknown one, with the nearest.
    """
    if not isinstance(style, str):
        raise TypeError(f"{NAME}: style={style!r} is a {type(style).__name__}; pass the name of a style, a string")
    if style in STYLES:
        return STYLES[style]()
    if style in REFUSED:
        raise ValueError(f"{NAME}: style={style!r} {REFUSED[style]}")
    near = get_close_matches(style, [*STYLES, *REFUSED], n=1, cutoff=0.0)[0]
    raise ValueError(f"{NAME}: style={style!r} is not known; nearest: {near!r}")
