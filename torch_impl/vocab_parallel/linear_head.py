"""The output layer as a rank holds it, and what it refuses before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import arguments as a

HIDDEN, WEIGHT = "tensor_parallel_hidden_states", "output_weight_layer"


@dataclass(frozen=True)
class LinearHead:
    """Rows [vocab_start, vocab_end) of the weight; `function` is what an error calls the caller."""

    function: str
    group: ProcessGroup
    vocab_start: int
    vocab_end: int
    chunk_size: int | None

    def check(self, hidden: Float[Tensor, "l b d"], weight: Float[Tensor, "v d"], ids: Int[Tensor, "b s"]) -> None:
        """Refuse tensors that do not fit each other or the range."""
        a.checked_tp_group(self.function, "tp_group", self.group)
        for name, tensor in ((HIDDEN, hidden), (WEIGHT, weight)):
            if not tensor.dtype.is_floating_point:
                raise TypeError(f"{self.function}: {name} is {a.dtype_name(tensor)}; it must be floating")
        a.check_ids(self.function, "target", ids)
        a.check_chunk_size(self.function, self.chunk_size)
        if hidden.ndim != 3 or ids.ndim != 2 or hidden.shape[1] != len(ids):
            raise ValueError(
                f"{self.function}: {HIDDEN} is {list(hidden.shape)} but target is {list(ids.shape)}; "
                "they must be [s, b, d] and [b, s]"
            )
        if weight.ndim != 2 or weight.shape[1] != hidden.shape[2]:
            raise ValueError(
                f"{self.function}: {WEIGHT} is {list(weight.shape)} but hidden states have d={hidden.shape[2]}"
            )
        if weight.dtype != hidden.dtype:
            theirs = a.dtype_name(hidden)
            raise ValueError(f"{self.function}: {WEIGHT} is {a.dtype_name(weight)} but hidden states are {theirs}")
        if not 0 <= self.vocab_start <= self.vocab_end <= self.vocab_start + len(weight):
            raise ValueError(
                f"{self.function}: vocab range [{self.vocab_start}, {self.vocab_end}) does not fit "
                f"the {len(weight)} rows of {WEIGHT}"
            )

    def is_sequence_parallel(self, held: int, s: int, cp: int) -> bool:
        """Whether `held` positions are a block over tp of this rank's share of s, and not all of it."""
        local, tp = s // cp, self.group.size()
        if held == local:
            return False
        if local % tp == 0 and held == local // tp:
            return True
        cut = (
            f"{local} (replicated) or {local // tp} (sequence-parallel)"
            if local % tp == 0
            else f"{local} (replicated); {local} is no multiple of tp={tp}, so they cannot be sequence-parallel"
        )
        raise ValueError(
            f"{self.function}: {HIDDEN} has {held} positions; with s={s}, cp={cp}, tp={tp} it must have {cut}"
        )
