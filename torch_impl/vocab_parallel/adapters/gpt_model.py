"""Patch Megatron's GPTModel so that its forward can return log-probabilities without gathering the logits.

Without the flag, the patched forward calls the original one. Weight rows are sharded over tp in rank order; labels are
replicated and unshifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Rejected, contract, type_name
from torch_impl.vocab_parallel.linear_logprob import from_parallel_hidden_states_to_logprobs
from torch_impl.vocab_parallel.vocab_range import ChunkSize

FUSION = "_linear_ce_fusion"  # the one attribute, besides forward, that a patch sets on a class

PATCH = "vocab_parallel.patch_gpt_model_forward_for_linear_ce_fusion"

FORWARD = "vocab_parallel._gpt_forward_with_linear_ce_fusion"


@dataclass
class Fusion:
    """The state of a class before the patch: its own `forward` (None if inherited) and the forward to call unfused."""

    class_forward: Callable[..., Any] | None
    original: Callable[..., Any]
    chunk_size: int | None


class Patch:
    """A patched class; `unpatch`, or leaving the `with` block, restores it. A second `unpatch` does nothing."""

    def __init__(self, model_class: type) -> None:
        self.model_class = model_class

    def unpatch(self) -> None:
        """Restore the original `forward` and remove the patch's attribute.

        Errors: RuntimeError if `forward` was replaced again after the patch.
        """
        fusion = vars(self.model_class).get(FUSION)
        if fusion is None:
            return
        # Another patch on top of ours calls our forward: removing the attribute would break it.
        if vars(self.model_class).get("forward") is not _gpt_forward_with_linear_ce_fusion:
            raise RuntimeError(
                f"{PATCH}: {self.model_class.__name__}.forward was replaced after the patch; undo that first"
            )
        # An inherited forward shows again once the class has none of its own.
        if fusion.class_forward is None:
            del self.model_class.forward
        else:
            self.model_class.forward = fusion.class_forward
        delattr(self.model_class, FUSION)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpatch()


@contract
def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: ChunkSize | None, model_class: type | None = None
) -> Patch:
    """Replace `forward` of Megatron's GPTModel, or of `model_class`, by `_gpt_forward_with_linear_ce_fusion`.

    Patching a class again only sets its `chunk_size`. Patches of different classes are independent.

    Cost:   none to patch; each forward for log-probabilities as `from_parallel_hidden_states_to_logprobs`.
    Errors: ValueError if chunk_size is below 1; ImportError without Megatron-core, unless a class is given.
    """
    model_class = _gpt_model() if model_class is None else model_class
    if not (isinstance(model_class, type) and callable(getattr(model_class, "forward", None))):
        raise Rejected(f"model_class is {type_name(model_class)}; pass a class with a forward", TypeError)
    fusion = vars(model_class).get(FUSION)
    if fusion is not None:
        fusion.chunk_size = chunk_size
        return Patch(model_class)
    original = model_class.forward
    if original is _gpt_forward_with_linear_ce_fusion:  # inherited from a class that is patched
        original = getattr(model_class, FUSION).original
    setattr(model_class, FUSION, Fusion(vars(model_class).get("forward"), original, chunk_size))
    model_class.forward = _gpt_forward_with_linear_ce_fusion
    return Patch(model_class)


def _gpt_forward_with_linear_ce_fusion(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Any,
    decoder_input: Tensor | None = None,
    labels: Int[Tensor, "b s"] | None = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    extra_block_kwargs: dict[str, Any] | None = None,
    runtime_gather_output: bool | None = None,
    *,
    inference_params: Any = None,
    loss_mask: Tensor | None = None,
    padding_mask: Any = None,
    return_logprobs_for_linear_ce_fusion: bool = False,
    is_spec_decode: bool | None = None,
    **later_keywords: Any,
) -> Any:
    """The original forward; with `return_logprobs_for_linear_ce_fusion`, log-probabilities of the unshifted labels.

        labels  "b s"   ->   "b u tp=I cp=R",   u = s - 1

    `input_ids`, `position_ids`, `attention_mask`, `decoder_input`, `padding_mask`, `extra_block_kwargs` and
    `inference_context` (formerly `inference_params`) produce the hidden states, as in the original. Only the original
    uses `runtime_gather_output`, `loss_mask`, `is_spec_decode` and `later_keywords`, since logits are never gathered.
    Stages before the last return hidden states. Ids follow the rows of the weight in rank order, padding rows included,
    as in the model's own logits. With `packed_seq_params` the shift stays inside each sequence, and the last token of
    each sequence scores 0.0. With an inference context, outside training, nothing is saved. Multi-token prediction
    layers are skipped. Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient;
    divide by cp.

    Cost:   as `from_parallel_hidden_states_to_logprobs`.
    Errors: with the flag, ValueError if labels are None on the last stage or the output layer has a bias or a scale;
            TypeError for a keyword that only the original accepts.
    """
    # 1. Without the flag, call the original with only the keywords that were passed: older versions know fewer.
    if not return_logprobs_for_linear_ce_fusion:
        keywords = {"inference_params": inference_params, "loss_mask": loss_mask, "padding_mask": padding_mask}
        keywords |= {"is_spec_decode": is_spec_decode}
        keywords = {name: value for name, value in keywords.items() if value is not None}
        tokens = (input_ids, position_ids, attention_mask, decoder_input, labels)
        options = (inference_context, packed_seq_params, extra_block_kwargs, runtime_gather_output)
        return getattr(self, FUSION).original(self, *tokens, *options, **keywords, **later_keywords)
    # 2. With the flag, compute the hidden states as the original does.
    _check(self, labels, later_keywords)
    if getattr(self.config, "fine_grained_activation_offloading", False):
        self.preprocess_for_fine_grained_offloading()
    inference_context = inference_params if inference_context is None else inference_context
    inputs = dict(inference_context=inference_context, packed_seq_params=packed_seq_params)
    ids = dict(input_ids=input_ids, position_ids=position_ids, decoder_input=decoder_input, padding_mask=padding_mask)
    hidden = _decode(self, self._preprocess(**ids, **inputs), attention_mask, inputs, extra_block_kwargs or {})
    if not self.post_process:
        return hidden
    # 3. On the last stage, score them in place of computing logits.
    is_inference = inference_context is not None and not self.training
    return _score(self, hidden, labels, runtime_gather_output, packed_seq_params, is_inference)  # pyright: ignore[reportArgumentType]


def _decode(
    model: Any, preprocessed: tuple[Any, ...], attention_mask: Any, inputs: dict[str, Any], extra: dict[str, Any]
) -> Float[Tensor, "l b d"]:
    """The decoder's hidden states, from the 6 or 7 values that `_preprocess` returns."""
    decoder_input, rotary_pos_emb, cos, sin, sequence_len_offset, padding_mask, *last = preprocessed
    return model.decoder(
        hidden_states=decoder_input,
        attention_mask=attention_mask,
        rotary_pos_emb=rotary_pos_emb,
        rotary_pos_cos=cos,
        rotary_pos_sin=sin,
        rotary_pos_cos_sin=last[0] if last else None,
        sequence_len_offset=sequence_len_offset,
        padding_mask=padding_mask,
        **inputs,
        **extra,
    )


def _score(
    model: Any,
    hidden: Float[Tensor, "l b d"],
    labels: Int[Tensor, "b s"],
    runtime_gather_output: bool | None,
    packed: Any,
    inference_only: bool,
) -> Float[Tensor, "b u"]:
    """Log-probabilities of the labels, with the model's output weight and its groups."""
    # Megatron pads the vocabulary to equal shards, so the range follows from the rank; no collective.
    is_tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
    tp_group, cp_group = _groups(model)
    start = tp_group.rank() * len(weight)
    offsets = [getattr(packed, name, None) for name in ("cu_seqlens_q_padded", "cu_seqlens_q")]
    return from_parallel_hidden_states_to_logprobs(  # pyright: ignore[reportReturnType] - a pair with entropy alone
        hidden,
        weight,
        None,
        bool(runtime_gather_output),
        labels,
        start,
        start + len(weight),
        tp_group,
        inference_only=inference_only,
        cp_group=cp_group,
        chunk_size=getattr(model, FUSION).chunk_size,
        cu_seqlens_padded=next((each for each in offsets if each is not None), None),
    )


def _check(model: Any, labels: Tensor | None, later_keywords: dict[str, Any]) -> None:
    """Reject arguments and models that the flag does not support."""
    flag = "return_logprobs_for_linear_ce_fusion=True"
    for name in later_keywords:
        raise TypeError(f"{FORWARD}: {name} is not known together with {flag}; drop it")
    if not model.post_process:
        return
    if labels is None:
        raise ValueError(f"{FORWARD}: labels is None; {flag} needs the unshifted labels")
    if getattr(model.output_layer, "bias", None) is not None:
        raise ValueError(f"{FORWARD}: output_layer has a bias, which {flag} does not add; build it without")
    if getattr(model.config, "use_mup", False):
        raise ValueError(f"{FORWARD}: config.use_mup scales the logits, which {flag} does not; turn it off")


def _groups(model: Any) -> tuple[ProcessGroup, ProcessGroup | None]:
    """The tp and cp groups, from the model or else from Megatron's parallel state."""
    collection = getattr(model, "pg_collection", None)
    if collection is not None:
        return collection.tp, getattr(collection, "cp", None)
    try:
        from megatron.core import parallel_state
    except ImportError:
        raise _missing(FORWARD) from None
    state: Any = parallel_state  # its stubs type the getters as a group or a list of ranks
    return state.get_tensor_model_parallel_group(), state.get_context_parallel_group()


def _gpt_model() -> type:
    try:
        from megatron.core.models.gpt import GPTModel
    except ImportError:
        raise _missing(PATCH) from None
    return GPTModel


def _missing(function: str) -> ImportError:
    return ImportError(f"{function}: linear CE fusion needs Megatron-core; pip install -e '.[megatron]' in the clone")
