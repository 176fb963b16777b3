"""Classes of mistakes that others published, and the injected bug that stands for each in our model.

All classes of TrainVerify's artifact and the readable findings of NVIDIA/Megatron-LM #7452. A mistake that a model's
batches, layers, plan, loss and norm can express has a bug in the catalogue, the others have a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from parity_tests.evidence.injected_bugs.injected_bug import MEGATRON, TRAIN_VERIFY


@dataclass(frozen=True)
class Mistake:
    """A published class of mistakes, and the injected bug that stands for it here, or the reason why none does."""

    source: str
    words: str
    bug: str | None
    reason: str = ""


MISTAKES = (
    Mistake(TRAIN_VERIFY, "all-reduce missing, data flow intact", "the MLP's sum over tp missing, data flow intact"),
    Mistake(TRAIN_VERIFY, "all-reduce missing, data flow broken", "the norm's sum over ranks computed and lost"),
    Mistake(TRAIN_VERIFY, "all-reduce replaced by all-gather", "counts gathered and not summed"),
    Mistake(TRAIN_VERIFY, "all-gather replaced by all-reduce", "all-reduce for all-gather"),
    Mistake(TRAIN_VERIFY, "reduce missing in a fused backward", "the gradient of what columns read not summed over tp"),
    Mistake(TRAIN_VERIFY, "wrong rank between stages", None, "stages are torch's; a tie's wrong peer is a deadlock"),
    Mistake(TRAIN_VERIFY, "one rank's other constant", "one rank's other norm eps"),
    Mistake(TRAIN_VERIFY, "one rank's other exponent", "one rank's other exponent"),
    Mistake(TRAIN_VERIFY, "several ranks' inconsistent constants", "several ranks' inconsistent constants"),
    Mistake(TRAIN_VERIFY, "one rank's backward takes wrong tensors", "one rank's MLP goes back with gate for up"),
    Mistake(TRAIN_VERIFY, "rotary backward reversed on one rank", "rotary backward reversed on one rank"),
    Mistake(TRAIN_VERIFY, "inconsistent scaling, of the loss", "a loss whose gradient is divided by the count twice"),
    Mistake(TRAIN_VERIFY, "inconsistent scaling, inside a layer", "attention scaled otherwise on the way back"),
    Mistake(TRAIN_VERIFY, "last op of the second microbatch", "the last norm missing in the second microbatch"),
    Mistake(MEGATRON, "label smoothing from local statistics", None, "the loss has no label smoothing"),
    Mistake(MEGATRON, "cross entropy on gathered logits", "cross entropy on gathered logits"),
    Mistake(MEGATRON, "loss normalised by local token counts", "a loss over this rank's count of tokens"),
    Mistake(MEGATRON, "recompute on the global group", None, "the step keeps its activations and recomputes nothing"),
    Mistake(MEGATRON, "padding mask from the wrong group", "padding masked as the first cp rank has it"),
    Mistake(
        MEGATRON,
        "replicated gradient counted wrongly in the norm",
        "a repeated gradient counted on every rank in the norm",
    ),
    Mistake(MEGATRON, "CP loss normalisation", "a loss over the count of dp ranks alone"),
    Mistake(MEGATRON, "masked token count", "tokens counted that have no loss"),
    Mistake(
        MEGATRON,
        "replicated norm weight with a partial gradient",
        "the last norm's weight left with each rank's own gradient",
    ),
)
